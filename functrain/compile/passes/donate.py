"""Update donated leaves in place: the fused optimizer operation writes the parameter and its moments where they lie.

Only where nobody reads the old values afterwards; elsewhere the functional form stays and the old leaf is freed at its last use.
"""

import operator
from collections.abc import Set

import torch
import torch.fx as fx

import functrain.kernels.adamw  # noqa: F401 - registers the operators
from functrain.compile.graph import TAGS
from functrain.compile.passes.base import Pass
from functrain.compile.passes.storage import Writable

ops = torch.ops.functrain


def donate(donated: Set[int] = frozenset()) -> Pass:
    """The pass, for a step whose inputs with these numbers are donated."""
    return Pass("donate", lambda graph: _rewrite(graph, donated))


def _rewrite(graph: fx.GraphModule, donated: Set[int]) -> list[str]:
    writable = Writable(graph.graph, donated)
    details = []
    for node in [n for n in graph.graph.nodes if n.target is ops.adamw_apply.default]:
        leaves, (grad, coefficients) = node.args[:3], node.args[3:5]
        if len(set(leaves)) == 3 and all(writable(leaf, node) for leaf in leaves):
            details.append(f"{node.name} writes {', '.join(str(leaf.meta.get('path', leaf.name)) for leaf in leaves)}")
            _in_place(node, leaves, grad, coefficients, writable)
    return details


def _in_place(node: fx.Node, leaves: tuple[fx.Node, ...], grad: fx.Node, coefficients: fx.Node, writable: Writable) -> None:
    with node.graph.inserting_before(node):
        write = node.graph.call_function(ops.adamw_apply_.default, (*leaves, grad, coefficients))
        write.meta.update({key: node.meta.get(key) for key in TAGS}, val=None)
    for item in [user for user in node.users if user.target is operator.getitem]:
        leaf = leaves[item.args[1]]
        if item in writable.returned:
            writable.returned.add(leaf)
        item.replace_all_uses_with(leaf)
        node.graph.erase_node(item)
    writable.place[write] = writable.place[node]
    node.graph.erase_node(node)
