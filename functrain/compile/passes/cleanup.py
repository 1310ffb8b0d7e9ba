"""Drop operations that change nothing: what autograd and Python wrappers leave behind in a graph without mutation."""

import torch
import torch.fx as fx

from functrain.compile.passes.base import Pass

aten = torch.ops.aten

# Each returns its first argument's values; in a graph without mutation nobody can tell a copy or a view from the thing itself.
_SAME_VALUES = {aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift_fresh_copy.default, aten.clone.default}
_MAY_BE_SAME = {aten.view.default, aten._unsafe_view.default, aten.expand.default, aten._to_copy.default, aten.slice.Tensor}


def _changes_nothing(node: fx.Node) -> bool:
    if node.target not in _SAME_VALUES | _MAY_BE_SAME or not isinstance(node.args[0], fx.Node) or node.meta.get("must_copy"):
        return False
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    return (
        before.shape == after.shape and before.stride() == after.stride() and before.dtype == after.dtype and before.device == after.device
    )


def _rewrite(graph: fx.GraphModule) -> list[str]:
    details = []
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and _changes_nothing(node):
            details.append(f"{node.name} ({node.target})")
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
        elif node.target is aten.t.default and getattr(node.args[0], "target", None) is aten.t.default:
            details.append(f"{node.name} (transposed twice)")
            node.replace_all_uses_with(node.args[0].args[0])
    return details


cleanup = Pass("cleanup", _rewrite)
