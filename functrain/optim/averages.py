"""Running means of updates."""

import torch

from functrain import tree
from functrain.optim.base import GradientTransformation, increment, transformation, zero_count, zeros
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

    return transformation(lambda params: EmaState(zero_count(params), zeros("ema", params, accumulator_dtype)), update)


def bias_correction(decay: float | torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """``1 - decay ** count``, float64 scalar."""
    base = decay.to(torch.float64) if isinstance(decay, torch.Tensor) else torch.full_like(count, decay, dtype=torch.float64)
    return 1 - base**count
