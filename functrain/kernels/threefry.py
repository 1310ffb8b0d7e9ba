"""The operators that fill tensors with Threefry-2x32 draws: one node each in a captured graph, on every device.

A fill computes a window (`start` and `size` per dimension) of a draw of `shape`; an element depends on the key and on its row-major index
in `shape` alone, so a shard is filled by giving it its window. Keys are `[*batch, 2]` int64, results `[*batch, *size]`.

    functrain::threefry_fold_in(key, data)
    functrain::threefry_bits(key, shape, start, size, width)
    functrain::threefry_uniform(key, shape, start, size, dtype, low, high)
    functrain::threefry_normal(key, shape, start, size, dtype)
    functrain::threefry_bernoulli(key, shape, start, size, p)
    functrain::threefry_integers(key, shape, start, size, low, span, width)
    functrain::erfinv(x)

On CPU they run the C++ of `threefry.cpp`; without it, and on other devices, the torch operations of `threefry_torch.py`, with the same
bits on CPU. `decompositions` gives those to a compiler that is to fuse a draw with what uses it.
"""

import ctypes
import enum
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from functrain.kernels import library, threefry_torch

_OPERATORS = torch.library.Library("functrain", "FRAGMENT")
_WINDOW = "Tensor key, SymInt[] shape, SymInt[] start, SymInt[] size"
_SCHEMAS = {
    "threefry_fold_in": "(Tensor key, Tensor data) -> Tensor",
    "threefry_bits": f"({_WINDOW}, int width) -> Tensor",
    "threefry_uniform": f"({_WINDOW}, ScalarType dtype, float low, float high) -> Tensor",
    "threefry_normal": f"({_WINDOW}, ScalarType dtype) -> Tensor",
    "threefry_bernoulli": f"({_WINDOW}, float p) -> Tensor",
    "threefry_integers": f"({_WINDOW}, int low, int span, int width) -> Tensor",
    "erfinv": "(Tensor x) -> Tensor",
}

Ints = Sequence[int]


class _Kind(enum.IntEnum):
    """What the C++ fill makes of the words, as `threefry.cpp` numbers it."""

    BITS_32 = 0
    BITS_64 = 1
    UNIFORM = 2
    NORMAL = 3
    BERNOULLI = 4


# ---- C++

_INT, _INT64, _NUMBERS, _POINTER, _DOUBLE = ctypes.c_int, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64), ctypes.c_void_p, ctypes.c_double
_WINDOW_OF_KEYS = (_POINTER, _INT64, _INT, _NUMBERS, _NUMBERS, _NUMBERS)  # keys, how many, rank, shape, start, size
_C_ARGUMENTS = {
    "fill": (*_WINDOW_OF_KEYS, _INT, _DOUBLE, _DOUBLE, _POINTER, _INT),  # kind, low, span, out, threads
    "integers": (*_WINDOW_OF_KEYS, _INT64, _INT64, _INT, _POINTER, _INT),  # low, span, width, out, threads
    "fold_in": (_POINTER, _POINTER, _INT64, _POINTER),  # keys, counts, how many, out
    "erfinv": (_POINTER, _INT64, _POINTER, _INT),  # x, how many, out, threads
}


@functools.cache
def _function(name: str) -> Callable[..., int] | None:
    return library.function(f"functrain_threefry_{name}", *_C_ARGUMENTS[name], returns=_INT)


def _kernel(name: str, x: torch.Tensor) -> Callable[..., int] | None:
    """The C++ that can work on this tensor, or None."""
    return _function(name) if x.device.type == "cpu" else None


def _run(kernel: Callable[..., int], key: torch.Tensor, window: tuple[Ints, ...], dtype: torch.dtype, *rest: Any) -> torch.Tensor:
    """Let the C++ fill a new tensor; `rest` is what it takes between the window and the result."""
    rank = len(window[0])
    keys = key.contiguous()
    out = torch.empty([*key.shape[:-1], *window[2]], dtype=dtype)
    numbers = ((ctypes.c_int64 * rank)(*part) for part in window)
    if kernel(keys.data_ptr(), keys.numel() // 2, rank, *numbers, *rest, out.data_ptr(), library.threads()):
        raise ValueError(f"a random draw of shape {list(window[0])} has too many dimensions: at most 64")
    return out


# ---- what each operator computes


def _without_kernel(fill: Callable[..., torch.Tensor], key: torch.Tensor, window: tuple[Ints, ...], *rest: Any) -> torch.Tensor:
    return threefry_torch.in_blocks(fill, key, window, *rest) if key.device.type == "cpu" else fill(key, *window, *rest)


def _fold_in(key: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    kernel = _kernel("fold_in", key)
    if kernel is None:
        return threefry_torch.fold_in(key, data)
    shape = torch.broadcast_shapes(key.shape[:-1], data.shape)
    keys, counts = key.expand([*shape, 2]).contiguous(), data.expand(shape).contiguous()
    out = torch.empty([*shape, 2], dtype=torch.int64)
    kernel(keys.data_ptr(), counts.data_ptr(), counts.numel(), out.data_ptr())
    return out


def _bits(key: torch.Tensor, shape: Ints, start: Ints, size: Ints, width: int) -> torch.Tensor:
    kernel = _kernel("fill", key)
    if kernel is None:
        return _without_kernel(threefry_torch.bits, key, (shape, start, size), width)
    kind, dtype = (_Kind.BITS_32, torch.int32) if width == 32 else (_Kind.BITS_64, torch.int64)
    return _run(kernel, key, (shape, start, size), dtype, kind, 0, 1)


def _words_for(dtype: torch.dtype, key: torch.Tensor, shape: Ints, start: Ints, size: Ints) -> torch.Tensor:
    return _bits(key, shape, start, size, threefry_torch.bits_width(dtype))


def _uniform(key: torch.Tensor, shape: Ints, start: Ints, size: Ints, dtype: torch.dtype, low: float, high: float) -> torch.Tensor:
    kernel = _kernel("fill", key)
    if kernel is None:
        return _without_kernel(threefry_torch.uniform, key, (shape, start, size), dtype, low, high)
    if dtype != torch.float32:
        return threefry_torch.from_words_uniform(_words_for(dtype, key, shape, start, size), dtype, low, high)
    return _run(kernel, key, (shape, start, size), dtype, _Kind.UNIFORM, *threefry_torch.bounds(low, high, dtype))


def _normal(key: torch.Tensor, shape: Ints, start: Ints, size: Ints, dtype: torch.dtype) -> torch.Tensor:
    kernel = _kernel("fill", key)
    if kernel is None:
        return _without_kernel(threefry_torch.normal, key, (shape, start, size), dtype)
    if dtype != torch.float32:
        return threefry_torch.from_words_normal(_words_for(dtype, key, shape, start, size), dtype)
    return _run(kernel, key, (shape, start, size), dtype, _Kind.NORMAL, 0, 1)


def _bernoulli(key: torch.Tensor, shape: Ints, start: Ints, size: Ints, p: float) -> torch.Tensor:
    kernel = _kernel("fill", key)
    if kernel is None:
        return _without_kernel(threefry_torch.bernoulli, key, (shape, start, size), p)
    return _run(kernel, key, (shape, start, size), torch.bool, _Kind.BERNOULLI, threefry_torch.rounded(p, torch.float32), 1)


def _integers(key: torch.Tensor, shape: Ints, start: Ints, size: Ints, low: int, span: int, width: int) -> torch.Tensor:
    kernel = _kernel("integers", key)
    if kernel is None:
        return _without_kernel(threefry_torch.integers, key, (shape, start, size), low, span, width)
    return _run(kernel, key, (shape, start, size), torch.int64, low, span, width)


def _erfinv(x: torch.Tensor) -> torch.Tensor:
    kernel = _kernel("erfinv", x)
    if kernel is None or x.dtype != torch.float32:
        return threefry_torch.erfinv(x)
    values = x.contiguous()
    out = torch.empty_like(values)
    kernel(values.data_ptr(), values.numel(), out.data_ptr(), library.threads())
    return out


# ---- shapes without values, batching, derivatives


def _fake_fold_in(key: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    return key.new_empty([*torch.broadcast_shapes(key.shape[:-1], data.shape), 2])


def _fake_fill(dtype_of: Callable[..., torch.dtype]) -> Callable[..., torch.Tensor]:
    def fake(key: torch.Tensor, shape: Ints, start: Ints, size: Ints, *rest: Any) -> torch.Tensor:
        if key.shape[-1] != 2 or key.dtype != torch.int64:
            raise ValueError(f"a key is an int64 tensor [..., 2], not {key.dtype} {list(key.shape)}")
        if not len(shape) == len(start) == len(size):
            raise ValueError(f"shape {list(shape)}, start {list(start)} and size {list(size)} of a window differ in rank")
        return key.new_empty([*key.shape[:-1], *size], dtype=dtype_of(*rest))

    return fake


def _batched_fill(operator: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def batched(info: Any, in_dims: tuple[int, ...], key: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, int]:
        return operator(key.movedim(in_dims[0], 0), *rest), 0

    return batched


def _batched_fold_in(info: Any, in_dims: tuple[int | None, ...], key: torch.Tensor, data: torch.Tensor) -> tuple[torch.Tensor, int]:
    key_dim, data_dim = in_dims
    key = key.unsqueeze(0) if key_dim is None else key.movedim(key_dim, 0)
    data = data.unsqueeze(0) if data_dim is None else data.movedim(data_dim, 0)
    rank = max(key.ndim - 1, data.ndim)
    key = key.reshape([key.shape[0]] + [1] * (rank - key.ndim + 1) + [*key.shape[1:]])
    data = data.reshape([data.shape[0]] + [1] * (rank - data.ndim) + [*data.shape[1:]])
    return torch.ops.functrain.threefry_fold_in(key, data), 0


def _batched_erfinv(info: Any, in_dims: tuple[int | None, ...], x: torch.Tensor) -> tuple[torch.Tensor, int | None]:
    return torch.ops.functrain.erfinv(x), in_dims[0]


_IMPLEMENTATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "threefry_fold_in": _fold_in,
    "threefry_bits": _bits,
    "threefry_uniform": _uniform,
    "threefry_normal": _normal,
    "threefry_bernoulli": _bernoulli,
    "threefry_integers": _integers,
    "erfinv": _erfinv,
}
_FAKES: dict[str, Callable[..., torch.Tensor]] = {
    "threefry_fold_in": _fake_fold_in,
    "threefry_bits": _fake_fill(lambda width: torch.int32 if width == 32 else torch.int64),
    "threefry_uniform": _fake_fill(lambda dtype, low, high: dtype),
    "threefry_normal": _fake_fill(lambda dtype: dtype),
    "threefry_bernoulli": _fake_fill(lambda p: torch.bool),
    "threefry_integers": _fake_fill(lambda low, span, width: torch.int64),
    "erfinv": torch.empty_like,
}
_BATCHED: dict[str, Callable[..., Any]] = {"threefry_fold_in": _batched_fold_in, "erfinv": _batched_erfinv}


def _register(name: str) -> None:
    qualified = f"functrain::{name}"
    _OPERATORS.define(name + _SCHEMAS[name], tags=(torch.Tag.pt2_compliant_tag,))
    _OPERATORS.impl(name, _IMPLEMENTATIONS[name], "CompositeExplicitAutograd")
    torch.library.register_fake(qualified, _FAKES[name], lib=_OPERATORS)
    batched = _BATCHED.get(name) or _batched_fill(getattr(torch.ops.functrain, name))
    torch.library.register_vmap(qualified, batched, lib=_OPERATORS)


for _name in _SCHEMAS:
    _register(_name)


class _Erfinv(torch.autograd.Function):
    """The operator with its derivative, in a form that torch.func's transforms take too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.functrain.erfinv(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * _erfinv_slope(*ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor) -> torch.Tensor:
        return tangents[0] * _erfinv_slope(*ctx.saved_tensors)


def _erfinv_slope(y: torch.Tensor) -> torch.Tensor:
    return (math.sqrt(math.pi) / 2) * torch.exp(y * y)


def erfinv(x: torch.Tensor) -> torch.Tensor:
    """The inverse of erf for floating-point x in [-1, 1], infinite at the ends; differentiable.

    >>> erfinv(torch.tensor([0.0, 0.5, 1.0]))
    tensor([0.0000, 0.4769,    inf])
    """
    return _Erfinv.apply(x)


def decompositions() -> dict[Any, Callable[..., torch.Tensor]]:
    """Each operator with the torch operations it stands for, so that a compiler can fuse a draw with what uses it.

    >>> fill = decompositions()[torch.ops.functrain.threefry_bernoulli.default]
    >>> fill(torch.tensor([0, 3]), [4], [0], [4], 0.5)
    tensor([ True, False, False, False])
    """
    return {getattr(torch.ops.functrain, name).default: getattr(threefry_torch, name.removeprefix("threefry_")) for name in _SCHEMAS}
