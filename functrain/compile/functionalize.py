"""Remove in-place writes from a recorded graph: a write into a view becomes a new value of what it views.

Models write into tensors that they made themselves (shifted labels, filled masks). A graph that is cut, reordered and partitioned must
not depend on such writes. torch's own functionalization does the rewriting; this file replays the recorded graph under it, node by
node, and hands each node's line and phase to the nodes that replace it.
"""

from typing import Any

import torch
import torch.fx as fx

from functrain.compile.errors import CaptureError
from functrain.compile.graph import is_mutable, operations
from functrain.compile.recorder import Recorder
from functrain.torch_internals import FakeTensorMode


def without_mutation(graph: fx.GraphModule) -> fx.GraphModule:
    """The same computation without any in-place operation; placeholders, outputs and tags stay.

    Raises:
        CaptureError: an in-place operation remains that torch cannot rewrite; the message names it and its line.
    """
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(fake_mode)
    inputs = [recorder.input(n.meta["path"], n.meta["val"]) for n in graph.graph.nodes if n.op == "placeholder"]
    attributes = [n for n in graph.graph.nodes if n.op == "get_attr"]
    constants = [recorder.constant(getattr(graph, str(n.target)), _tags(n)) for n in attributes]

    def replay(*values: torch.Tensor) -> tuple[Any, ...]:
        return _replay(graph, values, recorder)

    with fake_mode, recorder:
        outputs = torch.func.functionalize(replay, remove="mutations")(*inputs, *constants)
    recorder.output(outputs)
    _check(recorder.graph)
    return fx.GraphModule(recorder.constants, recorder.graph)


def _replay(graph: fx.GraphModule, values: tuple[torch.Tensor, ...], recorder: Recorder) -> tuple[Any, ...]:
    """Run the graph's nodes on functional tensors; inputs come first, then constants, each in graph order."""
    order = [n for n in graph.graph.nodes if n.op == "placeholder"] + [n for n in graph.graph.nodes if n.op == "get_attr"]
    environment: dict[fx.Node, Any] = dict(zip(order, values, strict=True))
    for node in graph.graph.nodes:
        if node.op == "call_function":
            recorder.origin = _tags(node)
            args, kwargs = fx.map_arg((node.args, node.kwargs), environment.__getitem__)
            environment[node] = node.target(*args, **kwargs)
    recorder.origin = None
    return tuple(fx.map_arg(graph.graph.output_node().args[0], environment.__getitem__))


def _tags(node: fx.Node) -> dict[str, Any]:
    return {key: node.meta.get(key) for key in ("phase", "source", "sequence")}


def _check(graph: fx.Graph) -> None:
    for node in operations(graph):
        if is_mutable(node):
            raise CaptureError(
                f"{node.meta.get('source')}: the in-place operation {node.target} cannot be made functional; use its functional form"
            )
