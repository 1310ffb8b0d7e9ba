"""From random words to a range: integers between bounds, and the bounds of a truncated normal, with the arithmetic of JAX and XLA.

Words and integers are int64 tensors here. A bound that is a Python number stays one, so that it costs no operation of a captured graph.
"""

import math
import struct
from collections.abc import Callable
from typing import Any

import torch

from functrain.kernels.threefry_torch import rounded

Integer = int | torch.Tensor
Number = float | torch.Tensor

_WORD = 0xFFFFFFFF
_LARGEST = 2**63 - 1


# ---- integers


def integers(upper: torch.Tensor, lower: torch.Tensor, minval: Integer, maxval: Integer, dtype: torch.dtype) -> torch.Tensor:
    """Two words per value to integers in [minval, maxval): ``minval + (upper * 2**width + lower) % span``, as `jax.random.randint`.

    Args:
        upper: words of 64 bits for int64, of 32 otherwise.
        lower: likewise.
        minval: included.
        maxval: not included; may be one more than the largest number of the dtype.
        dtype: of the result.
    """
    width = 64 if dtype == torch.int64 else 32
    minval, span = _span(minval, maxval, dtype, width)
    multiplier = _remainder(1 << width // 2, span, width)
    multiplier = _remainder(_wrap(multiplier * multiplier, width), span, width)
    product = _wrap(_remainder(upper, span, width) * multiplier, width)
    offset = _remainder(_wrap(product + _remainder(lower, span, width), width), span, width)
    return (offset + minval).to(dtype)


def _span(minval: Integer, maxval: Integer, dtype: torch.dtype, width: int) -> tuple[Integer, Integer]:
    """The bounds brought into the dtype's range, as lower bound and width of the range (0 stands for 2**width, as a word has it)."""
    info = torch.iinfo(dtype)
    minval, last = _clip(minval, info.min, info.max), _clip(_minus_one(maxval), info.min, info.max)
    count: Any = last - minval + 1
    return minval, _wrap(max(count, 1) if isinstance(count, int) else torch.where(torch.as_tensor(last < minval), 1, count), width)


def _minus_one(maxval: Integer) -> Integer:
    if isinstance(maxval, int):
        return maxval - 1
    return maxval.to(torch.int64).clamp(min=-_LARGEST) - 1


def _clip(x: Integer, low: int, high: int) -> Integer:
    return min(max(x, low), high) if isinstance(x, int) else x.to(torch.int64).clamp(low, high)


def _wrap(x: Any, width: int) -> Any:
    """A number as a word: 32 bits without sign, or the int64 that holds 64."""
    if width == 32:
        return x & _WORD
    return ((x + 2**63) % 2**64) - 2**63 if isinstance(x, int) else x


def _remainder(x: Any, span: Integer, width: int) -> Any:
    """``x % span`` of words, x itself where the span is 0."""
    if isinstance(span, int):
        if span == 0:
            return x
        if isinstance(x, int):
            return _wrap((x % 2**width) % (span % 2**width), width)
        if width == 32:
            return x % span
        return _remainder_64(x, span) if span > 0 else _remainder_of_large(x, span)
    if isinstance(x, int):
        x = torch.full_like(span, x)
    if width == 32:
        return torch.where(span == 0, x, x % torch.where(span == 0, 1, span))
    return torch.where(span > 0, _remainder_64(x, torch.where(span > 0, span, 1)), _remainder_of_large(x, span))


def _remainder_64(x: torch.Tensor, span: Integer) -> torch.Tensor:
    """The remainder of words of 64 bits by a span below 2**63."""
    doubled = (((x >> 1) & _LARGEST) % span) * 2 + (x & 1)  # less than twice the span, perhaps above 2**63
    return torch.where(_below(doubled, span), doubled, doubled - span)


def _remainder_of_large(x: torch.Tensor, span: Integer) -> torch.Tensor:
    """The remainder of words of 64 bits by a span of 2**63 or more (a negative int64); x for the span 0."""
    return torch.where(_below(x, span), x, x - span)


def _below(x: torch.Tensor, y: Integer) -> torch.Tensor:
    """``x < y`` of words of 64 bits without sign."""
    return (x ^ -(2**63)) < (y ^ -(2**63))


# ---- truncation of a normal


def normal_range(bound: Number, dtype: torch.dtype) -> Number:
    """``erf(bound / sqrt(2))`` in a dtype, as XLA computes it: where in (-1, 1) a bound of a normal value cuts the uniform value."""
    root = rounded(math.sqrt(2.0), dtype)
    if isinstance(bound, torch.Tensor):
        ratios = bound / root
        return torch.erf(ratios) if dtype == torch.float64 else _erf(ratios.to(torch.float64), _nearest, _clamp).to(dtype)
    ratio = rounded(bound / root, dtype)
    return math.erf(ratio) if dtype == torch.float64 else rounded(_erf(ratio, _nearest_number, _clamp_number), dtype)


# The rational approximation of erf in float32 that XLA and Eigen use, and where it reaches 1.
_ERF_NUMERATOR = (0.00022905065861350646, 0.0034082910107109506, 0.050955695062380861, 0.18520832239976145, 1.128379143519084)
# fmt: off
_ERF_DENOMINATOR = (
    -1.1791602954361697e-7, 0.000023547966471313185, 0.0010179625278914885, 0.014070470171167667, 0.11098505178285362,
    0.49746925110067538, 1.0,
)
# fmt: on
_ERF_REACH = 3.832506856900711


def _erf(x: Any, nearest: Callable[[Any], Any], clamp: Callable[[Any, float], Any]) -> Any:
    """The error function with float32 roundings (fused multiply-adds) in float64 arithmetic, on a number or a tensor."""
    x = clamp(x, _nearest_number(_ERF_REACH))
    square = nearest(x * x)

    def polynomial(coefficients: tuple[float, ...]) -> Any:
        total = square * 0.0 + _nearest_number(coefficients[0])
        for coefficient in coefficients[1:]:
            total = nearest(total * square + _nearest_number(coefficient))
        return total

    return nearest(nearest(x * polynomial(_ERF_NUMERATOR)) / polynomial(_ERF_DENOMINATOR))


def _nearest(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32).to(torch.float64)


def _nearest_number(x: float) -> float:
    return rounded(x, torch.float32)


def _clamp(x: torch.Tensor, reach: float) -> torch.Tensor:
    return x.clamp(-reach, reach)


def _clamp_number(x: float, reach: float) -> float:
    return min(max(x, -reach), reach)


def clamp_open(values: torch.Tensor, lower: Number, upper: Number) -> torch.Tensor:
    """Values moved into the open interval between two bounds."""
    low, high = _next(lower, math.inf, values.dtype), _next(upper, -math.inf, values.dtype)
    if not isinstance(low, torch.Tensor) and not isinstance(high, torch.Tensor):
        return values.clamp(low, high)
    low, high = (end if isinstance(end, torch.Tensor) else torch.full_like(values, end) for end in (low, high))
    return torch.minimum(torch.maximum(values, low), high)


def _next(bound: Number, towards: float, dtype: torch.dtype) -> Number:
    """The number of a dtype that comes after a bound."""
    if isinstance(bound, torch.Tensor):
        return torch.nextafter(bound.detach(), torch.full_like(bound, towards))
    if dtype == torch.float64 or bound == towards:
        return math.nextafter(bound, towards)
    if bound == 0:
        return math.copysign(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps, towards)
    code, step = ("eH", 1) if dtype == torch.float16 else ("fI", 1 if dtype == torch.float32 else 1 << 16)
    (word,) = struct.unpack(code[1], struct.pack(code[0], bound))
    return struct.unpack(code[0], struct.pack(code[1], word + (step if (bound > 0) == (towards > 0) else -step)))[0]
