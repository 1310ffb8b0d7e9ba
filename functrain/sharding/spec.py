"""Where the dimensions of a leaf are split (`P`), and everything about where one leaf lives (`Sharding`)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from functrain.sharding.mesh import Mesh

TIERS = ("device",)  # where a shard rests between steps


class P:
    """Per dimension of a leaf, the mesh axes that split it, as JAX's `PartitionSpec`.

    An entry is None (not split), an axis, or a tuple of axes, the first of which cuts the largest pieces. Dimensions beyond the last
    entry are not split.

    >>> P("data", None), P(("pod", "data")), P()
    (P('data', None), P(('pod', 'data')), P())
    """

    __slots__ = ("entries",)

    def __init__(self, *entries: str | Sequence[str] | None) -> None:
        self.entries: tuple[tuple[str, ...], ...] = tuple(_axes(entry) for entry in entries)
        used = [axis for axes in self.entries for axis in axes]
        for axis in used:
            if used.count(axis) > 1:
                raise ValueError(f"{self} uses the mesh axis {axis!r} twice: an axis can split one dimension of a leaf only")

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, P) and _trimmed(self.entries) == _trimmed(other.entries)

    def __hash__(self) -> int:
        return hash(_trimmed(self.entries))

    def __repr__(self) -> str:
        return f"P({', '.join(repr(_entry(axes)) for axes in self.entries)})"

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis that splits something."""
        return tuple(axis for axes in self.entries for axis in axes)

    def to_plain(self) -> list[Any]:
        """The entries as plain data: "" for a dimension that is not split."""
        return [axes[0] if len(axes) == 1 else list(axes) or "" for axes in self.entries]

    @staticmethod
    def of_plain(entries: Sequence[Any]) -> "P":
        """The spec that `to_plain` wrote."""
        return P(*(entry or None for entry in entries))

    def without(self, axes: Sequence[str]) -> "P":
        """The spec with some axes taken out: those dimensions are gathered along them."""
        return P(*(tuple(axis for axis in entry if axis not in axes) for entry in self.entries))

    def adding(self, axis: str, dim: int) -> "P":
        """The spec with one more axis that splits `dim`, inside those that split it already."""
        entries = list(self.entries) + [()] * (dim + 1 - len(self.entries))
        entries[dim] = (*entries[dim], axis)
        return P(*entries)


def _axes(entry: str | Sequence[str] | None) -> tuple[str, ...]:
    if entry is None:
        return ()
    axes = tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)
    if not all(isinstance(axis, str) and axis for axis in axes):
        raise TypeError(f"an entry of P is None, the name of a mesh axis, or a tuple of names, not {entry!r}")
    return axes


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return None if not axes else axes[0] if len(axes) == 1 else axes


def _trimmed(entries: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
    last = max((i for i, axes in enumerate(entries) if axes), default=-1)
    return entries[: last + 1]


@dataclass(frozen=True)
class Sharding:
    """Everything about where one leaf lives."""

    mesh: Mesh
    spec: P
    tier: str = "device"

    def __post_init__(self) -> None:
        if self.tier not in TIERS:
            raise NotImplementedError(f"the tier {self.tier!r} is not available yet; leaves rest on {', '.join(TIERS)}")
        for axis in self.spec.axes:
            self.mesh.size(axis)  # raises for an axis that is not there
        for entry in self.spec:
            order = [self.mesh.axis_names.index(axis) for axis in entry]
            if order != sorted(order):
                raise ValueError(
                    f"{self.spec} splits one dimension by {entry}, but the mesh has its axes in the order {self.mesh.axis_names}: name "
                    "them in that order (the first cuts the largest pieces), or make the mesh with another order"
                )

    def check(self, shape: Sequence[int], path: str = "the leaf") -> None:
        """Raise if a leaf of this shape cannot have this spec.

        Raises:
            ValueError: the spec has more entries than the leaf has dimensions.
        """
        if len(self.spec) > len(shape):
            raise ValueError(
                f"{path} of shape {list(shape)} has {len(shape)} dimensions, but its spec {self.spec} has {len(self.spec)} entries; "
                "shorten the spec"
            )

    def parts(self, dim: int) -> int:
        """Into how many pieces a dimension is cut."""
        count = 1
        for axis in self.spec.entries[dim] if dim < len(self.spec) else ():
            count *= self.mesh.size(axis)
        return count

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The global shape with every split dimension rounded up, so that all shards have one size.

        >>> from functrain.sharding.mesh import make_mesh
        >>> Sharding(make_mesh({"data": 3}, simulate=True), P("data")).stored_shape((7, 5))
        (9, 5)
        """
        return tuple(-(-size // self.parts(dim)) * self.parts(dim) for dim, size in enumerate(shape))

    def shard_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of every rank's shard, padding included."""
        return tuple(-(-size // self.parts(dim)) for dim, size in enumerate(shape))

    def shard_box(self, shape: Sequence[int], coordinate: dict[str, int]) -> tuple[tuple[int, int], ...]:
        """Per dimension (start, stop) in the global leaf of one rank's shard, without padding; empty where a rank has padding only.

        Args:
            shape: of the global leaf.
            coordinate: the rank's place along each mesh axis.
        """
        box = []
        for dim, size in enumerate(shape):
            place = 0
            for axis in self.spec.entries[dim] if dim < len(self.spec) else ():
                place = place * self.mesh.size(axis) + coordinate[axis]
            width = -(-size // self.parts(dim))
            box.append((min(place * width, size), min((place + 1) * width, size)))
        return tuple(box)

    def is_replicated(self) -> bool:
        """Whether every rank holds the whole leaf."""
        return all(self.mesh.size(axis) == 1 for axis in self.spec.axes)

    def with_spec(self, spec: P) -> "Sharding":
        """The same mesh and tier with another spec."""
        return replace(self, spec=spec)
