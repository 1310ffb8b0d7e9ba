"""Give every result a buffer of its own.

A result that shows another's storage, an input that is not donated or a constant is copied: whoever donates one result later must not
change another value. An item cut from a larger buffer is copied too, so that it does not keep the buffer alive.
"""

from collections.abc import Set

import torch
import torch.fx as fx

from functrain.compile.graph import Storages, outputs, placeholders, value_bytes
from functrain.compile.passes.base import Pass


def own_outputs(donated: Set[int] = frozenset()) -> Pass:
    """The pass, for a step whose inputs with these numbers are donated."""
    return Pass("own_outputs", lambda graph: _rewrite(graph, donated))


def _rewrite(graph: fx.GraphModule, donated: Set[int]) -> list[str]:
    storages = Storages(graph.graph)
    given = {node for i, node in enumerate(placeholders(graph.graph)) if i in donated}
    taken: set[fx.Node] = set()
    results, details = [], []
    for node in outputs(graph.graph):
        owner = storages.owner[node]
        val = node.meta["val"]
        ours = owner.op == "call_function" or owner in given
        partial = val.numel() * val.element_size() < value_bytes(val)
        if not ours or owner in taken or partial:
            details.append(f"{node.name} is copied: it shows {owner.meta.get('path', owner.name)}")
            node = _copy(graph.graph, node)
        else:
            taken.add(owner)
        results.append(node)
    graph.graph.output_node().args = (tuple(results),)
    return details


def _copy(graph: fx.Graph, node: fx.Node) -> fx.Node:
    with graph.inserting_before(graph.output_node()):
        copy = graph.call_function(torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    fresh = torch.empty_like(node.meta["val"], memory_format=torch.contiguous_format)
    copy.meta.update(source=node.meta.get("source"), phase="update", val=fresh, must_copy=True)
    return copy
