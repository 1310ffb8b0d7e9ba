"""What the tests of fused AdamW share: a leaf in the middle of a run, and closeness in units in the last place."""

import pytest
import torch
from torch import Tensor

from functrain.kernels import build
from tests.helpers import assert_trees_close

OPERATORS = torch.ops.functrain
STREAMED = (1 << 18) + 77  # elements: large enough for results that bypass the caches, and no multiple of a block
HALVES = [torch.bfloat16, torch.float16]
GRADS = [torch.float32, torch.float64, *HALVES]
USUAL = {"learning_rate": 1e-2, "step": 3, "weight_decay": 0.1}

needs_library = pytest.mark.skipif(not build.compilers(), reason="no C++ compiler, so no library")


def leaf(
    shape: int | tuple[int, ...], dtype: torch.dtype = torch.float32, grad: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(param, mu, nu, grad) as they might stand in the middle of a run."""
    rng = torch.Generator().manual_seed(seed)
    size = (shape,) if isinstance(shape, int) else shape
    param, mu, gradient = (torch.randn(size, generator=rng, dtype=torch.float64) for _ in range(3))
    nu = torch.rand(size, generator=rng, dtype=torch.float64)
    return param.to(dtype), (mu * 0.1).to(dtype), (nu * 0.01).to(dtype), gradient.to(grad)


def assert_near(actual: Tensor, expected: Tensor, units: int = 2) -> None:
    """Equal within so many units in the last place of the larger magnitude that went into the value."""
    epsilon = torch.finfo(expected.dtype).eps
    assert_trees_close(actual, expected, rtol=units * epsilon, atol=units * epsilon * float(expected.abs().nan_to_num(0, 0, 0).max()))
