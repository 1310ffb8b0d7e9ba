"""Threefry-2x32 fills in torch operations: what the operators of `functrain.kernels.threefry` mean, on any device.

A draw of a shape gives its element with row-major index i the cipher of the count i under the key (JAX's partitionable layout). A fill
computes one window of it: `start` and `size` per dimension. Words are int32 tensors, which wrap like the unsigned words they stand for.

Every function takes keys `[*batch, 2]` (int64, two words of 32 bits) and returns `[*batch, *size]`: one draw per key.

Sources: Salmon, Moraes, Dror, Shaw (2011), "Parallel random numbers: as easy as 1, 2, 3"; Giles (2010), "Approximating the erfinv
function"; FreeBSD's s_log1pf.c for the logarithm.
"""

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from functrain.kernels import integers_torch

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_WORD = 0xFFFFFFFF
_BLOCK = (1 << 15) - 1  # elements: as many as torch computes on one thread

# Of each dtype: bits drawn, bits kept (those of the significand), as jax.random.uniform does it; bfloat16 is drawn from 8 bits.
_DRAWN_AND_KEPT = {torch.float64: (64, 52), torch.float32: (32, 23), torch.float16: (16, 10), torch.bfloat16: (8, 7)}
FLOAT_DTYPES = tuple(_DRAWN_AND_KEPT)

Ints = Sequence[int]
Words = tuple[torch.Tensor, torch.Tensor]


# ---- the cipher


def cipher(key: Words, count: Words) -> Words:
    """The two words that Threefry-2x32 with 20 rounds makes of a count under a key; int32 tensors that broadcast."""
    schedule = (*key, key[0] ^ key[1] ^ _PARITY)
    x0, x1 = count[0] + schedule[0], count[1] + schedule[1]
    for i in range(5):
        for distance in _ROTATIONS[i % 2]:
            x0 = x0 + x1
            x1 = _rotate(x1, distance) ^ x0
        x0, x1 = x0 + schedule[(i + 1) % 3], x1 + (schedule[(i + 2) % 3] + (i + 1))
    return x0, x1


def _rotate(x: torch.Tensor, distance: int) -> torch.Tensor:
    # `>>` is arithmetic: the mask removes the copies of the sign.
    return (x << distance) | ((x >> (32 - distance)) & ((1 << distance) - 1))


def _signed(word: int) -> int:
    """The int32 that holds the low 32 bits of a number."""
    word &= _WORD
    return word - (1 << 32) if word >> 31 else word


def _unsigned(word: torch.Tensor) -> torch.Tensor:
    return word.to(torch.int64) & _WORD


def _split_words(count: torch.Tensor) -> Words:
    return (count >> 32).to(torch.int32), count.to(torch.int32)


def fold_in(key: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Keys `[*n, 2]` from keys `[*n, 2]` and counts `[*n]` (int64), which broadcast: the cipher of the count, as a new key."""
    words = cipher((key[..., 0].to(torch.int32), key[..., 1].to(torch.int32)), _split_words(data))
    return torch.stack([_unsigned(word) for word in words], dim=-1)


# ---- windows


def window_counts(shape: Ints, start: Ints, size: Ints, device: torch.device) -> Words:
    """The row-major indices of a window of a shape, as two words each of a shape that broadcasts to `size`."""
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    first = sum(s * stride for s, stride in zip(start, strides, strict=True))
    last = first + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))
    one_high_word = first >> 32 == last >> 32
    dtype = torch.int32 if one_high_word else torch.int64
    index = torch.full([], _signed(first) if one_high_word else first, dtype=dtype, device=device)
    for d, (n, stride) in enumerate(zip(size, strides, strict=True)):
        steps = torch.arange(n, dtype=dtype, device=device) * (_signed(stride) if one_high_word else stride)
        index = index + steps.reshape([n] + [1] * (len(size) - d - 1))
    if one_high_word:
        return torch.full([], _signed(first >> 32), dtype=torch.int32, device=device), index
    return _split_words(index)


def _window_words(key: torch.Tensor, shape: Ints, start: Ints, size: Ints) -> Words:
    aligned = [key[..., i].to(torch.int32).reshape([*key.shape[:-1]] + [1] * len(size)) for i in (0, 1)]
    return cipher((aligned[0], aligned[1]), window_counts(shape, start, size, key.device))


def in_blocks(fill: Callable[..., torch.Tensor], key: torch.Tensor, window: tuple[Ints, ...], *rest: Any) -> torch.Tensor:
    """A fill in pieces whose temporaries stay in the cache: six times faster on CPU than at once, and without their memory."""
    shape, start, size = window
    if math.prod(size) * key.numel() <= 2 * _BLOCK:
        return fill(key, shape, start, size, *rest)
    split = next((d for d, n in enumerate(size) if n > 1), None)
    if split is None:  # many keys
        return fill(key, shape, start, size, *rest)
    rows = max(1, _BLOCK // (math.prod(size[split + 1 :]) * (key.numel() // 2)))
    parts = []
    for first in range(0, size[split], rows):
        starts, sizes = list(start), list(size)
        starts[split] += first
        sizes[split] = min(rows, size[split] - first)
        parts.append(in_blocks(fill, key, (shape, starts, sizes), *rest))
    return torch.cat(parts, dim=key.ndim - 1 + split)


def bits(key: torch.Tensor, shape: Ints, start: Ints, size: Ints, width: int) -> torch.Tensor:
    """Random words: int32 for a width of 32 bits, int64 for 64."""
    high, low = _window_words(key, shape, start, size)
    return high ^ low if width == 32 else (high.to(torch.int64) << 32) | _unsigned(low)


def as_int64(words: torch.Tensor) -> torch.Tensor:
    """Words as int64: 32 bits without sign, or all 64."""
    return words if words.dtype == torch.int64 else _unsigned(words)


def integers(key: torch.Tensor, shape: Ints, start: Ints, size: Ints, low: int, span: int, width: int) -> torch.Tensor:
    """Integers low + 0 ... span - 1 as int64, each from two words of a width, drawn from two keys that are split off."""
    keys = fold_in(key.unsqueeze(-2), torch.arange(2, device=key.device)).unbind(-2)
    upper, lower = (as_int64(bits(k, shape, start, size, width)) for k in keys)
    return integers_torch.from_words(upper, lower, low, span, width)


# ---- floating-point values


def bits_width(dtype: torch.dtype) -> int:
    """How wide the words are that a value of a dtype is made of: 32 or 64 bits."""
    return 64 if dtype == torch.float64 else 32


def unit(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Words as multiples of 2^-m in [0, 1), m the explicit bits of the dtype's significand."""
    drawn, kept = _DRAWN_AND_KEPT[dtype]
    return ((words >> (drawn - kept)) & ((1 << kept) - 1)).to(dtype) * 2.0**-kept


def rounded(value: float, dtype: torch.dtype) -> float:
    """The number of a dtype that is nearest to a Python float."""
    if dtype == torch.float64 or not math.isfinite(value):
        return value
    try:
        if dtype == torch.float16:
            return struct.unpack("e", struct.pack("e", value))[0]
        word = struct.unpack("I", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    if dtype == torch.bfloat16:
        word = (word + 0x7FFF + ((word >> 16) & 1)) & 0xFFFF0000
    return struct.unpack("f", struct.pack("I", word))[0]


def stretch(values: torch.Tensor, low: float | torch.Tensor, span: float | torch.Tensor) -> torch.Tensor:
    """``max(low, values * span + low)`` with the roundings of XLA on CPU: fused, but for bfloat16, which rounds twice."""
    dtype = values.dtype
    if dtype == torch.bfloat16:
        result = values * span + low
    elif dtype == torch.float64:
        result = _fused_multiply_add(values, span, low)
    else:
        wide = torch.float64 if dtype == torch.float32 else torch.float32  # the product is exact in it
        span, low = (x.to(wide) if isinstance(x, torch.Tensor) else x for x in (span, low))
        result = (values.to(wide) * span + low).to(dtype)
    return torch.clamp(result, min=low if isinstance(low, float) else low.to(dtype))


def _fused_multiply_add(x: torch.Tensor, y: float | torch.Tensor, z: float | torch.Tensor) -> torch.Tensor:
    """``x * y + z`` in float64 with (almost always) one rounding, by Dekker's product and Knuth's sum."""
    y = torch.full_like(x, y) if isinstance(y, float) else y
    product = x * y
    x_high, y_high = (_upper_half(v) for v in (x, y))
    x_low, y_low = x - x_high, y - y_high
    product_error = ((x_high * y_high - product) + x_high * y_low + x_low * y_high) + x_low * y_low
    total = product + z
    z_part = total - product
    total_error = (product - (total - z_part)) + (z - z_part)
    return total + (total_error + product_error)


def _upper_half(x: torch.Tensor) -> torch.Tensor:
    scaled = x * 134217729.0  # 2^27 + 1
    return scaled - (scaled - x)


def uniform(key: torch.Tensor, shape: Ints, start: Ints, size: Ints, dtype: torch.dtype, low: float, high: float) -> torch.Tensor:
    """Uniform values in [low, high)."""
    return from_words_uniform(bits(key, shape, start, size, bits_width(dtype)), dtype, low, high)


def from_words_uniform(words: torch.Tensor, dtype: torch.dtype, low: float, high: float) -> torch.Tensor:
    """Words as uniform values in [low, high)."""
    low, span = bounds(low, high, dtype)
    values = unit(words, dtype)
    return values if (low, span) == (0.0, 1.0) else stretch(values, low, span)


def bounds(low: float, high: float, dtype: torch.dtype) -> tuple[float, float]:
    """Lower bound and width of a range, as numbers of a dtype."""
    low = rounded(low, dtype)
    return low, rounded(rounded(high, dtype) - low, dtype)


def normal(key: torch.Tensor, shape: Ints, start: Ints, size: Ints, dtype: torch.dtype) -> torch.Tensor:
    """Standard normal values."""
    return from_words_normal(bits(key, shape, start, size, bits_width(dtype)), dtype)


def from_words_normal(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Words as standard normal values: sqrt(2) times erfinv of a uniform value in (-1, 1)."""
    lowest = torch.finfo(dtype).eps / 2 - 1  # the number after -1
    return erfinv(from_words_uniform(words, dtype, lowest, 1.0)) * rounded(math.sqrt(2.0), dtype)


def bernoulli(key: torch.Tensor, shape: Ints, start: Ints, size: Ints, p: float) -> torch.Tensor:
    """True with probability p (a number of float32)."""
    return unit(bits(key, shape, start, size, 32), torch.float32) < rounded(p, torch.float32)


# ---- the inverse of the error function

# fmt: off
_CENTRAL_32 = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164, 0.246640727,
    1.50140941,
)
_TAIL_32 = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047, 1.00167406,
    2.83297682,
)
_CENTRAL_64 = (
    -3.6444120640178196996e-21, -1.685059138182016589e-19, 1.2858480715256400167e-18, 1.115787767802518096e-17,
    -1.333171662854620906e-16, 2.0972767875968561637e-17, 6.6376381343583238325e-15, -4.0545662729752068639e-14,
    -8.1519341976054721522e-14, 2.6335093153082322977e-12, -1.2975133253453532498e-11, -5.4154120542946279317e-11,
    1.051212273321532285e-09, -4.1126339803469836976e-09, -2.9070369957882005086e-08, 4.2347877827932403518e-07,
    -1.3654692000834678645e-06, -1.3882523362786468719e-05, 0.0001867342080340571352, -0.00074070253416626697512,
    -0.0060336708714301490533, 0.24015818242558961693, 1.6536545626831027356,
)
_MIDDLE_64 = (
    2.2137376921775787049e-09, 9.0756561938885390979e-08, -2.7517406297064545428e-07, 1.8239629214389227755e-08,
    1.5027403968909827627e-06, -4.013867526981545969e-06, 2.9234449089955446044e-06, 1.2475304481671778723e-05,
    -4.7318229009055733981e-05, 6.8284851459573175448e-05, 2.4031110387097893999e-05, -0.0003550375203628474796,
    0.00095328937973738049703, -0.0016882755560235047313, 0.0024914420961078508066, -0.0037512085075692412107,
    0.005370914553590063617, 1.0052589676941592334, 3.0838856104922207635,
)
_TAIL_64 = (
    -2.7109920616438573243e-11, -2.5556418169965252055e-10, 1.5076572693500548083e-09, -3.7894654401267369937e-09,
    7.6157012080783393804e-09, -1.4960026627149240478e-08, 2.9147953450901080826e-08, -6.7711997758452339498e-08,
    2.2900482228026654717e-07, -9.9298272942317002539e-07, 4.5260625972231537039e-06, -1.9681778105531670567e-05,
    7.5995277030017761139e-05, -0.00021503011930044477347, -0.00013871931833623122026, 1.0103004648645343977,
    4.8499064014085844221,
)
# fmt: on


def erfinv(x: torch.Tensor) -> torch.Tensor:
    """The inverse of erf, infinite at -1 and 1 and NaN beyond; half precision is computed in float32.

    `torch.erfinv` is 2e-5 off where float32 values are near 1; this is what XLA computes, within 1e-6.
    """
    if x.dtype == torch.float64:
        return _erfinv_64(x)
    result = _erfinv_32(x if x.dtype == torch.float32 else x.to(torch.float32))
    return result.to(x.dtype)


def _erfinv_32(x: torch.Tensor) -> torch.Tensor:
    w = -_log1p_negative(-(x * x))
    inner = _polynomial(_CENTRAL_32, w - 2.5) * x
    root = torch.sqrt(w.to(torch.float64)).to(torch.float32)  # torch.sqrt in float32 goes through MKL, a last place off at times
    outer = _polynomial(_TAIL_32, root - 3.0) * x
    return _at_the_ends(x, torch.where(w < 5.0, inner, outer))


def _erfinv_64(x: torch.Tensor) -> torch.Tensor:
    w = -torch.log1p(-(x * x))
    root = torch.sqrt(w)
    inner = _polynomial(_CENTRAL_64, w - 3.125)
    outer = torch.where(w < 16.0, _polynomial(_MIDDLE_64, root - 3.25), _polynomial(_TAIL_64, root - 5.0))
    return _at_the_ends(x, torch.where(w < 6.25, inner, outer) * x)


def _at_the_ends(x: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
    size = x.abs()
    return torch.where(size < 1.0, finite, torch.where(size == 1.0, x * math.inf, math.nan))


def _polynomial(coefficients: Sequence[float], v: torch.Tensor) -> torch.Tensor:
    p = v * coefficients[0] + coefficients[1]
    for coefficient in coefficients[2:]:
        p = p * v + coefficient
    return p


def _log1p_negative(t: torch.Tensor) -> torch.Tensor:
    """log(1 + t) for -1 < t <= 0 in float32 within one unit in the last place, from operations that round the same everywhere."""
    u = 1.0 + t
    shifted = u.view(torch.int32) + (0x3F800000 - 0x3F3504F3)
    k = ((shifted >> 23) - 127).to(torch.float32)
    f = ((shifted & 0x007FFFFF) + 0x3F3504F3).view(torch.float32) - 1.0
    correction = (t - (u - 1.0)) / u
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    even = w * (w * 0.24279078841 + 0.40000972152)
    odd = z * (w * 0.28498786688 + 0.66666662693)
    half_square = f * 0.5 * f
    return s * (half_square + (odd + even)) + (k * 9.0580006145e-06 + correction) - half_square + f + k * 6.9313812256e-01
