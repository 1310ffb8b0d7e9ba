"""Settings for every test: one thread (two workers share two cores), float32, no stray warnings."""

import os

import pytest
import torch

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def single_thread() -> None:
    torch.set_num_threads(1)
