"""Collectives among a few CPU ranks as sends and receives between each two of them.

Gloo's all-gather copies its result once more and its reduce-scatter is an all-reduce inside. Sends straight from a value and receives
straight into a result need no copy and no worker thread, and sums are taken in rank order, whatever the size of the message.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from functrain.compile.collectives import ops

FEW = 8  # ranks; with more, each would send too many messages
SMALL = 2**16  # bytes; a larger value is all-reduced by gloo where there are more than two ranks, which sends less
REDUCTIONS: dict[str, tuple[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "sum": (dist.ReduceOp.SUM, torch.add),
    "max": (dist.ReduceOp.MAX, torch.maximum),
    "min": (dist.ReduceOp.MIN, torch.minimum),
    "product": (dist.ReduceOp.PRODUCT, torch.mul),
}


@dataclass
class Pending:
    """A collective that has started: what to wait for, and how its result is then put together. Holds what the back end still reads."""

    work: Any
    finish: Callable[[], torch.Tensor]
    held: tuple[torch.Tensor, ...]


class Several:
    """Several works as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self.works = works

    def wait(self) -> None:
        """Wait for all."""
        for work in self.works:
            work.wait()


def joined(pieces: torch.Tensor, dim: int) -> torch.Tensor:
    """Pieces [n, ...] side by side along a dimension of theirs; a view for the first one."""
    n, *shape = pieces.shape
    if all(size == 1 for size in shape[:dim]):
        shape[dim] *= n
        return pieces.view(shape)
    return torch.cat(list(pieces.unbind(0)), dim)


def cut(x: torch.Tensor, dim: int, n: int) -> torch.Tensor:
    """[n, ...]: the pieces of a dimension, each contiguous."""
    if all(size == 1 for size in x.shape[:dim]) and x.is_contiguous():
        return x.view([n, *x.shape[:dim], x.shape[dim] // n, *x.shape[dim + 1 :]])
    return torch.stack(x.chunk(n, dim))


def _exchange(group: Any, peers: Sequence[int], give: Sequence[torch.Tensor], take: Sequence[torch.Tensor], me: int) -> Several:
    """Give the i-th tensor to the i-th peer and take the i-th from it."""
    others = [i for i in range(len(peers)) if i != me]
    works = [dist.irecv(take[i].view(-1), peers[i], group=group) for i in others]
    works += [dist.isend(give[i].view(-1), peers[i], group=group) for i in others]
    return Several(works)


def _all_gather(group: Any, peers: list[int], dim: int, n: int) -> Callable[[torch.Tensor], Pending]:
    me = peers.index(dist.get_rank())

    def all_gather(x: torch.Tensor) -> Pending:
        x = x.contiguous()
        out = x.new_empty([n, *x.shape])
        work = _exchange(group, peers, [x] * n, out, me)
        out[me].copy_(x)
        return Pending(work, lambda: joined(out, dim), (x, out))

    return all_gather


def _reduce_scatter(group: Any, peers: list[int], dim: int, n: int) -> Callable[[torch.Tensor], Pending]:
    me = peers.index(dist.get_rank())

    def reduce_scatter(x: torch.Tensor) -> Pending:
        pieces = cut(x, dim, n)
        found = [pieces[i] if i == me else torch.empty_like(pieces[i]) for i in range(n)]
        return Pending(_exchange(group, peers, pieces, found, me), lambda: _reduced(found, "sum", me), (x, pieces))

    return reduce_scatter


def _all_reduce(group: Any, peers: list[int], op: str, n: int) -> Callable[[torch.Tensor], Pending]:
    me = peers.index(dist.get_rank())

    def all_reduce(x: torch.Tensor) -> Pending:
        if n > 2 and x.nbytes > SMALL:
            out = x.clone(memory_format=torch.contiguous_format)
            return Pending(dist.all_reduce(out, REDUCTIONS[op][0], group=group, async_op=True), lambda: out, ())
        x = x.contiguous()
        found = [x if i == me else torch.empty_like(x) for i in range(n)]
        return Pending(_exchange(group, peers, [x] * n, found, me), lambda: _reduced(found, op, me), (x,))

    return all_reduce


def _reduced(found: Sequence[torch.Tensor], op: str, me: int) -> torch.Tensor:
    """The reduction in rank order, in memory of a received value."""
    reduce, total = REDUCTIONS[op][1], found[0]
    for i, value in enumerate(found[1:], start=1):
        total = reduce(total, value, out=total if total is not found[me] else value if i != me else None)  # type: ignore[call-arg]
    return total


EXCHANGES: dict[Any, Callable[..., Callable[[torch.Tensor], Pending]]] = {
    ops.all_gather.default: _all_gather,
    ops.reduce_scatter.default: _reduce_scatter,
    ops.all_reduce.default: _all_reduce,
}
