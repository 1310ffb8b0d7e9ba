"""A captured graph -> something that runs: the passes, then one of the back ends.

`Lowered` is what `step.lower(...)` returns: it can be read, measured and compiled, and has run nothing.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from functrain.compile.analysis import CostAnalysis, MemoryAnalysis, cost_analysis, memory_analysis
from functrain.compile.capture import Captured, Output
from functrain.compile.codegen import Program, generate
from functrain.compile.graph import Storages, outputs, placeholders
from functrain.compile.inductor import compile_graph
from functrain.compile.passes import (
    Pass,
    PassReport,
    cleanup,
    donate,
    early_updates,
    fuse_adamw,
    merge_equal,
    own_outputs,
    reuse_buffers,
    run_passes,
)
from functrain.compile.real import bound
from functrain.compile.report import Status
from functrain.compile.schedule import schedule
from functrain.compile.text import as_text
from functrain.compile.virtual import VirtualProgram
from functrain.sharding import Mesh

logger = logging.getLogger("functrain.compile")
BACKENDS = ("auto", "eager", "inductor")


@dataclass(frozen=True)
class Options:
    """How a graph is lowered."""

    backend: str  # "auto", "eager" or "inductor"
    passes: str | tuple[Pass, ...]  # "auto", or the passes to run
    release_over: int  # bytes; smaller values live until the step ends


@dataclass(frozen=True)
class Lowered:
    """One captured step after its passes: nothing has run."""

    captured: Captured
    graph: fx.GraphModule  # after the passes
    passes: tuple[PassReport, ...]
    donated: frozenset[int]  # numbers of the donated inputs
    options: Options
    mesh: Mesh | None = None  # whose collectives the graph has

    @property
    def ranks(self) -> bool:
        """Whether the graph is that of one rank of several."""
        return self.mesh is not None and self.mesh.world_size > 1

    def as_text(self) -> str:
        """The graph as readable code: each operation with the shape of its result and the user's line."""
        return as_text(self.graph, self.captured.in_paths)

    def memory_analysis(self) -> MemoryAnalysis:
        """Bytes of arguments, results, temporaries, and the peak by liveness."""
        return memory_analysis(self.graph, self.donated)

    def cost_analysis(self) -> CostAnalysis:
        """Floating-point operations and bytes accessed."""
        return cost_analysis(self.graph)

    def compile(self) -> "Executable":
        """Make it runnable on a list of leaves."""
        return build(self)


@dataclass(frozen=True)
class Executable:
    """A lowered step that runs."""

    lowered: Lowered
    call: Callable[[list[torch.Tensor]], list[Any]]  # empties its argument
    program: Program | None  # of the eager back end
    status: Status
    seconds: float  # how long lowering took
    aliased: frozenset[int]  # donated inputs whose memory a result took over


def lower(captured: Captured, donated: frozenset[int], options: Options, mesh: Mesh | None = None) -> Lowered:
    """Run the passes that the back end wants; on a mesh of several ranks collectives are scheduled too."""
    if options.backend not in BACKENDS:
        raise ValueError(f"backend {options.backend!r} is unknown; choose one of {', '.join(BACKENDS)}")
    # Results must not share memory whatever passes are chosen; equal ones are merged before that, and not after.
    chosen = [own_outputs(donated), *options.passes]
    if options.passes == "auto":
        scheduled = mesh is not None and mesh.world_size > 1
        chosen = [merge_equal, own_outputs(donated), *_passes(_backend(options, captured.graph, scheduled), donated, scheduled)]
    graph, reports = run_passes(captured.graph, chosen)  # type: ignore[arg-type]
    return Lowered(captured, graph, reports, donated, options, mesh)


def _passes(backend: str, donated: frozenset[int], scheduled: bool) -> list[Pass]:
    shared = [cleanup, fuse_adamw, *([schedule()] if scheduled else [])]
    if backend == "inductor":  # it orders and reuses buffers itself
        return [*shared, donate(donated)]
    return [*shared, early_updates(donated), donate(donated), reuse_buffers(donated)]


def _backend(options: Options, graph: fx.GraphModule, ranks: bool = False) -> str:
    if ranks:
        return "eager"
    if options.backend != "auto":
        return options.backend
    on_gpu = any(n.meta["val"].device.type == "cuda" for n in placeholders(graph.graph))
    return "inductor" if on_gpu else "eager"


def build(lowered: Lowered) -> Executable:
    """Make a lowered step runnable; where Inductor fails the graph runs operation by operation, and status and log say so."""
    start = time.perf_counter()
    wanted = _backend(lowered.options, lowered.graph, lowered.ranks)
    status = Status("captured", "eager")
    call: Any = None
    if lowered.ranks and lowered.options.backend == "inductor":
        status = Status("captured", "eager", "Inductor does not run a graph with collectives yet")
    if lowered.mesh is not None and lowered.mesh.kind == "virtual":
        call = VirtualProgram(lowered.graph, lowered.mesh).call
        return Executable(lowered, call, None, status, time.perf_counter() - start, _taken_over(lowered))
    if wanted == "inductor":
        try:
            call = compile_graph(lowered.graph)
            status = Status("compiled", "inductor")
        except Exception as error:
            reason = f"Inductor raised {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            logger.warning("the step runs operation by operation: %s", reason)
            logger.debug("Inductor's failure", exc_info=True)
            status = Status("fallen back", "eager", reason)
    program = None
    if call is None:
        runnable = bound(lowered.graph, lowered.mesh) if lowered.mesh is not None and lowered.ranks else lowered.graph
        program = generate(runnable, lowered.options.release_over)
        call = program.call
    return Executable(lowered, call, program, status, time.perf_counter() - start, _taken_over(lowered))


def _taken_over(lowered: Lowered) -> frozenset[int]:
    """The donated inputs that some result shows."""
    storages = Storages(lowered.graph.graph)
    owners = {storages.owner[x] for x in outputs(lowered.graph.graph) if isinstance(x, fx.Node)}
    return frozenset(i for i, node in enumerate(placeholders(lowered.graph.graph)) if i in lowered.donated and node in owners)


def rebuild_result(captured: Captured, results: Sequence[Any]) -> list[Any]:
    """The leaves of the function's result: the graph's outputs, and the plain Python values between them."""
    return [results[leaf.index] if isinstance(leaf, Output) else leaf for leaf in captured.out_leaves]
