"""Every optimizer on a mesh takes the steps of one device, whatever the shapes of its leaves and however its state is split."""

import functools
from typing import Any

import pytest
import torch

import functrain as ft
from functrain import P, optim, tree
from tests.helpers import assert_same_structure, assert_trees_close
from tests.sharding.test_contract import gathered
from tests.test_optim import CASES

STEPS = 5
MESHES: dict[str, dict[str, int]] = {"data=2": {"data": 2}, "data=3": {"data": 3}, "data=2 x model=2": {"data": 2, "model": 2}}
RULES = ft.Rules(
    {"params/matrix": P("model"), "params/tall": P(None, "model"), "params/cube": P(None, "model"), "params/prime": P("model")}
)

# The names that the optimizers' table knows, and dimensions of 1, of the ranks, one more and one less, and prime.
SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "vector": (7,),
    "matrix": (6, 4),
    "tall": (3, 9),
    "cube": (3, 4, 5),
    "none": (0,),
    "one": (1,),
    "row": (1, 4),
    "column": (3, 1),
    "two": (2,),
    "prime": (5, 11),
    "empty": (2, 0),
    "block": (2, 3, 7),
}


def draw(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gradients(case: str, i: int) -> dict[str, torch.Tensor]:
    """What both sides are given; in the cases that skip such steps one element of one step is no number."""
    grads = draw(100 + i)
    if case in ("if finite", "multi steps, skipped") and i == 2:
        grads["matrix"][4, 1] = torch.nan
    return grads


def step_of(tx: Any) -> Any:
    def step(state: ft.TrainState, batch: Any) -> ft.TrainState:
        return state.apply_gradients(batch, tx)

    return step


@functools.cache
def one_device(case: str) -> tuple[Any, Any]:
    """(state before, state after) on one device."""
    tx = CASES[case][0]()
    first = state = ft.TrainState.create(params=draw(0), tx=tx)
    step = ft.jit(step_of(tx))
    for i in range(STEPS):
        state = step(state, gradients(case, i))
    return first, state


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_one_device(case: str, stage: int, mesh: str) -> None:
    axes = MESHES[mesh]
    rules = (RULES,) if "model" in axes else ()
    plan = ft.Plan(ft.make_mesh(axes, simulate=True), *rules, ft.zero(stage, min_size=0))
    first, expected = one_device(case)
    step = ft.jit(step_of(CASES[case][0]()), plan=plan, donate="state")
    state = ft.device_put(first, plan)
    for i in range(STEPS):
        state = step(state, gradients(case, i))
    found = gathered(state)
    assert_same_structure(found, expected)
    # Newton-Schulz iterations turn a last bit that another order of a sum gives into a few.
    assert_trees_close(found, expected, rtol=1e-4 if "muon" in case else 1e-5, atol=2e-5 if "muon" in case else 1e-6)


def test_the_state_is_really_split() -> None:
    plan = ft.Plan(ft.make_mesh({"data": 3}, simulate=True), ft.zero(1, min_size=0))
    tx = optim.adam(0.1)
    state = ft.device_put(ft.TrainState.create(params=draw(0), tx=tx), plan)
    after = ft.jit(step_of(tx), plan=plan)(state, draw(1))
    split = {path for path, x in tree.leaves_with_path(after) if not x.sharding.is_replicated()}
    moments = {path for path in split if path.startswith("opt_state") and ("/mu/" in path or "/nu/" in path)}
    assert split == moments
    assert len(moments) == 2 * sum(bool(shape) and 0 not in shape for shape in SHAPES.values())
    assert {path: x.sharding for path, x in tree.leaves_with_path(after)} == {path: x.sharding for path, x in tree.leaves_with_path(state)}
