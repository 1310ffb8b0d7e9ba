"""Which leaf and which model block each operation of a captured step belongs to, worked out from where its arguments come from.

An operation that takes a param (through casts, views and markers) belongs to it. One that takes none belongs to the block that its latest
argument came from, so a block ends where the next one's params come in. A backward operation belongs where its forward operation does:
both carry autograd's sequence number.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.fx as fx

from functrain.compile.collectives import ops

aten = torch.ops.aten
_CARRIERS = {  # operations whose result is still the param, in another form
    ops.unshard.default,
    aten._to_copy.default,
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.expand.default,
    aten.permute.default,
    aten.reshape.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
}


@dataclass(frozen=True)
class Owner:
    """What an operation belongs to."""

    leaf: str | None  # path of the param below the params, such as `blocks/0/qkv`
    block: str | None  # such as `blocks/0`


NOBODY = Owner(None, None)


def block_of(leaf: str) -> str:
    """The part of the model that a param is in: the path to its innermost numbered part, else its parent, else itself.

    >>> block_of("model/layers/3/self_attn/q_proj/weight"), block_of("ln_f/w"), block_of("embed")
    ('model/layers/3', 'ln_f', 'embed')
    """
    parts = leaf.split("/")
    numbered = [i for i, part in enumerate(parts[:-1]) if part.isdigit()]
    return "/".join(parts[: numbered[0] + 1] if numbered else parts[:-1] or parts)


def owners(graph: fx.Graph, leaves: Mapping[fx.Node, str]) -> dict[fx.Node, Owner]:
    """The owner of every node.

    Args:
        graph: a captured step, its nodes tagged with `phase` and `sequence`.
        leaves: path of the param that each input is, or is optimizer state of; other inputs are missing.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    param = dict(leaves)  # nodes that are a param
    found: dict[fx.Node, Owner] = {node: Owner(leaf, block_of(leaf)) for node, leaf in leaves.items()}
    forward: dict[int, Owner] = {}  # sequence number -> owner of the forward operation
    for node in graph.nodes:
        if node.op != "call_function":
            found.setdefault(node, NOBODY)
            continue
        taken = [x for x in node.all_input_nodes if x in param]
        if taken and node.target in _CARRIERS:
            param[node] = param[taken[0]]
        found[node] = _owner(node, taken, found, forward, place)
        if node.meta.get("phase") == "forward" and found[node].block is not None:
            known = forward.get(node.meta.get("sequence", -1))
            if known is None or (known.leaf is None and found[node].leaf is not None):
                forward[node.meta.get("sequence", -1)] = found[node]
    return found


def _owner(
    node: fx.Node, taken: list[fx.Node], found: Mapping[fx.Node, Owner], forward: Mapping[int, Owner], place: Mapping[fx.Node, int]
) -> Owner:
    phase, inputs = node.meta.get("phase"), node.all_input_nodes
    if node.target in (ops.store_grad.default, ops.part_grad.default):  # (gradient, its param)
        return found[inputs[-1]]
    if phase == "backward" and node.meta.get("sequence") in forward:
        return forward[node.meta["sequence"]]
    if phase in ("forward", "backward"):
        if taken:
            return found[taken[0]]
        latest = max((x for x in inputs if found[x].block is not None), key=place.__getitem__, default=None)
        return NOBODY if latest is None else Owner(None, found[latest].block)
    return _common(found[x] for x in (taken or inputs))


def _common(sources: Iterable[Owner]) -> Owner:
    """In an update, what mixes several leaves belongs to none."""
    known = [owner for owner in sources if owner.block is not None]
    leaves, blocks = {owner.leaf for owner in known}, {owner.block for owner in known}
    return Owner(leaves.pop() if len(leaves) == 1 else None, blocks.pop() if len(blocks) == 1 else None)
