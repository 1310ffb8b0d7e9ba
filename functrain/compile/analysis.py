"""What a captured step will cost, from its graph alone: bytes by liveness, floating-point operations, bytes moved. Nothing runs."""

import operator
from collections import Counter
from dataclasses import dataclass

import torch
import torch.fx as fx
from torch.utils.flop_counter import flop_registry

from functrain.compile.codegen import last_uses
from functrain.compile.graph import Storages, is_mutable, is_view, operations, outputs, placeholders, value_bytes, values


@dataclass(frozen=True)
class MemoryAnalysis:
    """Bytes that one call holds, by liveness: a value lives from the operation that makes it to its last reader."""

    arguments: int  # bytes of all inputs
    outputs: int  # bytes of the results that are new (not donated inputs updated in place)
    aliased: int  # bytes of inputs that results overwrite
    constants: int  # bytes of tensors that the graph holds itself
    temporaries: int  # largest sum of values that are neither inputs nor constants, results included
    peak: int  # largest sum of everything, donated inputs leaving at their last use
    peak_at: str  # the operation at which the peak is reached
    peak_source: str  # its line

    def __str__(self) -> str:
        rows = [(name, getattr(self, name)) for name in ("arguments", "outputs", "aliased", "constants", "temporaries", "peak")]
        return (
            "\n".join(f"{name:12} {size / 2**20:12.2f} MiB" for name, size in rows) + f"\npeak at      {self.peak_at} ({self.peak_source})"
        )


@dataclass(frozen=True)
class CostAnalysis:
    """Work of one call, summed over the graph's operations."""

    flops: int  # floating-point operations of matrix products, convolutions and attention
    bytes_accessed: int  # bytes read and written by all operations, views not counted
    operations: int  # how many operations allocate or write
    by_operator: tuple[tuple[str, int], ...]  # flops by operator, most first

    def __str__(self) -> str:
        head = f"{self.flops / 1e9:.3f} GFLOP, {self.bytes_accessed / 2**20:.1f} MiB accessed, {self.operations} operations"
        return "\n".join([head, *(f"  {name:50} {flops / 1e9:10.3f} GFLOP" for name, flops in self.by_operator)])


def memory_analysis(graph: fx.GraphModule, donated: frozenset[int] = frozenset()) -> MemoryAnalysis:
    """Walk the graph in its order and add up what is alive."""
    storages = Storages(graph.graph)
    dies = _deaths(graph.graph, storages, donated)
    held = {n: _bytes(n) for n in graph.graph.nodes if n.op in ("placeholder", "get_attr")}
    arguments = sum(size for n, size in held.items() if n.op == "placeholder")
    constants = sum(size for n, size in held.items() if n.op == "get_attr")
    live, temporary, temporaries, peak, peak_at = arguments + constants, 0, 0, arguments + constants, None
    for node in operations(graph.graph):
        made = _bytes(node) if storages.owner[node] is node else 0
        live, temporary = live + made, temporary + made
        temporaries = max(temporaries, temporary)
        if live > peak:
            peak, peak_at = live, node
        for owner in dies.get(node, ()):
            size = _bytes(owner)
            live -= size
            temporary -= size if owner.op == "call_function" else 0
    results = {storages.owner[x] for x in outputs(graph.graph) if isinstance(x, fx.Node)}
    return MemoryAnalysis(
        arguments=arguments,
        outputs=sum(_bytes(x) for x in results if x.op == "call_function"),
        aliased=sum(_bytes(x) for x in results if x.op == "placeholder"),
        constants=constants,
        temporaries=temporaries,
        peak=peak,
        peak_at=peak_at.name if peak_at is not None else "the start",
        peak_source=str(peak_at.meta.get("source")) if peak_at is not None else "",
    )


def _bytes(node: fx.Node) -> int:
    """Bytes that a node allocated. The items of a tuple own them; the tuple itself nothing."""
    val = node.meta.get("val")
    return value_bytes(val) if isinstance(val, torch.Tensor) else 0


def _deaths(graph: fx.Graph, storages: Storages, donated: frozenset[int]) -> dict[fx.Node, list[fx.Node]]:
    """For each operation, the storages whose last member has its last use there. Inputs that are not donated are the caller's."""
    kept = {n for i, n in enumerate(placeholders(graph)) if i not in donated} | {n for n in graph.nodes if n.op == "get_attr"}
    returned = {storages.owner[x] for x in outputs(graph) if isinstance(x, fx.Node)}
    last = {storages.owner[value]: node for node, ending in reversed(list(last_uses(graph).items())) for value in ending}
    dies: dict[fx.Node, list[fx.Node]] = {}
    for owner, node in last.items():
        if owner not in returned and owner not in kept:
            dies.setdefault(node, []).append(owner)
    return dies


def cost_analysis(graph: fx.GraphModule) -> CostAnalysis:
    """Add up flops by torch's formulas, and the bytes of each operation's arguments and results."""
    flops: Counter[str] = Counter()
    moved = count = 0
    for node in operations(graph.graph):
        if node.target is operator.getitem or (is_view(node) and not is_mutable(node)):
            continue
        count += 1
        moved += sum(x.numel() * x.element_size() for source in (*node.all_input_nodes, node) for x in values(source))
        formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
        if formula is not None:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            flops[str(node.target)] += int(formula(*args, **kwargs, out_val=node.meta["val"]))
    return CostAnalysis(sum(flops.values()), moved, count, tuple(flops.most_common()))
