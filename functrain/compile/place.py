"""State in shards: `init` makes it so, `device_put` moves it, and operations on arrays outside a step run where the shards are."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from functrain import tree
from functrain.compile.lower import Options
from functrain.compile.planned import PlannedJit
from functrain.sharding import Array, Mesh, P, Plan, Sharding, place, register_runner
from functrain.tree import PyTree

_EAGER = Options("eager", "auto", 0)


def init(function: Callable[..., Any], *args: Any, plan: Plan | None = None) -> Any:
    """Call a function that makes a state, so that no rank ever holds all of it.

    Random leaves are drawn shard by shard: an element depends on its key and its place in the whole leaf, so the values are the same on
    any mesh.

    Args:
        function: returns a tree of tensors; pure.
        args: its arguments; tensors (keys) are equal on all ranks.
        plan: where the leaves go; None calls the function as it is.

    Returns:
        The state, its leaves arrays on the plan's mesh.

    >>> from functrain import random
    >>> from functrain.sharding import make_mesh, zero
    >>> plan = Plan(make_mesh({"data": 2}, simulate=True), zero(3, min_size=0))
    >>> init(lambda key: {"params": {"w": random.normal(key, (4, 3))}}, random.key(0), plan=plan)["params"]["w"]
    Array([4, 3], float32, P('data') on data=2 (virtual))
    """
    if plan is None:
        return function(*args)
    dynamic = [i for i, x in enumerate(args) if any(isinstance(leaf, (torch.Tensor, Array)) for leaf in tree.leaves(x))]

    @functools.wraps(function)
    def make(*tensors: Any) -> Any:
        given = list(args)
        for i, x in zip(dynamic, tensors, strict=True):
            given[i] = x
        return function(*given)

    whole = Plan(plan.mesh, *plan.rules, *plan.zeros, params=plan.params_name, opt_state=plan.opt_state_names)
    return PlannedJit(make, frozenset(), frozenset(), _EAGER, whole)(*[args[i] for i in dynamic])


def device_put(values: PyTree, where: Plan | Sharding | PyTree) -> PyTree:
    """Move a tree of tensors and arrays to other shardings, as `jax.device_put`; only what must move is sent.

    Args:
        values: a tree of tensors (global values, equal on all ranks), numbers, and arrays.
        where: a plan, one sharding for all leaves, or a tree of shardings.

    Raises:
        StructureError: a tree of shardings has another structure.

    >>> from functrain.sharding import make_mesh
    >>> mesh = make_mesh({"data": 2}, simulate=True)
    >>> device_put(torch.arange(4.0), Sharding(mesh, P("data"))).shards[1]
    tensor([2., 3.])
    """
    leaves, structure = tree.flatten(values)
    paths = tree.paths(values)
    leaves = [x if isinstance(x, (torch.Tensor, Array)) else torch.as_tensor(x) for x in leaves]
    if isinstance(where, Plan):
        layout = where.layout(leaves, paths)
        wanted = [Sharding(where.mesh, layout.spec(path, x.shape)) for path, x in zip(paths, leaves, strict=True)]
    elif isinstance(where, Sharding):
        wanted = [where] * len(leaves)
    else:
        wanted = tree.leaves(tree.map(lambda _, sharding: sharding, values, where))
    for path, x, sharding in zip(paths, leaves, wanted, strict=True):
        sharding.check(x.shape, path or "the leaf")
    moving = [i for i, x in enumerate(leaves) if isinstance(x, Array) and x.sharding != wanted[i] and x.mesh == wanted[i].mesh]
    by_mesh: dict[Mesh, list[int]] = {}
    for i in moving:
        by_mesh.setdefault(wanted[i].mesh, []).append(i)
    moved = dict[int, Array]()
    for mesh, places in by_mesh.items():
        specs = [wanted[i].spec for i in places]
        step = PlannedJit(_same, frozenset(), frozenset(), _EAGER, Plan(mesh), out_specs=specs)
        moved.update(zip(places, step([leaves[i] for i in places]), strict=True))
    return tree.unflatten(structure, [moved[i] if i in moved else _put(x, wanted[i]) for i, x in enumerate(leaves)])


def _same(values: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.clone() for x in values]


def _put(x: Any, sharding: Sharding) -> Array:
    if isinstance(x, Array):
        return x if x.sharding == sharding else place(x.full(), sharding)
    return place(x, sharding)


# ---- operations on arrays outside a step


@functools.lru_cache(maxsize=512)
def _captured(function: Any, structure: Any, static: tuple[Any, ...], mesh: Mesh) -> PlannedJit:
    """One operation on a mesh, captured once for each set of arguments that are no arrays."""

    def run(*arrays: Any) -> Any:
        given = iter(arrays)
        args, kwargs = tree.unflatten(structure, [next(given) if x is _ARRAY else _thawed(x) for x in static])
        return function(*args, **kwargs)

    return _AsLeft(run, frozenset(), frozenset(), _EAGER, Plan(mesh))


class _AsLeft(PlannedJit):
    """Results stay split as the operation leaves them."""

    def _output_spec(self, *_: Any) -> Any:
        return None


_ARRAY = "array"


def _run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function on arrays: where their shards are."""
    leaves, structure = tree.flatten((args, kwargs))
    arrays = [x for x in leaves if isinstance(x, (Array, torch.Tensor))]
    mesh = next(x.mesh for x in arrays if isinstance(x, Array))
    static = tuple(_ARRAY if isinstance(x, (Array, torch.Tensor)) else _frozen(x) for x in leaves)
    plain = [x if isinstance(x, Array) else place(x, Sharding(mesh, P())) for x in arrays]
    return _captured(function, structure, static, mesh)(*plain)


def _frozen(x: Any) -> Any:
    """An argument as part of a cache's key: 1 and True are equal, and slices have no hash."""
    return (slice, x.start, x.stop, x.step) if isinstance(x, slice) else (type(x), x)


def _thawed(x: Any) -> Any:
    return slice(*x[1:]) if x[0] is slice else x[1]


register_runner(_run)
