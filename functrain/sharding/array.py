"""`Array`: one global tensor, as the shards of it that this process holds."""

import html
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from functrain import tree
from functrain.sharding.mesh import Mesh
from functrain.sharding.spec import P, Sharding
from functrain.tree import PyTree


class ArrayLayout(NamedTuple):
    """Everything about an array but its values."""

    shape: torch.Size  # global
    dtype: torch.dtype
    sharding: Sharding


class Array:
    """A tensor of a global shape whose shards rest where a `Sharding` says.

    Every shard has one size: a split dimension that does not divide is rounded up, and what lies beyond the global shape is padding.
    """

    __slots__ = ("_donated", "_shards", "layout")

    def __init__(self, layout: ArrayLayout, shards: Sequence[torch.Tensor]) -> None:
        self.layout = layout
        self._shards: Sequence[torch.Tensor] | None = shards
        self._donated: str | None = None

    # ---- what it is

    @property
    def shape(self) -> torch.Size:
        """The global shape."""
        return self.layout.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        return self.layout.dtype

    @property
    def sharding(self) -> Sharding:
        """Where it lives."""
        return self.layout.sharding

    @property
    def shards(self) -> Sequence[torch.Tensor]:
        """The shards of this process, padding included: one on a real rank, one for each virtual rank.

        Raises:
            ValueError: the array was donated to a step.
        """
        if self._shards is None:
            raise ValueError(
                f"{self._donated} was donated: the step took its memory, and the array has no values any more. Use the step's result "
                "instead, or leave the argument out of `donate`."
            )
        return self._shards

    def retire(self, label: str) -> None:
        """Let go of the shards; using the array from now on raises an error with this label."""
        self._shards, self._donated = None, label

    @property
    def mesh(self) -> Mesh:
        """The mesh that it lives on."""
        return self.sharding.mesh

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the global value."""
        return self.numel() * self.dtype.itemsize

    @property
    def device(self) -> torch.device:
        """Where the shards are."""
        return self.shards[0].device if self.shards else torch.device("cpu")

    def numel(self) -> int:
        """Elements of the global value."""
        return self.shape.numel()

    # ---- operations, which whoever can capture them runs

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run a torch function where the shards are."""
        return _runner[0](function, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        method = getattr(torch.Tensor, name, None)
        if name.startswith("_") or not callable(method):
            raise AttributeError(f"an Array has no {name!r}")
        return lambda *args, **kwargs: _runner[0](method, (self, *args), kwargs)

    # ---- its values

    def full(self) -> torch.Tensor:
        """The global value; on a real mesh every rank must call this."""
        if not self.mesh.local_ranks:
            raise ValueError("an array on an abstract mesh has no values")
        if self.sharding.is_replicated():
            return self.shards[0]
        return assemble(self, _all_shards(self))

    def numpy(self) -> np.ndarray:
        """The global value as a numpy array."""
        return self.full().cpu().numpy()

    # ---- to and from DTensor

    def to_dtensor(self) -> DTensor:
        """The same values as a DTensor, on the shards' own memory; on a real mesh all ranks call this together the first time.

        A DTensor has no padding: its local tensor is the part of the shard without it.

        Raises:
            ValueError: the mesh is virtual or abstract, or several axes split a dimension that they do not divide, which DTensor cuts
                elsewhere.

        >>> from functrain.sharding.mesh import make_mesh
        >>> array = place(torch.ones(4, 3), Sharding(make_mesh({"data": 1}), P("data")))
        >>> array.to_dtensor().placements
        (Shard(dim=0),)
        """
        device_mesh = self.mesh.device_mesh
        _check_nested(self.sharding, self.shape)
        box = self.sharding.shard_box(self.shape, self.mesh.coordinate(self.mesh.rank))
        local = self.shards[0][tuple(slice(0, stop - start) for start, stop in box)]
        strides = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(local, device_mesh, _placements(self.sharding), run_check=False, shape=self.shape, stride=strides)

    @staticmethod
    def from_dtensor(dtensor: DTensor, mesh: Mesh | None = None) -> "Array":
        """A DTensor as an array, on its local tensor's memory; copied where a split dimension does not divide and must be padded.

        Args:
            dtensor: on a `DeviceMesh` of all ranks in order, with named dimensions.
            mesh: the mesh to live on, of the same axes; None takes the process groups of the DTensor's.

        Raises:
            ValueError: it is a partial sum, its mesh is another one, or it is cut in a way that an array is not.

        >>> from functrain.sharding.mesh import make_mesh
        >>> array = place(torch.ones(4, 3), Sharding(make_mesh({"data": 1}), P("data")))
        >>> Array.from_dtensor(array.to_dtensor())
        Array([4, 3], float32, P('data', None) on data=1 (real))
        """
        found = Mesh.of_device_mesh(dtensor.device_mesh)
        if mesh is not None and mesh != found:
            raise ValueError(f"the DTensor lives on the mesh {found}, not on {mesh}")
        sharding = Sharding(mesh or found, _spec(dtensor, found))
        _check_nested(sharding, dtensor.shape)
        local, want = dtensor.to_local().detach(), sharding.shard_shape(dtensor.shape)
        shard = local.contiguous() if tuple(local.shape) == want else _padded(local, want)
        return Array(ArrayLayout(dtensor.shape, dtensor.dtype, sharding), [shard])

    def item(self) -> Any:
        """The value of an array of one element."""
        return self.full().item()

    def tolist(self) -> Any:
        """The global value as nested lists."""
        return self.full().tolist()

    def __float__(self) -> float:
        return float(self.full())

    def __int__(self) -> int:
        return int(self.full())

    def __bool__(self) -> bool:
        return bool(self.full())

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.numpy().astype(dtype) if dtype is not None else self.numpy()

    def __repr__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        if self._shards is None:
            return f"<donated: {self._donated}>"
        value = f", {self.shards[0].item()}" if self.ndim == 0 and self.shards else ""
        return f"Array({list(self.shape)}, {name}, {self.sharding.spec} on {self.mesh}{value})"

    def _repr_html_(self) -> str:
        """A table: which ranks hold which box of the global value."""
        holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for rank in range(self.mesh.world_size):
            holders.setdefault(self.sharding.shard_box(self.shape, self.mesh.coordinate(rank)), []).append(rank)
        rows = "".join(
            f"<tr><td>{html.escape(' x '.join(f'{a}:{b}' for a, b in box) or 'scalar')}</td><td>{', '.join(map(str, ranks))}</td></tr>"
            for box, ranks in holders.items()
        )
        return f"<div><b>{html.escape(repr(self))}</b><table><tr><th>box</th><th>ranks</th></tr>{rows}</table></div>"


def _missing(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise NotImplementedError("operations on arrays need functrain.compile: import functrain first")


_runner: list[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = [_missing]


def register_runner(runner: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Say how a torch function is run on arrays; `functrain.compile` does, once, at import."""
    _runner[0] = runner


def _operator(name: str) -> Callable[..., Any]:
    method = getattr(torch.Tensor, name)

    def apply(self: Array, *args: Any) -> Any:
        return _runner[0](method, (self, *args), {})

    return apply


_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv mod pow rpow matmul rmatmul neg abs eq ne lt le gt ge and or xor invert getitem"
)
for _name in _OPERATORS.split():
    setattr(Array, f"__{_name}__", _operator(f"__{_name}__"))
Array.__hash__ = object.__hash__  # type: ignore[method-assign]


# ---- between global values and shards


def shard_of(value: torch.Tensor, sharding: Sharding, rank: int) -> torch.Tensor:
    """A rank's shard of a global value, padded with zeros; a copy."""
    box = sharding.shard_box(value.shape, sharding.mesh.coordinate(rank))
    piece = value[tuple(slice(start, stop) for start, stop in box)]
    local = sharding.shard_shape(value.shape)
    return piece.clone(memory_format=torch.contiguous_format) if tuple(piece.shape) == local else _padded(piece, local)


def _padded(piece: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    out = piece.new_zeros(shape)
    out[tuple(slice(0, size) for size in piece.shape)] = piece
    return out


def place(value: torch.Tensor, sharding: Sharding, path: str = "the leaf") -> Array:
    """An array of a global value that every process has.

    Raises:
        ValueError: the spec is longer than the value has dimensions.
    """
    sharding.check(value.shape, path)
    device = sharding.mesh.groups.device if sharding.mesh.groups else value.device
    shards = [shard_of(value.detach(), sharding, rank).to(device) for rank in sharding.mesh.local_ranks]
    return Array(ArrayLayout(value.shape, value.dtype, sharding), shards)


def assemble(array: Array, shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """The global value from the shards of all ranks."""
    out = torch.empty(array.shape, dtype=array.dtype, device=shards[0].device)
    for rank, shard in enumerate(shards):
        box = array.sharding.shard_box(array.shape, array.mesh.coordinate(rank))
        out[tuple(slice(start, stop) for start, stop in box)] = shard[tuple(slice(0, stop - start) for start, stop in box)]
    return out


def _all_shards(array: Array) -> Sequence[torch.Tensor]:
    """The shards of all ranks, in rank order."""
    if array.mesh.kind == "virtual" or array.mesh.groups is None:
        return array.shards
    mine = array.shards[0].contiguous()
    bytes_ = mine.view(torch.uint8) if mine.ndim else mine.reshape(1).view(torch.uint8)
    parts = [torch.empty_like(bytes_) for _ in range(array.mesh.world_size)]
    torch.distributed.all_gather(parts, bytes_, group=array.mesh.groups.everyone)
    return [part.view(array.dtype).reshape(mine.shape) for part in parts]


def from_local(values: PyTree, mesh: Mesh, spec: P) -> PyTree:
    """Arrays from each rank's own rows, such as a loader yields on real ranks.

    Args:
        values: a tree of tensors `[rows of this rank, ...]`; on a virtual mesh a list of such trees, one a rank.
        mesh: where the arrays live.
        spec: how the global value is split; its rows are the ranks' rows in order.

    Raises:
        ValueError: ranks of a virtual mesh differ in shape.

    >>> from functrain.sharding.mesh import make_mesh
    >>> mesh = make_mesh({"data": 2}, simulate=True)
    >>> from_local([torch.zeros(3, 4), torch.ones(3, 4)], mesh, P("data")).shape
    torch.Size([6, 4])
    """
    sharding = Sharding(mesh, spec)
    per_rank = values if mesh.kind == "virtual" else [values]
    if mesh.kind == "virtual" and len(per_rank) != mesh.world_size:
        raise ValueError(
            f"a virtual mesh of {mesh.world_size} ranks takes a list of {mesh.world_size} trees, one a rank, not {len(per_rank)}"
        )

    def join(path: str, *shards: torch.Tensor) -> Array:
        if len({(shard.shape, shard.dtype) for shard in shards}) > 1:
            raise ValueError(f"{path or 'the leaf'} differs between ranks: {', '.join(str(list(shard.shape)) for shard in shards)}")
        shape = [size * (sharding.parts(dim)) for dim, size in enumerate(shards[0].shape)]
        sharding.check(shape, path or "the leaf")
        return Array(ArrayLayout(torch.Size(shape), shards[0].dtype, sharding), shards)

    return tree.map_with_path(join, *per_rank)


# ---- DTensor's words for the same


def _placements(sharding: Sharding) -> list[Placement]:
    splits = {axis: dim for dim, axes in enumerate(sharding.spec) for axis in axes}
    return [Shard(splits[axis]) if axis in splits else Replicate() for axis in sharding.mesh.axis_names]


def _spec(dtensor: DTensor, mesh: Mesh) -> P:
    entries: list[list[str]] = [[] for _ in dtensor.shape]
    for axis, placement in zip(mesh.axis_names, dtensor.placements, strict=True):
        if type(placement) is Shard:
            entries[placement.dim].append(axis)
        elif not isinstance(placement, Replicate):
            raise ValueError(f"a DTensor that is {placement} along {axis!r} is no array: redistribute it to Shard or Replicate first")
    return P(*map(tuple, entries))


def _check_nested(sharding: Sharding, shape: Sequence[int]) -> None:
    """Raise where DTensor, which cuts axis by axis, cuts elsewhere than an array, which cuts into equal parts at once."""
    for dim, axes in enumerate(sharding.spec):
        if sum(sharding.mesh.size(axis) > 1 for axis in axes) > 1 and shape[dim] % sharding.parts(dim):
            raise ValueError(
                f"dimension {dim} of {list(shape)} is split by {', '.join(axes)} into {sharding.parts(dim)} parts, which do not divide it: "
                "an Array and a DTensor cut it at different places; move it to a spec that divides first"
            )
