"""Small steps that the tests of the compile layer capture."""

from typing import Any

import torch
import torch.nn.functional as F

import functrain as ft


def mlp_params(width: int = 8, layers: int = 2, seed: int = 0) -> dict[str, Any]:
    """Weights `[width, width]` and biases `[width]`, drawn by key."""
    keys = ft.random.split(ft.random.key(seed), layers)
    return {f"layer{i}": {"w": 0.3 * ft.random.normal(keys[i], (width, width)), "b": torch.zeros(width)} for i in range(layers)}


def mlp_loss(params: dict[str, Any], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean squared error of a small network with a gelu."""
    for name in sorted(params):
        x = F.gelu(F.linear(x, params[name]["w"], params[name]["b"]))
    return ((x - y) ** 2).mean()


def make_step(tx: Any) -> Any:
    """A train step over `TrainState`."""

    def train_step(state: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss, grads = ft.value_and_grad(mlp_loss)(state.params, x, y)
        return state.apply_gradients(grads, tx), {"loss": loss}

    return train_step


def data(rows: int = 4, width: int = 8, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets `[rows, width]`."""
    one, two = ft.random.split(ft.random.key(seed))
    return ft.random.normal(one, (rows, width)), ft.random.normal(two, (rows, width))
