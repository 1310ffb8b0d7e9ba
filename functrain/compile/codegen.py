"""A graph -> one Python function that runs it operation by operation and lets go of every value after its last use.

The function takes its inputs in a list and empties it, so that an input that nobody else holds is freed at its last use too.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from functrain.compile.graph import is_view, operations, outputs, placeholders, value_bytes, values
from functrain.compile.source import SourceLine
from functrain.torch_internals import OpOverload

FILENAME = "<functrain step>"  # of the generated source, in tracebacks
Boxed = Callable[[list[torch.Tensor]], list[Any]]


@dataclass(frozen=True)
class Released:
    """One value that the generated function lets go of at its last use."""

    value: str  # name in the graph
    after: str  # name of its last user
    nbytes: int  # bytes
    source: SourceLine | None  # line that made it


@dataclass(frozen=True)
class Program:
    """A graph as a runnable Python function."""

    call: Boxed
    text: str  # the generated source
    released: tuple[Released, ...]  # let go of at once, in order
    kept: tuple[str, ...]  # smaller than the bound: they live until the function returns
    lines: dict[int, SourceLine | None]  # line of the generated source -> line of the user's


def generate(graph: fx.GraphModule, release_over: int = 0) -> Program:
    """Write and compile the function.

    Args:
        graph: a captured graph, after the passes.
        release_over: values of at least this many bytes are let go of at their last use, smaller ones when the function returns.
    """
    writer = _Writer(graph, release_over)
    text = writer.write()
    scope = dict(writer.bound)
    exec(compile(text, FILENAME, "exec"), scope)
    return Program(scope["step"], text, tuple(writer.released), tuple(writer.kept), writer.lines)


class _Writer:
    """Builds the source line by line; `bound` holds the objects that the source names."""

    def __init__(self, graph: fx.GraphModule, release_over: int) -> None:
        self.graph = graph
        self.release_over = release_over
        self.bound: dict[str, Any] = {}
        self.names: dict[int, str] = {}  # id of a bound object -> its name
        self.released: list[Released] = []
        self.kept: list[str] = []
        self.lines: dict[int, SourceLine | None] = {}
        self.text: list[str] = ["def step(inputs):"]
        self.dying = last_uses(graph.graph)

    def write(self) -> str:
        inputs = placeholders(self.graph.graph)
        for node in self.graph.graph.nodes:
            if node.op == "get_attr":
                self.bound[node.name] = getattr(self.graph, str(node.target))
        if inputs:
            self._line(f"{', '.join(n.name for n in inputs)}, = inputs", None)
        self._line("inputs.clear()", None)
        self._release([n for n in inputs if not n.users], None)
        for node in operations(self.graph.graph):
            arguments = [self._value(x) for x in node.args] + [f"{key}={self._value(x)}" for key, x in node.kwargs.items()]
            self._line(f"{node.name} = {self._call(node, arguments)}", node.meta.get("source"))
            self._release(self.dying.get(node, []), node)
        self._line(f"return [{', '.join(self._value(x) for x in outputs(self.graph.graph))}]", None)
        return "\n".join(self.text) + "\n"

    def _line(self, text: str, source: SourceLine | None) -> None:
        self.text.append(f"    {text}")
        self.lines[len(self.text)] = source

    def _call(self, node: fx.Node, arguments: list[str]) -> str:
        if node.target is operator.getitem:
            return f"{arguments[0]}[{arguments[1]}]"
        target = node.target
        function = target._op if isinstance(target, OpOverload) else target
        name = "".join(c if c.isalnum() else "_" for c in str(target).removeprefix("aten."))
        return f"{self._bind(function, f'op_{name}')}({', '.join(arguments)})"

    def _release(self, nodes: list[fx.Node], after: fx.Node | None) -> None:
        gone = []
        for node in nodes:
            size = sum(value_bytes(x) for x in values(node))
            owns = not is_view(node) and node.op == "call_function"
            if owns and size < self.release_over:
                self.kept.append(node.name)
                continue
            if owns:
                self.released.append(Released(node.name, after.name if after else "", size, node.meta.get("source")))
            gone.append(node.name)
        if gone:
            self._line(f"del {', '.join(gone)}", None)

    def _value(self, x: Any) -> str:
        """Source text of an argument."""
        if isinstance(x, fx.Node):
            return x.name
        if isinstance(x, (list, tuple)):
            inside = ", ".join(self._value(y) for y in x)
            return f"[{inside}]" if isinstance(x, list) else f"({inside}{',' if len(x) == 1 else ''})"
        if x is None or isinstance(x, (bool, int, str)) or (isinstance(x, float) and x - x == 0):
            return repr(x)
        return self._bind(x, f"value_{type(x).__name__}")

    def _bind(self, x: Any, name: str) -> str:
        if id(x) not in self.names:
            unique = name if name not in self.bound else f"{name}_{len(self.bound)}"
            self.bound[unique] = x
            self.names[id(x)] = unique
        return self.names[id(x)]


def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each operation, the values that nothing after it reads (its own result where nobody reads it)."""
    seen = {x for x in outputs(graph) if isinstance(x, fx.Node)}
    dying: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(list(operations(graph))):
        fresh = [x for x in dict.fromkeys([node, *node.all_input_nodes]) if x not in seen and x.op != "get_attr"]
        seen.update(fresh)
        dying[node] = fresh
    return dying
