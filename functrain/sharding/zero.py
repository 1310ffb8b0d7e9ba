"""ZeRO as specs: which of params, gradients and optimizer state have the data axis in their spec.

Rajbhandari et al. 2020, arXiv 1910.02054.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from functrain import tree
from functrain.sharding.mesh import Mesh
from functrain.sharding.spec import P

MIN_SIZE = 1024  # elements; a smaller leaf costs more in messages than it saves in bytes


@dataclass(frozen=True)
class Zero:
    """What `zero` returns: plain data that a `Plan` reads."""

    stage: int
    axes: tuple[str, ...]
    min_size: int = MIN_SIZE  # elements
    groups: tuple[str, ...] = ()  # patterns of sub-trees that are gathered and reduced as one unit
    only: str = "**"  # which params, by their path below the params
    bucket_bytes: int = 0  # neighbouring leaves outside of groups are sent together up to this size

    def covers(self, path: str) -> bool:
        """Whether this says how the param of this path (below the params) is split."""
        return tree.matches(self.only, path)

    def split(self, base: P, shape: Sequence[int], mesh: Mesh) -> P:
        """A leaf's spec with the axes that `base` does not use added to a dimension that it leaves whole.

        The dimension is the first that divides, else the largest, padded. Experts that a rule splits over an axis stay as they are there.
        """
        used = {axis for entry in base.entries for axis in entry}
        axes = [axis for axis in self.axes if axis not in used]
        parts = 1
        for axis in axes:
            parts *= mesh.size(axis)
        size = 1
        for n in shape:
            size *= n
        free = [dim for dim in range(len(shape)) if dim >= len(base) or not base.entries[dim]]
        if parts == 1 or not free or size == 0 or size < self.min_size:
            return base
        dim = next((d for d in free if shape[d] % parts == 0), max(free, key=lambda d: shape[d]))
        for axis in axes:
            base = base.adding(axis, dim)
        return base

    def to_plain(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "stage": self.stage,
            "axis": list(self.axes),
            "min_size": self.min_size,
            "groups": list(self.groups),
            "only": self.only,
            "bucket_bytes": self.bucket_bytes,
        }


def zero(
    stage: int,
    axis: str | Sequence[str] = "data",
    *,
    min_size: int = MIN_SIZE,
    groups: str | Sequence[str] = (),
    only: str = "**",
    bucket_bytes: int = 0,
) -> Zero:
    """Split the training state over an axis: nothing (0), the optimizer state (1), the gradients too (2), and the params too (3).

    Args:
        stage: 0 to 3.
        axis: the mesh axis, or several, the outermost first.
        min_size: elements; smaller leaves stay whole.
        groups: path patterns of sub-trees whose params are gathered and reduced as one unit, such as `"blocks/*"`.
        only: which params this is for, by path below the params; the first `zero` of a plan that covers a param decides.
        bucket_bytes: neighbouring leaves outside of `groups` are gathered and reduced together up to this size; 0: each on its own. The
            size changes how many messages are sent, and no number.

    Raises:
        ValueError: no such stage, or a negative size.

    >>> zero(3).split(P(), (7, 8), Mesh(("data",), (2,), "abstract"))  # too small
    P()
    >>> zero(3, min_size=0).split(P(), (7, 8), Mesh(("data",), (2,), "abstract"))
    P(None, 'data')
    """
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise ValueError(f"ZeRO has the stages 0, 1, 2 and 3, not {stage!r}")
    names = (groups,) if isinstance(groups, str) else tuple(groups)
    if bucket_bytes < 0:
        raise ValueError(f"bucket_bytes is a number of bytes, 0 or more, not {bucket_bytes}")
    return Zero(stage, (axis,) if isinstance(axis, str) else tuple(axis), min_size, names, only, bucket_bytes)
