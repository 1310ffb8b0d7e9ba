"""Transformations of functions: gradients, vector-Jacobian and Jacobian-vector products, batching. They nest in any order."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from functrain.differentiate import phase, pullback, select_arguments
from functrain.precision import LossScale, Precision
from functrain.tree import Mean, PyTree

# ---- gradients of a loss


def value_and_grad(
    loss_fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    precision: Precision | None = None,
    loss_scale: LossScale | None = None,
) -> Callable[..., Any]:
    """A function that returns the loss and its gradient, as `jax.value_and_grad`.

    Args:
        loss_fn: returns a scalar, or a `Mean(total, weight)` that stands for total / weight (0, with zero gradients, where the weight is
            0). With `has_aux` it returns (loss, any tree).
        argnums: the positional argument, or arguments, to differentiate by: trees of tensors, numbers or numpy arrays. Leaves that are
            not floating-point are passed on as they are and get zeros of their own dtype; so do leaves that have no influence.
        has_aux: whether `loss_fn` returns a second value to be passed through.
        precision: float leaves of the differentiated arguments are cast to `precision.compute` before use. Other arguments are not.
        loss_scale: a `StaticScale` or `DynamicScale` value: the loss is multiplied by it before the backward pass, and the gradients
            divided by it after, in float32.

    Returns:
        `f(*args, **kwargs) -> (value, gradients)`, or ((value, aux), gradients). Gradients have the structure of the argument (a tuple of
        such for a tuple of argnums), and each the shape and dtype of its leaf. A complex leaf gets JAX's convention, the conjugate of
        torch's. Nothing that comes out requires a gradient, unless inside another derivative.

    Raises:
        TypeError: the loss is not a real scalar, or an argument cannot be differentiated by.
        ValueError: `argnums` names an argument that was not given.

    Example:
        >>> value_and_grad(lambda params, x: (params["w"] * x).sum())({"w": torch.ones(2)}, torch.tensor([3.0, 4.0]))
        (tensor(7.), {'w': tensor([3., 4.])})
    """
    name = _name(loss_fn)

    @functools.wraps(loss_fn)
    def with_gradient(*args: Any, **kwargs: Any) -> Any:
        selection = select_arguments(name, args, argnums)

        def run(leaves: list[torch.Tensor]) -> tuple[list[torch.Tensor], PyTree]:
            loss, aux = split_loss(name, loss_fn(*selection.arguments(leaves), **kwargs), has_aux)
            return [loss.value() if isinstance(loss, Mean) else loss], aux

        with phase("forward"):
            params = selection.tensors(precision)
        (value,), aux, pull = pullback(run, params)
        seed = torch.ones_like(value) if loss_scale is None else loss_scale.scale.to(value)
        tensors = pull([seed])
        with phase("backward"):
            gradients = selection.gradients(tensors, precision, None if loss_scale is None else 1 / loss_scale.scale)
        return ((value, aux) if has_aux else value), gradients

    return with_gradient


def grad(
    loss_fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    precision: Precision | None = None,
    loss_scale: LossScale | None = None,
) -> Callable[..., Any]:
    """A function that returns the gradient of a loss, as `jax.grad`; see `value_and_grad` for the arguments.

    Returns:
        `f(*args, **kwargs) -> gradients`, or (gradients, aux) with `has_aux`.

    Example:
        >>> grad(grad(lambda x: x**3))(2.0)
        tensor(12.)
    """
    both = value_and_grad(loss_fn, argnums, has_aux, precision, loss_scale)

    @functools.wraps(loss_fn)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return gradient


def split_loss(name: str, result: Any, has_aux: bool) -> tuple[torch.Tensor | Mean, PyTree]:
    """Check what a loss function returned and split it into (loss, aux).

    Raises:
        TypeError: it is not a real scalar or a `Mean` of scalars, or not a pair where there should be an aux.
    """
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(f"with has_aux=True, {name} must return a pair (loss, aux), but it returned {_describe(result)}")
    loss, aux = result if has_aux else (result, None)
    if isinstance(loss, Mean):
        return Mean(_scalar(name, "total", loss.total), torch.as_tensor(loss.weight)), aux
    return _scalar(name, None, loss), aux


def _scalar(name: str, part: str | None, loss: Any) -> torch.Tensor:
    loss = torch.full((), loss) if isinstance(loss, float) else loss
    if isinstance(loss, torch.Tensor) and loss.shape == () and loss.is_floating_point():
        return loss
    where = f"an ft.Mean whose {part} is {_describe(loss)}" if part else _describe(loss)
    remedy = "reduce it, for instance with .mean(), or return ft.Mean(total, weight)"
    hint = "pass has_aux=True for (loss, aux)" if isinstance(loss, tuple) else remedy
    raise TypeError(f"{name} must return a real floating-point scalar to be differentiated, but it returned {where}; {hint}")


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)} and dtype {str(value.dtype).removeprefix('torch.')}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, (tuple, list, dict)) else type(value).__name__


def _name(function: Any) -> str:
    return getattr(function, "__name__", None) or type(function).__name__
