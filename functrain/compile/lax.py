"""Collectives for functions under `ft.shard_map`, with the names and the meaning of `jax.lax`.

Each works along a mesh axis: the ranks that differ in that axis alone take part. All but `pmax` have derivatives. Arguments are trees;
shapes are those of one rank.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from functrain import tree
from functrain.compile import shards
from functrain.compile.collectives import ops
from functrain.compile.errors import CaptureError
from functrain.compile.shards import Inside, inside_shard_map
from functrain.compile.source import current_source
from functrain.tree import PyTree

Axes = str | Sequence[str]


def psum(x: PyTree, axis_name: Axes) -> PyTree:
    """The sum over the ranks of an axis, on each of them; its transpose is itself.

    Args:
        x: a tree of tensors and numbers; a number is the same on each rank.
        axis_name: a mesh axis, or several.

    >>> import functrain as ft
    >>> mesh = ft.make_mesh({"data": 2}, simulate=True)
    >>> ft.shard_map(lambda x: psum(x, "data"), mesh, ft.P("data"), ft.P())(torch.tensor([1.0, 2.0, 3.0, 4.0])).full()
    tensor([4., 6.])
    """
    sizes = _sizes("psum", axis_name)
    return tree.map(lambda x: _each_axis(shards.psum, x, sizes) if _is_tensor(x) else x * math.prod(sizes.values()), x)


def pmean(x: PyTree, axis_name: Axes) -> PyTree:
    """The mean over the ranks of an axis, on each of them.

    Args:
        x: a tree of tensors and numbers.
        axis_name: a mesh axis, or several.

    >>> import functrain as ft
    >>> mesh = ft.make_mesh({"data": 2}, simulate=True)
    >>> ft.shard_map(lambda x: pmean(x, "data"), mesh, ft.P("data"), ft.P())(torch.tensor([1.0, 2.0, 3.0, 4.0])).full()
    tensor([2., 3.])
    """
    n = math.prod(_sizes("pmean", axis_name).values())
    return tree.map(lambda x: x / n, psum(x, axis_name))


def pmax(x: PyTree, axis_name: Axes) -> PyTree:
    """The largest of each element over the ranks of an axis, on each of them.

    Args:
        x: a tree of tensors and numbers.
        axis_name: a mesh axis, or several.

    Raises:
        NotImplementedError: it is differentiated; give it `x.detach()`.

    >>> import functrain as ft
    >>> mesh = ft.make_mesh({"data": 2}, simulate=True)
    >>> ft.shard_map(lambda x: pmax(x, "data"), mesh, ft.P("data"), ft.P())(torch.tensor([1.0, 5.0, 3.0, 4.0])).full()
    tensor([3., 5.])
    """
    sizes = _sizes("pmax", axis_name)
    return tree.map(lambda x: _each_axis(shards.pmax, x, sizes) if _is_tensor(x) else x, x)


def all_gather(x: PyTree, axis_name: Axes, *, axis: int = 0, tiled: bool = False) -> PyTree:
    """What all ranks of an axis have, on each of them; its transpose is `reduce_scatter`.

    Args:
        x: a tree of tensors `[...]`.
        axis_name: a mesh axis, or several, the first of which is the outermost.
        axis: the dimension of the result along which the ranks stand.
        tiled: put them side by side along a dimension that is there, `[ranks * size]`; by default they get a new one, `[ranks, ...]`.

    >>> import functrain as ft
    >>> mesh = ft.make_mesh({"data": 2}, simulate=True)
    >>> ft.shard_map(lambda x: all_gather(x, "data"), mesh, ft.P("data"), ft.P())(torch.tensor([1.0, 2.0, 3.0, 4.0])).full()
    tensor([[1., 2.],
            [3., 4.]])
    """
    sizes = _sizes("all_gather", axis_name)

    def gather(x: torch.Tensor) -> torch.Tensor:
        x = torch.as_tensor(x)
        dim = _dimension("all_gather", axis, x, x.ndim + (not tiled))
        x = x if tiled else x.unsqueeze(dim)
        for name, n in reversed(sizes.items()):
            x = shards.all_gather(x, name, dim, n) if n > 1 else x
        return x

    return tree.map(gather, x)


def reduce_scatter(x: PyTree, axis_name: Axes, *, scatter_dimension: int = 0, tiled: bool = False) -> PyTree:
    """One piece of the sum over the ranks of an axis on each of them, as `jax.lax.psum_scatter`; its transpose is `all_gather`.

    Args:
        x: a tree of tensors.
        axis_name: a mesh axis, or several, the first of which is the outermost.
        scatter_dimension: the dimension that is cut.
        tiled: its size is a multiple of the ranks, `[ranks * size] -> [size]`; by default it is their number, and goes, `[ranks, ...]`.

    Raises:
        ValueError: the dimension has another size.

    >>> import functrain as ft
    >>> mesh = ft.make_mesh({"data": 2}, simulate=True)
    >>> f = ft.shard_map(lambda x: reduce_scatter(x, "data", tiled=True), mesh, ft.P(), ft.P("data"))
    >>> f(torch.tensor([1.0, 2.0, 3.0, 4.0])).full()
    tensor([2., 4., 6., 8.])
    """
    sizes = _sizes("reduce_scatter", axis_name)

    def scatter(x: torch.Tensor) -> torch.Tensor:
        dim = _dimension("reduce_scatter", scatter_dimension, x, x.ndim)
        _check_cut("reduce_scatter", x, dim, sizes, tiled)
        for name, n in sizes.items():
            x = shards.reduce_scatter(x, name, dim, n) if n > 1 else x
        return x if tiled else x.squeeze(dim)

    return tree.map(scatter, x)


def all_to_all(x: PyTree, axis_name: str, split_axis: int, concat_axis: int, *, tiled: bool = False) -> PyTree:
    """Each rank sends one piece to each rank of an axis; its transpose is itself, with the two dimensions exchanged.

    Args:
        x: a tree of tensors.
        axis_name: a mesh axis.
        split_axis: the dimension that is cut; piece i goes to rank i.
        concat_axis: the dimension along which what comes is put together, in the order of ranks.
        tiled: `split_axis` becomes shorter and `concat_axis` longer by as many times as there are ranks; by default `split_axis` has the
            size of the number of ranks and goes, and `concat_axis` is a new dimension of the result.

    Raises:
        ValueError: `split_axis` has another size.

    >>> import functrain as ft
    >>> mesh = ft.make_mesh({"data": 2}, simulate=True)
    >>> f = ft.shard_map(lambda x: all_to_all(x, "data", 0, 0, tiled=True), mesh, ft.P("data"), ft.P("data"))
    >>> f(torch.tensor([1.0, 2.0, 3.0, 4.0])).full()
    tensor([1., 3., 2., 4.])
    """
    name, n = _one("all_to_all", axis_name)

    def exchange(x: torch.Tensor) -> torch.Tensor:
        split = _dimension("all_to_all", split_axis, x, x.ndim)
        join = _dimension("all_to_all", concat_axis, x, x.ndim)
        _check_cut("all_to_all", x, split, {name: n}, tiled)
        if tiled:
            return shards.all_to_all(x, name, split, join, n) if n > 1 else x
        x = x.movedim(split, 0)
        return (shards.all_to_all(x, name, 0, 0, n) if n > 1 else x).movedim(0, join)

    return tree.map(exchange, x)


def ppermute(x: PyTree, axis_name: str, perm: Sequence[tuple[int, int]]) -> PyTree:
    """Send shards along an axis; the transpose sends them back.

    Args:
        x: a tree of tensors.
        axis_name: a mesh axis.
        perm: pairs (from, to) of places along it, each at most once on either side; a rank that nothing is sent to gets zeros.

    Raises:
        ValueError: a place is not there, or stands twice on one side.

    >>> import functrain as ft
    >>> mesh = ft.make_mesh({"data": 2}, simulate=True)
    >>> f = ft.shard_map(lambda x: ppermute(x, "data", [(0, 1)]), mesh, ft.P("data"), ft.P("data"))
    >>> f(torch.tensor([1.0, 2.0, 3.0, 4.0])).full()
    tensor([0., 0., 1., 2.])
    """
    name, n = _one("ppermute", axis_name)
    source = [-1] * n
    for come_from, to in perm:
        if not (0 <= come_from < n and 0 <= to < n):
            raise ValueError(f"ppermute: the pair ({come_from}, {to}) is outside the axis {name!r}, whose places are 0 to {n - 1}")
        if source[to] != -1 or come_from in source:
            raise ValueError(f"ppermute: perm={list(perm)} names a place twice on one side; a rank sends once and gets once")
        source[to] = int(come_from)

    def send(x: torch.Tensor) -> torch.Tensor:
        if n > 1:
            return shards.permute(x, name, source, n)
        return x if source == [0] else torch.zeros_like(x)

    return tree.map(send, x)


def axis_index(axis_name: Axes) -> torch.Tensor:
    """Where this rank stands along an axis, from 0: an int64 scalar.

    Args:
        axis_name: a mesh axis, or several, the first of which is the outermost.

    >>> import functrain as ft
    >>> mesh = ft.make_mesh({"data": 3}, simulate=True)
    >>> ft.shard_map(lambda: axis_index("data")[None], mesh, (), ft.P("data"))().full()
    tensor([0, 1, 2])
    """
    sizes = {name: n for name, n in _sizes("axis_index", axis_name).items() if n > 1}
    device = _where("axis_index", axis_name).device
    if not sizes:
        return torch.zeros((), dtype=torch.int64, device=device)
    return ops.axis_index(list(sizes), list(sizes.values()), device)  # type: ignore[no-any-return]


def axis_size(axis_name: Axes) -> int:
    """How many ranks an axis has, or several have together: a Python number.

    >>> import functrain as ft
    >>> mesh = ft.make_mesh({"data": 3}, simulate=True)
    >>> ft.shard_map(lambda x: x * axis_size("data"), mesh, ft.P(), ft.P())(torch.ones(())).full()
    tensor(3.)
    """
    return math.prod(_sizes("axis_size", axis_name).values())


# ---- what is asked for


def _where(operation: str, axis_name: Axes) -> Inside:
    inside = inside_shard_map()
    if inside is None:
        raise CaptureError(
            f"{current_source()}: {operation} over {axis_name!r} is called outside ft.shard_map, where values are global: sums over a "
            "split dimension need no collective there. Call it in a function under ft.shard_map"
        )
    return inside


def _sizes(operation: str, axis_name: Axes) -> dict[str, int]:
    """The axes and their sizes, in the order asked for."""
    mesh = _where(operation, axis_name).mesh
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    if len(set(names)) < len(names):
        raise ValueError(f"{operation} over {names} names an axis twice")
    for name in names:
        if name not in mesh.axis_names:
            known = ", ".join(f"{axis}={n}" for axis, n in mesh.shape.items())
            raise ValueError(f"{operation} over {name!r}: the mesh of this shard_map has no such axis; its axes are {known}")
    return {name: mesh.size(name) for name in names}


def _one(operation: str, axis_name: str) -> tuple[str, int]:
    sizes = _sizes(operation, axis_name)
    if len(sizes) != 1:
        raise ValueError(f"{operation} works along one mesh axis, not {axis_name!r}: call it for one after the other")
    return next(iter(sizes.items()))


def _is_tensor(x: Any) -> bool:
    return not isinstance(x, (int, float, complex))


def _each_axis(operation: Callable[..., torch.Tensor], x: Any, sizes: dict[str, int]) -> torch.Tensor:
    return functools.reduce(lambda x, size: operation(x, *size), [size for size in sizes.items() if size[1] > 1], torch.as_tensor(x))


def _dimension(operation: str, dim: int, x: torch.Tensor, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise ValueError(f"{operation}: dimension {dim} is not one of a shard of shape {list(x.shape)}")
    return dim % ndim


def _check_cut(operation: str, x: torch.Tensor, dim: int, sizes: dict[str, int], tiled: bool) -> None:
    n, size = math.prod(sizes.values()), x.shape[dim]
    axes = " x ".join(f"{name}={k}" for name, k in sizes.items())
    if tiled and size % n:
        raise ValueError(
            f"{operation}: a shard of shape {list(x.shape)} has {size} along dimension {dim}, which {n} ranks ({axes}) do not divide: "
            "pad it to a multiple"
        )
    if not tiled and size != n:
        raise ValueError(
            f"{operation}: a shard of shape {list(x.shape)} has {size} along dimension {dim}, but there are {n} ranks ({axes}): "
            "give it one row a rank, or pass tiled=True to cut a longer dimension"
        )
