"""One function, any mesh: ten steps at every ZeRO stage, world size and number of microbatches give the numbers of one device."""

import functools
from typing import Any

import pytest
import torch

import functrain as ft
from functrain import P
from tests.helpers import assert_trees_close
from tests.sharding import model


@functools.cache
def one_device(optimizer: str, steps: int = 10) -> tuple[Any, Any, list[dict[str, float]]]:
    """(state before, state after, metrics of each step) on one device, the whole batch at once."""
    tx = model.OPTIMIZERS[optimizer]()
    first = state = ft.TrainState.create(params=model.init(ft.random.key(0)), tx=tx)
    step, metrics = ft.jit(model.train_step(tx)), []
    for i in range(steps):
        state, found = step(state, model.batch(i))
        metrics.append({name: float(x) for name, x in found.items()})
    return first, state, metrics


def gathered(tree: Any) -> Any:
    """Arrays as global tensors."""
    return ft.tree.map(lambda x: x.full() if isinstance(x, ft.Array) else x, tree)


def assert_equal_to_one_device(plan: ft.Plan, optimizer: str, accumulate: int, steps: int = 10) -> None:
    state, expected, metrics = one_device(optimizer, steps)
    step = ft.jit(model.train_step(model.OPTIMIZERS[optimizer](), accumulate), plan=plan, donate="state")
    for i in range(steps):
        state, found = step(state, model.batch(i))
        assert_trees_close({name: torch.tensor(float(x)) for name, x in found.items()}, metrics[i])
    assert_trees_close(gathered(state), expected)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_world_and_number_of_microbatches(stage: int, world: int, accumulate: int, optimizer: str) -> None:
    mesh = ft.make_mesh({"data": world}, simulate=True)
    assert_equal_to_one_device(ft.Plan(mesh, ft.zero(stage, min_size=0), batch=P("data")), optimizer, accumulate)


MESHES: dict[str, tuple[dict[str, int], tuple[Any, ...], P]] = {
    "hybrid": ({"pod": 2, "data": 3}, (), P(("pod", "data"))),
    "data and model": (
        {"data": 2, "model": 3},
        (
            ft.Rules(
                {
                    **{f"params/**/{name}": P("model", None) for name in ("q", "k", "v")},
                    "params/**/up": P("model"),
                    "params/**/out": P(None, "model"),
                    "params/**/down": P(None, "model"),
                }
            ),
        ),
        P("data"),
    ),
}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", MESHES)
def test_two_axes(name: str, stage: int) -> None:
    axes, rules, batch = MESHES[name]
    plan = ft.Plan(ft.make_mesh(axes, simulate=True), *rules, ft.zero(stage, min_size=0), batch=batch)
    assert_equal_to_one_device(plan, "adam", 1)


@pytest.mark.parametrize("axes", [("pod", "data"), "data"])
def test_split_over_two_axes(axes: Any) -> None:
    mesh = ft.make_mesh({"pod": 2, "data": 2}, simulate=True)
    assert_equal_to_one_device(ft.Plan(mesh, ft.zero(3, axes, min_size=0), batch=P(("pod", "data"))), "adam", 2)


def test_each_sub_tree_has_its_stage() -> None:
    mesh = ft.make_mesh({"data": 3}, simulate=True)
    plan = ft.Plan(mesh, ft.zero(3, min_size=0, only="blocks/**"), ft.zero(1, min_size=0), batch=P("data"))
    assert_equal_to_one_device(plan, "adam", 2)


def test_a_batch_that_is_not_split_is_computed_by_all() -> None:
    mesh = ft.make_mesh({"data": 2}, simulate=True)
    assert_equal_to_one_device(ft.Plan(mesh, ft.zero(3, min_size=0)), "sgd", 1, 3)
