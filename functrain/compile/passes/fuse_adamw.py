"""Give each Adam-family update to one kernel: moments, update and the parameter's addition in a single pass over memory.

The optimizer emits `functrain.adamw` for each leaf and `apply_updates` an addition; between the gradient and the operation may stand a
cast from half precision and multiplications by scalars (the inverse loss scale, the clip factor). All of these go into
`functrain.adamw_apply`, which takes the gradient in its own dtype and a scale among its coefficients.
"""

import operator
from typing import Any

import torch
import torch.fx as fx

import functrain.kernels.adamw  # noqa: F401 - registers the operators
from functrain.compile.graph import TAGS
from functrain.compile.passes.base import Pass

aten, ops = torch.ops.aten, torch.ops.functrain
_GRAD_SCALE = 8  # its place among the coefficients


def _rewrite(graph: fx.GraphModule) -> list[str]:
    details: list[str] = []
    scaled: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
    for node in [n for n in graph.graph.nodes if n.target is ops.adamw.default]:
        folded = _fold_gradient(node, scaled)
        added = _fold_addition(node)
        if folded or added:
            details.append(f"{node.name}: {', '.join(folded + added)}")
    return details


def _fold_gradient(node: fx.Node, scaled: dict[tuple[fx.Node, fx.Node], fx.Node]) -> list[str]:
    """Take casts to float32 and multiplications by a scalar off the gradient and into the operation."""
    done: list[str] = []
    while True:
        grad, coefficients = node.args[0], node.args[4]
        if not isinstance(grad, fx.Node) or len(grad.users) != 1:
            return done
        if _is_widening_cast(grad):
            node.update_arg(0, grad.args[0])
            done.append("cast")
        elif (factor := _scalar_factor(grad)) is not None:
            other, scalar = factor
            node.update_arg(0, other)
            node.update_arg(4, _with_scale(node, coefficients, scalar, scaled))
            done.append("scale")
        else:
            return done


def _is_widening_cast(node: fx.Node) -> bool:
    if node.target is not aten._to_copy.default or not isinstance(node.args[0], fx.Node):
        return False
    before, after = node.args[0].meta["val"], node.meta["val"]
    return before.dtype in (torch.bfloat16, torch.float16) and after.dtype == torch.float32 and before.device == after.device


def _scalar_factor(node: fx.Node) -> tuple[Any, Any] | None:
    """(tensor, 0-dim tensor) of a multiplication that rounds as the kernel's own does: in float32 or float64."""
    if node.target is not aten.mul.Tensor or not all(isinstance(x, fx.Node) for x in node.args):
        return None
    for x, scalar in (node.args, reversed(node.args)):
        plain = x.meta["val"].dtype == node.meta["val"].dtype and x.meta["val"].shape == node.meta["val"].shape
        narrow = node.meta["val"].dtype in (torch.float32, torch.float64) and scalar.meta["val"].dtype in (torch.float32, torch.float64)
        if plain and narrow and scalar.meta["val"].dim() == 0 and x.meta["val"].dim() > 0:
            return x, scalar
    return None


def _with_scale(node: fx.Node, coefficients: fx.Node, scalar: fx.Node, scaled: dict[tuple[fx.Node, fx.Node], fx.Node]) -> fx.Node:
    """Coefficients whose gradient scale is multiplied by the scalar: made once for all leaves that share both."""
    if (coefficients, scalar) not in scaled:
        graph, value = node.graph, coefficients.meta["val"]
        with graph.inserting_before(node):
            head = _emit(graph, node, aten.slice.Tensor, (coefficients, 0, 0, _GRAD_SCALE), value.new_empty(_GRAD_SCALE))
            old = _emit(graph, node, aten.slice.Tensor, (coefficients, 0, _GRAD_SCALE, _GRAD_SCALE + 1), value.new_empty(1))
            new = _emit(graph, node, aten.mul.Tensor, (old, scalar), value.new_empty(1))
            scaled[coefficients, scalar] = _emit(graph, node, aten.cat.default, ([head, new],), torch.empty_like(value))
    return scaled[coefficients, scalar]


def _fold_addition(node: fx.Node) -> list[str]:
    """`param + update` becomes the operation's own result, where the update goes nowhere else."""
    param = node.args[3]
    parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    update = parts.get(0)
    if update is None or len(update.users) != 1 or len(parts) != len(node.users):
        return []
    (addition,) = update.users
    if addition.target is not aten.add.Tensor or addition.args != (param, update) or addition.kwargs:
        return []
    grad, mu, nu, _, coefficients = node.args
    with node.graph.inserting_before(addition):
        vals = (addition.meta["val"], *(x for x in node.meta["val"][1:]))
        fused = _emit(node.graph, addition, ops.adamw_apply.default, (param, mu, nu, grad, coefficients), vals)
        for old, index in ((addition, 0), (parts.get(1), 1), (parts.get(2), 2)):
            if old is not None:
                item = _emit(node.graph, addition, operator.getitem, (fused, index), vals[index])
                old.replace_all_uses_with(item)
    return ["addition"]


def _emit(graph: fx.Graph, like: fx.Node, target: object, args: tuple[object, ...], val: object) -> fx.Node:
    """A new node at the insertion point with another's line and phase."""
    node = graph.call_function(target, args)  # type: ignore[arg-type]
    node.meta.update({key: like.meta.get(key) for key in TAGS}, val=val)
    return node


fuse_adamw = Pass("fuse_adamw", _rewrite)
