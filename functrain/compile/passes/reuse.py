"""Write element-wise results into an argument's buffer where nobody reads that argument again: less memory, fewer fresh pages.

Uses each operator's `out=` form, found by its schema, so the kernel and the bits are the same. Only operators tagged `pointwise`: an
element of their result depends on the same element of the arguments alone.
"""

import functools
from collections.abc import Set
from typing import Any

import torch
import torch.fx as fx

from functrain.compile.graph import schema_of, values
from functrain.compile.passes.base import Pass
from functrain.compile.passes.storage import Writable


def reuse_buffers(donated: Set[int] = frozenset()) -> Pass:
    """The pass, for a step whose inputs with these numbers are donated."""
    return Pass("reuse_buffers", lambda graph: _rewrite(graph, donated))


def _rewrite(graph: fx.GraphModule, donated: Set[int]) -> list[str]:
    writable = Writable(graph.graph, donated)
    details = []
    for node in graph.graph.nodes:
        found = out_form(node.target) if node.op == "call_function" and schema_of(node) is not None else None
        buffer = next((x for x in node.all_input_nodes if _fits(x, node) and writable(x, node)), None) if found else None
        if found is None or buffer is None:
            continue
        node.target, name = found
        node.kwargs = {**node.kwargs, name: buffer}
        writable.overwritten(buffer, by=node)
        details.append(f"{node.name} into {buffer.name} ({values(node)[0].untyped_storage().nbytes()} bytes)")
    return details


def _fits(buffer: fx.Node, node: fx.Node) -> bool:
    """Same shape, layout, dtype and device."""
    have, want = buffer.meta.get("val"), node.meta.get("val")
    if not isinstance(have, torch.Tensor) or not isinstance(want, torch.Tensor) or want.dim() == 0:
        return False
    return have.shape == want.shape and have.stride() == want.stride() and have.dtype == want.dtype and have.device == want.device


@functools.cache
def out_form(target: Any) -> tuple[Any, str] | None:
    """The overload of a pointwise operator that takes the same arguments and a buffer to write, and the buffer's name."""
    schema = target._schema
    if torch.Tag.pointwise not in target.tags or schema.is_mutable or len(schema.returns) != 1:
        return None
    plain = [(a.name, str(a.type)) for a in schema.arguments]
    packet = target.overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        written = [a for a in other._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        read = [(a.name, str(a.type)) for a in other._schema.arguments if a not in written]
        native = torch.Tag.generated not in other.tags  # a generated one computes elsewhere and copies
        if native and len(written) == 1 and written[0].kwarg_only and read == plain:
            return other, written[0].name
    return None
