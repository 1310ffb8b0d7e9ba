"""A graph as text that a person reads."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from functrain.compile.graph import outputs

_SHORT = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16", torch.int64: "i64", torch.int32: "i32"}


def as_text(graph: fx.GraphModule, in_paths: Sequence[str]) -> str:
    """One line an operation: ``name: dtype[shape] = operator(arguments)  # phase, leaf or block, file:line in function``."""
    lines = []
    inputs = iter(in_paths)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            lines.append(f"{node.name}: {_type(node)} = input {next(inputs)}")
        elif node.op == "get_attr":
            lines.append(f"{node.name}: {_type(node)} = constant")
        elif node.op == "call_function":
            lines.append(_operation(node))
    lines.append(f"return {', '.join(str(x) for x in outputs(graph.graph))}")
    return "\n".join(lines)


def _operation(node: fx.Node) -> str:
    if node.target is operator.getitem:
        body = f"{node.args[0]}[{node.args[1]}]"
    else:
        arguments = [str(x) for x in node.args] + [f"{key}={value}" for key, value in node.kwargs.items()]
        body = f"{node.target}({', '.join(arguments)})"
    said = (node.meta.get("phase"), node.meta.get("param") or node.meta.get("block"), node.meta.get("source"))
    return f"{node.name}: {_type(node)} = {body}  # {', '.join(str(x) for x in said if x is not None)}"


def _type(node: fx.Node) -> str:
    val = node.meta.get("val")
    return f"({', '.join(_shape(x) for x in val)})" if isinstance(val, (tuple, list)) else _shape(val)


def _shape(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return "none" if value is None else type(value).__name__
    dtype = _SHORT.get(value.dtype, str(value.dtype).removeprefix("torch."))
    return f"{dtype}[{', '.join(str(s) for s in value.shape)}]"


def readable_bytes(n: int) -> str:
    """A number of bytes in the unit that a person would choose.

    >>> readable_bytes(4), readable_bytes(3 * 2**10), readable_bytes(5 * 2**19)
    ('4 B', '3.0 KiB', '2.5 MiB')
    """
    return f"{n} B" if n < 2**10 else f"{n / 2**10:.1f} KiB" if n < 2**20 else f"{n / 2**20:.1f} MiB"
