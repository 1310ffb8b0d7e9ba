"""AdamW in torch operations: any device, any floating dtype. What the operators of ``adamw.py`` run where the C++ does not.

Moments are those of the C++ kernel bit for bit; the update is within two units in the last place, since `torch.sqrt` on CPU is not
correctly rounded.
"""

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

Three = tuple[Tensor, Tensor, Tensor]
Row = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]

_COEFFICIENTS_SHAPE = torch.Size([9])


def adamw(grad: Tensor, mu: Tensor, nu: Tensor, param: Tensor, coefficients: Tensor) -> Three:
    """(update, mu, nu), each in the dtype and layout of param, mu, nu. The arguments are those of ``functrain::adamw``."""
    check(param, mu, nu, grad, coefficients)
    update, m, v = _update(param, mu, nu, grad, coefficients)
    return like(update, param), like(m, mu), like(v, nu)


def adamw_apply(param: Tensor, mu: Tensor, nu: Tensor, grad: Tensor, coefficients: Tensor) -> Three:
    """(param, mu, nu) with the update added, before it is rounded to the parameter's dtype."""
    check(param, mu, nu, grad, coefficients)
    update, m, v = _update(param, mu, nu, grad, coefficients)
    return like(param.to(update.dtype) + update, param), like(m, mu), like(v, nu)


def adamw_apply_(param: Tensor, mu: Tensor, nu: Tensor, grad: Tensor, coefficients: Tensor, model: Tensor | None = None) -> None:
    """`adamw_apply` written over param, mu and nu, and the parameter over `model`."""
    write(adamw_apply(param, mu, nu, grad, coefficients), param, mu, nu, model)


def adamw_apply_many_(
    param: Sequence[Tensor],
    mu: Sequence[Tensor],
    nu: Sequence[Tensor],
    grad: Sequence[Tensor],
    coefficients: Tensor,
    model: Sequence[Tensor],
) -> None:
    """`adamw_apply_` for each leaf; `model` is empty or has one tensor for each."""
    for p, m, v, g, half in rows(param, mu, nu, grad, model):
        adamw_apply_(p, m, v, g, coefficients, half)


def _update(param: Tensor, mu: Tensor, nu: Tensor, grad: Tensor, coefficients: Tensor) -> Three:
    """(update, mu, nu) in the working dtype: the kernel's arithmetic, one operation at a time."""
    dtype = _working_dtype(param, mu, nu)
    lr, b1, b2, eps, eps_root, decay, scale, rest1, rest2, over_c1, over_c2 = _rounded(coefficients, dtype)
    g = grad.to(dtype) * scale
    m = b1 * mu.to(dtype) + rest1 * g
    v = b2 * nu.to(dtype) + rest2 * (g * g)
    direction = m * over_c1 / (torch.sqrt(v * over_c2 + eps_root) + eps)
    return -lr * (direction + decay * param.to(dtype)), m, v


def _working_dtype(*state: Tensor) -> torch.dtype:
    """The widest dtype of the state, and float32 at least."""
    return functools.reduce(torch.promote_types, [x.dtype for x in state], torch.float32)


def _rounded(coefficients: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Scalars as 0-dim tensors; what is derived from a coefficient is derived in float64 and rounded once."""
    lr_to_decay, c, scale = coefficients[:6], coefficients[6:8], coefficients[8:]
    return torch.cat([lr_to_decay, scale, 1 - coefficients[1:3], 1 / c]).to(dtype).unbind()


def like(value: Tensor, old: Tensor) -> Tensor:
    """A result in the dtype and layout of what it replaces."""
    target = torch.empty_like(old)
    return value if value.dtype == old.dtype and value.stride() == target.stride() else target.copy_(value)


def write(new: Three, param: Tensor, mu: Tensor, nu: Tensor, model: Tensor | None) -> None:
    """Copy new values over the old ones, and the parameter over its half-precision copy."""
    for old, value in zip((param, mu, nu), new, strict=True):
        old.copy_(value)
    if model is not None:
        model.copy_(param)


def rows(
    param: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], grad: Sequence[Tensor], model: Sequence[Tensor]
) -> Iterator[Row]:
    """One tuple a leaf, with None where there is no half-precision copy.

    Raises:
        ValueError: the lists differ in length.
    """
    lengths = [len(x) for x in (param, mu, nu, grad)]
    if len(set(lengths)) != 1 or len(model) not in (0, lengths[0]):
        raise ValueError(f"adamw: lists of different lengths: param, mu, nu, grad {lengths}, model {len(model)}")
    models: Sequence[Tensor | None] = model or [None] * len(param)
    return zip(param, mu, nu, grad, models, strict=True)


def check(param: Tensor, mu: Tensor, nu: Tensor, grad: Tensor, coefficients: Tensor) -> None:
    """Raise ValueError unless all leaves have the parameter's shape and the coefficients are nine float64 values."""
    shape = param.shape
    if mu.shape != shape or nu.shape != shape or grad.shape != shape:
        found = ", ".join(f"{name} {list(x.shape)}" for name, x in (("mu", mu), ("nu", nu), ("grad", grad)))
        raise ValueError(f"adamw: shapes differ: param {list(shape)}, {found}; the state must be made for this parameter")
    if coefficients.shape != _COEFFICIENTS_SHAPE or coefficients.dtype != torch.float64:
        raise ValueError(
            "adamw: coefficients must be 9 float64 values (functrain.kernels.adamw.coefficients makes them), "
            f"got {list(coefficients.shape)} {coefficients.dtype}"
        )


def check_model(param: Tensor, model: Tensor | None) -> None:
    """Raise ValueError unless the half-precision copy has the parameter's shape."""
    if model is not None and model.shape != param.shape:
        raise ValueError(f"adamw: model {list(model.shape)} must have the shape of param {list(param.shape)}")
