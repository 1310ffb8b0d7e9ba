"""What a pass is: a pure function from a graph to a new graph, with a name, that reports what it did."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch.fx as fx

from functrain.compile.graph import drop_dead_code


@dataclass(frozen=True)
class PassReport:
    """What one pass did."""

    name: str
    changed: int  # how many places were rewritten
    details: tuple[str, ...] = ()  # one line each


@dataclass(frozen=True)
class Pass:
    """A named pass; calling it leaves its argument as it was."""

    name: str
    rewrite: Callable[[fx.GraphModule], list[str]]  # changes a graph that belongs to the pass; one line for each place

    def __call__(self, graph: fx.GraphModule) -> tuple[fx.GraphModule, PassReport]:
        """The rewritten copy, and the report."""
        own = copied(graph)
        details = self.rewrite(own)
        drop_dead_code(own.graph)
        return own, PassReport(self.name, len(details), tuple(details))


def copied(graph: fx.GraphModule) -> fx.GraphModule:
    """A graph module of its own nodes that shares the constants and the nodes' tags."""
    target = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    output = target.graph_copy(graph.graph, mapping)
    target.output(output)
    for node in graph.graph.nodes:
        if node in mapping:
            mapping[node].meta = copy.copy(node.meta)
    attributes = {str(n.target): getattr(graph, str(n.target)) for n in graph.graph.nodes if n.op == "get_attr"}
    return fx.GraphModule(attributes, target)


def run_passes(graph: fx.GraphModule, passes: list[Pass]) -> tuple[fx.GraphModule, tuple[PassReport, ...]]:
    """Apply passes in order."""
    reports = []
    for one in passes:
        graph, report = one(graph)
        reports.append(report)
    return graph, tuple(reports)
