"""The head of a language model and its loss in one, chunk by chunk: cross-entropy that never holds all logits."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from functrain.losses.classes import Options, check_targets, token_losses, wide_dtype
from functrain.torch_internals import transform_is_active
from functrain.tree import Mean

CHUNK_SIZE = 512  # tokens: measured on CPU, smaller ones pay more for summing the weight's gradient, larger ones for memory


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    chunk_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Mean:
    """`cross_entropy(F.linear(hidden, weight, bias), targets)` that never holds more than one chunk of the logits.

    Where a derivative will be wanted, each chunk's gradients are computed right behind its logits (Hsu et al. 2024, Liger Kernel, arXiv
    2410.10989), so the logits are made once, and the backward pass is a multiplication by the upstream gradient. Derivatives of any
    order are true ones; those of second and higher order do hold all logits.

    The matrix products are done in the inputs' dtype (that of `torch.autocast` where it is active), softmax and sums in float32 at least,
    and the weight's gradient is summed over the chunks in float32.

    Args:
        hidden: floating-point [..., d]. With [batch, seq, d] the chunks are cut along seq, so that a batch that is split over ranks
            stays split.
        weight: [classes, d].
        targets: integer [...], each a class or `ignore_index`.
        bias: [classes].
        chunk_size: tokens in a chunk, about; the memory is `chunk_size * classes` values. None: 512.
        ignore_index: as for `cross_entropy`. What stands in ignored rows of `hidden`, NaN included, has no influence.
        label_smoothing: as for `cross_entropy`.
        z_loss: as for `cross_entropy`.

    Returns:
        `Mean(total, weight)`, as `cross_entropy`.

    Raises:
        ValueError: shapes do not fit, or an option is out of range.
        TypeError: targets are not integers.

    >>> loss = linear_cross_entropy(torch.zeros(2, 3, 8), torch.ones(5, 8), torch.ones(2, 3, dtype=torch.int64), chunk_size=4)
    >>> round(float(loss.value()), 4), int(loss.weight)
    (1.6094, 6)
    """
    check_targets("linear_cross_entropy", "hidden", hidden, targets)
    _check_head(hidden, weight, bias)
    rows, labels, width = _arranged(hidden, targets, CHUNK_SIZE if chunk_size is None else chunk_size)
    needed = tuple(_needs_gradient(x) for x in (rows, weight, bias))
    options = Options.make(ignore_index, label_smoothing, z_loss, width, needed)
    if any(needed):
        total = _LinearCrossEntropy.apply(rows, weight, bias, labels, options)[0]
    else:
        total = _total(rows, weight, bias, labels, options)
    return Mean(total, (targets != ignore_index).sum())


# ---- chunk by chunk


def _total(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, options: Options) -> torch.Tensor:
    """The summed loss alone, in plain operations."""
    compute, wide = _dtypes(hidden, weight)
    total = torch.zeros((), dtype=wide, device=hidden.device)
    with _no_autocast(hidden):
        weight, bias = weight.to(compute), None if bias is None else bias.to(compute)
        for span in _spans(hidden.shape[1], options.width):
            logits = F.linear(hidden[:, span].to(compute), weight, bias).to(wide)
            total = total + token_losses(logits, targets[:, span], options).sum()
    return total


class _LinearCrossEntropy(torch.autograd.Function):
    """[rows, positions, d] -> the summed loss, and its gradients as further outputs.

    The backward pass multiplies those outputs by the upstream gradient. They are outputs so that they can be differentiated again: what
    then flows into them comes back as the product of the loss's Hessian with it, in plain operations, which differentiate further.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, options: Options) -> Any:
        compute, _ = _dtypes(hidden, weight)
        sums = _Sums()
        with _no_autocast(hidden):
            head = weight.to(compute), None if bias is None else bias.to(compute)
            for span in _spans(hidden.shape[1], options.width):
                sums.add(_chunk(hidden[:, span], *head, targets[:, span], options))
        assert sums.total is not None
        gradients = (None if not sums.by_hidden else torch.cat(sums.by_hidden, 1), sums.by_weight, sums.by_bias)
        return (sums.total, *(g for g in gradients if g is not None))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        *tensors, ctx.options = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output[1:])
        ctx.save_for_forward(*tensors, *output[1:])

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (hidden, weight, bias, targets), gradients = _saved(ctx)
        upstream, directions = cotangents[0], _placed(ctx.options.needed, cotangents[1:])
        total = _second_order(hidden, weight, bias, targets, directions, ctx.options)
        if upstream is not None:
            total = [_plus(None if g is None else upstream * g, t) for g, t in zip(gradients, total, strict=True)]
        cast = (None if g is None else g.to(x.dtype) for g, x in zip(total, (hidden, weight, bias), strict=True))
        return (*cast, None, None)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        (hidden, weight, bias, targets), gradients = _saved(ctx)
        pairs = [(g, t) for g, t in zip(gradients, tangents, strict=False) if g is not None and t is not None]
        total = torch.stack([(g * t).sum() for g, t in pairs]).sum()
        moved = _second_order(hidden, weight, bias, targets, list(tangents[:3]), ctx.options)
        return (total, *(m.to(g.dtype) for m, g in zip(moved, gradients, strict=True) if g is not None and m is not None))


def _chunk(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, options: Options) -> "_Part":
    """Loss and gradients of one chunk [rows, positions, d]; weight and bias are in the dtype to compute in."""
    compute, wide = weight.dtype, wide_dtype(weight.dtype)
    valid, classes = (x.reshape(-1, 1) for x in options.safe(targets))
    rows = torch.where(valid, hidden.reshape(-1, hidden.shape[-1]), 0).to(compute)
    logits = F.linear(rows, weight, bias)
    largest, picked = logits.amax(-1, keepdim=True).to(wide), logits.gather(1, classes).to(wide)
    losses = -(1 - options.label_smoothing) * picked
    if options.label_smoothing:
        losses = losses - options.label_smoothing * logits.mean(-1, keepdim=True, dtype=wide)
    by_logits = torch.softmax(logits, -1, dtype=wide)
    del logits
    # The largest probability is 1 / sum(exp(logits - largest)): the sum that softmax made, without another pass of exponentials.
    normalizer = largest - by_logits.amax(-1, keepdim=True).log()
    losses = losses + normalizer
    if options.z_loss:
        losses = losses + options.z_loss * normalizer.square()
        by_logits = by_logits * (1 + 2 * options.z_loss * normalizer)
    if options.label_smoothing:
        by_logits = by_logits - options.label_smoothing / weight.shape[0]
    by_logits = by_logits.scatter_add(1, classes, torch.full_like(picked, options.label_smoothing - 1)).to(compute)
    need_hidden, need_weight, need_bias = options.needed
    return _Part(
        torch.where(valid, losses, 0).sum(),
        torch.where(valid, by_logits @ weight, 0).reshape(hidden.shape) if need_hidden else None,
        (by_logits, rows) if need_weight else None,
        torch.where(valid, by_logits, 0).sum(0, dtype=wide) if need_bias else None,
    )


@dataclass(frozen=True)
class _Part:
    """What one chunk gives."""

    total: torch.Tensor
    by_hidden: torch.Tensor | None  # [rows, positions, d]
    by_weight: tuple[torch.Tensor, torch.Tensor] | None  # [tokens, classes], [tokens, d]: factors of the gradient
    by_bias: torch.Tensor | None  # [classes]


class _Sums:
    """Sums over chunks; the weight's gradient in float32 at least."""

    def __init__(self) -> None:
        self.total: torch.Tensor | None = None
        self.by_hidden: list[torch.Tensor] = []
        self.by_weight: torch.Tensor | None = None
        self.by_bias: torch.Tensor | None = None

    def add(self, part: _Part) -> None:
        self.total = _plus(self.total, part.total)
        self.by_bias = _plus(self.by_bias, part.by_bias)
        if part.by_hidden is not None:
            self.by_hidden.append(part.by_hidden)
        if part.by_weight is not None:
            by_logits, rows = part.by_weight
            if self.by_weight is not None and rows.dtype == self.by_weight.dtype:
                self.by_weight = torch.addmm(self.by_weight, by_logits.t(), rows)
            else:
                self.by_weight = _plus(self.by_weight, (by_logits.t() @ rows).to(wide_dtype(rows.dtype)))


def _second_order(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    directions: list[torch.Tensor | None],
    options: Options,
) -> list[torch.Tensor | None]:
    """The loss's Hessian times a direction (by hidden, weight, bias), in plain operations; the Hessian is symmetric."""
    if all(direction is None for direction in directions):
        return [None, None, None]
    wide = _dtypes(hidden, weight)[1]
    valid, classes = options.safe(targets)
    mask = valid.unsqueeze(-1)
    with _no_autocast(hidden):
        rows, weight = torch.where(mask, hidden, 0).to(wide), weight.to(wide)
        by_hidden, by_weight, by_bias = (None if d is None else d.to(wide) for d in directions)
        by_hidden = None if by_hidden is None else torch.where(mask, by_hidden, 0)
        logits = F.linear(rows, weight, None if bias is None else bias.to(wide))
        moved = torch.zeros_like(logits) if by_bias is None else by_bias.expand_as(logits)
        moved = moved if by_hidden is None else moved + by_hidden @ weight.t()
        moved = moved if by_weight is None else moved + rows @ by_weight.t()
        probabilities, normalizer = torch.softmax(logits, -1), torch.logsumexp(logits, -1, keepdim=True)
        normalizer_moved = (probabilities * moved).sum(-1, keepdim=True)
        slope = 1 + 2 * options.z_loss * normalizer
        curved = slope * probabilities * (moved - normalizer_moved) + 2 * options.z_loss * normalizer_moved * probabilities
        curved = torch.where(mask, curved, 0).flatten(0, 1)
        results: list[torch.Tensor | None] = [(curved @ weight).reshape(rows.shape), curved.t() @ rows.flatten(0, 1), curved.sum(0)]
        even = options.label_smoothing / weight.shape[0]
        by_logits = (slope * probabilities - even).scatter_add(-1, classes, torch.full_like(slope, options.label_smoothing - 1))
        by_logits = torch.where(mask, by_logits, 0).flatten(0, 1)
        if by_weight is not None:
            results[0] = _plus(results[0], (by_logits @ by_weight).reshape(rows.shape))
        if by_hidden is not None:
            results[1] = _plus(results[1], by_logits.t() @ by_hidden.flatten(0, 1))
    return [r if needed else None for r, needed in zip(results, options.needed, strict=True)]


# ---- small parts


def _saved(ctx: Any) -> tuple[tuple[Any, ...], list[torch.Tensor | None]]:
    """(hidden, weight, bias, targets), and the gradients by the first three, None where they are not wanted."""
    saved = ctx.saved_tensors
    return saved[:4], _placed(ctx.options.needed, saved[4:])


def _placed(needed: tuple[bool, ...], values: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
    given = iter(values)
    return [next(given) if need else None for need in needed]


def _plus(x: torch.Tensor | None, y: torch.Tensor | None) -> torch.Tensor | None:
    return y if x is None else x if y is None else x + y


def _needs_gradient(x: torch.Tensor | None) -> bool:
    """Inside torch.func a tensor does not tell which of the transforms around it wants its gradient: assume that one does."""
    return x is not None and torch.is_grad_enabled() and (x.requires_grad or transform_is_active())


def _dtypes(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.dtype, torch.dtype]:
    """What matrix products are done in, and what softmax and sums are done in."""
    compute = torch.promote_types(hidden.dtype, weight.dtype)
    kind = hidden.device.type
    if compute != torch.float64 and torch.is_autocast_enabled(kind):
        compute = torch.get_autocast_dtype(kind)
    return compute, wide_dtype(compute)


def _no_autocast(x: torch.Tensor) -> torch.autocast:
    """Dtypes are chosen here explicitly."""
    return torch.autocast(x.device.type, enabled=False)


def _arranged(hidden: torch.Tensor, targets: torch.Tensor, chunk_size: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Hidden as [rows, positions, d], targets as [rows, positions], and how many positions make a chunk."""
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 1:
        raise ValueError(f"chunk_size must be an int of at least 1, not {chunk_size!r}")
    positions, width = (1, *hidden.shape)[-2:]
    rows = max(1, hidden.numel() // max(1, positions * width)) if hidden.dim() > 2 else 1
    if rows > chunk_size:  # one position of every row would be too much: cut through the rows
        rows, positions = 1, rows * positions
    return hidden.reshape(rows, positions, width), targets.reshape(rows, positions), max(1, chunk_size // rows)


def _spans(length: int, width: int) -> Iterator[slice]:
    """Cuts of nearly one size, none longer than `width`.

    >>> list(_spans(7, 3))
    [slice(0, 3, None), slice(3, 5, None), slice(5, 7, None)]
    """
    count = max(1, -(-length // width))
    start = 0
    for i in range(count):
        stop = start + length // count + (i < length % count)
        yield slice(start, stop)
        start = stop


def _check_head(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"linear_cross_entropy: weight is [classes, {hidden.shape[-1]}] for hidden of shape {list(hidden.shape)}, as in F.linear, not "
            f"{list(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"linear_cross_entropy: bias is [{weight.shape[0]}] for weight of shape {list(weight.shape)}, not {list(bias.shape)}"
        )
