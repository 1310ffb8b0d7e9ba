"""Adam and AdamW: one fused operator a leaf (`functrain.kernels.adamw`), its scalars computed once for all leaves."""

from collections.abc import Callable
from typing import Any

import torch

from functrain import tree
from functrain.kernels.adamw import coefficients
from functrain.optim.base import GradientTransformation, ScalarOrSchedule, increment, map_rows, need_params, value_at, zero_count
from functrain.optim.masks import Mask, as_mask
from functrain.tree import PyTree, struct


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
    return _adam(-1.0, b1, b2, eps, eps_root, mu_dtype, nesterov, 0.0, None)


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
    return _adam(learning_rate, b1, b2, eps, eps_root, mu_dtype, nesterov, 0.0, None)


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
        mask: which leaves decay: a tree of bools, a function of the params, or path patterns; all where None.
        nesterov: Nesterov's momentum.

    >>> tx = adamw(0.1, weight_decay=0.5)
    >>> params = {"w": torch.ones(1)}
    >>> updates, state = tx.update({"w": torch.tensor([3.0])}, tx.init(params), params)
    >>> updates["w"].round(decimals=4), tree.paths(state)
    (tensor([-0.1500]), ['count', 'mu/w', 'nu/w'])
    """
    return _adam(learning_rate, b1, b2, eps, eps_root, mu_dtype, nesterov, weight_decay, mask)


def _adam(
    learning_rate: ScalarOrSchedule,
    b1: Any,
    b2: Any,
    eps: Any,
    eps_root: Any,
    mu_dtype: torch.dtype | None,
    nesterov: bool,
    weight_decay: Any,
    mask: Mask,
) -> GradientTransformation:
    decays = isinstance(weight_decay, torch.Tensor) or weight_decay != 0

    def init(params: PyTree) -> AdamState:
        mu = tree.map(lambda p: torch.zeros_like(p, dtype=mu_dtype or p.dtype, requires_grad=False), params)
        return AdamState(zero_count(params), mu, tree.map(lambda p: torch.zeros_like(p, requires_grad=False), params))

    def update(grads: PyTree, state: AdamState, params: PyTree = None) -> tuple[PyTree, AdamState]:
        count = increment(state.count)
        rate = value_at(learning_rate, state.count)
        shared = {"step": count, "b1": b1, "b2": b2, "eps": eps, "eps_root": eps_root}
        plain = coefficients(rate, **shared)
        decayed = coefficients(rate, **shared, weight_decay=weight_decay) if decays else plain
        like = need_params("adamw", params) if decays else grads
        chosen = tree.map(lambda keep: decayed if keep else plain, as_mask(mask, like)) if decays else tree.map(lambda g: plain, grads)
        step: Callable[..., tuple[torch.Tensor, ...]] = _nesterov if nesterov else _fused
        updates, mu, nu = map_rows(step, 3, grads, state.mu, state.nu, like, chosen)
        return updates, AdamState(count, mu, nu)

    return GradientTransformation(init, update)


def _fused(grad: torch.Tensor, mu: torch.Tensor, nu: torch.Tensor, param: torch.Tensor, scalars: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(torch.ops.functrain.adamw(grad, mu, nu, param, scalars))


def _nesterov(
    grad: torch.Tensor, mu: torch.Tensor, nu: torch.Tensor, param: torch.Tensor, scalars: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    lr, b1, b2, eps, eps_root, decay, c1, c2, _ = scalars.unbind()
    mean, squares = b1 * mu + (1 - b1) * grad, b2 * nu + (1 - b2) * grad * grad
    ahead = 1 - (1 - c1) * b1  # 1 - b1 ** (t + 1)
    corrected = b1 * mean / ahead + (1 - b1) * grad / c1
    update = -lr * (corrected / (torch.sqrt(squares / c2 + eps_root) + eps) + decay * param)
    return update.to(param.dtype), mean.to(mu.dtype), squares.to(nu.dtype)
