"""Virtual ranks: one rank's graph run for every rank of a mesh, in lock step, in this process. No process group, no thread, any mesh.

Every collective is really computed from every rank's tensors, and every rank holds shards of its own.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx

from functrain.compile.codegen import last_uses
from functrain.compile.collectives import AXIS_OPERATIONS, ops, place_along, shard_start
from functrain.compile.graph import operations, outputs, placeholders
from functrain.sharding import Mesh

Ranked = list[Any]  # one value a rank


class VirtualProgram:
    """A graph that runs for all ranks: `call` takes and returns lists of values, each a list over ranks."""

    def __init__(self, graph: fx.GraphModule, mesh: Mesh) -> None:
        self.mesh = mesh
        self.ranks = range(mesh.world_size)
        self._inputs = placeholders(graph.graph)
        self._outputs = outputs(graph.graph)
        self._constants = {n: getattr(graph, str(n.target)) for n in graph.graph.nodes if n.op == "get_attr"}
        dying = last_uses(graph.graph)
        self._steps = [(node, self._runner(node), dying.get(node, [])) for node in operations(graph.graph)]
        self._unused = [n for n in self._inputs if not n.users]

    def call(self, inputs: list[Ranked]) -> list[Ranked]:
        """Run; empties its argument. A value is let go of after its last use."""
        env: dict[fx.Node, Ranked] = {node: [value] * len(self.ranks) for node, value in self._constants.items()}
        env.update(zip(self._inputs, inputs, strict=True))
        inputs.clear()
        for node in self._unused:
            del env[node]
        for node, run, dying in self._steps:
            env[node] = run(env)
            for gone in dying:
                del env[gone]
        return [env[x] if isinstance(x, fx.Node) else [x] * len(self.ranks) for x in self._outputs]

    def _runner(self, node: fx.Node) -> Callable[[dict[fx.Node, Ranked]], Ranked]:
        target: Any = node.target
        if target is ops.wait.default:
            started: Any = node.args[0]
            return operator.itemgetter(started)
        if target is shard_start:
            axes, sizes, width = node.args
            starts = [place_along(self.mesh.coordinate(rank), axes, sizes) * width for rank in self.ranks]  # type: ignore[arg-type,operator]
            return functools.partial(_same, starts)
        if target in AXIS_OPERATIONS:
            arguments: Any = node.args
            x, axis, rest = arguments[0], arguments[1], arguments[2:]

            def run_collective(env: dict[fx.Node, Ranked]) -> Ranked:
                return collective(target, env[x], self.mesh, axis, rest)

            return run_collective

        read = node.all_input_nodes

        def run(env: dict[fx.Node, Ranked]) -> Ranked:
            results = []
            for rank in self.ranks:
                mine = {n: env[n][rank] for n in read}
                args, kwargs = fx.map_arg((node.args, node.kwargs), mine.__getitem__)
                results.append(target(*args, **kwargs))
            return results

        return run


def _same(value: Ranked, env: dict[fx.Node, Ranked]) -> Ranked:
    return value


def collective(target: Any, values: Sequence[torch.Tensor], mesh: Mesh, axis: str, rest: Sequence[Any]) -> Ranked:
    """One collective, for all ranks.

    Args:
        target: an operation of `collectives.py` over an axis.
        values: its first argument, one a rank.
        mesh: tells who is whose peer.
        axis: its mesh axis.
        rest: its further arguments.
    """
    out: Ranked = [None] * mesh.world_size
    for rank in range(mesh.world_size):
        if out[rank] is None:
            line = mesh.peers(rank, axis)
            for peer, result in zip(line, _LINES[target]([values[p] for p in line], *rest), strict=True):
                out[peer] = result
    return out


def _all_gather(parts: list[torch.Tensor], dim: int, n: int) -> Ranked:
    whole = torch.cat(parts, dim)
    return [whole, *(whole.clone() for _ in parts[1:])]


def reduced(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction of the ranks' values, in rank order."""
    total = parts[0].clone()
    for part in parts[1:]:
        if op == "sum":
            total += part
        elif op == "product":
            total *= part
        elif op in ("max", "min"):
            total = torch.maximum(total, part) if op == "max" else torch.minimum(total, part)
        else:
            raise NotImplementedError(f"no reduction {op!r}")
    return total


def _all_reduce(parts: list[torch.Tensor], op: str, n: int) -> Ranked:
    total = reduced(parts, op)
    return [total, *(total.clone() for _ in parts[1:])]


def _reduce_scatter(parts: list[torch.Tensor], dim: int, n: int) -> Ranked:
    pieces = [part.chunk(n, dim) for part in parts]
    return [reduced([p[i] for p in pieces], "sum").contiguous() for i in range(n)]


def _all_to_all(parts: list[torch.Tensor], split: int, join: int, n: int) -> Ranked:
    pieces = [part.chunk(n, split) for part in parts]
    return [torch.cat([p[i] for p in pieces], join) for i in range(n)]


def _permute(parts: list[torch.Tensor], source: Sequence[int], n: int) -> Ranked:
    return [parts[s].clone() if s >= 0 else torch.zeros_like(parts[0]) for s in source]


def _my_shard(parts: list[torch.Tensor], dim: int, n: int) -> Ranked:
    return [part.chunk(n, dim)[i].clone(memory_format=torch.contiguous_format) for i, part in enumerate(parts)]


_LINES: dict[Any, Callable[..., Ranked]] = {
    ops.all_gather.default: _all_gather,
    ops.all_reduce.default: _all_reduce,
    ops.reduce_scatter.default: _reduce_scatter,
    ops.all_to_all.default: _all_to_all,
    ops.permute.default: _permute,
    ops.my_shard.default: _my_shard,
}
