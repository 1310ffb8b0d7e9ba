"""AdamW in one pass over memory: one operator per leaf, or one for many, with every scalar in a tensor of coefficients.

    functrain::adamw(Tensor grad, Tensor mu, Tensor nu, Tensor param, Tensor coefficients) -> (Tensor update, Tensor mu, Tensor nu)
    functrain::adamw_apply(Tensor param, Tensor mu, Tensor nu, Tensor grad, Tensor coefficients) -> (Tensor param, Tensor mu, Tensor nu)
    functrain::adamw_apply_(Tensor(a!) param, Tensor(b!) mu, Tensor(c!) nu, Tensor grad, Tensor coefficients,
                            Tensor(d!)? model=None) -> ()
    functrain::adamw_apply_many_(Tensor(a!)[] param, Tensor(b!)[] mu, Tensor(c!)[] nu, Tensor[] grad, Tensor coefficients,
                                 Tensor(d!)[] model) -> ()

They compute, with ``lr, b1, b2, eps, eps_root, weight_decay, c1, c2, grad_scale = coefficients`` (float64, made by `coefficients`)::

    g = grad * grad_scale                       grad_scale: 1 / loss scale times the clip factor
    mu' = b1 * mu + (1 - b1) * g
    nu' = b2 * nu + (1 - b2) * g * g
    update = -lr * ((mu' / c1) / (sqrt(nu' / c2 + eps_root) + eps) + weight_decay * param)

(Loshchilov and Hutter 2019, arXiv 1711.05101; Kingma and Ba 2015, arXiv 1412.6980, algorithm 1.) ``adamw`` returns the update,
``adamw_apply`` the parameter with the update added, the forms with a trailing underscore write param, mu and nu in place. `model` is a
half-precision copy of the parameter that is written in the same pass. Division by c1 and c2 is multiplication by their reciprocals.

All leaves of one call have one shape; `grad` has any floating dtype; `param`, `mu` and `nu` are float32 or float64 in the C++ kernel of
``adamw.cpp`` (CPU); other dtypes, other devices and installations without the library use torch operations, which give the same moments
bit for bit and an update within two units in the last place (`torch.sqrt` on CPU is not correctly rounded). Results have the dtype and layout of what they replace. The operators have no derivative and no batching rule. Those in place have
no results: their schema says that they write, so neither FX nor Inductor removes them as dead code.
"""

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence

import torch
from torch.autograd.graph import increment_version

from functrain.kernels import library

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Number = float | torch.Tensor

_OPERATORS = torch.library.Library("functrain", "FRAGMENT")
_SCHEMAS = {
    "adamw": "(Tensor grad, Tensor mu, Tensor nu, Tensor param, Tensor coefficients) -> (Tensor update, Tensor mu, Tensor nu)",
    "adamw_apply": "(Tensor param, Tensor mu, Tensor nu, Tensor grad, Tensor coefficients) -> (Tensor param, Tensor mu, Tensor nu)",
    "adamw_apply_": "(Tensor(a!) param, Tensor(b!) mu, Tensor(c!) nu, Tensor grad, Tensor coefficients, Tensor(d!)? model=None) -> ()",
    "adamw_apply_many_": "(Tensor(a!)[] param, Tensor(b!)[] mu, Tensor(c!)[] nu, Tensor[] grad, Tensor coefficients, "
    "Tensor(d!)[] model) -> ()",
}

# Below this many elements a call stays on one thread: waking others takes longer.
PARALLEL_ELEMENTS = 1 << 15
_COEFFICIENTS_SHAPE = torch.Size([9])


def coefficients(
    learning_rate: Number,
    *,
    step: Number,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    eps_root: Number = 0.0,
    weight_decay: Number = 0.0,
    grad_scale: Number = 1.0,
) -> torch.Tensor:
    """The scalars of one step as the operators take them.

    Args:
        learning_rate: this and the others are numbers or 0-dim tensors (on one device).
        step: 1 for the first update.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the denominator, outside the root.
        eps_root: added inside the root.
        weight_decay: decoupled, times the learning rate.
        grad_scale: multiplies the gradient before anything else.

    Returns:
        ``[9]`` float64: lr, b1, b2, eps, eps_root, weight_decay, 1 - b1^step, 1 - b2^step, grad_scale.

    >>> coefficients(0.1, step=1, weight_decay=0.01).tolist()
    [0.1, 0.9, 0.999, 1e-08, 0.0, 0.01, 0.0999..., 0.001..., 1.0]
    """
    values = [_scalar(x) for x in (learning_rate, b1, b2, eps, eps_root, weight_decay, grad_scale, step)]
    lr, first, second, outside, inside, decay, scale, count = values
    return torch.stack([lr, first, second, outside, inside, decay, 1 - first**count, 1 - second**count, scale])


def _scalar(value: Number) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.to(torch.float64)
    return torch.full((), value, dtype=torch.float64)


# ---- torch operations: any device, any floating dtype


def _update_by_torch(param: torch.Tensor, mu: torch.Tensor, nu: torch.Tensor, grad: torch.Tensor, coefficients: torch.Tensor) -> Three:
    """(update, mu, nu) in the working dtype: the kernel's arithmetic, one operation at a time."""
    dtype = _working_dtype(param, mu, nu)
    lr, b1, b2, eps, eps_root, decay, scale, rest1, rest2, over_c1, over_c2 = _rounded(coefficients, dtype)
    g = grad.to(dtype) * scale
    m = b1 * mu.to(dtype) + rest1 * g
    v = b2 * nu.to(dtype) + rest2 * (g * g)
    direction = m * over_c1 / (torch.sqrt(v * over_c2 + eps_root) + eps)
    return -lr * (direction + decay * param.to(dtype)), m, v


def _working_dtype(*state: torch.Tensor) -> torch.dtype:
    """The widest dtype of the state, and float32 at least."""
    return functools.reduce(torch.promote_types, [x.dtype for x in state], torch.float32)


def _rounded(coefficients: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Scalars as 0-dim tensors; what is derived from a coefficient is derived in float64 and rounded once."""
    lr_to_decay, c, scale = coefficients[:6], coefficients[6:8], coefficients[8:]
    return torch.cat([lr_to_decay, scale, 1 - coefficients[1:3], 1 / c]).to(dtype).unbind()


def _adamw_by_torch(grad: torch.Tensor, mu: torch.Tensor, nu: torch.Tensor, param: torch.Tensor, coefficients: torch.Tensor) -> Three:
    _check(param, mu, nu, grad, coefficients)
    update, m, v = _update_by_torch(param, mu, nu, grad, coefficients)
    return _like(update, param), _like(m, mu), _like(v, nu)


def _apply_by_torch(param: torch.Tensor, mu: torch.Tensor, nu: torch.Tensor, grad: torch.Tensor, coefficients: torch.Tensor) -> Three:
    _check(param, mu, nu, grad, coefficients)
    update, m, v = _update_by_torch(param, mu, nu, grad, coefficients)
    return _like(param.to(update.dtype) + update, param), _like(m, mu), _like(v, nu)


def _like(value: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """A result in the dtype and layout of what it replaces."""
    target = torch.empty_like(old)
    return value if value.dtype == old.dtype and value.stride() == target.stride() else target.copy_(value)


def _apply_by_torch_(
    param: torch.Tensor,
    mu: torch.Tensor,
    nu: torch.Tensor,
    grad: torch.Tensor,
    coefficients: torch.Tensor,
    model: torch.Tensor | None = None,
) -> None:
    _write(_apply_by_torch(param, mu, nu, grad, coefficients), param, mu, nu, model)


def _write(new: Three, param: torch.Tensor, mu: torch.Tensor, nu: torch.Tensor, model: torch.Tensor | None) -> None:
    for old, value in zip((param, mu, nu), new, strict=True):
        old.copy_(value)
    if model is not None:
        model.copy_(param)


def _apply_many_by_torch_(
    param: Sequence[torch.Tensor],
    mu: Sequence[torch.Tensor],
    nu: Sequence[torch.Tensor],
    grad: Sequence[torch.Tensor],
    coefficients: torch.Tensor,
    model: Sequence[torch.Tensor],
) -> None:
    for p, m, v, g, half in _rows(param, mu, nu, grad, model):
        _apply_by_torch_(p, m, v, g, coefficients, half)


def _rows(param: Sequence, mu: Sequence, nu: Sequence, grad: Sequence, model: Sequence) -> zip:
    """One tuple a leaf, with None where there is no half-precision copy."""
    lengths = [len(x) for x in (param, mu, nu, grad)]
    if len({*lengths}) != 1 or len(model) not in (0, lengths[0]):
        raise ValueError(f"adamw: lists of different lengths: param, mu, nu, grad {lengths}, model {len(model)}")
    return zip(param, mu, nu, grad, model or [None] * len(param), strict=True)


def _check(param: torch.Tensor, mu: torch.Tensor, nu: torch.Tensor, grad: torch.Tensor, coefficients: torch.Tensor) -> None:
    shape = param.shape
    if mu.shape != shape or nu.shape != shape or grad.shape != shape:
        found = ", ".join(f"{name} {list(x.shape)}" for name, x in (("mu", mu), ("nu", nu), ("grad", grad)))
        raise ValueError(f"adamw: shapes differ: param {list(shape)}, {found}; the state must be made for this parameter")
    if coefficients.shape != _COEFFICIENTS_SHAPE or coefficients.dtype != torch.float64:
        raise ValueError(
            f"adamw: coefficients must be 9 float64 values (functrain.kernels.adamw.coefficients makes them), "
            f"got {list(coefficients.shape)} {coefficients.dtype}"
        )


# ---- C++: CPU, float32 and float64 state

# The numbers of `DType` in halves.h.
_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_HALVES = {torch.bfloat16: 2, torch.float16: 3}
_NO_MODEL = -1
# (dtype of param, mu, nu, grad) -> (code of the state, code of the gradient)
_KINDS = {(s, s, s, g): (_CODES[s], code) for s in (torch.float32, torch.float64) for g, code in _CODES.items()}
# state, grad, model, add, threads, count, coefficients, size and eight addresses: see `functrain_adamw`. One argument costs a third of what
# sixteen do.
_pack_one = struct.Struct("16q").pack


@functools.cache
def _kernel() -> Callable[[bytes], None] | None:
    return library.function("functrain_adamw", ctypes.c_char_p)


def _threads(elements: int) -> int:
    return library.threads() if elements >= PARALLEL_ELEMENTS else 1


def _adamw_cpu(grad: torch.Tensor, mu: torch.Tensor, nu: torch.Tensor, param: torch.Tensor, coefficients: torch.Tensor) -> Three:
    new = _functional(0, param, mu, nu, grad, coefficients)
    return _adamw_by_torch(grad, mu, nu, param, coefficients) if new is None else new


def _apply_cpu(param: torch.Tensor, mu: torch.Tensor, nu: torch.Tensor, grad: torch.Tensor, coefficients: torch.Tensor) -> Three:
    new = _functional(1, param, mu, nu, grad, coefficients)
    return _apply_by_torch(param, mu, nu, grad, coefficients) if new is None else new


def _functional(
    add: int, param: torch.Tensor, mu: torch.Tensor, nu: torch.Tensor, grad: torch.Tensor, coefficients: torch.Tensor
) -> Three | None:
    """New (update or param, mu, nu), or None where the kernel does not know the dtypes or is not there."""
    kind, kernel = _KINDS.get((param.dtype, mu.dtype, nu.dtype, grad.dtype)), _kernel()
    if kind is None or kernel is None:
        return None
    _check(param, mu, nu, grad, coefficients)
    old = param, mu, nu
    if not (param.is_contiguous() and mu.is_contiguous() and nu.is_contiguous() and grad.is_contiguous()):
        strides = _dense_strides(param)
        param, mu, nu, grad = (_in_layout(x, strides) for x in (param, mu, nu, grad))
    first, second, third, n = torch.empty_like(param), torch.empty_like(param), torch.empty_like(param), param.numel()
    kernel(
        _pack_one(
            *(*kind, _NO_MODEL, add, _threads(n), 1, coefficients.data_ptr(), n),
            *(param.data_ptr(), mu.data_ptr(), nu.data_ptr(), grad.data_ptr()),
            *(first.data_ptr(), second.data_ptr(), third.data_ptr(), 0),
        )
    )
    if param is old[0]:
        return first, second, third
    return _like(first, old[0]), _like(second, old[1]), _like(third, old[2])


def _dense_strides(x: torch.Tensor) -> tuple[int, ...]:
    """The strides of a tensor made like `x`: its own, unless they leave gaps or overlap."""
    return torch.empty_like(x, device="meta").stride()


def _in_layout(x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    return x if x.stride() == strides else torch.empty_strided(x.shape, strides, dtype=x.dtype).copy_(x)


def _apply_cpu_(
    param: torch.Tensor,
    mu: torch.Tensor,
    nu: torch.Tensor,
    grad: torch.Tensor,
    coefficients: torch.Tensor,
    model: torch.Tensor | None = None,
) -> None:
    kernel = _kernel()
    kind = _in_place_kind(param, mu, nu, grad, coefficients, model)
    if kernel is None or kind is None:
        return _write(_apply_cpu(param, mu, nu, grad, coefficients), param, mu, nu, model)
    n = param.numel()
    p, m, v = param.data_ptr(), mu.data_ptr(), nu.data_ptr()
    half = 0 if model is None else model.data_ptr()
    kernel(_pack_one(*kind, 1, _threads(n), 1, coefficients.data_ptr(), n, p, m, v, grad.data_ptr(), p, m, v, half))
    increment_version((param, mu, nu) if model is None else (param, mu, nu, model))
    return None


def _in_place_kind(
    param: torch.Tensor, mu: torch.Tensor, nu: torch.Tensor, grad: torch.Tensor, coefficients: torch.Tensor, model: torch.Tensor | None
) -> tuple[int, int, int] | None:
    """The codes (state, grad, model) of a leaf that the kernel can update where it lies, or None."""
    kind = _KINDS.get((param.dtype, mu.dtype, nu.dtype, grad.dtype))
    half = _NO_MODEL if model is None else _HALVES.get(model.dtype)
    if kind is None or half is None:
        return None
    _check(param, mu, nu, grad, coefficients)
    tensors = (param, mu, nu, grad) if model is None else (param, mu, nu, grad, model)
    if not all([x.is_contiguous() for x in tensors]) and not _share_dense_layout(tensors):
        return None
    return (*kind, half)


def _share_dense_layout(tensors: Sequence[torch.Tensor]) -> bool:
    strides = _dense_strides(tensors[0])
    return all(x.stride() == strides for x in tensors)


def _apply_many_cpu_(
    param: Sequence[torch.Tensor],
    mu: Sequence[torch.Tensor],
    nu: Sequence[torch.Tensor],
    grad: Sequence[torch.Tensor],
    coefficients: torch.Tensor,
    model: Sequence[torch.Tensor],
) -> None:
    groups: dict[tuple[int, int, int], list[tuple]] = {}
    for row in _rows(param, mu, nu, grad, model):
        p, m, v, g, half = row
        kind = _in_place_kind(p, m, v, g, coefficients, half)
        if kind is None or _kernel() is None:
            _apply_cpu_(p, m, v, g, coefficients, half)
        else:
            groups.setdefault(kind, []).append(row)
    for kind, rows in groups.items():
        _apply_group_(kind, rows, coefficients)


def _apply_group_(kind: tuple[int, int, int], rows: list[tuple], coefficients: torch.Tensor) -> None:
    """One call for all leaves of a kind."""
    kernel = _kernel()
    if kernel is None:
        raise RuntimeError("the C++ kernels are not loaded")
    *inputs, models = ([0 if x is None else x.data_ptr() for x in column] for column in zip(*rows, strict=True))
    sizes = [row[0].numel() for row in rows]
    record = [*kind, 1, _threads(sum(sizes)), len(rows), coefficients.data_ptr(), *sizes]
    for column in (*inputs, *inputs[:3], models):
        record += column
    kernel(struct.pack(f"{len(record)}q", *record))
    increment_version([x for row in rows for x in (*row[:3], row[4]) if x is not None])


# ---- registration


def _fake(param: torch.Tensor, mu: torch.Tensor, nu: torch.Tensor, grad: torch.Tensor, coefficients: torch.Tensor) -> Three:
    _check(param, mu, nu, grad, coefficients)
    return torch.empty_like(param), torch.empty_like(mu), torch.empty_like(nu)


def _adamw_fake(grad: torch.Tensor, mu: torch.Tensor, nu: torch.Tensor, param: torch.Tensor, coefficients: torch.Tensor) -> Three:
    return _fake(param, mu, nu, grad, coefficients)


def _apply_fake_(
    param: torch.Tensor,
    mu: torch.Tensor,
    nu: torch.Tensor,
    grad: torch.Tensor,
    coefficients: torch.Tensor,
    model: torch.Tensor | None = None,
) -> None:
    _check(param, mu, nu, grad, coefficients)


def _apply_many_fake_(
    param: Sequence[torch.Tensor],
    mu: Sequence[torch.Tensor],
    nu: Sequence[torch.Tensor],
    grad: Sequence[torch.Tensor],
    coefficients: torch.Tensor,
    model: Sequence[torch.Tensor],
) -> None:
    for p, m, v, g, _ in _rows(param, mu, nu, grad, model):
        _check(p, m, v, g, coefficients)


def _register(name: str, cpu: Callable, anywhere: Callable, fake: Callable) -> None:
    _OPERATORS.define(name + _SCHEMAS[name])
    _OPERATORS.impl(name, cpu, "CPU")
    _OPERATORS.impl(name, anywhere, "CompositeExplicitAutograd")
    torch.library.register_fake(f"functrain::{name}", fake, lib=_OPERATORS)


_register("adamw", _adamw_cpu, _adamw_by_torch, _adamw_fake)
_register("adamw_apply", _apply_cpu, _apply_by_torch, _fake)
_register("adamw_apply_", _apply_cpu_, _apply_by_torch_, _apply_fake_)
_register("adamw_apply_many_", _apply_many_cpu_, _apply_many_by_torch_, _apply_many_fake_)
