"""Adam and AdamW: one fused operator a leaf (`functrain.kernels.adamw`), its scalars computed once for all leaves."""

from collections.abc import Callable
from typing import Any

import torch

from functrain.kernels.adamw import coefficients
from functrain.optim.base import (
    GradientTransformation,
    ScalarOrSchedule,
    increment,
    map_rows,
    need_params,
    transformation,
    value_at,
    zero_count,
    zeros,
)
from functrain.optim.masks import Mask, as_mask
from functrain.tree import PyTree, struct

Step = Callable[..., tuple[torch.Tensor, ...]]  # (grad, mu, nu, param) -> (update, mu, nu)


@struct
class AdamState:
    """Moments of the gradients."""

    count: torch.Tensor  # updates so far, int32 scalar
    mu: PyTree  # mean of the gradients, in the structure of the params
    nu: PyTree  # mean of their squares


def scale_by_adam(
    b1: float | torch.Tensor = 0.9,
    b2: float | torch.Tensor = 0.999,
    eps: float | torch.Tensor = 1e-8,
    eps_root: float | torch.Tensor = 0.0,
    mu_dtype: torch.dtype | None = None,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """Adam's direction, without a learning rate (Kingma and Ba 2015, arXiv 1412.6980, algorithm 1).

    Args:
        b1: decay of the mean.
        b2: decay of the mean of squares.
        eps: added to the denominator outside the root.
        eps_root: added inside it.
        mu_dtype: dtype of the mean; the param's where None.
        nesterov: Nesterov's momentum (Dozat 2016).

    >>> tx = scale_by_adam()
    >>> updates, _ = tx.update({"w": torch.tensor([3.0])}, tx.init({"w": torch.zeros(1)}))
    >>> updates["w"].round(decimals=4)
    tensor([1.])
    """
    return _adam("scale_by_adam", -1.0, b1, b2, eps, eps_root, mu_dtype, nesterov)


def adam(
    learning_rate: ScalarOrSchedule,
    b1: float | torch.Tensor = 0.9,
    b2: float | torch.Tensor = 0.999,
    eps: float | torch.Tensor = 1e-8,
    eps_root: float | torch.Tensor = 0.0,
    mu_dtype: torch.dtype | None = None,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """Adam with a learning rate: a number, a 0-dim tensor or a schedule. See `scale_by_adam` for the others.

    >>> tx = adam(0.1)
    >>> updates, _ = tx.update({"w": torch.tensor([3.0])}, tx.init({"w": torch.zeros(1)}))
    >>> updates["w"].round(decimals=4)
    tensor([-0.1000])
    """
    return _adam("adam", learning_rate, b1, b2, eps, eps_root, mu_dtype, nesterov)


def adamw(
    learning_rate: ScalarOrSchedule,
    b1: float | torch.Tensor = 0.9,
    b2: float | torch.Tensor = 0.999,
    eps: float | torch.Tensor = 1e-8,
    eps_root: float | torch.Tensor = 0.0,
    mu_dtype: torch.dtype | None = None,
    weight_decay: float | torch.Tensor = 1e-4,
    mask: Mask = None,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv 1711.05101).

    Args:
        learning_rate: a number, a 0-dim tensor or a schedule.
        b1: decay of the mean.
        b2: decay of the mean of squares.
        eps: added to the denominator outside the root.
        eps_root: added inside it.
        mu_dtype: dtype of the mean; the param's where None.
        weight_decay: times the learning rate and the param, subtracted.
        mask: which leaves decay, as `masked` takes it; all where None.
        nesterov: Nesterov's momentum.

    >>> from functrain import tree
    >>> tx = adamw(0.1, weight_decay=0.5)
    >>> params = {"w": torch.ones(1)}
    >>> updates, state = tx.update({"w": torch.tensor([3.0])}, tx.init(params), params)
    >>> updates["w"].round(decimals=4), tree.paths(state)
    (tensor([-0.1500]), ['count', 'mu/w', 'nu/w'])
    """
    return _adam("adamw", learning_rate, b1, b2, eps, eps_root, mu_dtype, nesterov, weight_decay, mask)


def _adam(
    name: str,
    learning_rate: ScalarOrSchedule,
    b1: Any,
    b2: Any,
    eps: Any,
    eps_root: Any,
    mu_dtype: torch.dtype | None,
    nesterov: bool,
    weight_decay: Any = 0.0,
    mask: Mask = None,
) -> GradientTransformation:
    decays = isinstance(weight_decay, torch.Tensor) or weight_decay != 0
    make_step = _nesterov if nesterov else _fused

    def init(params: PyTree) -> AdamState:
        return AdamState(zero_count(params), zeros(name, params, mu_dtype), zeros(name, params))

    def update(grads: PyTree, state: AdamState, params: PyTree = None) -> tuple[PyTree, AdamState]:
        count = increment(state.count)
        numbers = (value_at(learning_rate, state.count), b1, b2, eps, eps_root, weight_decay)
        rate, *rest = (_on(count.device, x) for x in numbers)
        options: dict[str, Any] = dict(zip(("b1", "b2", "eps", "eps_root", "weight_decay"), rest, strict=True), step=count)
        if decays:
            need_params(name, params)
        # Without decay the values of the params do not matter, only their dtype: nu has it.
        columns = (grads, state.mu, state.nu, state.nu if params is None else params)
        step = make_step(coefficients(rate, **options))
        if decays and mask is not None:
            plain = make_step(coefficients(rate, **{**options, "weight_decay": 0.0}))
            keep = as_mask(mask, params)
            results = map_rows(lambda *row: (step if row[-1] else plain)(*row[:-1]), 3, *columns, keep)
        else:
            results = map_rows(step, 3, *columns)
        updates, mu, nu = results
        return updates, AdamState(count, mu, nu)

    return transformation(init, update)


def _on(device: torch.device, value: float | torch.Tensor) -> torch.Tensor:
    """A number as a scalar on the device where the count is, so that the coefficients can be put together there."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return torch.full((), value, dtype=torch.float64, device=device)


def _fused(scalars: torch.Tensor) -> Step:
    """Adam for one leaf as one operator."""
    return lambda grad, mu, nu, param: torch.ops.functrain.adamw(grad, mu, nu, param, scalars)


def _nesterov(scalars: torch.Tensor) -> Step:
    """Adam with Nesterov's momentum for one leaf."""
    lr, b1, b2, eps, eps_root, decay, c1, c2, _ = scalars.unbind()
    descent, new1, new2 = -lr, 1 - b1, 1 - b2
    from_mean = b1 / (1 - (1 - c1) * b1)  # 1 - b1 ** (t + 1)
    from_grad = new1 / c1

    def step(grad: torch.Tensor, mu: torch.Tensor, nu: torch.Tensor, param: torch.Tensor) -> tuple[torch.Tensor, ...]:
        grad = grad.to(torch.promote_types(grad.dtype, nu.dtype))
        mean, squares = b1 * mu + new1 * grad, b2 * nu + new2 * grad * grad
        direction = (from_mean * mean + from_grad * grad) / (torch.sqrt(squares / c2 + eps_root) + eps)
        return (descent * (direction + decay * param)).to(param.dtype), mean.to(mu.dtype), squares.to(nu.dtype)

    return step
