"""The bounds of a truncated normal, with the arithmetic of JAX and XLA.

A bound that is a Python number stays one, so that it costs no operation of a captured graph.
"""

import math
import struct
from collections.abc import Callable
from typing import Any

import torch

from functrain.kernels.threefry_torch import rounded

Number = float | torch.Tensor


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
