"""Draws from a key: what `functrain.random` offers beside keys."""

import math

import torch

from functrain.kernels import integers_torch, threefry, threefry_torch
from functrain.random import truncation
from functrain.random.keys import OPERATORS, Shape, as_shape, check_key, fill, split
from functrain.random.keys import key as key  # for the examples

Number = float | torch.Tensor

_BITS_DTYPES = (torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64)
_INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


# ---- bits and uniform values


def bits(key: torch.Tensor, shape: int | Shape = (), dtype: torch.dtype = torch.uint32) -> torch.Tensor:
    """Random bits.

    Args:
        key: `[2]`.
        shape: of the result.
        dtype: an integer dtype; a signed one holds the same bits as the unsigned of its width (for which torch has few operations).

    Raises:
        TypeError: `dtype` is not an integer dtype.

    >>> bits(key(0), (2,), torch.uint8)
    tensor([167, 146], dtype=torch.uint8)
    """
    check_key("bits", key)
    if dtype not in _BITS_DTYPES:
        raise TypeError(f"bits come in an integer dtype, not {dtype}")
    words = fill(OPERATORS.threefry_bits, key, as_shape(shape), 64 if dtype.itemsize == 8 else 32)
    return words.view(dtype) if words.element_size() == dtype.itemsize else words.to(dtype)


def uniform(
    key: torch.Tensor, shape: int | Shape = (), dtype: torch.dtype | None = None, minval: Number = 0.0, maxval: Number = 1.0
) -> torch.Tensor:
    """Uniform values in [minval, maxval).

    Args:
        key: `[2]`.
        shape: of the result.
        dtype: float32 (torch's default dtype where not given), float64, float16 or bfloat16. As in JAX a value has as many random bits as
            the significand of its dtype: 7 for bfloat16.
        minval: included; a number or a tensor that broadcasts to `shape`.
        maxval: not included; likewise.

    Raises:
        TypeError: `dtype` is not one of these.
        ValueError: the bounds do not broadcast to `shape`.

    >>> uniform(key(0), (2,))
    tensor([0.9477, 0.9786])
    """
    check_key("uniform", key)
    dtype, shape = _float_dtype("uniform", dtype), as_shape(shape)
    if not isinstance(minval, torch.Tensor) and not isinstance(maxval, torch.Tensor):
        return fill(OPERATORS.threefry_uniform, key, shape, dtype, float(minval), float(maxval))
    low, high = _tensor(minval, dtype, key), _tensor(maxval, dtype, key)
    _check_broadcast("uniform", shape, low, high)
    return threefry_torch.stretch(fill(OPERATORS.threefry_uniform, key, shape, dtype, 0.0, 1.0), low, high - low)


def bernoulli(key: torch.Tensor, p: Number = 0.5, shape: int | Shape | None = None) -> torch.Tensor:
    """True with probability p.

    Args:
        key: `[2]`.
        p: a number, or a floating-point tensor that broadcasts to `shape` (its dtype says how many bits are drawn).
        shape: of the result; p's by default.

    Returns:
        A tensor of booleans.

    Raises:
        TypeError: p is a tensor of integers.
        ValueError: p does not broadcast to `shape`.

    >>> bernoulli(key(0), 0.25, (4,))
    tensor([False, False, False, False])
    """
    check_key("bernoulli", key)
    if not isinstance(p, torch.Tensor):
        return fill(OPERATORS.threefry_bernoulli, key, as_shape(shape or ()), float(p))
    shape = as_shape(p.shape if shape is None else shape)
    _check_broadcast("bernoulli", shape, p)
    return uniform(key, shape, _float_dtype("bernoulli", p.dtype)) < p


# ---- normal values and their relatives


def normal(key: torch.Tensor, shape: int | Shape = (), dtype: torch.dtype | None = None) -> torch.Tensor:
    """Standard normal values, as sqrt(2) erfinv(u) of a uniform u in (-1, 1).

    Args:
        key: `[2]`.
        shape: of the result.
        dtype: as for `uniform`. Half precision is drawn from as few bits as JAX takes (bfloat16 knows 128 values): where the tails matter,
            draw float32 and convert.

    >>> normal(key(0), (2,))
    tensor([1.6226, 2.0253])
    """
    check_key("normal", key)
    return fill(OPERATORS.threefry_normal, key, as_shape(shape), _float_dtype("normal", dtype))


def truncated_normal(
    key: torch.Tensor, lower: Number, upper: Number, shape: int | Shape | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Standard normal values on condition that they lie in (lower, upper).

    Args:
        key: `[2]`.
        lower: a number or a tensor.
        upper: likewise.
        shape: of the result, to which the bounds broadcast; theirs by default.
        dtype: as for `uniform`.

    Raises:
        ValueError: the bounds do not broadcast to `shape`.

    >>> truncated_normal(key(0), -2.0, 2.0, (2,))
    tensor([1.4560, 1.7147])
    """
    check_key("truncated_normal", key)
    dtype = _float_dtype("truncated_normal", dtype)
    ends = [x.to(key.device, dtype) if isinstance(x, torch.Tensor) else threefry_torch.rounded(float(x), dtype) for x in (lower, upper)]
    tensors = [x for x in ends if isinstance(x, torch.Tensor)]
    shape = as_shape(torch.broadcast_shapes(*(x.shape for x in tensors)) if shape is None else shape)
    _check_broadcast("truncated_normal", shape, *tensors)
    values = uniform(key, shape, dtype, *(truncation.normal_range(x, dtype) for x in ends))
    values = threefry.erfinv(values) * threefry_torch.rounded(math.sqrt(2.0), dtype)
    return truncation.clamp_open(values, *ends)


def exponential(key: torch.Tensor, shape: int | Shape = (), dtype: torch.dtype | None = None) -> torch.Tensor:
    """Exponential values of rate 1, as ``-log1p(-u)`` of a uniform u.

    >>> exponential(key(0), (2,))
    tensor([2.9501, 3.8434])
    """
    return -torch.log1p(-uniform(key, shape, dtype))


def gumbel(key: torch.Tensor, shape: int | Shape = (), dtype: torch.dtype | None = None) -> torch.Tensor:
    """Gumbel values, as ``-log(-log(u))`` of a uniform u in (0, 1).

    >>> gumbel(key(0), (2,))
    tensor([2.9234, 3.8326])
    """
    dtype = _float_dtype("gumbel", dtype)
    return -torch.log(-torch.log(uniform(key, shape, dtype, torch.finfo(dtype).tiny, 1.0)))


# ---- integers, orders, choices


def randint(
    key: torch.Tensor, shape: int | Shape, minval: int | torch.Tensor, maxval: int | torch.Tensor, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Integers in [minval, maxval); minval where the range is empty.

    Args:
        key: `[2]`.
        shape: of the result.
        minval: included; an integer or an integer tensor that broadcasts to `shape` (it may be traced).
        maxval: not included; likewise.
        dtype: int64 (as JAX with x64), int32 (JAX's default otherwise: other numbers, for twice as many bits are drawn as the dtype has),
            int16, int8 or uint8.

    Raises:
        TypeError: a dtype or bound that is not an integer.
        ValueError: the bounds do not broadcast to `shape`.

    >>> randint(key(0), (3,), 0, 10)
    tensor([5, 1, 5])
    """
    check_key("randint", key)
    if dtype not in _INTEGER_DTYPES:
        raise TypeError(f"randint draws one of {', '.join(map(str, _INTEGER_DTYPES))}, not {dtype}")
    shape = as_shape(shape)
    for bound in (minval, maxval):
        if isinstance(bound, float) or (isinstance(bound, torch.Tensor) and bound.is_floating_point()):
            raise TypeError(f"randint has integer bounds, not {bound}")
    _check_broadcast("randint", shape, *(bound for bound in (minval, maxval) if isinstance(bound, torch.Tensor)))
    low, span = integers_torch.span_of(minval, maxval, dtype)
    width = integers_torch.word_width(dtype)
    if isinstance(low, int) and isinstance(span, int):
        return fill(OPERATORS.threefry_integers, key, shape, low, span, width).to(dtype)
    upper, lower = (threefry_torch.as_int64(fill(OPERATORS.threefry_bits, k, shape, width)) for k in split(key))
    return integers_torch.from_words(upper, lower, low, span, width).to(dtype)


def permutation(key: torch.Tensor, x: int | torch.Tensor, axis: int = 0, independent: bool = False) -> torch.Tensor:
    """A tensor in random order along an axis, or the numbers 0 to x - 1 in random order.

    Args:
        key: `[2]`.
        x: a number n, or a tensor `[...]` of at least one dimension.
        axis: along which slices change places.
        independent: whether every line along the axis gets an order of its own.

    Returns:
        int64 `[n]`, or x in its new order.

    Raises:
        ValueError: x is a scalar tensor.

    >>> permutation(key(0), 5)
    tensor([0, 1, 4, 3, 2])
    """
    check_key("permutation", key)
    if not isinstance(x, torch.Tensor):
        return _order(key, (x,), 0)
    if x.ndim == 0:
        raise ValueError("permutation takes a Python number n or a tensor of at least one dimension, not a scalar tensor")
    if independent:
        return torch.take_along_dim(x, _order(key, tuple(x.shape), axis), axis)
    return torch.index_select(x, axis, _order(key, (x.shape[axis],), 0))


def _order(key: torch.Tensor, shape: Shape, axis: int) -> torch.Tensor:
    """Indices `shape` that put lines along an axis in random order: sorts by random words, often enough that ties do not matter."""
    size = math.prod(shape)
    rounds = math.ceil(3 * math.log(max(1, size)) / math.log(2**32 - 1))
    order = torch.zeros(shape, dtype=torch.int64, device=key.device)  # of at most one element, where there is nothing to exchange
    for i in range(rounds):
        key, subkey = split(key)
        words = fill(OPERATORS.threefry_bits, subkey, shape, 32) ^ -(2**31)  # the order of words without sign
        indices = torch.sort(words, dim=axis, stable=True).indices
        order = indices if i == 0 else torch.gather(order, axis, indices)
    return order


def categorical(
    key: torch.Tensor, logits: torch.Tensor, axis: int = -1, shape: int | Shape | None = None, replace: bool = True
) -> torch.Tensor:
    """Indices drawn with the probabilities softmax(logits), by the Gumbel-max trick.

    Args:
        key: `[2]`.
        logits: floating-point `[..., n, ...]`; as in JAX the draw is made in their dtype, so bring half precision to float32 first.
        axis: the one whose n entries are chosen among.
        shape: of the result; it ends in logits' shape without the axis (the default), what comes before repeats the draw.
        replace: whether repeated draws may choose the same index again (else Gumbel-top-k: Kool, van Hoof, Welling 2019).

    Returns:
        int64 `shape`.

    Raises:
        ValueError: `shape` does not fit, or asks for more draws without replacement than there are entries.

    >>> categorical(key(0), torch.tensor([0.0, 2.0, -1.0]), shape=(4,))
    tensor([1, 1, 1, 1])
    """
    check_key("categorical", key)
    logits = logits.movedim(axis, -1)
    batch = tuple(logits.shape[:-1])
    shape = batch if shape is None else as_shape(shape)
    prefix = shape[: len(shape) - len(batch)]
    _check_broadcast("categorical", shape, logits[..., 0])
    if not replace:
        return _without_replacement(key, logits, axis, prefix).reshape(shape)
    axis = axis % logits.ndim - logits.ndim
    drawn = list(shape[len(prefix) :])
    drawn.insert(axis % logits.ndim, logits.shape[-1])
    return torch.argmax(gumbel(key, (*prefix, *drawn), logits.dtype) + logits.movedim(-1, axis), dim=axis)


def _without_replacement(key: torch.Tensor, logits: torch.Tensor, axis: int, prefix: Shape) -> torch.Tensor:
    """`[k, *batch]` different indices each, for logits `[*batch, n]` whose last axis stood at `axis`."""
    count, n = math.prod(prefix), logits.shape[-1]
    if count > n:
        raise ValueError(f"categorical cannot draw {count} different indices out of {n}")
    original = logits.movedim(-1, axis)
    scores = (original + gumbel(key, tuple(original.shape), logits.dtype)).movedim(axis, -1)
    return torch.topk(scores, count).indices.movedim(-1, 0)


def dropout(key: torch.Tensor, x: torch.Tensor, rate: Number, *, train: bool = True) -> torch.Tensor:
    """Elements of x set to 0 with probability `rate` and the others divided by 1 - rate.

    Args:
        key: `[2]`.
        x: floating-point `[...]`; the mask depends on the key and the shape alone.
        rate: a number in [0, 1], or a scalar tensor.
        train: False returns x as it is.

    Raises:
        ValueError: the rate is a number outside [0, 1].

    >>> dropout(key(3), torch.ones(4), 0.5)
    tensor([2., 0., 0., 0.])
    """
    check_key("dropout", key)
    if not isinstance(rate, torch.Tensor) and not 0 <= rate <= 1:
        raise ValueError(f"a dropout rate lies in [0, 1], not {rate}")
    if not train or (not isinstance(rate, torch.Tensor) and rate == 0):
        return x
    keep = bernoulli(key, 1 - rate, x.shape)
    if not isinstance(rate, torch.Tensor):
        return torch.where(keep, x * (1 / (1 - rate)) if rate < 1 else x, 0)
    return torch.where(keep, x * (1 / (1 - rate)).to(x.dtype), 0)


# ---- checks


def _float_dtype(name: str, dtype: torch.dtype | None) -> torch.dtype:
    dtype = dtype or torch.get_default_dtype()
    if dtype not in threefry_torch.FLOAT_DTYPES:
        raise TypeError(f"{name} draws one of {', '.join(map(str, threefry_torch.FLOAT_DTYPES))}, not {dtype}")
    return dtype


def _tensor(x: Number, dtype: torch.dtype, key: torch.Tensor) -> torch.Tensor:
    return x.to(key.device, dtype) if isinstance(x, torch.Tensor) else torch.full((), float(x), dtype=dtype, device=key.device)


def _check_broadcast(name: str, shape: tuple[int, ...], *parameters: torch.Tensor) -> None:
    shapes = [tuple(x.shape) for x in parameters]
    try:
        fits = tuple(torch.broadcast_shapes(shape, *shapes)) == shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"{name}: parameters of shapes {', '.join(map(str, shapes))} do not broadcast to the result's shape {shape}")
