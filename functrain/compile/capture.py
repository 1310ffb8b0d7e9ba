"""A function and its arguments -> one graph on global shapes, without mutation: the whole step, optimizer included.

user function + abstract leaves -> record (recorder.py) -> remove mutation (functionalize.py) -> drop dead code
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from functrain import tree
from functrain.compile.errors import LeafError
from functrain.compile.functionalize import without_mutation
from functrain.compile.graph import drop_dead_code
from functrain.compile.recorder import Recorder
from functrain.differentiate import Markers, marked
from functrain.torch_internals import FakeTensorMode, active_modes, single_threaded_backward


@dataclass(frozen=True)
class Captured:
    """One function captured for one set of argument shapes."""

    graph: fx.GraphModule  # one placeholder a tensor leaf of the arguments, one output a tensor leaf of the result
    in_paths: tuple[str, ...]  # path of each placeholder, such as `state/params/w`
    out_structure: tree.Structure  # of the function's result
    out_leaves: tuple[Any, ...]  # for each leaf of the result: an `Output` (its place among the graph's outputs) or a plain Python value
    seconds: float  # how long capture took

    @property
    def out_paths(self) -> list[str]:
        """The path of each tensor in the result, in the order of the graph's outputs."""
        named = tree.paths(tree.unflatten(self.out_structure, self.out_leaves), is_leaf=lambda x: isinstance(x, Output))
        return [path for path, leaf in zip(named, self.out_leaves, strict=True) if isinstance(leaf, Output)]


@dataclass(frozen=True)
class Output:
    """A place among a graph's outputs."""

    index: int


def capture(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    paths: Sequence[str],
    rebuild: Callable[[list[Any]], Any],
    markers: Markers | None = None,
) -> Captured:
    """Record one call as a graph.

    Args:
        function: called once, with fake tensors.
        arguments: the tensor leaves of the call, real or abstract; only shape, strides, dtype and device are read.
        paths: the path of each leaf, for messages.
        rebuild: turns the list of leaves into the function's (args, kwargs).
        markers: for a graph that is to be partitioned: what derivatives leave in it.

    Raises:
        CaptureError: the function does something that a graph cannot hold; the message names the user's line and the remedy.
    """
    start = time.perf_counter()
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(fake_mode, decompose=markers is not None)
    fakes = [recorder.input(path, leaf) for path, leaf in zip(paths, arguments, strict=True)]
    args, kwargs = rebuild(fakes)
    with ExitStack() as stack:
        stack.enter_context(single_threaded_backward())
        stack.enter_context(fake_mode)
        stack.enter_context(recorder)
        stack.enter_context(marked(markers))
        result = function(*args, **kwargs)
    leaves, structure = tree.flatten(result)
    outputs = [x for x in leaves if isinstance(x, torch.Tensor)]
    _check_outputs(leaves, tree.paths(result))
    recorder.output(outputs)
    graph = fx.GraphModule(recorder.constants, recorder.graph)
    if recorder.mutates:
        graph = without_mutation(graph)
    drop_dead_code(graph.graph)
    counter = iter(range(len(outputs)))
    out_leaves = tuple(Output(next(counter)) if isinstance(x, torch.Tensor) else x for x in leaves)
    return Captured(graph, tuple(paths), structure, out_leaves, time.perf_counter() - start)


def _check_outputs(leaves: list[Any], paths: list[str]) -> None:
    for path, leaf in zip(paths, leaves, strict=True):
        if not isinstance(leaf, (torch.Tensor, bool, int, float, complex, str)):
            raise LeafError(
                f"the captured function returns {type(leaf).__name__} at {path or 'the root'}: a step returns tensors, numbers and "
                "strings in dicts, lists, tuples, named tuples and ft.struct classes"
            )


def as_tensor_leaf(leaf: Any, path: str) -> torch.Tensor:
    """The tensor that a leaf of the arguments is: numbers and numpy arrays become tensors as JAX makes them arrays.

    Raises:
        LeafError: the leaf is neither; the remedy is `static_argnames`.
    """
    if type(leaf) in (torch.Tensor, torch.nn.Parameter):
        return leaf
    if isinstance(leaf, torch.Tensor):
        raise LeafError(f"argument {path} is a {type(leaf).__name__}: pass plain tensors, for instance `x.as_subclass(torch.Tensor)`")
    if isinstance(leaf, (bool, int, float, complex)) or type(leaf).__module__ == "numpy":
        return torch.as_tensor(leaf)
    raise LeafError(
        f"argument {path} is {type(leaf).__name__} {str(leaf)[:60]!r}, which is no tensor or number. Name the argument in "
        "`static_argnames` (its value then becomes part of the graph), or close over it."
    )


def is_capturing() -> bool:
    """Whether a function is being captured at this point."""
    return any(isinstance(mode, Recorder) for mode in active_modes())
