"""Where collectives start and where they are waited for: reductions as early as possible, gathers one ahead of their use.

A gathered param is let go of after its last use in the forward pass and gathered again for the backward pass.
"""

import torch
import torch.fx as fx

from functrain.compile.collectives import SENT, ops
from functrain.compile.graph import is_view, operations
from functrain.compile.messages import join_units, reduce_small_together
from functrain.compile.passes.base import Pass

aten = torch.ops.aten
_REDUCTIONS = {ops.reduce_scatter.default, ops.all_reduce.default}
_CHEAP = {
    aten._to_copy.default,
    aten.reshape.default,
    aten.view.default,
    aten.detach.default,
    aten.constant_pad_nd.default,
    aten.t.default,
    aten.alias.default,
    aten.cat.default,
    aten.permute.default,
    ops.my_shard.default,
}


def schedule() -> Pass:
    """The pass: gathers again, splits every collective into a start and a wait, and moves both."""
    return Pass("schedule", _rewrite)


def _rewrite(graph: fx.GraphModule) -> list[str]:
    details = reduce_small_together(graph.graph)
    details += _gather_again(graph.graph)
    details += join_units(graph.graph)
    _split(graph.graph)
    details += _reduce_early(graph.graph)
    _wait_late(graph.graph)
    details += _gather_ahead(graph.graph)
    return details


# ---- params that forward and backward both use


def _gather_again(graph: fx.Graph) -> list[str]:
    """A second gather for the backward uses of a param, unless no other gather lies between its last forward use and those."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    gathers = [n for n in operations(graph) if n.target is ops.all_gather.default and n.meta.get("leaf") is not None]
    firsts = sorted(place[n] for n in gathers)
    details = []
    for gather in gathers:
        if any(u.target is ops.all_gather.default and u.meta.get("leaf") is not None for u in gather.users):
            continue  # an inner gather of two: the outer one is taken
        uses = _real_uses(gather)
        forward = [user for user, _ in uses if user.meta.get("phase") != "backward"]
        backward = [(user, chain) for user, chain in uses if user.meta.get("phase") == "backward"]
        if not forward or not backward:
            continue
        last, first = max(place[u] for u in forward), min(place[u] for u, _ in backward)
        if last < first and any(last < p < first or p > place[gather] for p in firsts if p != place[gather]):
            _duplicate(graph, gather, backward, min(backward, key=lambda pair: place[pair[0]])[0])
            details.append(f"{gather.meta['leaf']} is gathered again for the backward pass")
    return details


def _real_uses(gather: fx.Node) -> list[tuple[fx.Node, list[fx.Node]]]:
    """The operations that read a gathered value, each with the views between."""
    found: list[tuple[fx.Node, list[fx.Node]]] = []

    def follow(node: fx.Node, chain: list[fx.Node]) -> None:
        for user in node.users:
            if user.op == "call_function" and (is_view(user) or user.target is aten.reshape.default) and len(user.all_input_nodes) == 1:
                follow(user, [*chain, user])
            else:
                found.append((user, chain))

    follow(gather, [])
    return found


def _duplicate(graph: fx.Graph, gather: fx.Node, uses: list[tuple[fx.Node, list[fx.Node]]], before: fx.Node) -> None:
    """A copy of the gather (and of gathers that it rests on) for some of its uses."""
    with graph.inserting_before(before):
        source = gather
        inner = []
        while source.target is ops.all_gather.default and source.meta.get("leaf") is not None:
            inner.append(source)
            source = source.args[0]  # type: ignore[assignment]
        new = source
        for one in reversed(inner):
            new = graph.call_function(one.target, (new, *one.args[1:]))
            new.meta = {**one.meta, "phase": "backward", "again": True}
        copies: dict[fx.Node, fx.Node] = {gather: new}
        for user, chain in uses:
            for view in chain:
                if view not in copies:
                    copies[view] = graph.node_copy(view, lambda n: copies.get(n, n))
                    copies[view].meta = dict(view.meta)
            old = chain[-1] if chain else gather
            user.replace_input_with(old, copies[old])


# ---- starts and waits


def _split(graph: fx.Graph) -> None:
    for node in list(operations(graph)):
        if node.target in SENT:
            users = list(node.users)
            with graph.inserting_after(node):
                wait = graph.call_function(ops.wait.default, (node, list(node.all_input_nodes)))
            wait.meta = {**node.meta}
            wait.meta.pop("move", None)
            for user in users:
                user.replace_input_with(node, wait)


def _reduce_early(graph: fx.Graph) -> list[str]:
    """Each reduction of a gradient starts right behind what makes the gradient: autograd leaves them all to the end."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    details = []
    for start in [n for n in operations(graph) if n.target in _REDUCTIONS]:
        chain, sources = _preparation(start)
        source = max(sources, key=place.__getitem__, default=None)
        if source is None or source.op != "call_function":
            continue
        if place[start] - place[source] > len(chain):
            details.append(f"{start.name} starts behind {source.name}")
        at = source
        for node in sorted(chain, key=place.__getitem__):
            at.append(node)
            at = node
    return details


def _preparation(start: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """A collective with the cheap operations that serve it alone, and what those read."""
    chain, sources, stack = [start], [], list(start.all_input_nodes)
    while stack:
        node = stack.pop()
        if node.target in _CHEAP and len(node.users) == 1:
            chain.append(node)
            stack.extend(node.all_input_nodes)
        else:
            sources.append(node)
    return chain, sources


def _wait_late(graph: fx.Graph) -> None:
    """Each wait stands right before the first operation that reads its result."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    for wait in [n for n in operations(graph) if n.target is ops.wait.default]:
        first = min(wait.users, key=place.__getitem__, default=None)
        if first is not None and first.op != "output":
            first.prepend(wait)
        elif first is not None:
            graph.output_node().prepend(wait)


def _gather_ahead(graph: fx.Graph, ahead: int = 1) -> list[str]:
    """Each gather of a param starts right before the wait of the gather `ahead` of it, so that one is under way while one is used."""
    waits = [n for n in operations(graph) if n.target is ops.wait.default and _is_param_gather(n.args[0])]
    details = []
    position = {n: i for i, n in enumerate(graph.nodes)}
    for i, wait in enumerate(waits):
        start = wait.args[0]
        anchor = waits[max(0, i - ahead)]
        ready = max((position[x] for x in start.all_input_nodes), default=-1)  # type: ignore[union-attr]
        if ready < position[anchor]:
            anchor.prepend(start)  # type: ignore[arg-type]
            details.append(f"{start} starts before {anchor}")
        else:
            wait.prepend(start)  # type: ignore[arg-type]
    return details


def _is_param_gather(node: object) -> bool:
    return isinstance(node, fx.Node) and node.target is ops.all_gather.default and node.meta.get("leaf") is not None
