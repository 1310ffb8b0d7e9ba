"""Running means of updates, and updates only every so many steps."""

import torch

from functrain import tree
from functrain.optim.base import GradientTransformation, increment, like, zero_count
from functrain.tree import PyTree, struct


@struct
class EmaState:
    """A running mean."""

    count: torch.Tensor  # updates so far, int32 scalar
    ema: PyTree  # in the structure of the params


def ema(decay: float, debias: bool = True, accumulator_dtype: torch.dtype | None = None) -> GradientTransformation:
    """The running mean of updates takes their place.

    Args:
        decay: weight of the old mean.
        debias: divide by ``1 - decay ** count``.
        accumulator_dtype: of the mean; the param's where None.

    >>> tx = ema(0.5, debias=False)
    >>> tx.update({"w": torch.ones(1)}, tx.init({"w": torch.zeros(1)}))[0]["w"]
    tensor([0.5000])
    """

    def update(grads: PyTree, state: EmaState, params: PyTree = None) -> tuple[PyTree, EmaState]:
        count = increment(state.count)
        mean = tree.map(lambda g, m: (1 - decay) * g + decay * m, grads, state.ema)
        kept = tree.map(lambda new, old: new.to(old.dtype), mean, state.ema)
        if debias:
            correction = bias_correction(decay, count)
            mean = tree.map(lambda m: m / correction.to(m.dtype), mean)
        return mean, EmaState(count, kept)

    return GradientTransformation(lambda params: EmaState(zero_count(params), like(params, accumulator_dtype)), update)


def bias_correction(decay: float | torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """``1 - decay ** count``, float64 scalar."""
    base = decay.to(torch.float64) if isinstance(decay, torch.Tensor) else torch.full_like(count, decay, dtype=torch.float64)
    return 1 - base**count


@struct
class MultiStepsState:
    """Gradients on their way to a step."""

    mini_step: torch.Tensor  # gradients added up so far, int32 scalar
    gradient_step: torch.Tensor  # steps done, int32 scalar
    inner_opt_state: PyTree
    acc_grads: PyTree  # their mean so far (or sum)


def multi_steps(
    inner: GradientTransformation, every_k: int, use_grad_mean: bool = True, accumulator_dtype: torch.dtype | None = torch.float32
) -> GradientTransformation:
    """Let `inner` step once every k updates, with the mean (or sum) of their gradients; the others are zero. Optax's `MultiSteps`.

    Args:
        inner: the transformation that steps.
        every_k: how many gradients make a step.
        use_grad_mean: the mean, else the sum.
        accumulator_dtype: of the mean or sum; the param's where None.

    >>> from functrain.optim import sgd
    >>> tx = multi_steps(sgd(1.0), 2)
    >>> state = tx.init({"w": torch.zeros(1)})
    >>> first, state = tx.update({"w": torch.ones(1)}, state)
    >>> second, state = tx.update({"w": torch.full((1,), 3.0)}, state)
    >>> float(first["w"]), float(second["w"])
    (0.0, -2.0)
    """
    if every_k < 1:
        raise ValueError(f"every_k must be at least 1, not {every_k}")

    def init(params: PyTree) -> MultiStepsState:
        return MultiStepsState(zero_count(params), zero_count(params), inner.init(params), like(params, accumulator_dtype))

    def update(grads: PyTree, state: MultiStepsState, params: PyTree = None) -> tuple[PyTree, MultiStepsState]:
        def add(g: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
            return mean + (g - mean) / (state.mini_step + 1) if use_grad_mean else mean + g

        total = tree.map(add, grads, state.acc_grads)
        candidate, stepped = inner.update(tree.map(lambda t, g: t.to(g.dtype), total, grads), state.inner_opt_state, params)
        emit = state.mini_step == every_k - 1
        return tree.map(lambda u: torch.where(emit, u, torch.zeros_like(u)), candidate), MultiStepsState(
            (state.mini_step + 1) % every_k,
            torch.where(emit, increment(state.gradient_step), state.gradient_step),
            tree.map(lambda new, old: torch.where(emit, new, old), stepped, state.inner_opt_state),
            tree.map(lambda t, old: torch.where(emit, torch.zeros_like(t), t).to(old.dtype), total, state.acc_grads),
        )

    return GradientTransformation(init, update)
