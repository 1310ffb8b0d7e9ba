"""Plain descent, momentum, Lion."""

import torch

from functrain import tree
from functrain.optim.base import (
    GradientTransformation,
    ScalarOrSchedule,
    chain,
    identity,
    increment,
    map_rows,
    transformation,
    zero_count,
    zeros,
)
from functrain.optim.masks import Mask
from functrain.optim.scaling import add_decayed_weights, scale_by_learning_rate
from functrain.tree import PyTree, struct


@struct
class TraceState:
    """A running sum of gradients."""

    trace: PyTree  # in the structure of the params


def trace(decay: float, nesterov: bool = False, accumulator_dtype: torch.dtype | None = None) -> GradientTransformation:
    """Momentum: a running sum that decays.

    >>> tx = trace(0.9)
    >>> _, state = tx.update({"w": torch.ones(1)}, tx.init({"w": torch.zeros(1)}))
    >>> tx.update({"w": torch.ones(1)}, state)[0]["w"]
    tensor([1.9000])
    """

    def init(params: PyTree) -> TraceState:
        return TraceState(zeros("trace", params, accumulator_dtype))

    def update(grads: PyTree, state: TraceState, params: PyTree = None) -> tuple[PyTree, TraceState]:
        moved = tree.map(lambda g, t: g + decay * t, grads, state.trace)
        updates = tree.map(lambda g, t: g + decay * t, grads, moved) if nesterov else moved
        return updates, TraceState(tree.map(lambda new, old: new.to(old.dtype), moved, state.trace))

    return transformation(init, update)


def sgd(
    learning_rate: ScalarOrSchedule,
    momentum: float | None = None,
    nesterov: bool = False,
    accumulator_dtype: torch.dtype | None = None,
) -> GradientTransformation:
    """Stochastic gradient descent, with momentum where one is given.

    >>> tx = sgd(0.5)
    >>> tx.update({"w": torch.ones(1)}, tx.init({"w": torch.zeros(1)}))[0]["w"]
    tensor([-0.5000])
    """
    first = identity() if momentum is None else trace(momentum, nesterov, accumulator_dtype)
    return chain(first, scale_by_learning_rate(learning_rate))


@struct
class LionState:
    """A running mean of gradients."""

    count: torch.Tensor  # updates so far, int32 scalar
    mu: PyTree  # in the structure of the params


def scale_by_lion(b1: float = 0.9, b2: float = 0.99, mu_dtype: torch.dtype | None = None) -> GradientTransformation:
    """Lion's direction: the sign of a mixture of the gradient and its mean (Chen et al. 2023, arXiv 2302.06675).

    >>> tx = scale_by_lion()
    >>> tx.update({"w": torch.tensor([-3.0])}, tx.init({"w": torch.zeros(1)}))[0]["w"]
    tensor([-1.])
    """

    def one(g: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.sign((1 - b1) * g + b1 * m), ((1 - b2) * g + b2 * m).to(m.dtype)

    def update(grads: PyTree, state: LionState, params: PyTree = None) -> tuple[PyTree, LionState]:
        updates, mu = map_rows(one, 2, grads, state.mu)
        return updates, LionState(increment(state.count), mu)

    return transformation(lambda params: LionState(zero_count(params), zeros("lion", params, mu_dtype)), update)


def lion(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.99,
    mu_dtype: torch.dtype | None = None,
    weight_decay: float = 1e-3,
    mask: Mask = None,
) -> GradientTransformation:
    """Lion with decoupled weight decay.

    >>> tx = lion(0.1, weight_decay=0.0)
    >>> params = {"w": torch.zeros(1)}
    >>> tx.update({"w": torch.tensor([-3.0])}, tx.init(params), params)[0]["w"]
    tensor([0.1000])
    """
    return chain(scale_by_lion(b1, b2, mu_dtype), add_decayed_weights(weight_decay, mask), scale_by_learning_rate(learning_rate))
