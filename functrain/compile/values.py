"""A value while it is partitioned: a node of one rank's graph, how it is split over the mesh, and what of it is padding."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from functrain.sharding import Mesh, P

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Value:
    """One tensor of the captured graph on the mesh."""

    node: fx.Node  # in the rank's graph; its meta["val"] is the local fake tensor
    placements: Placements  # one for each mesh axis
    shape: tuple[int, ...]  # global, as stored: split dimensions that do not divide are rounded up
    padding: dict[int, int] = field(default_factory=dict)  # dimension -> its true size, where the stored size is larger

    @property
    def local(self) -> Any:
        """The fake tensor of a rank's piece."""
        return self.node.meta["val"]


def placements_of(spec: P, mesh: Mesh) -> Placements:
    """A spec as one placement for each mesh axis; an axis of one rank splits nothing.

    >>> from functrain.sharding import make_mesh
    >>> placements_of(P(None, "model"), make_mesh({"data": 2, "model": 2}, simulate=True))
    (Replicate(), Shard(dim=1))
    """
    found: list[Placement] = [Replicate() for _ in mesh.axis_names]
    for dim, axes in enumerate(spec):
        for axis in axes:
            if mesh.size(axis) > 1:
                found[mesh.axis_names.index(axis)] = Shard(dim)
    return tuple(found)


def spec_of(placements: Sequence[Placement], mesh: Mesh) -> P:
    """The spec of placements without partial sums."""
    entries: dict[int, list[str]] = {}
    for axis, placement in zip(mesh.axis_names, placements, strict=True):
        if isinstance(placement, Shard):
            entries.setdefault(placement.dim, []).append(axis)
    return P(*(tuple(entries.get(dim, ())) for dim in range(max(entries, default=-1) + 1)))


def parts(placements: Sequence[Placement], mesh: Mesh) -> dict[int, int]:
    """Dimension -> into how many pieces it is split."""
    found: dict[int, int] = {}
    for size, placement in zip(mesh.axis_sizes, placements, strict=True):
        if isinstance(placement, Shard):
            found[placement.dim] = found.get(placement.dim, 1) * size
    return found


def splitting_axes(placements: Sequence[Placement], mesh: Mesh, dim: int) -> tuple[str, ...]:
    """The mesh axes that split a dimension, outermost first."""
    return tuple(axis for axis, placement in zip(mesh.axis_names, placements, strict=True) if placement == Shard(dim))


def is_partial(placement: Placement) -> bool:
    """Whether each rank holds a summand."""
    return isinstance(placement, Partial)


def written(placements: Sequence[Placement], mesh: Mesh) -> str:
    """How a value is split, for messages: `data: split 0, model: whole`."""
    words = []
    for axis, placement in zip(mesh.axis_names, placements, strict=True):
        if isinstance(placement, Shard):
            words.append(f"{axis}: split {placement.dim}")
        else:
            words.append(f"{axis}: {'partial ' + placement.reduce_op if isinstance(placement, Partial) else 'whole'}")
    return ", ".join(words)
