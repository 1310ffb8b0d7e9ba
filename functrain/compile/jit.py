"""`jit`: call a function as one captured graph, on one device or on a mesh."""

from collections.abc import Callable, Iterable
from typing import Any

from functrain.compile.jitted import Jitted
from functrain.compile.lower import BACKENDS, Options
from functrain.compile.passes import Pass
from functrain.compile.planned import PlannedJit
from functrain.sharding import Plan


def jit(
    function: Callable[..., Any],
    *,
    plan: Plan | None = None,
    donate: str | Iterable[str] = (),
    static_argnames: str | Iterable[str] = (),
    backend: str = "auto",
    memory: None = None,
    passes: str | Iterable[Pass] = "auto",
    release_over: int = 0,
    strict: bool = False,
) -> Jitted:
    """Capture a pure function as one graph at its first call, and run the graph from then on.

    Args:
        function: takes and returns trees of tensors; it must be pure, and must not branch on tensor values.
        plan: where the leaves live on a mesh; None: on one device.
        donate: names of arguments that the step may overwrite. Their tensors cannot be used after the call.
        static_argnames: names of arguments that are Python values, part of the graph; they must be hashable.
        backend: "eager" (operation by operation, freeing at last use), "inductor", or "auto": eager on CPU, inductor on CUDA.
        memory: a budget in bytes; not available yet.
        passes: "auto", or the graph passes to run, in order.
        strict: with a plan: what it did not ask for (a redistribution, an operation computed whole on every rank) is an error.
        release_over: bytes; values of at least this size are freed at their last use, smaller ones when the step ends.

    Returns:
        A function with `.lower(...)`, `.status` and `.report()`.

    Raises:
        NotImplementedError: `memory` is given.
        ValueError: an unknown back end, or a name in `donate` or `static_argnames` that is no argument of the function.

    >>> import torch
    >>> step = jit(lambda state, x: {"sum": state["sum"] + x.sum()}, donate="state")
    >>> float(step({"sum": torch.tensor(1.0)}, torch.ones(3))["sum"])
    4.0
    """
    if memory is not None:
        raise NotImplementedError("jit(memory=...) is not available yet: leave it out")
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is unknown; choose one of {', '.join(BACKENDS)}")
    options = Options(backend, passes if isinstance(passes, str) else tuple(passes), release_over)
    if isinstance(options.passes, str) and options.passes != "auto":
        raise ValueError(f'passes={options.passes!r} is unknown; give "auto" or a sequence of passes')
    if plan is not None:
        return PlannedJit(function, _names(donate), _names(static_argnames), options, plan, strict)
    return Jitted(function, _names(donate), _names(static_argnames), options)


def _names(given: str | Iterable[str]) -> frozenset[str]:
    return frozenset((given,) if isinstance(given, str) else given)
