"""What a step says about itself: status, recompilations, passes, what is released where. Values that print."""

from dataclasses import dataclass, field

from functrain.compile.codegen import Released
from functrain.compile.partition import PartitionReport
from functrain.compile.passes import PassReport
from functrain.compile.source import SourceLine


@dataclass(frozen=True)
class Status:
    """The truth about what runs when the step is called."""

    state: str  # "not captured", "captured" (operation by operation), "compiled", "fallen back", "disabled"
    backend: str  # what runs: "eager", "inductor", or "none"
    reason: str = ""  # why it is not what was asked for

    def __str__(self) -> str:
        return f"{self.state} ({self.backend})" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class Compilation:
    """One capture of the step, for one set of argument shapes."""

    number: int  # from 0
    why: str  # "first call", or what differs from the last capture
    nodes: int  # of the captured graph
    capture_seconds: float
    lower_seconds: float
    status: Status
    passes: tuple[PassReport, ...] = ()
    released: tuple[Released, ...] = ()
    kept: tuple[str, ...] = ()
    partition: PartitionReport | None = None  # on a mesh

    def __str__(self) -> str:
        timing = f"captured in {self.capture_seconds:.2f} s, lowered in {self.lower_seconds:.2f} s"
        lines = [f"compilation {self.number}: {self.why}; {self.nodes} operations, {timing}; {self.status}"]
        lines += [f"  pass {p.name}: {p.changed} places" for p in self.passes]
        total = sum(r.nbytes for r in self.released)
        lines.append(f"  {len(self.released)} values ({total} bytes) released at their last use, {len(self.kept)} kept until the end")
        lines += [f"  {line}" for line in str(self.partition).splitlines()] if self.partition else []
        return "\n".join(lines)


@dataclass(frozen=True)
class Report:
    """Everything a step has done so far."""

    function: str
    source: SourceLine | None
    compilations: tuple[Compilation, ...] = ()
    uncaptured: dict[str, int] = field(default_factory=dict)  # reason -> calls that ran operation by operation, without the graph

    def __str__(self) -> str:
        lines = [f"{self.function} ({self.source})"]
        lines += [str(c) for c in self.compilations]
        lines += [f"{count} calls ran uncaptured: {reason}" for reason, count in self.uncaptured.items()]
        return "\n".join(lines)

    def released(self) -> str:
        """A table of what is released where: bytes, value, the operation after which it goes, the line that made it."""
        rows = [r for c in self.compilations for r in c.released]
        return "\n".join(f"{r.nbytes:12d}  {r.value} after {r.after}  [{r.source}]" for r in rows)
