"""Transformations of functions: gradients, vector-Jacobian and Jacobian-vector products, batching. They nest in any order."""

import functools
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import torch

from functrain import tree
from functrain.batching import vmap as vmap
from functrain.differentiate import active_markers, as_tensor, cut, is_active, is_nested, phase, pullback, select_arguments, split_tensors
from functrain.precision import LossScale, Precision
from functrain.torch_internals import load_forward_mode_rules
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
        with phase("backward"):
            seed = torch.ones_like(value) if loss_scale is None else loss_scale.scale.to(value)
            tensors = pull([seed])
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
    loss, aux = _split_aux(name, result, has_aux)
    if isinstance(loss, Mean):
        return Mean(_scalar(name, "total", loss.total), _weight(name, loss.weight)), aux
    return _scalar(name, None, loss), aux


def _scalar(name: str, part: str | None, loss: Any) -> torch.Tensor:
    loss = torch.full((), loss) if isinstance(loss, float) else loss
    if isinstance(loss, torch.Tensor) and loss.shape == () and loss.is_floating_point():
        return loss
    where = f"an ft.Mean whose {part} is {_describe(loss)}" if part else _describe(loss)
    remedy = "reduce it, for instance with .mean(), or return ft.Mean(total, weight)"
    hint = "pass has_aux=True for (loss, aux)" if isinstance(loss, tuple) else remedy
    raise TypeError(f"{name} must return a real floating-point scalar to be differentiated, but it returned {where}; {hint}")


def _weight(name: str, weight: Any) -> torch.Tensor:
    weight = torch.full((), weight) if isinstance(weight, (int, float)) else weight
    if isinstance(weight, torch.Tensor) and weight.shape == () and not weight.is_complex():
        return weight
    raise TypeError(f"{name} returned an ft.Mean whose weight is {_describe(weight)}; it must be a scalar, for instance mask.sum()")


def _split_aux(name: str, result: Any, has_aux: bool) -> tuple[Any, PyTree]:
    if not has_aux:
        return result, None
    if isinstance(result, tuple) and len(result) == 2:
        return result
    raise TypeError(f"with has_aux=True, {name} must return a pair (result, aux), but it returned {_describe(result)}")


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)} and dtype {str(value.dtype).removeprefix('torch.')}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, (tuple, list, dict)) else type(value).__name__


def _name(function: Any) -> str:
    return getattr(function, "__name__", None) or type(function).__name__


# ---- products with a Jacobian


def vjp(function: Callable[..., Any], *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """Run a function and return its pullback, as `jax.vjp`.

    Args:
        function: takes `primals`, returns a tree; with `has_aux` a pair (tree, anything).
        primals: trees of tensors or numbers.
        has_aux: whether the function returns a second value to be passed through.

    Returns:
        (result, `pull`) or (result, `pull`, aux). `pull(cotangent)`, for a tree like the result, returns a tuple of trees like the primals:
        cotangent @ Jacobian (for complex numbers too, without conjugation). It can be called any number of times. Leaves that are not
        floating-point, on either side, take no part: their cotangents are ignored and their results zeros.

    Raises:
        StructureError, ValueError: a cotangent differs from the result in structure, shape or dtype.

    Example:
        >>> result, pull = vjp(torch.sin, torch.zeros(2))
        >>> pull(torch.ones(2))
        (tensor([1., 1.]),)
    """
    name = _name(function)
    selection = select_arguments(name, primals, tuple(range(len(primals))))
    rebuild: list[Any] = []

    def run(leaves: list[torch.Tensor]) -> tuple[list[torch.Tensor], PyTree]:
        result, aux = _split_aux(name, function(*selection.arguments(leaves)), has_aux)
        tensors, put_back = split_tensors(result)
        active = [is_active(x) for x in tensors]
        rebuild[:] = [put_back, active]
        return list(compress(tensors, active)), ([x for x in tensors if not is_active(x)], aux)

    outputs, (others, aux), pull = pullback(run, selection.tensors(None))
    put_back, active = rebuild
    live, dead = iter(outputs), iter(others)
    result = put_back([next(live) if is_live else next(dead) for is_live in active])

    def pull_tree(cotangent: PyTree) -> tuple[PyTree, ...]:
        pairs = zip(_matching("cotangent", "result", cotangent, result), tree.leaves(result), strict=True)
        gradients: tuple[PyTree, ...] = selection.gradients(pull([c for c, x in pairs if is_active(x)], keep=True), None, None)
        return gradients

    return (result, pull_tree, aux) if has_aux else (result, pull_tree)


def jvp(function: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], has_aux: bool = False) -> tuple[Any, ...]:
    """Run a function together with its derivative in one direction (forward mode), as `jax.jvp`.

    Args:
        function: takes `primals`, returns a tree; with `has_aux` a pair (tree, anything).
        primals: tuple or list of trees of tensors or numbers.
        tangents: the direction: a tuple or list like `primals`. Tangents of leaves that are not floating-point are ignored.
        has_aux: whether the function returns a second value to be passed through.

    Returns:
        (result, Jacobian @ tangents) or (result, Jacobian @ tangents, aux); zeros where there is no influence.

    Raises:
        StructureError, ValueError: tangents differ from the primals in structure, shape or dtype.

    Example:
        >>> jvp(lambda x: x**2, (torch.tensor(3.0),), (torch.tensor(1.0),))
        (tensor(9.), tensor(6.))
    """
    if not (isinstance(primals, (tuple, list)) and isinstance(tangents, (tuple, list))):
        raise TypeError("jvp takes a tuple of primals and a tuple of tangents, one entry an argument")
    name = _name(function)
    selection = select_arguments(name, tuple(primals), tuple(range(len(primals))))
    direction = _matching("tangents", "primals", tuple(tangents), tree.unflatten(selection.structure, selection.leaves))
    rebuild: list[Any] = []

    def run(*leaves: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        result, aux = _split_aux(name, function(*selection.arguments(leaves)), has_aux)
        (tensors, put_back), (extra, put_back_aux) = split_tensors(result), split_tensors(aux)
        rebuild[:] = [put_back, put_back_aux]
        return tensors, extra

    load_forward_mode_rules()
    with phase("forward"):
        inputs, directions = tuple(selection.tensors(None)), tuple(direction[i] for i in selection.active)
        outputs, derivatives, extra = torch.func.jvp(run, inputs, directions, has_aux=True)  # type: ignore[misc]
    put_back, put_back_aux = rebuild
    result, derivative = put_back(_visible(outputs)), put_back(_visible(derivatives))
    return (result, derivative, put_back_aux(_visible(extra))) if has_aux else (result, derivative)


def _visible(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Results as they leave: without history, unless inside another derivative."""
    return list(tensors) if is_nested() else [cut(x) for x in tensors]


def _matching(what: str, model: str, given: PyTree, wanted: PyTree) -> list[Any]:
    """The leaves of `given`, which must be like those of `wanted`."""
    difference = tree.mismatch(wanted, given)
    if difference:
        raise tree.StructureError(f"the {what} must have the structure of the {model}: {difference}")
    leaves = [as_tensor(leaf, path) for path, leaf in tree.leaves_with_path(given)]
    for path, leaf, like in zip(tree.paths(wanted), leaves, tree.leaves(wanted), strict=True):
        if is_active(like) and not (isinstance(leaf, torch.Tensor) and (leaf.shape, leaf.dtype) == (like.shape, like.dtype)):
            raise ValueError(f"leaf {path or '(the whole tree)'} of the {what} is {_describe(leaf)}, but the {model} has {_describe(like)}")
    return leaves


def unshard(params: PyTree) -> PyTree:
    """Params as a forward pass uses them, in a function on a mesh that takes no gradient, such as a validation; the identity elsewhere.

    `value_and_grad` and `accumulate` do this for the arguments that they differentiate by.

    >>> unshard({"w": torch.ones(2)})
    {'w': tensor([1., 1.])}
    """
    markers = active_markers()
    return params if markers is None else tree.map(lambda x: markers.unshard(x) if isinstance(x, torch.Tensor) else x, params)
