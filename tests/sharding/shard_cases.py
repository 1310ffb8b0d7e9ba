"""What `shard_map` is compared on, as functions of one rank that torch and JAX both run: `lax` is `ft.lax` or `jax.lax`."""

from collections.abc import Callable
from typing import Any

SHAPE = (2, 3)  # a shard is [2 n, n, 3] for an axis of n ranks


def _reduce_scatter(lax: Any) -> Callable[..., Any]:
    return getattr(lax, "reduce_scatter", None) or lax.psum_scatter  # JAX's name


def ring(n: int) -> list[tuple[int, int]]:
    return [(i, (i + 1) % n) for i in range(n)]


# name -> (function of (lax, shard, axis, size of the axis), whether the result is equal along the axis)
CASES: dict[str, tuple[Callable[..., Any], bool]] = {
    "psum": (lambda lax, x, a, n: lax.psum(x * x, a), True),
    "psum_of_a_number": (lambda lax, x, a, n: lax.psum(x, a) * lax.psum(3.0, a), True),
    "psum_used_unequally": (lambda lax, x, a, n: x * lax.psum(x * x, a) * (1 + lax.axis_index(a)), False),
    "pmean": (lambda lax, x, a, n: lax.pmean(x * x, a), True),
    "all_gather": (lambda lax, x, a, n: lax.all_gather(x * x, a, axis=1), True),
    "all_gather_last": (lambda lax, x, a, n: lax.all_gather(x * x, a, axis=-1), True),
    "all_gather_tiled": (lambda lax, x, a, n: lax.all_gather(x * x, a, axis=1, tiled=True), True),
    "all_gather_used_unequally": (lambda lax, x, a, n: lax.all_gather(x * x, a, tiled=True) * (1 + lax.axis_index(a)), False),
    "reduce_scatter": (lambda lax, x, a, n: _reduce_scatter(lax)(x * x, a, scatter_dimension=1), False),
    "reduce_scatter_tiled": (lambda lax, x, a, n: _reduce_scatter(lax)(x * x, a, tiled=True), False),
    "axis_index": (lambda lax, x, a, n: x * lax.axis_index(a), False),
    "axis_size": (lambda lax, x, a, n: x * lax.axis_size(a), False),
    "all_to_all": (lambda lax, x, a, n: lax.all_to_all(x * x, a, 1, 0), False),
    "all_to_all_last": (lambda lax, x, a, n: lax.all_to_all(x * x, a, 1, 2), False),
    "all_to_all_tiled": (lambda lax, x, a, n: lax.all_to_all(x * x, a, 0, 1, tiled=True), False),
    "all_to_all_in_place": (lambda lax, x, a, n: lax.all_to_all(x * x, a, 0, 0, tiled=True), False),
    "ppermute_ring": (lambda lax, x, a, n: lax.ppermute(x * x, a, ring(n)), False),
    "ppermute_once": (lambda lax, x, a, n: lax.ppermute(x * x, a, [(0, n - 1)]), False),
}
ONE_AXIS = {name for name in CASES if name.startswith(("all_to_all", "ppermute"))}
MESHES: list[dict[str, int]] = [{"a": 1}, {"a": 2}, {"a": 3}, {"a": 4}, {"a": 2, "b": 2}, {"b": 2, "a": 2}]
# (case, mesh, axes of the collective)
GRID = [(name, mesh, ("a",)) for name in CASES for mesh in MESHES]
GRID += [(name, mesh, ("a", "b")) for name in CASES if name not in ONE_AXIS for mesh in MESHES[-2:]]


def label(case: tuple[str, dict[str, int], tuple[str, ...]]) -> str:
    name, mesh, axes = case
    return f"{name}-{'x'.join(f'{axis}{n}' for axis, n in mesh.items())}-{''.join(axes)}"


def size(case: tuple[str, dict[str, int], tuple[str, ...]]) -> int:
    _, mesh, axes = case
    count = 1
    for axis in axes:
        count *= mesh[axis]
    return count


def global_shape(case: tuple[str, dict[str, int], tuple[str, ...]]) -> tuple[int, int, int]:
    """Dimension 0 is split by all axes, in the mesh's order."""
    _, mesh, _ = case
    world = 1
    for n in mesh.values():
        world *= n
    return (2 * size(case) * world, size(case), 3)


def local(case: tuple[str, dict[str, int], tuple[str, ...]], lax: Any) -> Callable[[Any], Any]:
    """The function of one rank; what is equal along an axis is weighted there, so that all results can be laid side by side."""
    name, _, axes = case
    function, _ = CASES[name]
    axis = axes[0] if len(axes) == 1 else axes
    return lambda x: function(lax, x, axis, size(case))


def out_axes(case: tuple[str, dict[str, int], tuple[str, ...]]) -> tuple[str, ...]:
    """The axes along which the results differ: those of dimension 0 of the global result."""
    name, mesh, axes = case
    equal = CASES[name][1]
    return tuple(axis for axis in mesh if not (equal and axis in axes))
