"""The inside of a `shard_map`, where tensors are one rank's: operations with their derivatives, and how a captured graph of them is cut.

Each operation is linear, and its derivative is its transpose, another one of them. They are right together: what `leave` divides a
cotangent by, `psum` and `enter` sum up again.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from functrain.compile.collectives import SENT, SHARD_OPERATIONS, ops, shard_start
from functrain.compile.emitter import Emitter
from functrain.compile.errors import CaptureError, PartitionError
from functrain.compile.graph import operations
from functrain.compile.padding import unpad
from functrain.compile.source import current_source
from functrain.compile.values import Value, placements_of
from functrain.sharding import Mesh, P, Sharding
from functrain.torch_internals import FakeTensor, transform_is_active

aten = torch.ops.aten


@dataclass(frozen=True)
class Inside:
    """What a function of local shards may ask for."""

    mesh: Mesh
    device: torch.device  # of what has no argument to take it from


_inside: ContextVar[Inside | None] = ContextVar("functrain_shard_map", default=None)


@contextmanager
def local_shards(inside: Inside) -> Iterator[None]:
    """Inside, tensors are those of one rank."""
    token = _inside.set(inside)
    try:
        yield
    finally:
        _inside.reset(token)


def inside_shard_map() -> Inside | None:
    """The innermost `shard_map` around this, or None."""
    return _inside.get()


# ---- operations that are one another's transposes


class _Linear(torch.autograd.Function):
    """A linear operation, and the operation that pulls cotangents back through it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: Callable[..., torch.Tensor], transpose: Callable[..., torch.Tensor]) -> torch.Tensor:
        ctx.transpose = transpose
        if isinstance(x, FakeTensor):
            x.constant = None  # what it remembers of a literal such as torch.tensor(2.0): torch would run the operation on it at once
        return run(x)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.transpose(cotangents[0]), None, None


def _linear(x: torch.Tensor, run: Callable[..., torch.Tensor], transpose: Callable[..., torch.Tensor]) -> torch.Tensor:
    if transform_is_active():
        raise CaptureError(
            f"{current_source()}: ft.vmap and ft.jvp cannot go through a collective: call it on the whole batch, "
            "outside the mapped function"
        )
    return _Linear.apply(x, run, transpose)  # type: ignore[no-any-return, no-untyped-call]


def enter(x: torch.Tensor, sharding: Sharding) -> torch.Tensor:
    """A global value -> this rank's piece of it; cotangents of copies are summed."""

    def transpose(cotangent: torch.Tensor) -> torch.Tensor:
        for axis in _copying_axes(sharding):
            cotangent = psum(cotangent, axis, sharding.mesh.size(axis))
        return leave(cotangent, sharding)

    where, pieces = _written(sharding), [sharding.parts(dim) for dim in range(x.ndim)]
    return _linear(x, lambda x: ops.enter_shards(x, where, pieces), transpose)


def leave(x: torch.Tensor, sharding: Sharding) -> torch.Tensor:
    """Each rank's piece -> the global value; each of several copies gets an equal part of the cotangent."""

    def transpose(cotangent: torch.Tensor) -> torch.Tensor:
        copies = math.prod(sharding.mesh.size(axis) for axis in _copying_axes(sharding))
        piece = enter(cotangent, sharding)
        return piece / copies if copies > 1 else piece

    where, pieces = _written(sharding), [sharding.parts(dim) for dim in range(x.ndim)]
    return _linear(x, lambda x: ops.leave_shards(x, where, pieces), transpose)


def psum(x: torch.Tensor, axis: str, n: int) -> torch.Tensor:
    """The sum over an axis, on each of its ranks."""
    return _linear(x, lambda x: ops.all_reduce(x, axis, "sum", n), lambda g: psum(g, axis, n))


def pmax(x: torch.Tensor, axis: str, n: int) -> torch.Tensor:
    """The largest over an axis, on each of its ranks; it has no derivative."""
    source = current_source()

    def refuse(cotangent: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError(
            f"{source}: pmax has no derivative. Where it only keeps numbers in range, as in a softmax, pass it `x.detach()`; else take the "
            "maximum of an all_gather"
        )

    return _linear(x, lambda x: ops.all_reduce(x, axis, "max", n), refuse)


def all_gather(x: torch.Tensor, axis: str, dim: int, n: int) -> torch.Tensor:
    """The pieces of an axis's ranks, side by side along a dimension."""
    return _linear(x, lambda x: ops.all_gather(x, axis, dim, n), lambda g: reduce_scatter(g, axis, dim, n))


def reduce_scatter(x: torch.Tensor, axis: str, dim: int, n: int) -> torch.Tensor:
    """A piece, along a dimension, of the sum over an axis: rank i of it has piece i."""
    return _linear(x, lambda x: ops.reduce_scatter(x, axis, dim, n), lambda g: all_gather(g, axis, dim, n))


def all_to_all(x: torch.Tensor, axis: str, split: int, join: int, n: int) -> torch.Tensor:
    """Piece i along `split` goes to rank i of an axis; what comes is put together along `join`, in the order of ranks."""
    return _linear(x, lambda x: ops.all_to_all(x, axis, split, join, n), lambda g: all_to_all(g, axis, join, split, n))


def permute(x: torch.Tensor, axis: str, source: Sequence[int], n: int) -> torch.Tensor:
    """Rank i of an axis gets what source[i] has; zeros where that is -1."""
    back = [-1] * n
    for to, come_from in enumerate(source):
        if come_from >= 0:
            back[come_from] = to
    return _linear(x, lambda x: ops.permute(x, axis, list(source), n), lambda g: permute(g, axis, back, n))


def _copying_axes(sharding: Sharding) -> list[str]:
    """The mesh axes whose ranks all hold the same piece."""
    return [axis for axis, n in sharding.mesh.shape.items() if n > 1 and axis not in sharding.spec.axes]


def _written(sharding: Sharding) -> str:
    return json.dumps({"mesh": str(sharding.mesh), "spec": sharding.spec.to_plain()})


# ---- partition


def shard_operation(emitter: Emitter, node: fx.Node, env: dict[fx.Node, Any]) -> Value:
    """One operation of a `shard_map`, for one rank.

    Between `enter_shards` and `leave_shards` every value counts as whole and has its local shape, so that the partitioner leaves each
    operation as it is.

    Args:
        emitter: of the rank's graph.
        node: an operation of `SHARD_OPERATIONS` in the captured graph.
        env: values of the captured graph's nodes.

    Raises:
        PartitionError: the plan is for another mesh.
    """
    emitter.planned, emitter.reason = True, "shard_map"
    if node.target is ops.axis_index.default:
        return _index(emitter, *node.args)
    value = env[node.args[0]]
    if node.target in SENT:
        axis, *rest, _ = node.args[1:]
        return emitter.value(emitter.collective(_NAMES[node.target], value.node, axis, *rest))
    spec = _spec_of(node, emitter.mesh)
    emitter.reason = f"shard_map {spec}"
    placements = placements_of(spec, emitter.mesh)
    if node.target is ops.enter_shards.default:
        return emitter.value(emitter.redistribute(unpad(emitter, value), placements).node)
    return emitter.value(value.node, placements, node.meta["val"].shape)


_NAMES = {getattr(ops, name).default: name for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")}


def _index(emitter: Emitter, axes: Sequence[str], sizes: Sequence[int], device: torch.device) -> Value:
    start = emitter.graph.call_function(shard_start, (list(axes), list(sizes), 1))
    start.meta.update(emitter.tags, val=0)
    return emitter.value(emitter.emit(aten.full.default, [], start, dtype=torch.int64, device=device))


def _spec_of(node: fx.Node, mesh: Mesh) -> P:
    where = json.loads(str(node.args[1]))
    if where["mesh"] != str(mesh):
        raise PartitionError(
            f"{node.meta.get('source')}: this shard_map is for the mesh {where['mesh']}, but the plan of the step is for {mesh}: "
            "give both the same mesh"
        )
    return P.of_plain(where["spec"])


def check_closures(graph: fx.Graph) -> None:
    """Refuse operations on local shards together with traced values that did not come in as arguments, and local shards that got out.

    Raises:
        PartitionError: names the line.
    """
    local: set[fx.Node] = set()
    whole: set[fx.Node] = {n for n in graph.nodes if n.op == "placeholder"}
    for node in operations(graph):
        read = node.all_input_nodes
        shards, others = [x for x in read if x in local], [x for x in read if x in whole]
        collects = node.target in SHARD_OPERATIONS and node.target is not ops.enter_shards.default
        if others and (shards or collects):
            raise PartitionError(_mixed(node, others[0]))
        if node.target is ops.leave_shards.default or node.target is ops.unshard.default:
            whole.add(node)
        elif shards or node.target in SHARD_OPERATIONS:
            local.add(node)
        elif others:
            whole.add(node)
    for item in graph.output_node().args[0]:
        if item in local:
            raise PartitionError(
                f"{item.meta.get('source')}: a value of one rank left its shard_map other than as a result. Return it, "
                "with a spec in out_specs"
            )


_SAME = (ops.unshard.default, aten._to_copy.default, aten.detach.default, aten.alias.default)


def _mixed(node: fx.Node, other: fx.Node) -> str:
    origin: Any = other
    while origin.op == "call_function" and origin.target in _SAME:
        origin = origin.args[0]
    what = origin.meta.get("path") or f"a tensor of shape {list(other.meta['val'].shape)}"
    return (
        f"{node.meta.get('source')}: the function of a shard_map uses {what}, a global value from outside, which has no local shards "
        "and no derivative there. Pass it as an argument, with P() in in_specs where each rank wants all of it"
    )
