"""A captured function on a mesh: its leaves are arrays, its graph is that of one rank, and a plan says where everything lives."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from functrain import tree
from functrain.compile.abstract import ShapeDtypeStruct
from functrain.compile.capture import Captured, Output, as_tensor_leaf, capture
from functrain.compile.collectives import MARK
from functrain.compile.entry import signature_of
from functrain.compile.errors import PartitionError
from functrain.compile.fingerprint import check_equal_on_all_ranks
from functrain.compile.guards import Guards, watch
from functrain.compile.jitted import Jitted, LoweredCall, add_line, ambient, static_key
from functrain.compile.lower import Executable, Lowered, Options, build, lower
from functrain.compile.partition import PartitionReport, partition
from functrain.compile.passes import cleanup, merge_equal, run_passes
from functrain.sharding import Array, ArrayLayout, Layout, P, Plan, Sharding, place


@dataclass(frozen=True)
class PlannedEntry:
    """One captured version of a planned step, and what its calls need, worked out once."""

    executable: Executable
    layouts: list[ArrayLayout]  # of the leaves that it is for
    shardings: list[Sharding]  # of the inputs
    results: list[ArrayLayout]  # of the graph's outputs
    donated: list[tuple[int, str]]  # places of donated leaves, and what to call each in an error
    guards: Guards

    def fits(self, leaves: list[Any]) -> bool:
        """Whether the leaves are arrays of these layouts, or plain tensors of these shapes and dtypes."""
        found = [getattr(x, "layout", None) for x in leaves]
        if found == self.layouts:
            return True
        return len(leaves) == len(self.layouts) and all(
            have == want if have.__class__ is ArrayLayout else type(x) is torch.Tensor and x.shape == want.shape and x.dtype == want.dtype
            for x, have, want in zip(leaves, found, self.layouts, strict=True)
        )


class PlannedJit(Jitted):
    """A function captured for a mesh. Call it as the function; see `jit`."""

    def __init__(
        self,
        function: Any,
        donate: frozenset[str],
        static: frozenset[str],
        options: Options,
        plan: Plan,
        strict: bool = False,
        out_specs: Sequence[P | None] | None = None,
    ) -> None:
        super().__init__(function, donate, static, options)
        self.plan, self.strict = plan, strict
        self._out_specs = out_specs  # of every tensor of the result, where the plan is not to say; None: as the operations leave it
        self._planned: dict[Any, list[PlannedEntry]] = {}
        self._last_planned: tuple[Any, PlannedEntry] | None = None

    # ---- calling

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step on the mesh; leaves are arrays, or plain tensors that hold the global value."""
        reason = self._runs_uncaptured()
        if reason is not None:
            self._uncaptured[reason] = self._uncaptured.get(reason, 0) + 1
            return self._plainly(args, kwargs)
        args, kwargs, statics = self._split_static(args, kwargs) if self.static else (args, kwargs, {})
        entry, leaves = self._recall_planned(args, kwargs, statics)
        if entry is None:
            leaves, key = self._flatten(args, kwargs, statics)
            paths = self._paths(key[0])
            leaves = self._placed(leaves, paths)
            entry = next((e for e in self._planned.get(key, ()) if e.fits(leaves)), None)
            if entry is None:
                entry = self._compile_planned(leaves, key, statics)
            self._last_planned = key, entry
        return self._run_planned(entry, leaves)

    def _recall_planned(self, args: Any, kwargs: Any, statics: dict[str, Any]) -> tuple[PlannedEntry | None, list[Any]]:
        """The latest entry where this call is like the one before."""
        if self._last_planned is None:
            return None, []
        (structure, static, around), entry = self._last_planned
        try:
            leaves = structure.flatten_up_to((args, kwargs))
        except ValueError:
            return None, []
        same = entry.fits(leaves) and around == ambient() and static == static_key(statics)
        return (entry, leaves) if same else (None, [])

    def _placed(self, leaves: list[Any], paths: list[str]) -> list[Any]:
        """Every leaf as an array on the plan's mesh: a plain tensor or number is a global value."""
        leaves = [x if isinstance(x, Array) else as_tensor_leaf(x, path) for x, path in zip(leaves, paths, strict=True)]
        layout = self.plan.layout(leaves, paths)
        specs = self._input_specs(leaves, paths, layout)
        mesh = self.plan.mesh
        return [
            x if isinstance(x, Array) else place(x, Sharding(mesh, spec), path) for x, path, spec in zip(leaves, paths, specs, strict=True)
        ]

    def _plainly(self, args: Any, kwargs: Any) -> Any:
        """The function itself, on global values."""
        args, kwargs = tree.map(lambda x: x.full() if isinstance(x, Array) else x, (args, kwargs))
        result = self.function(*args, **kwargs)
        layout = self.plan.layout([x for x in tree.leaves(result) if isinstance(x, torch.Tensor)], _tensor_paths(result))

        def put(path: str, x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            return place(x, Sharding(self.plan.mesh, layout.spec(path, x.shape)), path)

        return tree.map_with_path(put, result)

    def _run_planned(self, entry: PlannedEntry, leaves: list[Any]) -> Any:
        entry.guards.check()
        inputs = [x.shards if type(x) is Array else place(x, sharding).shards for x, sharding in zip(leaves, entry.shardings, strict=True)]
        for i, label in entry.donated:
            if type(leaves[i]) is Array:
                leaves[i].retire(label)
        del leaves
        virtual = self.plan.mesh.kind == "virtual"
        try:
            with torch.no_grad():
                results = entry.executable.call(inputs if virtual else [shards[0] for shards in inputs])
        except Exception as error:
            add_line(error, entry.executable)
            raise
        arrays = [Array(layout, x if virtual else (x,)) for layout, x in zip(entry.results, results, strict=True)]
        captured = entry.executable.lowered.captured
        return tree.unflatten(
            captured.out_structure, [arrays[leaf.index] if isinstance(leaf, Output) else leaf for leaf in captured.out_leaves]
        )

    # ---- capturing

    def _compile_planned(self, leaves: list[Any], key: Any, statics: dict[str, Any]) -> PlannedEntry:
        if self.plan.mesh.kind == "abstract":
            raise PartitionError(
                "a step on an abstract mesh cannot run; use step.lower(...) to plan, or make_mesh(..., simulate=True) to run"
            )
        lowered, guards, report, shardings, results = self._lower_planned(leaves, key, statics)
        check_equal_on_all_ranks(self.name, lowered.graph, self.plan.mesh)
        executable = build(lowered)
        self._note(executable, key, signature_of([_abstract(x) for x in leaves]), report)
        paths = lowered.captured.in_paths
        donated = [(i, f"{paths[i]} of {self.name}") for i in sorted(lowered.donated)]
        layouts = [ArrayLayout(torch.Size(x.shape), x.dtype, s) for x, s in zip(leaves, shardings, strict=True)]
        entry = PlannedEntry(executable, layouts, shardings, results, donated, guards)
        self._planned.setdefault(key, []).insert(0, entry)
        return entry

    def _lower_planned(
        self, leaves: list[Any], key: Any, statics: dict[str, Any]
    ) -> tuple[Lowered, Guards, PartitionReport, list[Sharding], list[ArrayLayout]]:
        paths = self._paths(key[0])
        guards = watch(self.function)
        captured = capture(self.function, [_abstract(x) for x in leaves], paths, self._rebuild(key[0], statics), MARK)
        guards.check(during_capture=True)
        # One reduction, not two, of what a metric and a clip both want; no copies between a fill and its use.
        captured = replace(captured, graph=run_passes(captured.graph, [merge_equal, cleanup])[0])
        layout = self.plan.layout(leaves, paths)
        if not any(layout.role(path) == "params" for path in paths):  # a function that makes a state
            outs = [n.meta["val"] for n in captured.graph.graph.output_node().args[0]]
            layout = self.plan.layout(outs, captured.out_paths)
        in_specs = self._input_specs(leaves, paths, layout)
        known = {layout.state_path(path): spec for path, spec in zip(paths, in_specs, strict=True) if layout.role(path) != "batch"}
        by_plan = [self._output_spec(path, n, layout, known) for path, n in zip(captured.out_paths, _outputs(captured), strict=True)]
        cut = partition(captured.graph, (paths, captured.out_paths), in_specs, self._out_specs or by_plan, self.plan, layout)
        if self.strict and (cut.report.unplanned_large or cut.report.replicated):
            found = "\n".join(map(str, [*cut.report.unplanned_large, *cut.report.replicated]))
            raise PartitionError(f"{self.name} does more than its plan asks for, and strict=True:\n{found}")
        donated = frozenset(i for i, path in enumerate(paths) if path.split("/")[0] in self.donate)
        lowered = lower(replace(captured, graph=cut.graph), donated, self.options, self.plan.mesh)
        mesh = self.plan.mesh
        results = [
            ArrayLayout(n.meta["val"].shape, n.meta["val"].dtype, Sharding(mesh, spec))
            for n, spec in zip(_outputs(captured), cut.out_specs, strict=True)
        ]
        return lowered, guards, cut.report, [Sharding(mesh, spec) for spec in in_specs], results

    def _input_specs(self, leaves: Sequence[Any], paths: Sequence[str], layout: Layout) -> list[P]:
        """Where each argument leaf is: an array where it says, a leaf of an argument that holds state by the plan, others as a batch."""
        states = {path.partition("/")[0] for path in paths if layout.role(path) != "other"}
        specs = []
        for leaf, path in zip(leaves, paths, strict=True):
            if isinstance(leaf, Array):
                if leaf.mesh != self.plan.mesh:
                    raise PartitionError(f"{path} lives on the mesh {leaf.mesh}, but the plan of {self.name} is for {self.plan.mesh}")
                specs.append(leaf.sharding.spec)
            elif path.partition("/")[0] in states:
                specs.append(layout.spec(path, leaf.shape))
            else:
                specs.append(self._batch_spec(leaf, path))
        return specs

    def _batch_spec(self, leaf: Any, path: str) -> P:
        batch = self.plan.batch
        if isinstance(batch, P):
            if not leaf.shape or (tuple(leaf.shape[-1:]) == (2,) and leaf.dtype == torch.int64 and len(leaf.shape) == 1):
                return P()  # a scalar or a random key
            spec = P(*batch.entries[: len(leaf.shape)])
        else:
            spec = next((s for pattern, s in batch.items() if tree.matches(pattern, path)), P())
        sharding = Sharding(self.plan.mesh, spec)
        sharding.check(leaf.shape, path)
        for dim, size in enumerate(leaf.shape):
            if size % sharding.parts(dim):
                raise PartitionError(
                    f"batch leaf {path} of shape {list(leaf.shape)} has {size} along dimension {dim}, which {sharding.parts(dim)} ranks "
                    f"({spec}) do not divide: choose a multiple, drop the rest, or pad the batch with rows of weight 0"
                )
        return spec

    def _output_spec(self, path: str, node: Any, layout: Layout, known: dict[str, P]) -> P:
        shape = tuple(node.meta["val"].shape)
        name = layout.state_path(path)
        for candidate in (name, name.partition("/")[2]):  # the state may be one of several results
            if candidate in known and layout.shapes.get(candidate) == shape:
                return known[candidate]
        return layout.spec(path, shape)

    # ---- looking

    def lower(self, *args: Any, **kwargs: Any) -> LoweredCall:
        """Capture and cut for these arguments, real or abstract, without running anything; `.graph` is one rank's."""
        args, kwargs, statics = self._split_static(args, kwargs)
        leaves, key = self._flatten(args, kwargs, statics)
        paths = self._paths(key[0])
        kept = (Array, ShapeDtypeStruct)
        leaves = [x if isinstance(x, kept) else as_tensor_leaf(x, path) for x, path in zip(leaves, paths, strict=True)]
        lowered, guards, report, _, _ = self._lower_planned(leaves, key, statics)
        return PlannedCall(self, lowered, key, guards, leaves, report, statics)


class PlannedCall(LoweredCall):
    """What `step.lower(...)` returns on a mesh."""

    def __init__(
        self,
        step: PlannedJit,
        lowered: Lowered,
        key: Any,
        guards: Guards,
        leaves: list[Any],
        report: PartitionReport,
        statics: dict[str, Any],
    ) -> None:
        super().__init__(step, lowered, key, guards, leaves)
        self.partition, self._statics = report, statics

    def compile(self) -> Jitted:
        """The step, with this call's graph built."""
        step: Any = self._step
        if not any(entry.fits(self._leaves) for entry in step._planned.get(self._key, ())):
            step._compile_planned(self._leaves, self._key, self._statics)
        return self._step


def _abstract(leaf: Any) -> ShapeDtypeStruct:
    return ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype, getattr(leaf, "device", torch.device("cpu")))


def _outputs(captured: Captured) -> list[Any]:
    return list(captured.graph.graph.output_node().args[0])


def _tensor_paths(value: Any) -> list[str]:
    return [path for path, x in tree.leaves_with_path(value) if isinstance(x, torch.Tensor)]
