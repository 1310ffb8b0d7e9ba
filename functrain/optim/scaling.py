"""Learning rates and weight decay as transformations of their own."""

import torch

from functrain import tree
from functrain.optim.base import (
    GradientTransformation,
    ScalarOrSchedule,
    Schedule,
    increment,
    need_float,
    need_params,
    scale,
    stateless,
    times,
    transformation,
    zero_count,
)
from functrain.optim.masks import Mask, as_mask
from functrain.tree import PyTree, struct


@struct
class ScheduleState:
    """How often a schedule was asked."""

    count: torch.Tensor  # int32 scalar


def scale_by_schedule(step_size_fn: Schedule) -> GradientTransformation:
    """Multiply by a schedule's value at the number of updates so far.

    >>> tx = scale_by_schedule(lambda count: 1.0 / (1 + count))
    >>> _, state = tx.update({"w": torch.ones(1)}, tx.init({}))
    >>> tx.update({"w": torch.ones(1)}, state)[0]["w"]
    tensor([0.5000])
    """

    def update(grads: PyTree, state: ScheduleState, params: PyTree = None) -> tuple[PyTree, ScheduleState]:
        return times(grads, step_size_fn(state.count)), ScheduleState(increment(state.count))

    return transformation(lambda params: ScheduleState(zero_count(params)), update)


def scale_by_learning_rate(learning_rate: ScalarOrSchedule, *, flip_sign: bool = True) -> GradientTransformation:
    """Multiply by the negative learning rate: a number, a 0-dim tensor or a schedule.

    >>> tx = scale_by_learning_rate(0.1)
    >>> tx.update({"w": torch.ones(1)}, tx.init({}))[0]["w"]
    tensor([-0.1000])
    """
    sign = -1 if flip_sign else 1
    if callable(learning_rate):
        rate = learning_rate
        return scale_by_schedule(lambda count: sign * rate(count))
    return scale(sign * learning_rate)


def add_decayed_weights(weight_decay: float | torch.Tensor = 0.0, mask: Mask = None) -> GradientTransformation:
    """Add ``weight_decay * param`` to the updates of the leaves that the mask names, as `masked` takes it (all, where None).

    >>> tx = add_decayed_weights(0.5)
    >>> tx.update({"w": torch.zeros(1)}, tx.init({}), {"w": torch.ones(1)})[0]["w"]
    tensor([0.5000])
    """

    def one(path: str, grad: torch.Tensor, param: torch.Tensor, keep: bool) -> torch.Tensor:
        if not keep:
            return grad
        need_float("add_decayed_weights", path, param)
        return grad + weight_decay * param

    def decayed(grads: PyTree, params: PyTree) -> PyTree:
        kept = as_mask(mask, need_params("add_decayed_weights", params))
        return tree.map_with_path(one, grads, params, kept)

    return stateless(decayed)
