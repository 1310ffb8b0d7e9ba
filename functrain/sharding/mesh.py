"""A mesh: the ranks of a run arranged along named axes, real, virtual (all in this process) or abstract (for planning)."""

import atexit
import datetime
import functools
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from functrain.torch_internals import mesh_for_rules, register_one_thread_gloo

KINDS = ("real", "virtual", "abstract")


@dataclass(frozen=True)
class Mesh:
    """Named axes over ranks, numbered row-major: the last axis varies fastest. Made by `make_mesh`."""

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    kind: str  # "real": one rank is this process; "virtual": all ranks are in this process; "abstract": there are none
    rank: int = 0  # of this process, on a real mesh
    groups: "Groups | None" = field(default=None, compare=False, repr=False)  # process groups of a real mesh of several ranks

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return math.prod(self.axis_sizes)

    @property
    def shape(self) -> dict[str, int]:
        """Axis name -> size."""
        return dict(zip(self.axis_names, self.axis_sizes, strict=True))

    def size(self, axis: str) -> int:
        """The size of an axis.

        Raises:
            ValueError: there is no such axis.
        """
        if axis not in self.axis_names:
            raise ValueError(f"the mesh has no axis {axis!r}; its axes are {', '.join(f'{n}={s}' for n, s in self.shape.items())}")
        return self.axis_sizes[self.axis_names.index(axis)]

    def coordinate(self, rank: int) -> dict[str, int]:
        """A rank's place along each axis."""
        place = {}
        for name, size in zip(reversed(self.axis_names), reversed(self.axis_sizes), strict=True):
            rank, place[name] = divmod(rank, size)
        return place

    def peers(self, rank: int, axis: str) -> list[int]:
        """The ranks that differ from this one along one axis only, in order."""
        stride = math.prod(self.axis_sizes[self.axis_names.index(axis) + 1 :])
        first = rank - self.coordinate(rank)[axis] * stride
        return [first + i * stride for i in range(self.size(axis))]

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks whose shards this process holds."""
        return {"real": (self.rank,), "virtual": tuple(range(self.world_size)), "abstract": ()}[self.kind]

    def rules(self) -> DeviceMesh:
        """A mesh for DTensor's rules: it has a shape and no back end."""
        return mesh_for_rules(self.axis_sizes, self.axis_names)

    @functools.cached_property
    def device_mesh(self) -> DeviceMesh:
        """The real mesh as a `DeviceMesh`, for DTensors; asked for the first time on all ranks together, as it may make process groups.

        Raises:
            ValueError: the mesh is not real.
        """
        if self.kind != "real":
            raise ValueError(f"the mesh {self} has no DeviceMesh and no DTensors, which need a process for each rank")
        if self.groups is None:
            return self.rules()  # one rank, without process groups
        return init_device_mesh(self.groups.device.type, self.axis_sizes, mesh_dim_names=self.axis_names)

    @staticmethod
    def of_device_mesh(found: DeviceMesh) -> "Mesh":
        """The mesh that a `DeviceMesh` is, with its process groups.

        Raises:
            ValueError: it has no names of dimensions, or is not all ranks in order.
        """
        names, ranks = found.mesh_dim_names, found.mesh.flatten().tolist()
        world = dist.get_world_size() if dist.is_initialized() else 1
        if names is None or ranks != list(range(world)):
            raise ValueError(
                f"{found} must have names of dimensions and all {world} ranks in order to be a mesh of functrain's; make it with "
                "init_device_mesh(..., mesh_dim_names=...)"
            )
        sizes = tuple(found.mesh.shape)
        if not dist.is_initialized():
            return Mesh(tuple(names), sizes, "real")
        by_axis = {name: found.get_group(name) for name, size in zip(names, sizes, strict=True) if size > 1}
        kind = found.device_type
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        return Mesh(tuple(names), sizes, "real", dist.get_rank(), Groups(by_axis, dist.group.WORLD, device))

    def __str__(self) -> str:
        axes = " x ".join(f"{name}={size}" for name, size in self.shape.items())
        return f"{axes} ({self.kind})"


@dataclass(frozen=True)
class Groups:
    """The process groups of a real mesh, by axis: those that this process is in."""

    by_axis: Mapping[str, Any]
    everyone: Any
    device: torch.device


def make_mesh(
    axes: Mapping[str, int], *, simulate: bool = False, abstract: bool = False, timeout: float = 30.0, device: str | None = None
) -> Mesh:
    """Arrange ranks along named axes.

    Args:
        axes: name -> size, outermost first; one size may be -1, which fills the world.
        simulate: all ranks live in this process: every shard is held, every collective computed, no socket opened.
        abstract: any number of ranks that compute nothing, for planning.
        timeout: seconds after which a collective of a real mesh fails.
        device: "cpu" or "cuda" of a real mesh; by default CUDA where the launcher's ranks have it.

    Returns:
        The mesh. Without a launcher (torchrun or `ft.launch`) a mesh of one rank needs no process group.

    Raises:
        ValueError: the axes do not fill the world, or a size is not positive.

    >>> make_mesh({"data": 2, "model": 2}, simulate=True).world_size
    4
    """
    _check_axes(axes)
    if simulate or abstract:
        if simulate and abstract:
            raise ValueError("a mesh is either simulated or abstract, not both")
        if -1 in axes.values():
            raise ValueError("a size of -1 is inferred from the number of processes, which this mesh has not: give all sizes")
        return Mesh(tuple(axes), tuple(axes.values()), "virtual" if simulate else "abstract")
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    sizes = _inferred(axes, world)
    if world == 1 and not dist.is_initialized():
        return Mesh(tuple(axes), sizes, "real")
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    rank = _join(kind, timeout)
    mesh = Mesh(tuple(axes), sizes, "real", rank)
    return Mesh(tuple(axes), sizes, "real", rank, _groups(mesh, kind, timeout))


def _check_axes(axes: Mapping[str, int]) -> None:
    if not axes:
        raise ValueError('a mesh needs at least one axis, for instance {"data": 2}')
    for name, size in axes.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"a mesh axis is a name of letters and digits, not {name!r}")
        if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
            raise ValueError(f"the size of the mesh axis {name!r} must be a positive int, or -1 to fill the world, not {size!r}")
    if list(axes.values()).count(-1) > 1:
        raise ValueError("at most one axis of a mesh can have the size -1")


def _inferred(axes: Mapping[str, int], world: int) -> tuple[int, ...]:
    known = math.prod(size for size in axes.values() if size != -1)
    sizes = tuple(world // known if size == -1 else size for size in axes.values())
    if math.prod(sizes) != world:
        wanted = " x ".join(f"{name}={size}" for name, size in axes.items())
        raise ValueError(
            f"the mesh {wanted} does not fill the world ({world} processes): start as many ranks as the product of the sizes "
            "(torchrun --nproc-per-node, ft.launch), give one axis the size -1, or use simulate=True for virtual ranks"
        )
    return sizes


def _join(kind: str, timeout: float) -> int:
    """Make this process part of the world, and say which rank it is."""
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        backend = "nccl" if kind == "cuda" else register_one_thread_gloo()
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout))
        atexit.register(_leave)
    return dist.get_rank()


def _leave() -> None:
    """End the back end's threads before the interpreter goes: gloo aborts the process otherwise."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _groups(mesh: Mesh, kind: str, timeout: float) -> Groups:
    """One group for each line of ranks along each axis; every process makes all of them, in one order."""
    backend = "nccl" if kind == "cuda" else register_one_thread_gloo()
    limit = datetime.timedelta(seconds=timeout)
    mine: dict[str, Any] = {}
    for axis, size in mesh.shape.items():
        if size == 1:
            continue
        for line in _lines(mesh, axis):
            group = dist.new_group(list(line), backend=backend, timeout=limit)
            if mesh.rank in line:
                mine[axis] = group
    everyone = dist.new_group(list(range(mesh.world_size)), backend=backend, timeout=limit)
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    return Groups(mine, everyone, device)


def _lines(mesh: Mesh, axis: str) -> list[Sequence[int]]:
    others = [range(size) if name != axis else range(1) for name, size in mesh.shape.items()]
    firsts = [sum(c * s for c, s in zip(place, _strides(mesh), strict=True)) for place in itertools.product(*others)]
    return [mesh.peers(first, axis) for first in firsts]


def _strides(mesh: Mesh) -> list[int]:
    return [math.prod(mesh.axis_sizes[i + 1 :]) for i in range(len(mesh.axis_sizes))]
