"""A captured graph on global shapes and a spec for each input and output -> one rank's graph, the same text on every rank.

The captured graph is walked once. DTensor's rules say which splits an operation accepts and returns (`sharding_rules.py` where they say
nothing or wrong); the graph that comes out, its collectives, its padding and its report are ours.
"""

import operator
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from functrain.compile.collectives import MARKERS, SHARD_OPERATIONS, ops
from functrain.compile.constraint import constraint_spec
from functrain.compile.emitter import Emitter, Redistribution
from functrain.compile.errors import PartitionError
from functrain.compile.graph import drop_dead_code, is_mutable, placeholders
from functrain.compile.owners import owners
from functrain.compile.padding import all_values, map_values, settle, store, unpad
from functrain.compile.sharding_rules import Row, as_placement, choose, pointwise_rows, rows_for
from functrain.compile.shards import check_closures, shard_operation
from functrain.compile.text import readable_bytes
from functrain.compile.values import Placements, Value, parts, placements_of, spec_of
from functrain.sharding import Layout, Mesh, P, Plan
from functrain.torch_internals import ShardingRules

aten = torch.ops.aten


@dataclass(frozen=True)
class Replicated:
    """One operation that every rank computes whole."""

    operation: str
    why: str
    nbytes: int  # of its result
    source: str
    phase: str

    def __str__(self) -> str:
        return f"{self.operation} ({readable_bytes(self.nbytes)}) is computed whole on every rank: {self.why} [{self.source}]"


@dataclass(frozen=True)
class PartitionReport:
    """What partitioning put into a step that the user did not write."""

    moves: tuple[Redistribution, ...]
    replicated: tuple[Replicated, ...]
    seconds: float

    @property
    def unplanned(self) -> tuple[Redistribution, ...]:
        """The collectives that the plan did not ask for; sums of scalars, such as a loss over the batch, are part of its meaning."""
        return tuple(move for move in self.moves if not move.planned)

    @property
    def unplanned_large(self) -> tuple[Redistribution, ...]:
        """Of those, the ones that move more than a few scalars."""
        return tuple(move for move in self.unplanned if move.nbytes > 64)

    def counts(self) -> dict[str, int]:
        """How many of each collective, such as `{"all_gather[data]": 12}`."""
        return dict(Counter(f"{move.operation}[{move.axis}]" for move in self.moves))

    def __str__(self) -> str:
        lines = [f"collectives: {', '.join(f'{n} {name}' for name, n in sorted(self.counts().items())) or 'none'}"]
        found = Counter([*(f"not asked for by the plan: {move}" for move in self.unplanned), *map(str, self.replicated)])
        lines += [f"{line}, {times} times" if times > 1 else line for line, times in found.items()]
        return "\n".join(lines)


Paths = tuple[Sequence[str], Sequence[str]]  # of a graph's inputs, and of its outputs


@dataclass(frozen=True)
class Partitioned:
    """One rank's graph, and how its inputs and outputs are split."""

    graph: fx.GraphModule
    in_specs: tuple[P, ...]
    out_specs: tuple[P, ...]
    report: PartitionReport


def partition(
    captured: fx.GraphModule, paths: Paths, in_specs: Sequence[P], out_specs: Sequence[P | None], plan: Plan, layout: Layout
) -> Partitioned:
    """Cut a captured graph for one rank of the plan's mesh.

    Args:
        captured: a graph on global shapes, without mutation.
        paths: of the inputs and of the outputs.
        in_specs: how each input is split in storage.
        out_specs: how each output is to be split; None: as the operations leave it.
        plan: the mesh, and the specs of named activations.
        layout: says how params are used and gradients are stored.

    Raises:
        PartitionError: an operation cannot be cut; names the user's line.
    """
    start = time.perf_counter()
    check_closures(captured.graph)
    walk = _Walk(captured, paths, plan, layout)
    graph = walk.run(in_specs, out_specs)
    report = PartitionReport(_kept_moves(graph, walk.emitter.moves), tuple(walk.replicated), time.perf_counter() - start)
    return Partitioned(graph, tuple(in_specs), tuple(walk.out_specs), report)


def _kept_moves(graph: fx.GraphModule, moves: Sequence[Redistribution]) -> tuple[Redistribution, ...]:
    """The moves whose collective is still in the graph: what nobody read is gone."""
    left = {n.meta["move"] for n in graph.graph.nodes if "move" in n.meta}
    return tuple(move for i, move in enumerate(moves) if i in left)


class _Walk:
    """One pass over a captured graph."""

    def __init__(self, captured: fx.GraphModule, paths: Paths, plan: Plan, layout: Layout) -> None:
        self.captured, self.plan, self.layout = captured, plan, layout
        self.in_paths, self.out_paths = paths
        self.mesh: Mesh = plan.mesh
        device = next((n.meta["val"].device for n in placeholders(captured.graph)), torch.device("cpu"))
        self.emitter = Emitter(self.mesh, device)
        self.rules, self.rules_mesh = ShardingRules(), self.mesh.rules()
        self.env: dict[fx.Node, Any] = {}
        leaves = {n: layout.owner(path) for n, path in zip(placeholders(captured.graph), self.in_paths, strict=True)}
        self.owners = owners(captured.graph, {n: leaf for n, leaf in leaves.items() if leaf is not None})
        self.replicated: list[Replicated] = []
        self.out_specs: list[P] = []

    def run(self, in_specs: Sequence[P], out_specs: Sequence[P | None]) -> fx.GraphModule:
        given = iter(in_specs)
        for node in self.captured.graph.nodes:
            self.emitter.tags = self._tags(node)
            self.emitter.reason, self.emitter.planned = str(node.target), False
            if node.op == "placeholder":
                self.env[node] = self._input(node, next(given))
            elif node.op == "get_attr":
                self.env[node] = self._constant(node)
            elif node.op == "output":
                self._outputs(node, out_specs)
            elif node.target in MARKERS:
                self.env[node] = self._marker(node)
            elif node.target in SHARD_OPERATIONS:
                self.env[node] = shard_operation(self.emitter, node, self.env)
            elif node.target is operator.getitem:
                self.env[node] = self.env[node.args[0]][node.args[1]]
            else:
                self.env[node] = self._operation(node)
                _check_shape(node, self.env[node])
        drop_dead_code(self.emitter.graph)
        attributes = {str(n.target): getattr(self.captured, str(n.target)) for n in self.emitter.graph.nodes if n.op == "get_attr"}
        return fx.GraphModule(attributes, self.emitter.graph)

    def _tags(self, node: fx.Node) -> dict[str, Any]:
        """What every operation made for a captured node says about itself: where it comes from, and what it belongs to."""
        owner = self.owners[node]
        return {"source": node.meta.get("source"), "phase": node.meta.get("phase"), "block": owner.block, "param": owner.leaf}

    # ---- the ends of the graph

    def _input(self, node: fx.Node, spec: P) -> Value:
        full, placements = node.meta["val"], placements_of(spec, self.mesh)
        stored, local, padding = list(full.shape), list(full.shape), {}
        for dim, n in parts(placements, self.mesh).items():
            if stored[dim] % n:
                padding[dim] = stored[dim]
                stored[dim] += -stored[dim] % n
            local[dim] = stored[dim] // n
        new = self.emitter.graph.placeholder(node.name)
        with self.emitter.fake_mode:
            new.meta.update(node.meta, **self._tags(node), val=torch.empty(local, dtype=full.dtype, device=full.device))
        return Value(new, placements, tuple(stored), padding)

    def _constant(self, node: fx.Node) -> Value:
        new = self.emitter.graph.get_attr(str(node.target))
        new.meta.update(node.meta, val=self.emitter.fake_mode.from_tensor(getattr(self.captured, str(node.target))))
        return self.emitter.value(new)

    def _outputs(self, node: fx.Node, specs: Sequence[P | None]) -> None:
        found = []
        for item, spec, path in zip(node.args[0], specs, self.out_paths, strict=True):
            self.emitter.tags = self._tags(item)
            if self.layout.role(path) == "params":
                self._tag_unit(path)
            self.emitter.reason, self.emitter.planned = "a result of the step", True
            value = self.env[item]
            want = self._settled(value) if spec is None else placements_of(spec, self.mesh)
            found.append(store(self.emitter, value, want).node)
            self.out_specs.append(spec_of(want, self.mesh) if spec is None else spec)
        self.emitter.graph.output(tuple(found))

    def _settled(self, value: Value) -> Placements:
        """A value's own placements, with sums over ranks done."""
        return tuple(Replicate() if isinstance(p, Partial) else p for p in value.placements)

    # ---- markers

    def _marker(self, node: fx.Node) -> Value:
        value = self.env[node.args[0]]
        self.emitter.planned = True
        if node.target is ops.constrain.default:
            spec = constraint_spec(str(node.args[1]), self.plan)
            if spec is None:
                return value
            self.emitter.reason = f"constraint {spec}"
            return self._constrained(value, placements_of(spec, self.mesh))
        if node.target in (ops.spread.default, ops.spread_like.default):
            self.emitter.reason = "work divided among ranks"
            value = unpad(self.emitter, value)
            if node.target is ops.spread_like.default:
                return self.emitter.redistribute(value, self.env[node.args[1]].placements)
            return self.emitter.redistribute(value, self._spread(value.shape[0]))
        like = node.args[0] if node.target is ops.unshard.default else node.args[1]
        path = self._path(like)
        if node.target is ops.unshard.default:
            self.emitter.reason = f"use of {path}"
            self._tag(path)
            used = value.placements if path is None else placements_of(self.layout.used(path), self.mesh)
            return unpad(self.emitter, self.emitter.redistribute(value, used))
        if path is None:  # the gradient of a value that is no leaf stays as it comes
            return value
        self.emitter.reason = f"gradient of {path}"
        self._tag(path)
        stored = self.layout.gradient(path, self._shape_of(like))
        if node.target is ops.part_grad.default and stored == self.layout.used(path):
            return value  # whole gradients of microbatches add up on each rank and are reduced once
        return store(self.emitter, value, placements_of(stored, self.mesh))

    def _tag(self, path: str | None) -> None:
        """What follows belongs to this param, and to the unit that is sent as one."""
        self.emitter.tags["leaf"] = path
        if path is not None:
            self._tag_unit(path)

    def _tag_unit(self, path: str) -> None:
        self.emitter.tags.update(unit=self.layout.group(path), bucket=self.layout.bucket_bytes(path))

    def _spread(self, size: int) -> Placements:
        """Dimension 0 split over every axis that still divides it."""
        placements: list[Placement] = []
        for n in self.mesh.axis_sizes:
            divides = n > 1 and size % n == 0
            placements.append(Shard(0) if divides else Replicate())
            size = size // n if divides else size
        return tuple(placements)

    def _constrained(self, value: Value, want: Placements) -> Value:
        if any(value.shape[dim] % n for dim, n in parts(want, self.mesh).items()):
            return store(self.emitter, value, want)
        return self.emitter.redistribute(unpad(self.emitter, value), want)

    def _path(self, node: Any) -> str | None:
        """The path of the param that a marker's value is, through casts; None for what the step computed."""
        while node.op == "call_function" and node.target in (aten._to_copy.default, aten.detach.default, aten.alias.default):
            node = node.args[0]
        path = node.meta.get("path") if node.op == "placeholder" else None
        return path if path is not None and self.layout.role(path) == "params" else None

    def _shape_of(self, node: Any) -> tuple[int, ...]:
        return tuple(node.meta["val"].shape)

    # ---- one operation

    def _operation(self, node: fx.Node) -> Any:
        target: Any = node.target
        if is_mutable(node):
            raise PartitionError(f"{node.meta.get('source')}: {target} writes in place, which cannot be cut for a mesh")
        if target in (aten.view.default, aten._unsafe_view.default):
            target = aten.reshape.default  # a transposed local shard has no view of that shape
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self.env.__getitem__)
        args, kwargs = _plain(args), _plain(kwargs)
        args, kwargs, padding = settle(self.emitter, target, args, kwargs)
        values = all_values((args, kwargs))
        if not values:
            return self._results(self.emitter.emit(target, *args, **kwargs), None, {})
        try:
            rows = rows_for(target, values, args)
            if rows is not None:
                return self._by_rows(rows, target, args, kwargs, padding, values)
            return self._by_dtensor(node, target, args, kwargs, padding, values)
        except PartitionError:
            raise
        except _Unknown as unknown:
            return self._whole(node, target, args, kwargs, str(unknown))

    def _by_rows(self, rows: list[Row], target: Any, args: Any, kwargs: Any, padding: dict[int, int], values: list[Value]) -> Any:
        chosen = choose(rows, values, self.mesh.axis_sizes)
        wanted = iter([tuple(as_placement(row.inputs[i]) for row in chosen) for i in range(len(values))])
        args, kwargs = map_values(lambda v: self.emitter.redistribute(v, next(wanted)).node, (args, kwargs))
        out = self.emitter.emit(target, *args, **kwargs)

        def placements(i: int) -> Placements:
            return tuple(as_placement(row.outputs[i]) if row.outputs else Replicate() for row in chosen)

        return self._results(out, placements, padding)

    def _by_dtensor(self, node: fx.Node, target: Any, args: Any, kwargs: Any, padding: dict[int, int], values: list[Value]) -> Any:
        spec = self._spec
        if target is aten.reshape.default and 0 in values[0].shape:
            raise _Unknown("an empty value")  # DTensor's rule for views of empty tensors does not end
        try:
            answer = self.rules.ask(target, map_values(spec, args), map_values(spec, kwargs))
        except Exception as error:
            rows = pointwise_rows(target, values)
            if rows is not None:
                return self._by_rows(rows, target, args, kwargs, padding, values)
            raise _Unknown(f"no rule ({type(error).__name__})") from None
        wanted_schema = answer.redistribute_schema
        asked = self._specs((wanted_schema.args_schema, wanted_schema.kwargs_schema)) if answer.needs_redistribute else []
        if any(isinstance(p, Partial) and type(p) is not Partial for s in self._specs(answer.output_spec) for p in s.placements):
            raise _Unknown("its rule gives a partial result of a special kind")
        if not all(self._divides(s) for s in [*asked, *self._specs(answer.output_spec)]):
            raise _Unknown("its rule splits a dimension that does not divide")
        if answer.needs_redistribute:
            wanted = iter(asked)
            args, kwargs = map_values(lambda v: self.emitter.redistribute(v, next(wanted).placements), (args, kwargs))
            if answer.use_val_from_redistribute_schema:  # shapes among the arguments become local; squeeze changes its overload
                target = answer.redistribute_schema.op
                given = answer.redistribute_schema.args_schema
                args = tuple(a if _holds_value(a) else b for a, b in zip(args, given, strict=False))
        args, kwargs = map_values(lambda v: v.node, (args, kwargs))
        out = self.emitter.emit(target, *args, **kwargs)
        specs = answer.output_spec if isinstance(answer.output_spec, (list, tuple)) else [answer.output_spec]
        return self._results(out, lambda i: specs[i].placements, padding)

    def _whole(self, node: fx.Node, target: Any, args: Any, kwargs: Any, why: str) -> Any:
        """Every rank computes the operation on whole arguments."""
        args, kwargs = map_values(lambda v: unpad(self.emitter, v), (args, kwargs))
        split = any(not isinstance(p, Replicate) for v in all_values((args, kwargs)) for p in v.placements)
        args, kwargs = map_values(lambda v: self.emitter.redistribute(v, self.emitter.whole).node, (args, kwargs))
        out = self.emitter.emit(target, *args, **kwargs)
        vals = out.meta["val"] if isinstance(out.meta["val"], (tuple, list)) else (out.meta["val"],)
        size = sum(v.nbytes for v in vals if isinstance(v, torch.Tensor))
        if split and size:
            tags = self.emitter.tags
            self.replicated.append(Replicated(str(target), why, size, str(tags.get("source")), str(tags.get("phase"))))
        return self._results(out, None, {})

    def _spec(self, value: Value) -> Any:
        return self.rules.spec(self.rules_mesh, value.placements, value.shape, value.local.dtype)

    def _specs(self, found: Any) -> list[Any]:
        if isinstance(found, self.rules.spec_class):
            return [found]
        if isinstance(found, dict):
            return self._specs(list(found.values()))
        return [s for item in found for s in self._specs(item)] if isinstance(found, (list, tuple)) else []

    def _divides(self, spec: Any) -> bool:
        """Every shard has one size: a rule may ask for splits that do not divide, and those are refused."""
        if spec.tensor_meta is None:
            return True
        return all(spec.tensor_meta.shape[dim] % n == 0 for dim, n in parts(spec.placements, self.mesh).items())

    def _results(self, node: fx.Node, placements: Any, padding: dict[int, int]) -> Any:
        val = node.meta["val"]

        def one(n: fx.Node, i: int) -> Value:
            chosen = tuple(placements(i)) if placements is not None else self.emitter.whole
            shape = list(n.meta["val"].shape)
            for dim, count in parts(chosen, self.mesh).items():
                shape[dim] *= count
            return Value(n, chosen, tuple(shape), padding)

        if isinstance(val, torch.Tensor):
            return one(node, 0)
        if isinstance(val, (tuple, list)):
            found = []
            for i, item in enumerate(val):
                found.append(one(self.emitter.emit(operator.getitem, node, i), i) if isinstance(item, torch.Tensor) else item)
            return found
        return node


def _check_shape(node: fx.Node, found: Any) -> None:
    """Raise where a value, without its padding, has another shape than the user's: a rule that forgets padding must not go unseen."""
    if isinstance(found, Value):
        shape = tuple(found.padding.get(dim, size) for dim, size in enumerate(found.shape))
        if shape != tuple(node.meta["val"].shape):
            raise PartitionError(
                f"{node.meta.get('source')}: {node.target} on the mesh gives {list(shape)} instead of {list(node.meta['val'].shape)}, "
                "which is a mistake of functrain's"
            )


class _Unknown(Exception):
    """There is no way to split an operation; it is computed whole."""


def _holds_value(x: Any) -> bool:
    return bool(all_values(x))


def _plain(x: Any) -> Any:
    """Fx's immutable lists and dicts as plain ones, which rules hash and unpack."""
    if isinstance(x, tuple):
        return tuple(_plain(y) for y in x)
    if isinstance(x, list):
        return [_plain(y) for y in x]
    return {k: _plain(v) for k, v in x.items()} if isinstance(x, dict) else x
