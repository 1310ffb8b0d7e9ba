"""Steps only every so many gradients (Optax's `MultiSteps`), and gradients that must not count."""

from collections.abc import Callable
from typing import Any

import torch

from functrain import tree
from functrain.optim.base import GradientTransformation, increment, transformation, zero_count, zeros
from functrain.tree import PyTree, struct

# (grads, steps done, params) -> (whether to leave the gradients out, bool scalar; values to keep in the state)
ShouldSkip = Callable[[PyTree, torch.Tensor, PyTree], tuple[torch.Tensor, PyTree]]


@struct
class MultiStepsState:
    """Gradients on their way to a step."""

    mini_step: torch.Tensor  # gradients added up so far, int32 scalar
    gradient_step: torch.Tensor  # steps done, int32 scalar
    inner_opt_state: PyTree
    acc_grads: PyTree  # their mean so far (or sum)
    skip_state: PyTree = ()  # what `should_skip_update_fn` tells of the last gradients


def multi_steps(
    opt: GradientTransformation,
    every_k_schedule: int | Callable[[torch.Tensor], Any],
    use_grad_mean: bool = True,
    should_skip_update_fn: ShouldSkip | None = None,
    accumulator_dtype: torch.dtype | None = torch.float32,
) -> GradientTransformation:
    """Let `opt` step once every k updates, with the mean (or sum) of their gradients; the others are zero. Optax's `MultiSteps`.

    Nothing branches on a value, so `opt` is computed at every call and its result chosen once in k. To accumulate within one step,
    without that, there is `ft.accumulate`.

    Args:
        opt: the transformation that steps.
        every_k_schedule: how many gradients make a step; may be a function of the number of steps done.
        use_grad_mean: the mean, else the sum.
        should_skip_update_fn: says of gradients whether to act as if they had never come, such as `skip_not_finite`.
        accumulator_dtype: of the mean or sum; the param's where None.

    Raises:
        ValueError: `every_k_schedule` is less than 1.

    >>> from functrain.optim import sgd
    >>> tx = multi_steps(sgd(1.0), 2)
    >>> state = tx.init({"w": torch.zeros(1)})
    >>> first, state = tx.update({"w": torch.ones(1)}, state)
    >>> second, state = tx.update({"w": torch.full((1,), 3.0)}, state)
    >>> float(first["w"]), float(second["w"])
    (0.0, -2.0)
    """
    if isinstance(every_k_schedule, int) and every_k_schedule < 1:
        raise ValueError(f"every_k_schedule must be at least 1, not {every_k_schedule}")
    skips = should_skip_update_fn

    def init(params: PyTree) -> MultiStepsState:
        done = zero_count(params)
        skip_state = () if skips is None else skips(tree.map(torch.zeros_like, params), done, params)[1]
        return MultiStepsState(zero_count(params), done, opt.init(params), zeros("multi_steps", params, accumulator_dtype), skip_state)

    def update(grads: PyTree, state: MultiStepsState, params: PyTree = None) -> tuple[PyTree, MultiStepsState]:
        every = every_k_schedule if isinstance(every_k_schedule, int) else every_k_schedule(state.gradient_step)
        total = _added(grads, state, use_grad_mean)
        candidate, stepped = opt.update(tree.map(lambda t, g: t.to(g.dtype), total, grads), state.inner_opt_state, params)
        emit = state.mini_step == every - 1
        new = MultiStepsState(
            ((state.mini_step + 1) % every).to(state.mini_step.dtype),
            torch.where(emit, increment(state.gradient_step), state.gradient_step),
            choose(emit, stepped, state.inner_opt_state),
            tree.map(lambda t, old: torch.where(emit, torch.zeros_like(t), t).to(old.dtype), total, state.acc_grads),
        )
        if skips is not None:
            skip, skip_state = skips(grads, state.gradient_step, params)
            emit = emit & ~skip
            new = choose(skip, state.replace(skip_state=()), new).replace(skip_state=skip_state)  # type: ignore[attr-defined]
        return tree.map(lambda u: torch.where(emit, u, torch.zeros_like(u)), candidate), new

    return transformation(init, update)


def _added(grads: PyTree, state: MultiStepsState, mean: bool) -> PyTree:
    if mean:
        return tree.map(lambda g, acc: acc + (g - acc) / (state.mini_step + 1), grads, state.acc_grads)
    return tree.map(lambda g, acc: acc + g, grads, state.acc_grads)


def choose(condition: torch.Tensor, new: PyTree, old: PyTree) -> PyTree:
    """The leaves of `new` where the condition holds, else those of `old`.

    >>> choose(torch.tensor(True), {"w": torch.ones(1)}, {"w": torch.zeros(1)})
    {'w': tensor([1.])}
    """
    return tree.map(lambda x, y: torch.where(condition, x, y), new, old)


def skip_not_finite(grads: PyTree, gradient_step: torch.Tensor, params: PyTree) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """For `multi_steps`: leave out gradients that hold an infinity or a NaN.

    Returns:
        Whether to skip, and a dict with it and the number of such elements.

    >>> skip_not_finite({"w": torch.tensor([1.0, float("inf")])}, torch.tensor(0), None)[0]
    tensor(True)
    """
    counts = [torch.logical_not(torch.isfinite(g)).sum() for g in tree.tensors(grads)]
    number = torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64)
    return number > 0, {"should_skip": number > 0, "num_not_finite": number}


def skip_large_updates(
    grads: PyTree, gradient_step: torch.Tensor, params: PyTree, max_squared_norm: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """For `multi_steps`, with `functools.partial`: leave out gradients whose squared norm is not below a bound, or NaN.

    Returns:
        Whether to skip, and a dict with it and the squared norm.

    >>> skip_large_updates({"w": torch.tensor([3.0, 4.0])}, torch.tensor(0), None, max_squared_norm=24.0)[0]
    tensor(True)
    """
    squared = tree.global_norm(grads).square()
    skip = torch.logical_not(squared < max_squared_norm)
    return skip, {"should_skip": skip, "norm_squared": squared}
