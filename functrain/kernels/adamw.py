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

(Loshchilov and Hutter 2019, arXiv 1711.05101; Kingma and Ba 2015, arXiv 1412.6980, algorithm 1.) Division by c1 and c2 is multiplication
by their reciprocals. ``adamw`` returns the update, ``adamw_apply`` the parameter with the update added, the forms with a trailing
underscore write param, mu and nu in place. `model` is a half-precision copy of the parameter that is written in the same pass.

All tensors of one leaf have one shape; `grad` has any floating dtype; `param`, `mu` and `nu` are float32 or float64 in the C++ kernel of
``adamw.cpp`` (CPU). Other dtypes, other devices and installations without the library use ``adamw_torch.py``. Results have the dtype and
layout of what they replace. ``adamw`` can be differentiated and batched; the others, which the compiler puts in its place, cannot. Those
in place have no results: their schema says that they write, so neither FX nor Inductor removes them as dead code.
"""

import ctypes
import functools
import itertools
import operator
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from functrain.kernels import adamw_torch, library
from functrain.kernels.adamw_torch import Row, Three, check, check_model, like, rows, write
from functrain.torch_internals import call_below_autograd

Number = float | Tensor

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
) -> Tensor:
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


def _scalar(value: Number) -> Tensor:
    return value.to(torch.float64) if isinstance(value, Tensor) else torch.full((), value, dtype=torch.float64)


# ---- C++: CPU, float32 and float64 state

# The numbers of `DType` in halves.h.
_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_HALVES = {torch.bfloat16: 2, torch.float16: 3}
_NO_MODEL = -1
# (dtype of param, mu, nu, grad) -> (code of the state, code of the gradient)
_KINDS = {(s, s, s, g): (_CODES[s], code) for s in (torch.float32, torch.float64) for g, code in _CODES.items()}
# One leaf as `functrain_adamw` in adamw.cpp takes it: kind (state, grad, model, add), threads, count 1, coefficients, size, 8 addresses.
_pack_one = struct.Struct("16q").pack
_shape, _dtype = operator.attrgetter("shape"), operator.attrgetter("dtype")


@functools.cache
def _kernel() -> Callable[[bytes], None] | None:
    return library.function("functrain_adamw", ctypes.c_char_p)


def _threads(elements: int) -> int:
    return library.threads() if elements >= PARALLEL_ELEMENTS else 1


def _adamw_cpu(grad: Tensor, mu: Tensor, nu: Tensor, param: Tensor, coefficients: Tensor) -> Three:
    new = _new_values(0, param, mu, nu, grad, coefficients)
    return adamw_torch.adamw(grad, mu, nu, param, coefficients) if new is None else new


def _apply_cpu(param: Tensor, mu: Tensor, nu: Tensor, grad: Tensor, coefficients: Tensor) -> Three:
    new = _new_values(1, param, mu, nu, grad, coefficients)
    return adamw_torch.adamw_apply(param, mu, nu, grad, coefficients) if new is None else new


def _new_values(add: int, param: Tensor, mu: Tensor, nu: Tensor, grad: Tensor, coefficients: Tensor) -> Three | None:
    """New (update or param, mu, nu), or None where the kernel does not know the dtypes or is not there."""
    kind, kernel = _KINDS.get((param.dtype, mu.dtype, nu.dtype, grad.dtype)), _kernel()
    if kind is None or kernel is None:
        return None
    check(param, mu, nu, grad, coefficients)
    call = (kernel, (*kind, _NO_MODEL, add), coefficients.contiguous())
    if param.is_contiguous() and mu.is_contiguous() and nu.is_contiguous() and grad.is_contiguous():
        return _run(*call, param, mu, nu, grad)
    strides = _dense_strides(param)
    p, m, v, g = (_in_layout(x, strides) for x in (param, mu, nu, grad))
    first, second, third = _run(*call, p, m, v, g)
    return like(first, param), like(second, mu), like(third, nu)


def _run(
    kernel: Callable[[bytes], None],
    kind: tuple[int, int, int, int],
    coefficients: Tensor,
    param: Tensor,
    mu: Tensor,
    nu: Tensor,
    grad: Tensor,
) -> Three:
    """The kernel on tensors of one dense layout, into new ones."""
    first, second, third, n = torch.empty_like(param), torch.empty_like(param), torch.empty_like(param), param.numel()
    olds = param.data_ptr(), mu.data_ptr(), nu.data_ptr(), grad.data_ptr()
    kernel(_pack_one(*kind, _threads(n), 1, coefficients.data_ptr(), n, *olds, first.data_ptr(), second.data_ptr(), third.data_ptr(), 0))
    return first, second, third


def _dense_strides(x: Tensor) -> tuple[int, ...]:
    """The strides of a tensor made like `x`: its own, unless they leave gaps or overlap."""
    return torch.empty_like(x, device="meta").stride()


def _in_layout(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    return x if x.stride() == strides else torch.empty_strided(x.shape, strides, dtype=x.dtype).copy_(x)


def _apply_cpu_(param: Tensor, mu: Tensor, nu: Tensor, grad: Tensor, coefficients: Tensor, model: Tensor | None = None) -> None:
    kernel = _kernel()
    kind = _in_place_kind(param, mu, nu, grad, coefficients, model)
    if kernel is None or kind is None:
        return write(_apply_cpu(param, mu, nu, grad, coefficients), param, mu, nu, model)
    n = param.numel()
    p, m, v, c = param.data_ptr(), mu.data_ptr(), nu.data_ptr(), coefficients.contiguous()
    half = 0 if model is None else model.data_ptr()
    kernel(_pack_one(*kind, 1, _threads(n), 1, c.data_ptr(), n, p, m, v, grad.data_ptr(), p, m, v, half))
    return increment_version((param, mu, nu) if model is None else (param, mu, nu, model))


def _in_place_kind(
    param: Tensor, mu: Tensor, nu: Tensor, grad: Tensor, coefficients: Tensor, model: Tensor | None
) -> tuple[int, int, int] | None:
    """The codes (state, grad, model) of a leaf that the kernel can update where it lies, or None."""
    kind = _KINDS.get((param.dtype, mu.dtype, nu.dtype, grad.dtype))
    check(param, mu, nu, grad, coefficients)
    check_model(param, model)
    half = _NO_MODEL if model is None else _HALVES.get(model.dtype)
    if kind is None or half is None:
        return None
    flat = param.is_contiguous() and mu.is_contiguous() and nu.is_contiguous() and grad.is_contiguous()
    if flat and (model is None or model.is_contiguous()):
        return (*kind, half)
    return (*kind, half) if _share_dense_layout(param, mu, nu, grad, model) else None


def _share_dense_layout(*tensors: Tensor | None) -> bool:
    given = [x for x in tensors if x is not None]
    strides = _dense_strides(given[0])
    return all(x.stride() == strides for x in given)


def _apply_many_cpu_(
    param: Sequence[Tensor],
    mu: Sequence[Tensor],
    nu: Sequence[Tensor],
    grad: Sequence[Tensor],
    coefficients: Tensor,
    model: Sequence[Tensor],
) -> None:
    kernel, all_rows = _kernel(), list(rows(param, mu, nu, grad, model))
    kind = _kind_of_all(param, mu, nu, grad, model)
    groups: dict[tuple[int, int, int], list[Row]] = {}
    if kernel is not None and kind is not None:
        check(param[0], mu[0], nu[0], grad[0], coefficients)
        groups[kind] = all_rows
    else:
        groups = _grouped(kernel, all_rows, coefficients)
    for kind, group in groups.items():
        _apply_group_(kernel, kind, group, coefficients.contiguous())


def _kind_of_all(*columns: Sequence[Tensor]) -> tuple[int, int, int] | None:
    """The codes of all leaves where they have one kind, agree in shape and are contiguous: the usual case, without a loop in Python."""
    given = [column for column in columns if column]
    shapes = list(map(_shape, columns[0]))
    dtypes = [set(map(_dtype, column)) for column in given]
    if len(given) < 4 or any(len(x) != 1 for x in dtypes) or not all(map(Tensor.is_contiguous, itertools.chain(*given))):
        return None
    p, m, v, g, *half = (x.pop() for x in dtypes)
    kind, model = _KINDS.get((p, m, v, g)), _HALVES.get(half[0]) if half else _NO_MODEL
    if kind is None or model is None or any(list(map(_shape, column)) != shapes for column in given[1:]):
        return None
    return (*kind, model)


def _grouped(kernel: Any, all_rows: list[Row], coefficients: Tensor) -> dict[tuple[int, int, int], list[Row]]:
    """Leaves by kind; those that the kernel cannot update where they lie are updated here and left out."""
    groups: dict[tuple[int, int, int], list[Row]] = {}
    for row in all_rows:
        p, m, v, g, half = row
        kind = _in_place_kind(p, m, v, g, coefficients, half)
        if kind is None or kernel is None:
            _apply_cpu_(p, m, v, g, coefficients, half)
        else:
            groups.setdefault(kind, []).append(row)
    return groups


def _apply_group_(kernel: Any, kind: tuple[int, int, int], group: list[Row], coefficients: Tensor) -> None:
    """One call for all leaves of a kind."""
    params, mus, nus, grads, models = zip(*group, strict=True)
    written = [*params, *mus, *nus, *(x for x in models if x is not None)]
    sizes, addresses = list(map(Tensor.numel, params)), list(map(Tensor.data_ptr, (*params, *mus, *nus, *grads)))
    halves = [0] * len(sizes) if models[0] is None else list(map(Tensor.data_ptr, models))
    record = [*kind, 1, _threads(sum(sizes)), len(sizes), coefficients.data_ptr(), *sizes, *addresses]
    record += addresses[: 3 * len(sizes)]
    record += halves
    kernel(struct.pack(f"{len(record)}q", *record))
    increment_version(written)


# ---- registration


def _apply_fake(param: Tensor, mu: Tensor, nu: Tensor, grad: Tensor, coefficients: Tensor) -> Three:
    check(param, mu, nu, grad, coefficients)
    return torch.empty_like(param), torch.empty_like(mu), torch.empty_like(nu)


def _adamw_fake(grad: Tensor, mu: Tensor, nu: Tensor, param: Tensor, coefficients: Tensor) -> Three:
    return _apply_fake(param, mu, nu, grad, coefficients)


def _apply_fake_(param: Tensor, mu: Tensor, nu: Tensor, grad: Tensor, coefficients: Tensor, model: Tensor | None = None) -> None:
    check(param, mu, nu, grad, coefficients)
    check_model(param, model)


def _apply_many_fake_(
    param: Sequence[Tensor],
    mu: Sequence[Tensor],
    nu: Sequence[Tensor],
    grad: Sequence[Tensor],
    coefficients: Tensor,
    model: Sequence[Tensor],
) -> None:
    for p, m, v, g, half in rows(param, mu, nu, grad, model):
        _apply_fake_(p, m, v, g, coefficients, half)


def _adamw_autograd(keyset: Any, grad: Tensor, mu: Tensor, nu: Tensor, param: Tensor, coefficients: Tensor) -> Three:
    """Where something is to be differentiated, torch operations, which can be; else the kernel."""
    arguments = grad, mu, nu, param, coefficients
    if torch.is_grad_enabled() and any([x.requires_grad for x in arguments]):
        return adamw_torch.adamw(*arguments)
    return call_below_autograd(torch.ops.functrain.adamw.default, keyset, *arguments)


def _batched(info: Any, in_dims: tuple[int | None, ...], *arguments: Tensor) -> tuple[Three, tuple[int, ...]]:
    """Element by element, a batch of leaves is a leaf; where the coefficients differ, one call each."""
    batches = [x.expand(info.batch_size, *x.shape) if d is None else x.movedim(d, 0) for x, d in zip(arguments, in_dims, strict=True)]
    one = torch.ops.functrain.adamw
    if in_dims[-1] is None:
        return one(*batches[:-1], arguments[-1]), (0, 0, 0)
    update, mu, nu = zip(*(one(*row) for row in zip(*batches, strict=True)), strict=True)
    return (torch.stack(update), torch.stack(mu), torch.stack(nu)), (0, 0, 0)


def _register(name: str, cpu: Callable, elsewhere: Callable, fake: Callable) -> None:
    _OPERATORS.define(name + _SCHEMAS[name])
    _OPERATORS.impl(name, cpu, "CPU")
    _OPERATORS.impl(name, elsewhere, "CompositeExplicitAutograd")
    torch.library.register_fake(f"functrain::{name}", fake, lib=_OPERATORS)


_register("adamw", _adamw_cpu, adamw_torch.adamw, _adamw_fake)
_register("adamw_apply", _apply_cpu, adamw_torch.adamw_apply, _apply_fake)
_register("adamw_apply_", _apply_cpu_, adamw_torch.adamw_apply_, _apply_fake_)
_register("adamw_apply_many_", _apply_many_cpu_, adamw_torch.adamw_apply_many_, _apply_many_fake_)
_OPERATORS.impl("adamw", _adamw_autograd, "Autograd", with_keyset=True)
torch.library.register_vmap("functrain::adamw", _batched, lib=_OPERATORS)
