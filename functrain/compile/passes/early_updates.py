"""Run each leaf's optimizer update as soon as its gradient exists, so that no two whole gradients live longer than they must.

A recorded step computes every gradient and then every update. Here an operation of the update phase that depends on a gradient moves up
to the first place where its inputs exist, and what it needs of the old state alone moves with it. An update that will overwrite a donated
leaf waits for the leaf's last reader.
"""

from collections.abc import Set

import torch
import torch.fx as fx

import functrain.kernels.adamw  # noqa: F401 - registers the operators
from functrain.compile.graph import Storages, operations
from functrain.compile.passes.base import Pass


def early_updates(donated: Set[int] = frozenset()) -> Pass:
    """The pass, for a step whose inputs with these numbers are donated."""
    return Pass("early_updates", lambda graph: _rewrite(graph, donated))


def _rewrite(graph: fx.GraphModule, donated: Set[int]) -> list[str]:
    before = list(operations(graph.graph))
    order = _Order(graph.graph, donated).run(before)
    if order == before:
        return []
    place = {node: i for i, node in enumerate(before)}
    anchor = graph.graph.output_node()
    for node in order:
        anchor.prepend(node)
    after = {node: i for i, node in enumerate(order)}
    return [f"{node.name} from place {place[node]} to {after[node]}" for node in order if place[node] > after[node]]


class _Order:
    """Emits the operations in a new order: the backward's own, each update behind the last thing it waits for."""

    def __init__(self, graph: fx.Graph, donated: Set[int]) -> None:
        self.graph = graph
        self.waits = _overwrite_hazards(graph, donated)
        self.late = _depends_on_backward(graph)  # update operations that wait for a gradient
        self.done: set[fx.Node] = {n for n in graph.nodes if n.op in ("placeholder", "get_attr")}
        self.order: list[fx.Node] = []

    def run(self, nodes: list[fx.Node]) -> list[fx.Node]:
        missing = {n: len(self._inputs(n) - self.done) for n in self.late}
        followers: dict[fx.Node, list[fx.Node]] = {}
        for node in nodes:  # in graph order, so that every process that captures the step writes the same graph
            for source in self._inputs(node) - self.done if node in self.late else ():
                followers.setdefault(source, []).append(node)
        for node in nodes:
            if node.meta.get("phase") != "update":
                self._emit_with_followers(node, missing, followers)
        for node in nodes:  # what no gradient leads to, and what is left
            if node not in self.done:
                self._emit_with_followers(node, missing, followers)
        return self.order

    def _inputs(self, node: fx.Node) -> set[fx.Node]:
        """What must have run before: gradient-dependent inputs and hazards; other update inputs are emitted on the way."""
        inputs = {x for x in node.all_input_nodes if x in self.late or x.meta.get("phase") != "update"}
        return inputs | self.waits.get(node, set())

    def _emit_with_followers(self, node: fx.Node, missing: dict[fx.Node, int], followers: dict[fx.Node, list[fx.Node]]) -> None:
        queue = [node]
        while queue:
            current = queue.pop(0)
            if current in self.done:
                continue
            emitted = self._emit(current)
            for one in emitted:
                for follower in followers.get(one, ()):
                    missing[follower] -= 1
                    if missing[follower] == 0:
                        queue.append(follower)

    def _emit(self, node: fx.Node) -> list[fx.Node]:
        """Emit a node behind those of its inputs that are not out yet; returns all that were emitted."""
        emitted: list[fx.Node] = []
        stack = [node]
        while stack:
            current = stack[-1]
            pending = [x for x in current.all_input_nodes if x not in self.done]
            if pending:
                stack.extend(pending)
                continue
            stack.pop()
            if current not in self.done:
                self.done.add(current)
                self.order.append(current)
                emitted.append(current)
        return emitted


def _depends_on_backward(graph: fx.Graph) -> set[fx.Node]:
    """Operations of the update phase that use, directly or not, what the backward computed."""
    late: set[fx.Node] = set()
    for node in operations(graph):
        sources = node.all_input_nodes
        if node.meta.get("phase") == "update" and any(x in late or x.meta.get("phase") == "backward" for x in sources):
            late.add(node)
    return late


def _overwrite_hazards(graph: fx.Graph, donated: Set[int]) -> dict[fx.Node, set[fx.Node]]:
    """For each fused update, the other readers of the donated leaves that it will overwrite."""
    storages = Storages(graph)
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    writable = {node for i, node in enumerate(inputs) if i in donated}
    waits: dict[fx.Node, set[fx.Node]] = {}
    for node in operations(graph):
        if node.target is torch.ops.functrain.adamw_apply.default:
            for leaf in node.args[:3]:
                if isinstance(leaf, fx.Node) and storages.owner[leaf] in writable:
                    readers = {u for u in storages.users(storages.owner[leaf]) if u.op == "call_function" and u is not node}
                    waits.setdefault(node, set()).update(readers)
    return waits
