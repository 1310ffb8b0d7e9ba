"""`vmap`: a function of one example becomes a function of many, over trees."""

import functools
from collections.abc import Callable
from typing import Any

import optree
import torch

from functrain import tree
from functrain.torch_internals import is_batched
from functrain.tree import PyTree


def vmap(function: Callable[..., Any], in_axes: Any = 0, out_axes: Any = 0) -> Callable[..., Any]:
    """Apply a function to every slice of its arguments at once, as `jax.vmap`.

    Random numbers come from explicit keys: pass one key a slice (`split(key, n)`); torch's own generator raises inside.

    Args:
        function: works on one slice. What it returns may hold numbers; they are repeated for every slice.
        in_axes: the axis to slice, for all arguments, or a tuple or list with one entry an argument; an entry is an int, None (the argument
            is the same for every slice) or a tree of such that stands above the argument's leaves. Keyword arguments are sliced along 0.
        out_axes: where the new axis goes in the results, likewise; None for a result that is the same for every slice.

    Returns:
        A function of the batched arguments.

    Raises:
        ValueError: axes that do not fit the arguments, nothing to slice, unequal sizes (each leaf's path and shape are named), or a result
            that differs between slices where `out_axes` is None.

    Example:
        >>> per_example = vmap(lambda w, x: {"y": w @ x}, in_axes=(None, 0))
        >>> per_example(torch.ones(3), torch.ones(5, 3))["y"].shape
        torch.Size([5])
    """
    name = getattr(function, "__name__", type(function).__name__)

    @functools.wraps(function)
    def batched(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree.flatten((args, kwargs))
        per_argument = tuple(in_axes) if isinstance(in_axes, (tuple, list)) else (in_axes,) * len(args)
        if len(per_argument) != len(args):
            raise ValueError(f"vmap of {name}: in_axes has {len(per_argument)} entries, but {len(args)} positional arguments were given")
        axes = [*_spread("in_axes", per_argument, args), *[0] * len(tree.leaves(kwargs))]
        tensors = [torch.as_tensor(leaf) if axis is not None else leaf for leaf, axis in zip(leaves, axes, strict=True)]
        _check_sizes(name, tree.paths((args, kwargs)), tensors, axes)
        return _run(function, tensors, axes, structure, out_axes)

    return batched


def _run(function: Callable[..., Any], leaves: list[Any], axes: list[int | None], structure: tree.Structure, out_axes: Any) -> Any:
    sliced = [i for i, axis in enumerate(axes) if axis is not None]
    found: list[Any] = []  # structure, axes and unbatched leaves of the result: torch.vmap takes batched tensors only

    def flat(*slices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = list(leaves)
        for i, part in zip(sliced, slices, strict=True):
            given[i] = part
        args, kwargs = tree.unflatten(structure, given)
        results, out_structure = tree.flatten(result := function(*args, **kwargs))
        places = _spread("out_axes", out_axes, result)
        same = {i: _unbatched(path, x) for i, (path, x, p) in enumerate(zip(tree.paths(result), results, places, strict=True)) if p is None}
        found[:] = [out_structure, places, same]
        return tuple(torch.as_tensor(x) for x, place in zip(results, places, strict=True) if place is not None)

    stacked = torch.vmap(flat, in_dims=tuple(axes[i] for i in sliced))(*(leaves[i] for i in sliced))
    out_structure, places, same = found
    batched = iter(stacked)
    return tree.unflatten(
        out_structure, [same[i] if i in same else torch.movedim(next(batched), 0, place) for i, place in enumerate(places)]
    )


def _spread(what: str, axes: Any, values: PyTree) -> list[int | None]:
    """One axis for each leaf of a tree, from a tree of axes that stands above it."""
    heads, structure = optree.tree_flatten(axes, is_leaf=lambda x: x is None, namespace=tree.NAMESPACE)
    try:
        parts = structure.flatten_up_to(values)
    except ValueError:
        raise ValueError(f"vmap: {what}={axes!r} does not fit the structure of what it describes") from None
    spread: list[int | None] = []
    for head, part in zip(heads, parts, strict=True):
        if head is not None and (not isinstance(head, int) or isinstance(head, bool)):
            raise TypeError(f"vmap: {what} holds ints and None, not {head!r}")
        spread += [head] * len(tree.leaves(part))
    return spread


def _check_sizes(name: str, paths: list[str], leaves: list[Any], axes: list[int | None]) -> None:
    rows = [(path, x, axis) for path, x, axis in zip(paths, leaves, axes, strict=True) if axis is not None]
    if not rows:
        raise ValueError(f"vmap of {name}: in_axes names no axis to slice; at least one argument needs one")
    for path, x, axis in rows:
        if not -x.dim() <= axis < x.dim():
            raise ValueError(f"vmap of {name}: axis {axis} of argument {_place(path)}, whose shape is {list(x.shape)}")
    if len({x.shape[axis] for _, x, axis in rows}) > 1:
        sizes = "; ".join(f"{_place(path)} has {x.shape[axis]} along axis {axis} of {list(x.shape)}" for path, x, axis in rows[:6])
        raise ValueError(f"vmap of {name}: arguments differ in the size of the sliced axis: {sizes}")


def _place(path: str) -> str:
    """`0/1/w` -> `1/w`: the first name says positional (0) or keyword (1)."""
    return path.partition("/")[2]


def _unbatched(path: str, x: Any) -> Any:
    if isinstance(x, torch.Tensor) and is_batched(x):
        raise ValueError(f"vmap: out_axes is None for result {path or '(the whole result)'}, which differs between slices; give it an axis")
    return x
