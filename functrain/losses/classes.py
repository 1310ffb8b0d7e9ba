"""Cross-entropy of class indices."""

from dataclasses import dataclass

import torch

from functrain.tree import Mean


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Mean:
    """Cross-entropy of class indices, summed over the tokens whose target is not `ignore_index`.

    Args:
        logits: floating-point [..., classes].
        targets: integer [...], each a class or `ignore_index`.
        ignore_index: a target that does not count, neither in the total nor in the weight.
        label_smoothing: in [0, 1], the share of the target that is spread evenly over all classes (Szegedy et al. 2016, arXiv 1512.00567).
        z_loss: factor of log(sum(exp(logits)))**2, which keeps logits from drifting (Chowdhery et al. 2022, arXiv 2204.02311, section 5).

    Returns:
        `Mean(total, weight)`: float32 scalar (float64 for float64 logits), and the int64 count of tokens that are not ignored.

    Raises:
        ValueError: shapes do not fit, or an option is out of range.
        TypeError: targets are not integers.

    >>> loss = cross_entropy(torch.zeros(3, 4), torch.tensor([1, 2, -100]))
    >>> round(float(loss.value()), 4), int(loss.weight)
    (1.3863, 2)
    """
    check_targets("cross_entropy", "logits", logits, targets)
    options = Options.make(ignore_index, label_smoothing, z_loss)
    return Mean(token_losses(widened(logits), targets, options).sum(), (targets != ignore_index).sum())


# ---- one token's loss


@dataclass(frozen=True)
class Options:
    """How a loss over classes is computed."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    width: int = 1  # positions in a chunk of [rows, positions, d]
    needed: tuple[bool, ...] = ()  # whether gradients by hidden, weight, bias are wanted

    @classmethod
    def make(cls, ignore_index: int, label_smoothing: float, z_loss: float, width: int = 1, needed: tuple[bool, ...] = ()) -> "Options":
        """The options, checked.

        Raises:
            ValueError: one is out of range.
        """
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"label_smoothing must be in [0, 1], not {label_smoothing}")
        if z_loss < 0:
            raise ValueError(f"z_loss must not be negative, but it is {z_loss}")
        return cls(ignore_index, label_smoothing, z_loss, width, needed)

    def safe(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which targets count [...], and targets that are all classes [..., 1]."""
        valid = targets != self.ignore_index
        return valid, torch.where(valid, targets, 0).long().unsqueeze(-1)


def token_losses(logits: torch.Tensor, targets: torch.Tensor, options: Options) -> torch.Tensor:
    """[..., classes] -> [...], 0 where the target is ignored; differentiable to any order.

    `log_softmax` and `gather` rather than torch's `nll_loss`, whose mean is a mean of means once a batch is split.
    """
    valid, classes = options.safe(targets)
    log_probabilities = torch.log_softmax(logits, -1)
    picked = log_probabilities.gather(-1, classes)
    losses = -picked.squeeze(-1)
    if options.label_smoothing:
        losses = (1 - options.label_smoothing) * losses - options.label_smoothing * log_probabilities.mean(-1)
    if options.z_loss:
        losses = losses + options.z_loss * (logits.gather(-1, classes) - picked).squeeze(-1).square()
    return torch.where(valid, losses, 0)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums are computed in: float32, float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def widened(x: torch.Tensor) -> torch.Tensor:
    """A tensor in the dtype that sums are computed in."""
    return x.to(wide_dtype(x.dtype))


def check_targets(name: str, what: str, scores: torch.Tensor, targets: torch.Tensor) -> None:
    """Raise unless targets [...] are class indices for scores [..., classes]; `name` and `what` are the caller's words."""
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise TypeError(f"{name}: targets are class indices, so integers, not {targets.dtype}")
    if scores.dim() == 0 or scores.shape[:-1] != targets.shape:
        raise ValueError(
            f"{name}: {what} of shape {list(scores.shape)} want targets of shape {list(scores.shape[:-1])}, not {list(targets.shape)}; "
            f"the last dimension of {what} is not one of the targets'"
        )
    if not scores.is_floating_point():
        raise TypeError(f"{name}: {what} must be floating-point, not {scores.dtype}")
