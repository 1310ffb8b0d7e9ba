"""One step function on virtual ranks against the same function run plainly on one device."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

import functrain as ft
from functrain import P
from tests.helpers import assert_trees_close, assert_trees_equal
from tests.sharding import model

STAGES = (1, 3)
WORLDS = (2, 3)


def plan_of(stage: int, world: int, **axes: int) -> ft.Plan:
    """Virtual ranks; every leaf is split, however small."""
    return ft.Plan(ft.make_mesh(axes or {"data": world}, simulate=True), ft.zero(stage, min_size=0), batch=P("data"))


def whole(tree: Any) -> Any:
    """Arrays as global tensors; ranks that hold the same piece hold the same bits."""

    def one(path: str, x: Any) -> Any:
        if not isinstance(x, ft.Array):
            return x
        found = x.full()
        for rank, shard in enumerate(x.shards):
            box = x.sharding.shard_box(x.shape, x.mesh.coordinate(rank))
            held = shard[tuple(slice(0, stop - start) for start, stop in box)]
            assert torch.equal(held.nan_to_num(7.0), found[tuple(slice(*edge) for edge in box)].nan_to_num(7.0)), (path, rank)
        return found

    return ft.tree.map_with_path(one, tree)


def run(step: Callable[..., Any], state: Any, batches: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The state after a batch each, and what the step returned besides."""
    results = []
    for rows in batches:
        state, found = step(state, rows)
        results.append(whole(found))
    return whole(state), results


def first_state(tx: Any, params: Any = None, **extra: Any) -> ft.TrainState:
    """The state before the first step."""
    return ft.TrainState.create(params=model.init(ft.random.key(0)) if params is None else params, tx=tx, **extra)


def assert_same(step: Callable[..., Any], state: Any, batches: Sequence[Any], plan: ft.Plan, expected: Any = None, **options: Any) -> Any:
    """The planned step gives the state and results of the plain one, or of what is given; returns what was found."""
    found = run(ft.jit(step, plan=plan, donate="state"), state, batches)
    assert_trees_close(found, run(step, state, batches) if expected is None else expected, **options)
    return found


__all__ = ["STAGES", "WORLDS", "assert_same", "assert_trees_equal", "first_state", "plan_of", "run", "whole"]
