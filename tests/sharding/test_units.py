"""Leaves that are gathered and reduced as one unit: fewer messages, the same bits."""

from collections import Counter
from typing import Any

import pytest

import functrain as ft
from functrain import P
from functrain.compile.collectives import ops
from tests.helpers import assert_trees_equal
from tests.sharding import model
from tests.sharding.test_contract import gathered

OPTIMIZER = model.OPTIMIZERS["adam"]
STARTS = {ops.all_gather.default: "gathers", ops.reduce_scatter.default: "scatters", ops.all_reduce.default: "reductions"}
HYBRID = {"pod": 2, "data": 2}


def run(mesh: dict[str, int], accumulate: int, *presets: Any, batch: Any = "data") -> tuple[Any, Counter[str]]:
    """(state and metrics after two steps, how many of each collective start in a step)."""
    plan = ft.Plan(ft.make_mesh(mesh, simulate=True), *presets, batch=P(batch))
    tx = OPTIMIZER()
    state = ft.TrainState.create(params=model.init(ft.random.key(0), layers=2), tx=tx)
    step = ft.jit(model.train_step(tx, accumulate), plan=plan)
    graph = step.lower(state, model.batch(0)).graph
    starts = Counter(STARTS[n.target] for n in graph.graph.nodes if n.target in STARTS)
    for i in range(2):
        state, metrics = step(state, model.batch(i))
    return gathered((state, metrics)), starts


@pytest.mark.parametrize("mesh", [{"data": 2}, {"data": 3}])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_groups_change_the_messages_and_no_bit(stage: int, accumulate: int, mesh: dict[str, int]) -> None:
    expected, each = run(mesh, accumulate, ft.zero(stage, min_size=0))
    found, together = run(mesh, accumulate, ft.zero(stage, min_size=0, groups="blocks/*"))
    assert_trees_equal(found, expected)
    if stage == 0:
        assert together["reductions"] <= each["reductions"]  # the model is so small that its leaves are reduced together anyway
    else:
        assert together["scatters"] < each["scatters"] - 10 * accumulate
    if stage >= 2:
        assert together["gathers"] < each["gathers"] / 3


@pytest.mark.parametrize("stage", [1, 3])
def test_the_size_of_a_bucket_changes_no_bit(stage: int) -> None:
    expected, each = run({"data": 2}, 2, ft.zero(stage, min_size=0))
    counts = [sum(each.values())]
    for size in (1000, 4000, 2**30):
        found, starts = run({"data": 2}, 2, ft.zero(stage, min_size=0, bucket_bytes=size))
        assert_trees_equal(found, expected)
        counts.append(sum(starts.values()))
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1], counts


@pytest.mark.parametrize("axes", [("pod", "data"), "data"])
def test_units_on_two_axes(axes: Any) -> None:
    batch = ("pod", "data")
    expected, each = run(HYBRID, 1, ft.zero(3, axes, min_size=0), batch=batch)
    found, together = run(HYBRID, 1, ft.zero(3, axes, min_size=0, groups=["blocks/*", "ln_f"]), batch=batch)
    assert_trees_equal(found, expected)
    assert together["gathers"] < each["gathers"] / 2


def test_a_unit_is_one_gather_forward_and_one_backward() -> None:
    _, starts = run({"data": 2}, 1, ft.zero(3, min_size=0, groups=["blocks/*", "ln_f"], only="blocks/**"), ft.zero(0))
    assert starts["gathers"] == 4
    assert starts["scatters"] == 2


def test_each_group_of_the_plan_must_exist() -> None:
    with pytest.raises(ValueError, match="layers/"):
        run({"data": 2}, 1, ft.zero(3, groups="layers/*"))
    with pytest.raises(ValueError, match="bucket_bytes"):
        ft.zero(3, bucket_bytes=-1)
