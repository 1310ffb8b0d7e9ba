"""Several values in one message: small ones, whose messages cost more than their bytes, and the leaves of a unit that the plan names.

A unit is a sub-tree of params (`zero(groups=)`) or as many neighbours as fit in a bucket (`zero(bucket_bytes=)`): they are gathered as one,
and their gradients reduced as one. Every element is sent and summed as before, so no bit changes.
"""

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx as fx

from functrain.compile.collectives import ops
from functrain.compile.graph import TAGS

aten = torch.ops.aten
SMALL = 2**14  # bytes; a message of that size costs more than its bytes do
Key = tuple[object, ...]


# ---- small values


def reduce_small_together(graph: fx.Graph) -> list[str]:
    """Reductions of small values over one axis, none of which rests on another, become one message."""
    depth: dict[fx.Node, int] = {}  # how many such reductions a value rests on, one after another
    groups: dict[tuple[object, ...], list[fx.Node]] = {}
    for node in graph.nodes:
        below = max((depth[x] for x in node.all_input_nodes), default=0)
        val = node.meta.get("val")
        small = node.target is ops.all_reduce.default and isinstance(val, torch.Tensor) and 0 < val.nbytes <= SMALL
        if small:
            groups.setdefault((*node.args[1:], val.dtype, node.meta.get("phase"), below), []).append(node)
        depth[node] = below + small
    together = [group for group in groups.values() if len(group) > 1]
    for group in together:
        _reduced(graph, group)
    if together:
        _inputs_first(graph)
    return [f"{len(group)} small values are reduced together" for group in together]


# ---- units


def join_units(graph: fx.Graph) -> list[str]:
    """The collectives of one unit's leaves become one."""
    units = [unit for unit in _units(graph) if len(unit) > 1]
    for unit in units:
        _JOINED[unit[0].target](graph, unit)
    if units:
        _inputs_first(graph)
    return [f"{len(unit)} leaves of {_name(unit[0])} have one {unit[0].target}" for unit in units]


def _name(node: fx.Node) -> object:
    return node.meta.get("unit") or "a bucket"


def _units(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The collectives to join, by when their values are ready. A leaf that comes again, as in the next microbatch, begins a new unit."""
    current: dict[Key, list[fx.Node]] = {}
    for node, depth in _ready(graph):
        unit, bucket = node.meta.get("unit"), node.meta.get("bucket") or 0
        axis_and_kind = [x for x in node.args[1:] if isinstance(x, str)]
        key = (node.target, *axis_and_kind, node.meta["val"].dtype, node.meta.get("phase"), depth, unit or bucket)
        members = current.setdefault(key, [])
        size = sum(n.meta["val"].nbytes for n in [*members, node])
        again = node.meta.get("leaf") is not None and any(n.meta.get("leaf") == node.meta["leaf"] for n in members)
        if members and (again or (unit is None and size > bucket)):
            yield members
            current[key] = members = []
        members.append(node)
    yield from current.values()


def _ready(graph: fx.Graph) -> list[tuple[fx.Node, int]]:
    """The collectives that may be joined, by when what they send is ready; and on how many of their kind each rests."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    depth: dict[fx.Node, dict[object, int]] = {}
    found = []
    for node in graph.nodes:
        below: dict[object, int] = {}
        for x in node.all_input_nodes:
            for target, n in depth[x].items():
                below[target] = max(below.get(target, 0), n)
        if node.target in _JOINED and (node.meta.get("unit") or node.meta.get("bucket")):
            found.append((node, below.get(node.target, 0)))
            below = {**below, node.target: below.get(node.target, 0) + 1}
        depth[node] = below
    return sorted(found, key=lambda pair: (place[_maker(pair[0])], place[pair[0]]))


def _maker(node: fx.Node) -> fx.Node:
    """What made the value that a reduction sends, before casts and views; a gather's place is its own."""
    if node.target is ops.all_gather.default:
        return node
    source = node.all_input_nodes[0]
    while source.op == "call_function" and len(source.all_input_nodes) == 1 and len(source.users) == 1:
        source = source.all_input_nodes[0]
    return source


def _gathered(graph: fx.Graph, unit: list[fx.Node]) -> None:
    """[1, all their elements] is gathered to [n, ...]; each leaf's part of every rank's row is put together as its own gather would."""
    first, n = unit[0], int(unit[0].args[3])  # type: ignore[arg-type]
    parts = _one(graph, unit, _rows(graph, unit), (0, n))
    wholes = []
    with graph.inserting_before(first):
        for part, node in zip(parts, unit, strict=True):
            local, dim = list(node.args[0].meta["val"].shape), int(node.args[2])  # type: ignore[union-attr,arg-type]
            pieces = _call(graph, aten.reshape.default, (part, [n, *local]), node)
            order = [*range(1, dim + 1), 0, *range(dim + 1, len(local) + 1)]
            wholes.append(_call(graph, aten.permute.default, (pieces, order), node) if dim else pieces)
    _replace(graph, unit, wholes)


def _scattered(graph: fx.Graph, unit: list[fx.Node]) -> None:
    """Each gradient as [n, elements of a piece], side by side; a rank's row of the sum is every leaf's piece."""
    n = int(unit[0].args[3])  # type: ignore[arg-type]
    rows = []
    for node in unit:
        with graph.inserting_before(node):
            shape, dim = list(node.args[0].meta["val"].shape), int(node.args[2])  # type: ignore[union-attr,arg-type]
            pieces = _call(graph, aten.reshape.default, (node.args[0], [*shape[:dim], n, shape[dim] // n, *shape[dim + 1 :]]), node)
            order = [dim, *(d for d in range(len(shape) + 1) if d != dim)]
            rows.append(_call(graph, aten.reshape.default, (_call(graph, aten.permute.default, (pieces, order), node), [n, -1]), node))
    _replace(graph, unit, _one(graph, unit, rows, (0, n)))


def _reduced(graph: fx.Graph, unit: list[fx.Node]) -> None:
    _replace(graph, unit, _one(graph, unit, _rows(graph, unit), unit[0].args[2:]))


def _rows(graph: fx.Graph, unit: list[fx.Node]) -> list[fx.Node]:
    """What each sends as [1, elements]."""
    rows = []
    for node in unit:
        with graph.inserting_before(node):
            rows.append(_call(graph, aten.reshape.default, (node.args[0], [1, -1]), node))
    return rows


def _one(graph: fx.Graph, unit: list[fx.Node], rows: list[fx.Node], rest: tuple[object, ...]) -> list[fx.Node]:
    """Rows [k, elements] side by side, sent at once, and each one's part of the result."""
    first = unit[0]
    with graph.inserting_before(first):
        joined = _call(graph, aten.cat.default, (rows, 1), first)
        sent = _call(graph, first.target, (joined, first.args[1], *rest), first)
        sent.meta.update({key: first.meta[key] for key in ("planned", "move", "again", "unit") if key in first.meta})
        if first.meta.get("leaf") is not None:
            sent.meta["leaf"] = _name(first)
        sizes = [row.meta["val"].shape[1] for row in rows]
        parts = _call(graph, aten.split_with_sizes.default, (sent, sizes, 1), first)
        return [_call(graph, operator.getitem, (parts, i), node) for i, node in enumerate(unit)]


def _replace(graph: fx.Graph, unit: list[fx.Node], values: list[fx.Node]) -> None:
    """Each value, in the shape of what it replaces. Nothing is erased before everything is inserted: an erased node holds no place."""
    with graph.inserting_before(unit[0]):
        shaped = [_call(graph, aten.reshape.default, (v, list(n.meta["val"].shape)), n) for v, n in zip(values, unit, strict=True)]
    for node, value in zip(unit, shaped, strict=True):
        node.replace_all_uses_with(value)
        graph.erase_node(node)


_JOINED: dict[Any, Callable[[fx.Graph, list[fx.Node]], None]] = {
    ops.all_gather.default: _gathered,
    ops.reduce_scatter.default: _scattered,
    ops.all_reduce.default: _reduced,
}


# ---- the graph


def _inputs_first(graph: fx.Graph) -> None:
    """Put every operation behind what it reads, and leave the order as it is otherwise."""
    done: set[fx.Node] = set()
    end = graph.output_node()
    for node in list(graph.nodes):
        stack = [node]
        while stack:
            missing = [x for x in stack[-1].all_input_nodes if x not in done]
            if missing:
                stack.extend(reversed(missing))
                continue
            ready = stack.pop()
            if ready not in done:
                done.add(ready)
                if ready is not end:
                    end.prepend(ready)


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
    """An operation that stands where another one does; its value is computed on fake tensors."""
    node = graph.call_function(target, args)
    values = fx.map_arg(args, lambda n: n.meta["val"])
    node.meta.update({key: like.meta.get(key) for key in TAGS}, val=target(*values))
    return node
