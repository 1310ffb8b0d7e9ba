"""Losses of one number each."""

import torch
import torch.nn.functional as F

from functrain.losses.classes import widened
from functrain.tree import Mean


def mean_squared_error(predictions: torch.Tensor, targets: torch.Tensor, *, mask: torch.Tensor | None = None) -> Mean:
    """Squared differences, summed where the mask is not 0.

    Args:
        predictions: floating-point [...].
        targets: of the same shape.
        mask: bool, or weights, that broadcast to it; None counts every element.

    Returns:
        `Mean(total, weight)`: the sum of mask * (predictions - targets)**2, and the mask's sum.

    Raises:
        ValueError: shapes differ.

    >>> mean_squared_error(torch.zeros(4), torch.ones(4), mask=torch.tensor([True, True, False, True])).value()
    tensor(1.)
    """
    _check_same_shape("mean_squared_error", predictions, targets)
    return _masked_sum((widened(predictions) - widened(targets)).square(), mask)


def binary_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, *, mask: torch.Tensor | None = None) -> Mean:
    """Cross-entropy of independent yes-or-no labels, summed where the mask is not 0.

    Args:
        logits: floating-point [...], of the answer yes.
        targets: of the same shape: bool, or probabilities.
        mask: bool, or weights, that broadcast to it; None counts every element.

    Returns:
        `Mean(total, weight)`.

    Raises:
        ValueError: shapes differ.

    >>> round(float(binary_cross_entropy(torch.zeros(2), torch.tensor([True, False])).value()), 4)
    0.6931
    """
    _check_same_shape("binary_cross_entropy", logits, targets)
    wide = widened(logits)
    return _masked_sum(F.binary_cross_entropy_with_logits(wide, targets.to(wide.dtype), reduction="none"), mask)


def _masked_sum(values: torch.Tensor, mask: torch.Tensor | None) -> Mean:
    if mask is None:
        return Mean(values.sum(), torch.full((), values.numel(), dtype=torch.int64, device=values.device))
    mask = mask.expand_as(values)
    return Mean(torch.where(mask != 0, values * mask, 0).sum(), mask.sum())


def _check_same_shape(name: str, one: torch.Tensor, other: torch.Tensor) -> None:
    if one.shape != other.shape:
        raise ValueError(f"{name}: shapes {list(one.shape)} and {list(other.shape)} differ; nothing is broadcast between them")
