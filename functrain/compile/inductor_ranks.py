"""Real ranks under Inductor: only the messages themselves are opaque, what prepares them and puts results together is compiled.

Each start becomes `functrain::send`, whose result is memory that messages arrive in, and each wait `functrain::receive_`, which says that
it writes there: so Inductor neither reads the memory before nor frees or overwrites what is still being sent. Both say that they write a
tensor `order` too, so that they stay in the order of the schedule, the same on all ranks, whose graphs differ in numbers. A reduction
arrives as one piece of each rank, and the sum, in rank order, is a part of the graph.
"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx

from functrain.compile.collectives import SENT, ops, place_along, shard_start
from functrain.compile.exchange import FEW, REDUCTIONS, SMALL, Several
from functrain.compile.graph import TAGS, operations
from functrain.compile.inductor import Boxed, compile_graph
from functrain.compile.passes.base import copied
from functrain.sharding import Mesh

aten = torch.ops.aten
_OPERATORS = torch.library.Library("functrain", "FRAGMENT")
_NUMBERS = itertools.count()

Send = Callable[[torch.Tensor, torch.Tensor], Any]  # (value, memory to arrive in) -> something to wait for


@dataclass(eq=False)
class Messages:
    """The messages of one compiled step: how to send each, and those that are under way."""

    sends: list[Send] = field(default_factory=list)
    under_way: dict[int, tuple[Any, torch.Tensor]] = field(default_factory=dict)
    program: int = field(default_factory=lambda: next(_NUMBERS))

    def __post_init__(self) -> None:
        _PROGRAMS[self.program] = self


# An operator's arguments are tensors, numbers and text, so a compiled step names its messages by a number.
_PROGRAMS: "weakref.WeakValueDictionary[int, Messages]" = weakref.WeakValueDictionary()


def _send(x: torch.Tensor, order: torch.Tensor, program: int, number: int, shape: Sequence[int]) -> torch.Tensor:
    messages, memory = _PROGRAMS[program], x.new_empty(shape)
    x = x.contiguous()
    messages.under_way[number] = messages.sends[number](x, memory), x
    return memory


def _receive(memory: torch.Tensor, order: torch.Tensor, held: Sequence[torch.Tensor], program: int, number: int) -> None:
    work, _ = _PROGRAMS[program].under_way.pop(number)
    work.wait()


def _register() -> None:
    _OPERATORS.define("send(Tensor x, Tensor(a!) order, int program, int number, int[] shape) -> Tensor")
    _OPERATORS.define("receive_(Tensor(a!) memory, Tensor(b!) order, Tensor[] held, int program, int number) -> ()")
    for name, run in (("send", _send), ("receive_", _receive)):
        _OPERATORS.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake("functrain::send", lambda x, order, program, number, shape: x.new_empty(shape), lib=_OPERATORS)
    torch.library.register_fake("functrain::receive_", lambda memory, order, held, program, number: None, lib=_OPERATORS)


_register()


def compile_for_rank(graph: fx.GraphModule, mesh: Mesh) -> Boxed:
    """Compile one rank's scheduled graph for this process's rank.

    Raises:
        Exception: whatever Inductor raises; the caller falls back and says so.
    """
    bound, messages = with_messages(graph, mesh)
    run = compile_graph(bound)

    def call(inputs: list[Any]) -> list[Any]:
        messages.under_way.clear()  # of a step that an error ended
        return run(inputs)

    return call


def with_messages(graph: fx.GraphModule, mesh: Mesh) -> tuple[fx.GraphModule, Messages]:
    """A copy whose collectives are messages and plain operations, and those messages."""
    own = copied(graph)
    writer = _Writer(own.graph, mesh, Messages())
    for node in list(operations(own.graph)):
        if node.target is shard_start or node.target is ops.my_shard.default or node.target in SENT:
            writer.replace(node)
    return own, writer.messages


class _Writer:
    """Replaces collectives in a graph."""

    def __init__(self, graph: fx.Graph, mesh: Mesh, messages: Messages) -> None:
        if mesh.groups is None:
            raise ValueError("a mesh of real ranks has process groups")
        self.graph, self.mesh, self.messages, self.groups = graph, mesh, messages, mesh.groups.by_axis
        self.on_cpu, self.coordinate = mesh.groups.device.type == "cpu", mesh.coordinate(mesh.rank)
        self.like: fx.Node = graph.output_node()
        with graph.inserting_before(next(operations(graph))):
            self.order = self.call(aten.zeros.default, [1])

    def replace(self, node: fx.Node) -> None:
        """One collective with its wait, one piece, or one number."""
        self.like = node
        if node.target is shard_start:
            axes, sizes, width = node.args
            start = place_along(self.coordinate, axes, sizes) * width  # type: ignore[arg-type,operator]
            for user in list(node.users):
                user.args = fx.map_arg(user.args, lambda n: start if n is node else n)
                user.kwargs = fx.map_arg(user.kwargs, lambda n: start if n is node else n)
            self.graph.erase_node(node)
            return
        if node.target is ops.my_shard.default:
            x, axis, dim, _ = node.args
            with self.graph.inserting_before(node):
                width = node.meta["val"].shape[dim]
                start = self.coordinate[str(axis)] * width
                piece = self.call(aten.slice.Tensor, x, dim, start, start + width)
                self.hand_over(node, self.call(aten.clone.default, piece))
            return
        (wait,) = node.users
        with self.graph.inserting_before(node):
            sent, shape, send, finish = _PARTS[node.target](self, *node.args)
            memory = self.call(torch.ops.functrain.send.default, sent, self.order, self.messages.program, len(self.messages.sends), shape)
        with self.graph.inserting_before(wait):
            number = len(self.messages.sends)
            self.call(torch.ops.functrain.receive_.default, memory, self.order, [sent], self.messages.program, number)
            self.messages.sends.append(send)
            self.hand_over(wait, finish(memory))
        self.graph.erase_node(node)

    def call(self, target: Any, *args: Any) -> fx.Node:
        """An operation in the place of what is replaced."""
        node = self.graph.call_function(target, args)
        values = fx.map_arg(args, lambda n: n.meta["val"])
        node.meta.update({key: self.like.meta.get(key) for key in TAGS}, val=target(*values))
        return node

    def hand_over(self, node: fx.Node, value: fx.Node) -> None:
        """Give a node's users another value instead."""
        node.replace_all_uses_with(value)
        self.graph.erase_node(node)

    # ---- parts

    def cut(self, x: fx.Node, dim: int, n: int) -> fx.Node:
        """[n, ...]: the pieces of a dimension."""
        shape = list(x.meta["val"].shape)
        pieces = self.call(aten.reshape.default, x, [*shape[:dim], n, shape[dim] // n, *shape[dim + 1 :]])
        if dim:
            order = [dim, *(d for d in range(len(shape) + 1) if d != dim)]
            pieces = self.call(aten.clone.default, self.call(aten.permute.default, pieces, order))
        return pieces

    def joined(self, memory: fx.Node, dim: int) -> fx.Node:
        """[n, ...] side by side along a dimension of the pieces."""
        n, *shape = memory.meta["val"].shape
        order = [*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1)]
        moved = self.call(aten.permute.default, memory, order) if dim else memory
        return self.call(aten.reshape.default, moved, [*shape[:dim], n * shape[dim], *shape[dim + 1 :]])

    def reduced(self, memory: fx.Node, op: str) -> fx.Node:
        """[n, ...] reduced over the pieces, in rank order."""
        reduce = {"sum": aten.add.Tensor, "max": aten.maximum.default, "min": aten.minimum.default, "product": aten.mul.Tensor}[op]
        pieces = [self.call(aten.select.int, memory, 0, i) for i in range(memory.meta["val"].shape[0])]
        total = pieces[0]
        for piece in pieces[1:]:
            total = self.call(reduce, total, piece)
        return total

    def few(self, n: int) -> bool:
        """Whether each rank sends to each other one, as `exchange` does."""
        return self.on_cpu and 1 < n <= FEW

    def exchange(self, axis: str, own_to_all: bool) -> Send:
        """Sends between each two ranks of an axis: each gives one value to all, or a piece of it to each."""
        group, peers, tag = self.groups[axis], self.mesh.peers(self.mesh.rank, axis), len(self.messages.sends)
        me = peers.index(dist.get_rank())
        others = [i for i in range(len(peers)) if i != me]

        def send(x: torch.Tensor, memory: torch.Tensor) -> Several:
            works = [dist.irecv(memory[i].view(-1), peers[i], group=group, tag=tag) for i in others]
            works += [dist.isend((x if own_to_all else x[i]).view(-1), peers[i], group=group, tag=tag) for i in others]
            memory[me].copy_(x if own_to_all else x[me])
            return Several(works)

        return send


Parts = tuple[Any, list[int], Send, Callable[[fx.Node], fx.Node]]  # what is sent, shape of what arrives, how, and what is made of it


def _all_gather(writer: _Writer, x: fx.Node, axis: str, dim: int, n: int) -> Parts:
    group = writer.groups[axis]

    def gather(x: torch.Tensor, memory: torch.Tensor) -> Any:
        return dist.all_gather_single(memory.view(-1), x.view(-1), group=group, async_op=True)

    send = writer.exchange(axis, own_to_all=True) if writer.few(n) else gather
    return x, [n, *x.meta["val"].shape], send, lambda memory: writer.joined(memory, dim)


def _reduce_scatter(writer: _Writer, x: fx.Node, axis: str, dim: int, n: int) -> Parts:
    group, pieces = writer.groups[axis], writer.cut(x, dim, n)
    shape = list(pieces.meta["val"].shape)
    if writer.few(n):
        return pieces, shape, writer.exchange(axis, own_to_all=False), lambda memory: writer.reduced(memory, "sum")

    def scatter(x: torch.Tensor, memory: torch.Tensor) -> Any:
        return dist.reduce_scatter_single(memory.view(-1), x.view(-1), group=group, async_op=True)

    return pieces, shape[1:], scatter, lambda memory: memory


def _all_reduce(writer: _Writer, x: fx.Node, axis: str, op: str, n: int) -> Parts:
    group, shape = writer.groups[axis], list(x.meta["val"].shape)
    if writer.few(n) and (n == 2 or x.meta["val"].nbytes <= SMALL):
        return x, [n, *shape], writer.exchange(axis, own_to_all=True), lambda memory: writer.reduced(memory, op)

    def reduce(x: torch.Tensor, memory: torch.Tensor) -> Any:
        return dist.all_reduce(memory.copy_(x), REDUCTIONS[op][0], group=group, async_op=True)

    return x, shape, reduce, lambda memory: memory


def _all_to_all(writer: _Writer, x: fx.Node, axis: str, split: int, join: int, n: int) -> Parts:
    group, pieces = writer.groups[axis], writer.cut(x, split, n)

    def swap(x: torch.Tensor, memory: torch.Tensor) -> Any:
        return dist.all_to_all_single(memory.view(-1), x.view(-1), group=group, async_op=True)

    send = writer.exchange(axis, own_to_all=False) if writer.few(n) else swap
    return pieces, list(pieces.meta["val"].shape), send, lambda memory: writer.joined(memory, join)


def _permute(writer: _Writer, x: fx.Node, axis: str, source: Sequence[int], n: int) -> Parts:
    group, peers, tag = writer.groups[axis], writer.mesh.peers(writer.mesh.rank, axis), len(writer.messages.sends)
    me = peers.index(dist.get_rank())

    def send(x: torch.Tensor, memory: torch.Tensor) -> Several:
        memory.copy_(x) if source[me] == me else memory.zero_()
        works = [dist.isend(x, peers[i], group=group, tag=tag) for i, s in enumerate(source) if s == me and i != me]
        works += [dist.irecv(memory, peers[source[me]], group=group, tag=tag)] if source[me] not in (-1, me) else []
        return Several(works)

    return x, list(x.meta["val"].shape), send, lambda memory: memory


_PARTS: dict[Any, Callable[..., Parts]] = {
    ops.all_gather.default: _all_gather,
    ops.reduce_scatter.default: _reduce_scatter,
    ops.all_reduce.default: _all_reduce,
    ops.all_to_all.default: _all_to_all,
    ops.permute.default: _permute,
}
