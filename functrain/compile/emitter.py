"""Writes one rank's graph: operations with their local shapes, and the collectives that bring a value from one split to another."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from functrain.compile.collectives import ops, shard_start
from functrain.compile.text import readable_bytes
from functrain.compile.values import Placements, Value, splitting_axes, written
from functrain.sharding import Mesh
from functrain.torch_internals import FakeTensorMode, OpOverload

aten = torch.ops.aten
FILL_SIZE = {  # constant fills, and which argument is their size
    aten.zeros.default: 0,
    aten.ones.default: 0,
    aten.full.default: 0,
    aten.empty.memory_format: 0,
    aten.new_zeros.default: 1,
    aten.new_ones.default: 1,
    aten.new_full.default: 1,
    aten.new_empty.default: 1,
}
FILL_LIKE = {aten.zeros_like.default: 0, aten.ones_like.default: 1, aten.full_like.default: None}  # value; None: the second argument
DRAWS = {  # random fills: (key, shape, start, size, ...)
    getattr(ops, f"threefry_{name}").default for name in ("bits", "uniform", "normal", "bernoulli", "integers")
}


@dataclass(frozen=True)
class Redistribution:
    """One collective of a partitioned step."""

    operation: str  # such as `all_gather`
    axis: str
    nbytes: int  # of this rank's result, or of its argument where that is larger
    reason: str  # what wanted it: "unshard params/w", "store gradient of params/w", "result", or an operation
    planned: bool  # whether the plan asks for it
    source: str  # the user's line
    phase: str
    count_bytes: int  # bytes that a rank must send, at least

    def __str__(self) -> str:
        return f"{self.operation}[{self.axis}] {readable_bytes(self.nbytes)} for {self.reason} [{self.source}]"


def bytes_sent(operation: str, nbytes: int, n: int) -> int:
    """Bytes that each of n ranks must send at least.

    Args:
        operation: a collective.
        nbytes: of the whole value for a gather, of the argument for a reduction, an exchange or a permutation.
        n: ranks.
    """
    if operation == "permute":
        return nbytes
    if operation == "all_reduce":
        return 2 * nbytes * (n - 1) // n
    return nbytes * (n - 1) // n


class Emitter:
    """One rank's graph under construction."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self.mesh, self.device = mesh, device
        self.graph = fx.Graph()
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.tags: dict[str, Any] = {}  # of the captured node that is being partitioned
        self.reason, self.planned = "", False
        self.moves: list[Redistribution] = []

    # ---- nodes

    def emit(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Add an operation and work out its local result."""
        node = self.graph.call_function(target, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.fake_mode:
            val = target(*values[0], **values[1])
        node.meta.update(self.tags, val=val)
        return node

    def collective(self, name: str, x: fx.Node, axis: str, *rest: Any) -> fx.Node:
        """Add a collective over an axis and remember why it is there."""
        n = self.mesh.size(axis)
        node = self.emit(getattr(ops, name).default, x, axis, *rest, n)
        sizes = [v.numel() * v.element_size() for v in (x.meta["val"], node.meta["val"])]
        whole = sizes[0] * n if name == "all_gather" else sizes[0]
        node.meta.update(move=len(self.moves), planned=self.planned)
        tags = str(self.tags.get("source")), str(self.tags.get("phase"))
        self.moves.append(Redistribution(name, axis, max(sizes), self.reason, self.planned, *tags, bytes_sent(name, whole, n)))
        return node

    def value(self, node: fx.Node, placements: Sequence[Placement] | None = None, shape: Sequence[int] | None = None) -> Value:
        """A value from a node; whole on every rank where not said otherwise."""
        placements = self.whole if placements is None else tuple(placements)
        return Value(node, placements, tuple(node.meta["val"].shape if shape is None else shape))

    @property
    def whole(self) -> Placements:
        """The placements of a value that every rank has whole."""
        return tuple(Replicate() for _ in self.mesh.axis_names)

    # ---- from one split to another

    def redistribute(self, x: Value, want: Sequence[Placement]) -> Value:
        """Bring a value to other placements.

        Where several axes split one dimension the first is the outer one: what lies inside a change is undone first, innermost first;
        then everything is split again from the outside.
        """
        want = tuple(want)
        have, node = list(x.placements), x.node
        if tuple(have) == want:
            return x
        for a in sorted(self._undone(have, want), reverse=True):
            node, have[a] = self._undo(node, have, want, a)
        for a, target in enumerate(want):
            if have[a] != target:
                node = self._reach(node, have[a], target, a)
                have[a] = target
        return Value(node, want, x.shape, x.padding)

    def _undone(self, have: Sequence[Placement], want: Sequence[Placement]) -> set[int]:
        """The axes whose split must be taken back: those that change, and those inside a changed one on the same dimension."""
        undone: set[int] = set()
        dirty: set[int] = set()
        for a, (h, w) in enumerate(zip(have, want, strict=True)):
            if isinstance(h, Shard) and (h != w or h.dim in dirty):
                undone.add(a)
            if h != w:
                dirty |= {p.dim for p in (h, w) if isinstance(p, Shard)}
        return undone

    def _undo(self, node: fx.Node, have: list[Placement], want: Sequence[Placement], a: int) -> tuple[fx.Node, Placement]:
        h, w, axis = have[a], want[a], self.mesh.axis_names[a]
        if not isinstance(h, Shard):
            raise TypeError(f"only a split is taken back, not {h}")
        if isinstance(w, Shard) and h != w and _innermost(have, want, a) and self._divides(node, w.dim, a):
            return self.collective("all_to_all", node, axis, w.dim, h.dim), w
        return self.collective("all_gather", node, axis, h.dim), Replicate()

    def _reach(self, node: fx.Node, h: Placement, w: Placement, a: int) -> fx.Node:
        """From whole or partial to the wanted placement along one axis."""
        axis, n = self.mesh.axis_names[a], self.mesh.axis_sizes[a]
        if isinstance(h, Partial) and isinstance(w, Shard) and h.reduce_op == "sum" and self._divides(node, w.dim, a):
            return self.collective("reduce_scatter", node, axis, w.dim)
        if isinstance(h, Partial):
            if h.reduce_op not in ("sum", "avg", "max", "min", "product"):
                raise NotImplementedError(f"a partial value of {h.reduce_op} cannot be reduced")
            node = self.collective("all_reduce", node, axis, "sum" if h.reduce_op == "avg" else h.reduce_op)
            if h.reduce_op == "avg":
                node = self.emit(aten.div.Tensor, node, n)
        if isinstance(w, Shard):
            return self.cut(node, a, w.dim)
        if isinstance(w, Partial):
            if w.reduce_op != "sum":
                raise NotImplementedError(f"{written((h,), self.mesh)} to {w}")
            return self.emit(aten.div.Tensor, node, n)
        return node

    def _divides(self, node: fx.Node, dim: int, a: int) -> bool:
        return node.meta["val"].shape[dim] % self.mesh.axis_sizes[a] == 0

    # ---- a rank's piece of what every rank could make

    def cut(self, node: fx.Node, a: int, dim: int) -> fx.Node:
        """The rank's piece along mesh axis number `a`. What is made from constants and keys alone is made at its local size."""
        made = self._made_small(node, a, dim)
        return made if made is not None else self.emit(ops.my_shard.default, node, self.mesh.axis_names[a], dim, self.mesh.axis_sizes[a])

    def _made_small(self, node: fx.Node, a: int, dim: int) -> fx.Node | None:
        val, n = node.meta["val"], self.mesh.axis_sizes[a]
        if not isinstance(val, torch.Tensor) or val.shape[dim] % n:
            return None
        size = val.shape[dim] // n
        if node.target in FILL_SIZE:
            at, args = FILL_SIZE[node.target], list(node.args)
            args[at] = [size if d == dim else s for d, s in enumerate(val.shape)]
            return self.emit(node.target, *args, **node.kwargs)
        if node.target in FILL_LIKE:
            return self.filled(node, [size if d == dim else s for d, s in enumerate(val.shape)])
        if node.target in DRAWS:
            return self._draw(node, a, dim, size)
        if (node.target is aten.arange.start_step and len(node.args) == 3) or node.target in (aten.arange.default, aten.arange.start):
            return self._arange(node, a, size)
        if node.target in (aten.unsqueeze.default, aten.expand.default):
            return self._widened(node, a, dim)
        return self._pointwise(node, a, dim)

    def _widened(self, node: fx.Node, a: int, dim: int) -> fx.Node | None:
        """A dimension of size 1 put in, or repeated: the piece of a piece."""
        source: Any = node.args[0]
        val, before = node.meta["val"], source.meta["val"]
        if node.target is aten.unsqueeze.default:
            at = int(node.args[1]) % val.ndim  # type: ignore[call-overload]
            small = self._made_small(source, a, dim - (dim > at)) if dim != at else None
            return None if small is None else self.emit(node.target, small, at)
        d = dim - (val.ndim - before.ndim)
        size = [n // self.mesh.axis_sizes[a] if i == dim else n for i, n in enumerate(val.shape)]
        if d < 0 or before.shape[d] == 1:
            return self.emit(node.target, source, size)
        small = self._made_small(source, a, d)
        return None if small is None else self.emit(node.target, small, size)

    def filled(self, node: fx.Node, shape: Sequence[int]) -> fx.Node:
        """What a `zeros_like` and its kin make, in another shape and without what it is like."""
        val = node.meta["val"]
        value: Any = FILL_LIKE[node.target]
        value = node.args[1] if value is None else value
        return self.emit(aten.full.default, list(shape), value, dtype=val.dtype, device=val.device)

    def _window(self, node: fx.Node, a: int, dim: int) -> tuple[str, ...]:
        """The axes that split a dimension of a fill, this one included; kept with the node."""
        return (*node.meta.get("window", {}).get(dim, ()), self.mesh.axis_names[a])

    def _start(self, axes: tuple[str, ...], width: int) -> fx.Node:
        node = self.graph.call_function(shard_start, (list(axes), [self.mesh.size(axis) for axis in axes], width))
        node.meta.update(self.tags, val=0)
        return node

    def _draw(self, node: fx.Node, a: int, dim: int, size: int) -> fx.Node | None:
        key, shape, start, sizes, *rest = node.args
        batch = key.meta["val"].ndim - 1  # a draw of several keys has their dimensions first
        d = dim - batch
        axes = self._window(node, a, dim)
        if d < 0 or (isinstance(start[d], int) and start[d] != 0):
            return None
        starts = [self._start(axes, size) if i == d else s for i, s in enumerate(start)]
        small = self.emit(node.target, key, list(shape), starts, [size if i == d else s for i, s in enumerate(sizes)], *rest)
        small.meta["window"] = {**node.meta.get("window", {}), dim: axes}
        return small

    def _arange(self, node: fx.Node, a: int, size: int) -> fx.Node | None:
        """Numbers 0, 1, ... moved by where the piece begins."""
        if node.meta["val"].is_floating_point():
            return None
        axes = self._window(node, a, 0)
        first, step = node.meta.get("arange", _first_and_step(node.args))
        begin = self.emit(operator.mul, self._start(axes, size), step)
        numbers = self.emit(aten.arange.start_step, first, first + step * size, step, **node.kwargs)
        small = self.emit(aten.add.Tensor, numbers, begin)
        small.meta.update(window={0: axes}, arange=(first, step))
        return small

    def _pointwise(self, node: fx.Node, a: int, dim: int) -> fx.Node | None:
        """An elementwise operation on things that can be made small, such as a mask from aranges."""
        elementwise = isinstance(node.target, OpOverload) and (
            torch.Tag.pointwise in node.target.tags or node.target is aten._to_copy.default
        )
        if not elementwise or node.meta.get("arange"):
            return None
        ndim, n = node.meta["val"].ndim, self.mesh.axis_sizes[a]
        small: dict[fx.Node, fx.Node] = {}
        for x in node.all_input_nodes:
            val = x.meta["val"]
            d = dim - (ndim - val.ndim) if isinstance(val, torch.Tensor) else -1
            if d < 0 or val.shape[d] == 1:
                small[x] = x
                continue
            made = self._made_small(x, a, d) if val.shape[d] % n == 0 else None
            if made is None:
                return None
            small[x] = made
        args, kwargs = fx.map_arg((node.args, node.kwargs), small.__getitem__)
        return self.emit(node.target, *args, **kwargs)

    # ---- whole dimensions

    def gather_dims(self, x: Value, dims: Sequence[int] | set[int]) -> Value:
        """The value with some dimensions whole on every rank."""
        return self.redistribute(x, [Replicate() if isinstance(p, Shard) and p.dim in dims else p for p in x.placements])

    def axes_of(self, x: Value, dim: int) -> tuple[str, ...]:
        """The mesh axes that split a dimension of a value."""
        return splitting_axes(x.placements, self.mesh, dim)


def _innermost(have: Sequence[Placement], want: Sequence[Placement], a: int) -> bool:
    """Whether axis `a`, split last, would lie inside the axes that split its wanted dimension by then, and outside those still to come."""
    others = [b for b in range(len(want)) if b != a and want[a] in (have[b], want[b])]
    return all(have[b] == want[b] if b < a else have[b] != want[a] for b in others)


def _first_and_step(args: Sequence[Any]) -> tuple[int, int]:
    """Of an arange's arguments (end), (start, end) or (start, end, step)."""
    return (0, 1) if len(args) == 1 else (args[0], args[2] if len(args) > 2 else 1)
