"""Real ranks: the collectives of one rank's graph as calls of `torch.distributed`, asynchronous, waited for where the graph waits."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx

from functrain.compile.collectives import SENT, ops, place_along, shard_start
from functrain.compile.exchange import EXCHANGES, FEW, REDUCTIONS, Pending, Several, cut, joined
from functrain.compile.graph import operations
from functrain.compile.passes.base import copied
from functrain.sharding import Mesh


def wait(pending: Pending, held: Any) -> torch.Tensor:
    """The result of a collective."""
    pending.work.wait()
    return pending.finish()


def bound(graph: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
    """A copy whose collectives call the process groups of a real mesh, for this process's rank."""
    own = copied(graph)
    coordinate = mesh.coordinate(mesh.rank)
    for node in operations(own.graph):
        target: Any = node.target
        if target is ops.wait.default:
            node.target = wait
        elif target is shard_start:
            axes, sizes, width = node.args
            node.target, node.args = _number(place_along(coordinate, axes, sizes) * width), ()  # type: ignore[arg-type,operator]
        elif target is ops.my_shard.default:
            x, axis, dim, n = node.args
            node.target, node.args = _piece(dim, n, coordinate[str(axis)]), (x,)  # type: ignore[arg-type]
        elif target in SENT:
            x, axis, *rest = node.args
            node.target, node.args = _start(target, mesh, str(axis), rest), (x,)
    return own


def _number(value: int) -> Callable[[], int]:
    def this_ranks_start() -> int:
        return value

    return this_ranks_start


def _piece(dim: int, n: int, place: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def my_shard(x: torch.Tensor) -> torch.Tensor:
        width = x.shape[dim] // n
        return x.narrow(dim, place * width, width).clone(memory_format=torch.contiguous_format)

    return my_shard


def _start(target: Any, mesh: Mesh, axis: str, rest: Sequence[Any]) -> Callable[[torch.Tensor], Pending]:
    """The function that starts one collective on its axis's group."""
    if mesh.groups is None or axis not in mesh.groups.by_axis:
        raise ValueError(f"this process has no group for the mesh axis {axis!r}")
    group = mesh.groups.by_axis[axis]
    starts = {**_STARTS, **EXCHANGES} if mesh.groups.device.type == "cpu" and 1 < mesh.size(axis) <= FEW else _STARTS
    return starts[target](group, mesh.peers(mesh.rank, axis), *rest)


def _all_gather(group: Any, peers: list[int], dim: int, n: int) -> Callable[[torch.Tensor], Pending]:
    def all_gather(x: torch.Tensor) -> Pending:
        x = x.contiguous()
        out = x.new_empty([n, *x.shape])
        work = dist.all_gather_single(out.view(-1), x.view(-1), group=group, async_op=True)
        return Pending(work, lambda: joined(out, dim), (x, out))

    return all_gather


def _reduce_scatter(group: Any, peers: list[int], dim: int, n: int) -> Callable[[torch.Tensor], Pending]:
    def reduce_scatter(x: torch.Tensor) -> Pending:
        pieces = cut(x, dim, n)
        out = torch.empty_like(pieces[0])
        work = dist.reduce_scatter_single(out.view(-1), pieces.view(-1), group=group, async_op=True)
        return Pending(work, lambda: out, (x, pieces))

    return reduce_scatter


def _all_reduce(group: Any, peers: list[int], op: str, n: int) -> Callable[[torch.Tensor], Pending]:
    def all_reduce(x: torch.Tensor) -> Pending:
        out = x.clone(memory_format=torch.contiguous_format)
        work = dist.all_reduce(out, REDUCTIONS[op][0], group=group, async_op=True)
        return Pending(work, lambda: out, ())

    return all_reduce


def _all_to_all(group: Any, peers: list[int], split: int, join: int, n: int) -> Callable[[torch.Tensor], Pending]:
    def all_to_all(x: torch.Tensor) -> Pending:
        pieces = cut(x, split, n)
        out = torch.empty_like(pieces)
        work = dist.all_to_all_single(out.view(-1), pieces.view(-1), group=group, async_op=True)
        return Pending(work, lambda: joined(out, join), (x, pieces, out))

    return all_to_all


def _permute(group: Any, peers: list[int], source: Sequence[int], n: int) -> Callable[[torch.Tensor], Pending]:
    me = peers.index(dist.get_rank())

    def permute(x: torch.Tensor) -> Pending:
        x = x.contiguous()
        out = torch.zeros_like(x)
        if source[me] == me:
            out.copy_(x)
        works = [dist.isend(x, peers[i], group=group) for i, s in enumerate(source) if s == me and i != me]
        works += [dist.irecv(out, peers[source[me]], group=group)] if source[me] not in (-1, me) else []
        return Pending(Several(works), lambda: out, (x, out))

    return permute


_STARTS: dict[Any, Callable[..., Callable[[torch.Tensor], Pending]]] = {
    ops.all_gather.default: _all_gather,
    ops.reduce_scatter.default: _reduce_scatter,
    ops.all_reduce.default: _all_reduce,
    ops.all_to_all.default: _all_to_all,
    ops.permute.default: _permute,
}
