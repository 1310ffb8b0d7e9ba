"""Compute once what the update phase asks for twice, such as a gradient norm that is a metric and the clip's measure.

Two operations are equal where their operator and all arguments are. Only in the update phase: forward and backward repeat operations on
purpose, where `remat` computes again instead of keeping.
"""

from typing import Any

import torch.fx as fx

from functrain.compile.graph import is_mutable, operations
from functrain.compile.passes.base import Pass


def _rewrite(graph: fx.GraphModule) -> list[str]:
    first: dict[Any, fx.Node] = {}
    details = []
    for node in list(operations(graph.graph)):
        if node.meta.get("phase") != "update" or is_mutable(node):
            continue
        same = first.setdefault((node.target, _key(node.args), _key(node.kwargs)), node)
        if same is not node:
            details.append(f"{node.name} is {same.name}")
            node.replace_all_uses_with(same)
            graph.graph.erase_node(node)
    return details


def _key(argument: Any) -> Any:
    """An argument as something to look up: 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    if isinstance(argument, (list, tuple)):
        return (type(argument).__name__, *map(_key, argument))
    if isinstance(argument, dict):
        return tuple((name, _key(value)) for name, value in argument.items())
    return argument if isinstance(argument, fx.Node) else (type(argument).__name__, repr(argument))


merge_equal = Pass("merge_equal", _rewrite)
