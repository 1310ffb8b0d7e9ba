"""`shard_map`: a function of one rank's shards, with the collectives of `ft.lax`, inside a step or on its own."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from functrain import tree
from functrain.compile.capture import as_tensor_leaf
from functrain.compile.errors import CaptureError, PartitionError
from functrain.compile.lower import Options
from functrain.compile.planned import PlannedJit
from functrain.compile.shards import Inside, enter, inside_shard_map, leave, local_shards
from functrain.compile.source import current_source
from functrain.differentiate import marked, recorded_markers
from functrain.sharding import Array, Mesh, P, Plan, Sharding
from functrain.torch_internals import transform_is_active
from functrain.tree import PyTree


def shard_map(function: Callable[..., Any], mesh: Mesh, in_specs: PyTree, out_specs: PyTree) -> "ShardMapped":
    """Write a part of a step as what each rank does with its shards, as `jax.shard_map(..., check_vma=False)`.

    Inside, every tensor is this rank's shard, an operation is this rank's alone, and what is sent is what `ft.lax` says: `psum`,
    `all_gather`, `ppermute` and so on. The rest of the step sees global values. Gradients are those of the global function that comes out,
    also with respect to arguments of which each rank has a copy.

    Inside a step the mesh is that of its plan. Outside, on arrays or tensors (global values), the function is captured at its first call
    and runs on the mesh; keep what `shard_map` returns, since that holds the captured graph.

    A draw from a key is the same on each rank; for another one on each, fold in the rank:
    `ft.random.fold_in(key, ft.lax.axis_index("data"))`. `ft.with_sharding_constraint` says nothing inside. Traced values from outside must
    be arguments: one that is closed over has no local shards.

    Args:
        function: takes trees of shards, `[size / ranks along a split dimension, ...]`, and returns such trees.
        mesh: of the plan.
        in_specs: a tuple with a `P` or a tree of them for each argument; one `P` is for all leaves below its place.
        out_specs: of the result, likewise. Along an axis that a spec does not name all ranks must have the same value, as after a `psum`
            (it is not checked).

    Returns:
        A function of global values, with positional arguments only.

    Raises:
        TypeError: a spec is no `P`.
        ValueError: a spec names an axis that the mesh does not have, or has more entries than a leaf has dimensions.
        StructureError: the specs do not match the arguments or the result.
        PartitionError: a dimension does not divide, or the mesh is not the plan's.
        CaptureError: the call is not in a captured step with a plan: under `disable_jit`, `vmap` or a plain `ft.jit`.

    >>> from functrain.compile import lax
    >>> from functrain.sharding import make_mesh
    >>> mesh = make_mesh({"data": 2}, simulate=True)
    >>> center = shard_map(lambda x: x - lax.pmean(x.mean(), "data"), mesh, P("data"), P("data"))
    >>> center(torch.tensor([1.0, 2.0, 3.0, 6.0])).full()
    tensor([-2., -1.,  0.,  3.])
    """
    for label, specs in (("in_specs", in_specs), ("out_specs", out_specs)):
        for path, spec in tree.leaves_with_path(specs):
            _check_spec(spec, mesh, f"{label}/{path}".removesuffix("/"))
    return ShardMapped(function, mesh, in_specs, out_specs)


def _check_spec(spec: Any, mesh: Mesh, where: str) -> None:
    if not isinstance(spec, P):
        raise TypeError(f"{where} of shard_map is {spec!r}, not an ft.P: P() is for what each rank has whole")
    try:
        Sharding(mesh, spec)
    except ValueError as error:
        raise ValueError(f"{where} of shard_map is {spec}: {error}") from None


class ShardMapped(PlannedJit):
    """A function of shards as one of global values; see `shard_map`."""

    def __init__(self, function: Callable[..., Any], mesh: Mesh, in_specs: PyTree, out_specs: PyTree) -> None:
        @functools.wraps(function)
        def on_shards(*args: Any) -> Any:
            names = [self._parameter(i) for i in range(len(args))]
            return _on_shards(function, mesh, in_specs, out_specs, args, names)

        super().__init__(on_shards, frozenset(), frozenset(), Options("eager", "auto", 0), Plan(mesh))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on global values."""
        if kwargs:
            raise TypeError(f"{self.name} under shard_map takes positional arguments only, since in_specs has no names: not {list(kwargs)}")
        return super().__call__(*args)

    def _plainly(self, args: Any, kwargs: Any) -> Any:
        """As part of a captured step; on one rank as the function that it is."""
        mesh = self.plan.mesh
        if recorded_markers() is None and inside_shard_map() is None and mesh.world_size > 1:
            raise CaptureError(_not_here(self.name, mesh, str(self._runs_uncaptured())))
        if recorded_markers() is None and any(isinstance(x, Array) for x in tree.leaves(args)):
            return super()._plainly(args, kwargs)
        return self.function(*args)

    def _output_spec(self, *_: Any) -> Any:
        """Results stay as `out_specs` says."""
        return None


def _not_here(name: str, mesh: Mesh, reason: str) -> str:
    where = f"{current_source()}: {name} is a shard_map over {mesh}"
    if transform_is_active():
        return f"{where}, and ft.vmap or ft.jvp around it cannot split their tensors: use them inside the function, or write the batch out"
    return (
        f"{where}, which needs a step that is captured for that mesh, but it is {reason}: call it inside "
        "ft.jit(step, plan=ft.Plan(mesh, ...)) and not under ft.disable_jit(), or debug on a mesh of one rank"
    )


def _on_shards(
    function: Callable[..., Any], mesh: Mesh, in_specs: PyTree, out_specs: PyTree, args: tuple[Any, ...], names: list[str]
) -> Any:
    """Global values -> shards -> the function -> global values."""
    if inside_shard_map() is not None:
        raise CaptureError(f"{current_source()}: a shard_map inside another is not available: one can use all axes of its mesh")
    traced = recorded_markers() is not None
    local, device = [], torch.device("cpu")
    for path, x, spec in _with_specs("in_specs", in_specs, args, names):
        x = x if isinstance(x, torch.Tensor) else as_tensor_leaf(x, path)
        local.append(enter(x, _sharding(mesh, spec, x.shape, path)) if traced else x)
        device = x.device
    with local_shards(Inside(mesh, device)), marked(None):
        result = function(*tree.unflatten(tree.structure(args), local))
    whole = []
    for path, x, spec in _with_specs("out_specs", out_specs, result):
        x = x if isinstance(x, torch.Tensor) else as_tensor_leaf(x, path)
        Sharding(mesh, spec).check(x.shape, f"result {path}".strip())
        whole.append(leave(x, Sharding(mesh, spec)) if traced else x)
    return tree.unflatten(tree.structure(result), whole)


def _sharding(mesh: Mesh, spec: P, shape: torch.Size, path: str) -> Sharding:
    """The sharding of an argument that every rank has an equal piece of."""
    sharding = Sharding(mesh, spec)
    sharding.check(shape, path)
    for dim, size in enumerate(shape):
        if size % sharding.parts(dim):
            axes = " x ".join(f"{axis}={mesh.size(axis)}" for axis in spec.entries[dim])
            raise PartitionError(
                f"{current_source()}: {path} of shape {list(shape)} has {size} along dimension {dim}, which {sharding.parts(dim)} ranks "
                f"({axes}) do not divide: choose a multiple, or pad it before the shard_map"
            )
    return sharding


def _with_specs(label: str, specs: PyTree, values: PyTree, names: list[str] | None = None) -> Iterator[tuple[str, Any, P]]:
    """(path, leaf, spec) of every leaf; a spec is for all leaves below its place."""
    found, structure = tree.flatten(specs)
    try:
        below = structure.flatten_up_to(values)
    except ValueError:
        raise tree.StructureError(
            f"{current_source()}: {label} of shard_map: {tree.mismatch(specs, values)}. Give a P for each place, or one P "
            "for a whole sub-tree"
        ) from None
    of_leaves = [spec for spec, values in zip(found, below, strict=True) for _ in tree.leaves(values)]
    for (path, x), spec in zip(tree.leaves_with_path(values), of_leaves, strict=True):
        place, _, rest = path.partition("/")
        yield (path if names is None else f"{names[int(place)]}/{rest}".removesuffix("/")), x, spec
