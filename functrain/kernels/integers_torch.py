"""Integers of a range from random words, in torch operations, as `jax.random.randint` computes them.

Words are int64 tensors here: 32 bits without sign, or all 64. A bound is a Python number or an integer tensor.
"""

from typing import Any

import torch

Integer = int | torch.Tensor

_WORD = 0xFFFFFFFF
_LARGEST = 2**63 - 1


def from_words(upper: torch.Tensor, lower: torch.Tensor, low: Integer, span: Integer, width: int) -> torch.Tensor:
    """``low + (upper * 2**width + lower) % span`` as int64, from words of a width of 32 or 64 bits."""
    multiplier = _remainder(1 << width // 2, span, width)
    multiplier = _remainder(_wrap(multiplier * multiplier, width), span, width)
    product = _wrap(_remainder(upper, span, width) * multiplier, width)
    return _remainder(_wrap(product + _remainder(lower, span, width), width), span, width) + low


def word_width(dtype: torch.dtype) -> int:
    """How wide the words are that integers of a dtype are made of, in bits."""
    return 64 if dtype == torch.int64 else 32


def span_of(minval: Integer, maxval: Integer, dtype: torch.dtype) -> tuple[Integer, Integer]:
    """Bounds brought into a dtype's range, as the lower bound and the number of integers, a word (0 stands for all that a word counts).

    >>> span_of(-3, 500, torch.int8), span_of(5, 2, torch.int64)
    ((-3, 131), (5, 1))
    """
    info = torch.iinfo(dtype)
    minval, last = _clip(minval, info.min, info.max), _clip(_minus_one(maxval), info.min, info.max)
    count: Any = last - minval + 1
    count = max(count, 1) if isinstance(count, int) else torch.where(torch.as_tensor(last < minval), 1, count)
    return minval, _wrap(count, word_width(dtype))


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
