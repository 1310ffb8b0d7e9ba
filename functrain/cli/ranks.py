"""A run on several ranks: each runs the same program; rank 0 alone writes, and what one rank wants to stop stops all at the same step."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import functrain as ft
from functrain import tree
from functrain.cli.errors import StoppedError, UsageError
from functrain.cli.run_folder import RunFolder
from functrain.cli.settings import TrainSettings
from functrain.compile.collectives import place_along
from functrain.data.errors import DataError
from functrain.launch import LaunchError, world
from functrain.tree import PyTree


@dataclass(frozen=True)
class Ranks:
    """One process among those of a run."""

    plan: ft.Plan | None  # None: one device

    @property
    def leads(self) -> bool:
        """Whether this rank writes and prints."""
        return self.plan is None or self.plan.mesh.rank == 0

    @property
    def share(self) -> tuple[int, int]:
        """(which part of a batch's rows this rank reads, of how many)."""
        if self.plan is None or not isinstance(self.plan.batch, ft.P) or not len(self.plan.batch):
            return 0, 1
        axes, mesh = self.plan.batch.entries[0], self.plan.mesh
        sizes = [mesh.size(axis) for axis in axes]
        parts = 1
        for size in sizes:
            parts *= size
        return place_along(mesh.coordinate(mesh.rank), axes, sizes), parts

    def batch(self, rows: PyTree, device: torch.device) -> PyTree:
        """What the loader read for this rank, as the step takes it."""
        if self.plan is None:
            return tree.map(lambda x: x.to(device), rows)
        if self.share[1] == 1:
            return rows
        spec = ft.P(self.plan.batch.entries[0]) if isinstance(self.plan.batch, ft.P) else ft.P()
        return ft.from_local(rows, self.plan.mesh, spec)

    def full(self, params: PyTree) -> PyTree:
        """Whole params; every rank must ask."""
        return tree.map(lambda x: x.full() if isinstance(x, ft.Array) else x, params)

    def agreed(self, wish: int) -> int:
        """The largest wish of all ranks: 0 where none has one."""
        groups = self.plan.mesh.groups if self.plan is not None else None
        if groups is None:
            return wish
        value = torch.tensor(wish, device=groups.device)
        torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MAX, group=groups.everyone)
        return int(value)

    def folder(self, path: Path) -> RunFolder:
        """Where this rank writes: nowhere, for all but one."""
        return RunFolder(path) if self.leads else _NoFolder(path)

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Inside, ranks that do not lead print nothing."""
        if self.leads:
            yield
            return
        with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            yield


class _NoFolder(RunFolder):
    """The folder of a rank that writes nothing."""

    @property
    def metrics(self) -> Path:
        return Path(os.devnull)

    def check(self) -> None:
        return None

    def start(self, *_: Any) -> None:
        return None

    def save_weights(self, *_: Any) -> None:
        return None

    def save_plot(self, *_: Any) -> None:
        return None


def wanted_ranks(settings: TrainSettings) -> int:
    """How many processes are to be started here: 1 inside a launcher's rank.

    Raises:
        UsageError: the plan cannot be read, or its mesh has another number of ranks.
    """
    if world().size > 1:
        return 1
    if settings.plan is None:
        return settings.nproc or 1
    mesh = _plan(settings, abstract=True).mesh if settings.nproc is None else None
    return settings.nproc or (mesh.world_size if mesh is not None else 1)


def make_ranks(settings: TrainSettings) -> Ranks:
    """Join the ranks of this run; every rank calls this."""
    size = world().size
    if size == 1 and settings.plan is None:
        return Ranks(None)
    try:
        if settings.plan is not None:
            return Ranks(_plan(settings))
        return Ranks(ft.Plan(ft.make_mesh({"data": size}), ft.zero(3), batch=ft.P("data")))
    except ValueError as error:
        raise UsageError(str(error)) from None


def _plan(settings: TrainSettings, **options: Any) -> ft.Plan:
    assert settings.plan is not None  # the callers asked
    try:
        return ft.Plan.of_toml(settings.plan.read_text(encoding="utf-8"), **options)
    except OSError as error:
        raise UsageError(f"the plan {settings.plan} cannot be read: {error.strerror}") from None
    except (ValueError, NotImplementedError) as error:
        raise UsageError(f"the plan {settings.plan}: {error}") from None


def of_ranks(error: LaunchError) -> Exception:
    """What ended a launch, as the error that a rank raised."""
    if not error.failures:
        return StoppedError(str(error))
    first = error.failures[0]
    kind, _, text = first.error.partition(": ")
    known = {cls.__name__: cls for cls in (UsageError, DataError, StoppedError)}
    cls = known.get(kind.rpartition(".")[2])
    return cls(text) if cls is not None else StoppedError(f"the run stopped: {first}, and all ranks were ended")
