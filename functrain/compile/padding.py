"""Dimensions that do not divide: rounded up in storage, masked in sums, passed through by elementwise operations, dropped by the rest."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch.distributed.tensor import Placement, Replicate, Shard

from functrain.compile.collectives import ops, shard_start
from functrain.compile.emitter import DRAWS, FILL_LIKE, FILL_SIZE, Emitter
from functrain.compile.values import Value, parts
from functrain.torch_internals import OpOverload

aten = torch.ops.aten
PASSES = {
    aten.clone.default,
    aten.detach.default,
    aten._to_copy.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.alias.default,
}
ELEMENTWISE_BUT_LAST = {ops.adamw.default}  # of several tensors of one shape, and one more that is whole
SUMS = {aten.sum.default, aten.sum.dim_IntList}


def unpad(emitter: Emitter, x: Value) -> Value:
    """The value without padding; its padded dimensions become whole on every rank."""
    if not x.padding:
        return x
    x = emitter.gather_dims(x, set(x.padding))
    node, shape = x.node, list(x.shape)
    for dim, true in x.padding.items():
        node, shape[dim] = emitter.emit(aten.slice.Tensor, node, dim, 0, true), true
    return emitter.value(node, x.placements, shape)


def store(emitter: Emitter, x: Value, want: Sequence[Placement]) -> Value:
    """To placements of storage, rounding up the split dimensions that do not divide."""
    pieces = parts(want, emitter.mesh)
    if any(pieces.get(dim, 1) == 1 or _rounded(true, pieces[dim]) != x.shape[dim] for dim, true in x.padding.items()):
        x = unpad(emitter, x)
    padding = {dim: x.shape[dim] for dim, n in pieces.items() if dim not in x.padding and x.shape[dim] % n}
    if not padding:
        return emitter.redistribute(x, want)
    x = emitter.gather_dims(x, set(padding))  # a partial value stays one: padding with zeros is linear
    shape = [_rounded(size, pieces[dim]) if dim in padding else size for dim, size in enumerate(x.shape)]
    local = [shape[dim] if dim in padding else size for dim, size in enumerate(x.local.shape)]
    node = _padded(emitter, x.node, local)
    return emitter.redistribute(Value(node, x.placements, tuple(shape), {**x.padding, **padding}), want)


def _rounded(size: int, n: int) -> int:
    return -(-size // n) * n


def _padded(emitter: Emitter, node: fx.Node, shape: Sequence[int]) -> fx.Node:
    """A larger node whose further elements are anything; what is made from constants and keys alone is made larger at once."""
    made = _made_large(emitter, node, shape)
    if made is not None:
        return made
    val = node.meta["val"]
    widths = [w for have, want in reversed(list(zip(val.shape, shape, strict=True))) for w in (0, want - have)]
    return emitter.emit(aten.constant_pad_nd.default, node, widths, 0)


def _made_large(emitter: Emitter, node: fx.Node, shape: Sequence[int]) -> fx.Node | None:
    if node.target in FILL_SIZE:
        arguments: list[Any] = list(node.args)
        arguments[FILL_SIZE[node.target]] = list(shape)
        return emitter.emit(node.target, *arguments, **node.kwargs)
    if node.target in FILL_LIKE:
        return emitter.filled(node, shape)
    if node.target in DRAWS and node.args[0].meta["val"].ndim == 1:  # type: ignore[union-attr]
        key, whole, start, _, *rest = node.args
        larger = emitter.emit(node.target, key, list(whole), list(start), list(shape), *rest)  # type: ignore[arg-type]
        larger.meta["window"] = dict(node.meta.get("window", {}))
        return larger
    if not isinstance(node.target, OpOverload) or (
        torch.Tag.pointwise not in node.target.tags and node.target is not aten._to_copy.default
    ):
        return None
    large: dict[fx.Node, fx.Node] = {}
    for x in node.all_input_nodes:
        have = x.meta["val"].shape
        if have == node.meta["val"].shape:
            made = _made_large(emitter, x, shape)
            if made is None:
                return None
            large[x] = made
        elif x.meta["val"].numel() == 1:
            large[x] = x
        else:
            return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), large.__getitem__)
    return emitter.emit(node.target, *args, **kwargs)


def mask(emitter: Emitter, x: Value, dims: set[int]) -> Value:
    """The value with zeros in the padding of some dimensions, so that a sum along them does not see it."""
    node = x.node
    for dim in sorted(dims & x.padding.keys()):
        size = x.local.shape[dim]
        keep = emitter.emit(aten.lt.Scalar, _positions(emitter, x, dim, size), x.padding[dim])
        keep = emitter.emit(aten.reshape.default, keep, [size if d == dim else 1 for d in range(len(x.shape))])
        node = emitter.emit(aten.where.self, keep, node, emitter.emit(aten.zeros_like.default, node))
    return Value(node, x.placements, x.shape, {dim: true for dim, true in x.padding.items() if dim not in dims})


def _sum(emitter: Emitter, x: Value, rest: Sequence[Any], kwargs: Any) -> tuple[Value, dict[int, int]]:
    """A sum's argument, with zeros where it would see padding, and the padding of its result: that of the dimensions that stay."""
    given = [*rest, *[kwargs.get("dim"), kwargs.get("keepdim", False)][len(rest) :]]
    dims = {dim % len(x.shape) for dim in given[0] or range(len(x.shape))}
    x = mask(emitter, x, dims)
    return x, x.padding if given[1] else {dim - sum(d < dim for d in dims): true for dim, true in x.padding.items()}


def _positions(emitter: Emitter, x: Value, dim: int, size: int) -> fx.Node:
    """The global positions of a rank's piece of a dimension."""
    axes = emitter.axes_of(x, dim)
    numbers = emitter.emit(aten.arange.default, size, device=emitter.device)
    if not axes:
        return numbers
    start = emitter.graph.call_function(shard_start, (list(axes), [emitter.mesh.size(axis) for axis in axes], size))
    start.meta.update(emitter.tags, val=0)
    return emitter.emit(aten.add.Tensor, numbers, start)


def settle(emitter: Emitter, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any, dict[int, int]]:
    """Arguments that an operation may see, and the padding that its result then has."""
    values = all_values((args, kwargs))
    like = next((v for v in values if v.padding), None)
    if like is None:
        return args, kwargs, {}
    if target in ELEMENTWISE_BUT_LAST:
        *leaves, last = args
        return (*(v if _padded_alike(v, like) else store(emitter, v, like.placements) for v in leaves), last), kwargs, like.padding
    if torch.Tag.pointwise in target.tags or target in PASSES:
        ndim = max(len(v.shape) for v in values)
        if len(like.shape) == ndim and all(_alike(v, like) for v in values):

            def settled(v: Value) -> Value:
                return v if _padded_alike(v, like) or not _needs_padding(v, like) else store(emitter, v, _aligned(v, like))

            args, kwargs = map_values(settled, (args, kwargs))
            return args, kwargs, like.padding
    if target in SUMS and isinstance(args[0], Value):
        x, left = _sum(emitter, args[0], args[1:], kwargs)
        return (x, *args[1:]), kwargs, left
    args, kwargs = map_values(lambda v: unpad(emitter, v), (args, kwargs))
    return args, kwargs, {}


def _alike(v: Value, like: Value) -> bool:
    """Whether an argument of an elementwise operation can have the padding of another: same rank, and no smaller in a padded dimension."""
    if not v.shape:
        return True
    if len(v.shape) != len(like.shape):
        offset = len(like.shape) - len(v.shape)
        return all(dim < offset or v.shape[dim - offset] == 1 for dim in like.padding) and not v.padding
    true = [v.padding.get(dim, size) for dim, size in enumerate(v.shape)]
    fits = all(true[dim] == size or v.shape[dim] == 1 for dim, size in like.padding.items())
    return fits and all(dim in like.padding for dim in v.padding)


def _padded_alike(v: Value, like: Value) -> bool:
    """Whether both have the same padding; one true size may be rounded up to several."""
    return v.padding == like.padding and all(v.shape[dim] == like.shape[dim] for dim in like.padding)


def _needs_padding(v: Value, like: Value) -> bool:
    if len(v.shape) != len(like.shape):
        return False
    return any(v.padding.get(dim, v.shape[dim]) == true and v.shape[dim] != like.shape[dim] for dim, true in like.padding.items())


def _aligned(v: Value, like: Value) -> Sequence[Placement]:
    """The placements of `like` where the argument has that dimension, else the argument's own; a padded dimension has no other axes."""
    out: list[Placement] = []
    for own, other in zip(v.placements, like.placements, strict=True):
        if isinstance(other, Shard) and v.shape[other.dim] != 1:
            out.append(other)
        elif isinstance(own, Shard) and own.dim in like.padding:
            out.append(Replicate())
        else:
            out.append(own)
    return out


def map_values(function: Callable[[Value], Any], arguments: Any) -> Any:
    """Apply a function to every value among an operation's arguments."""
    if isinstance(arguments, Value):
        return function(arguments)
    if isinstance(arguments, tuple):
        return tuple(map_values(function, x) for x in arguments)
    if isinstance(arguments, list):
        return [map_values(function, x) for x in arguments]
    if isinstance(arguments, dict):
        return {k: map_values(function, x) for k, x in arguments.items()}
    return arguments


def all_values(arguments: Any) -> list[Value]:
    """Every value among an operation's arguments, in order."""
    found: list[Value] = []
    map_values(found.append, arguments)
    return found
