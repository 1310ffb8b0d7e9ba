"""Hand a graph to torch's compiler. The graph is whole already (forward, backward, optimizer), so it compiles as one inference graph."""

from collections.abc import Callable
from typing import Any

import torch.fx as fx

from functrain.compile.graph import placeholders
from functrain.torch_internals import compile_whole_graph

Boxed = Callable[[list[Any]], list[Any]]


def compile_graph(graph: fx.GraphModule) -> Boxed:
    """Compile with Inductor.

    Returns:
        A function of a list of inputs, which it empties; inputs that the graph writes are written in place.

    Raises:
        Exception: whatever Inductor raises; the caller falls back and says so.
    """
    return compile_whole_graph(graph, [node.meta["val"] for node in placeholders(graph.graph)])
