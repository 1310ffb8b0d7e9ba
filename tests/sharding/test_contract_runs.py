"""How a run goes on a mesh: overflow on one rank, half precision, functions used twice, replays, steps side by side; operations."""

import operator
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import functrain as ft
from functrain import P, Sharding
from functrain.sharding import place
from tests.helpers import assert_trees_close, assert_trees_equal
from tests.sharding import model
from tests.sharding.compare import STAGES, WORLDS, assert_same, first_state, plan_of, run, whole

ADAM = model.OPTIMIZERS["adam"]()
BATCHES = [model.batch(i, rows=12) for i in range(3)]
each_plan = pytest.mark.parametrize(("stage", "world"), [(s, w) for s in STAGES for w in WORLDS])

# ---- overflow


def half_step(state: Any, rows: Any) -> Any:
    """A float16 step; `rows["boost"]` [rows] is added to the logits, so that an inf there is in one rank's loss alone."""

    def loss(params: Any, rows: Any) -> ft.Mean:
        found = model.logits(params, rows["tokens"]) + rows["boost"][:, None, None]
        return ft.losses.cross_entropy(found, rows["targets"])

    precision = ft.Precision(compute=torch.float16)
    value, grads = ft.value_and_grad(loss, precision=precision, loss_scale=state.loss_scale)(state.params, rows)
    return state.apply_gradients(grads, ADAM), {"loss": value}


def half_batches(world: int, bad: int) -> list[dict[str, torch.Tensor]]:
    """Four batches; in the second one the last row of rank `bad` has an inf."""
    batches = [{**model.batch(i, 4 * world), "boost": torch.zeros(4 * world, dtype=torch.float16)} for i in range(4)]
    batches[1]["boost"][4 * bad + 3] = float("inf")
    return batches


def assert_skipped_once(states: list[Any]) -> None:
    """The states before and after each step of `half_batches`: the second one did nothing but lower the scale."""
    scales = [float(state.loss_scale.scale) for state in states]
    assert scales == [256.0, 256.0, 128.0, 128.0, 128.0]
    assert [bool(state.loss_scale.finite) for state in states] == [True, True, False, True, True]
    assert [int(state.step) for state in states] == [0, 1, 1, 2, 3]
    assert_trees_equal((states[2].params, states[2].opt_state), (states[1].params, states[1].opt_state))
    for before, after in ((0, 1), (2, 3), (3, 4)):
        assert not torch.equal(states[before].params["wte"], states[after].params["wte"])
        assert all(torch.isfinite(x).all() for x in ft.tree.leaves(states[after].params))


@each_plan
def test_an_overflow_on_one_rank_undoes_the_step_on_all(stage: int, world: int) -> None:
    for bad in (0, world - 1):
        step = ft.jit(half_step, plan=plan_of(stage, world), donate="state")
        state, states = first_state(ADAM, loss_scale=ft.DynamicScale(256.0)), []
        for rows in half_batches(world, bad):
            states.append(whole(state))
            state, _ = step(state, rows)
        assert_skipped_once([*states, whole(state)])


# ---- sums of half-precision gradients


@each_plan
def test_64_microbatches_of_bfloat16_are_summed_in_float32(stage: int, world: int) -> None:
    microbatches, precision = 64, ft.Precision(compute=torch.bfloat16)
    rows, params = model.batch(0, 2 * world * microbatches), model.init(ft.random.key(0))

    def total(params: Any, rows: Any) -> torch.Tensor:
        return model.loss_fn(params, rows).total

    own = ft.jit(ft.grad(total, precision=precision))
    mine = ft.tree.map(lambda x: x.unflatten(0, (world, 2, microbatches)), rows)
    parts = [own(params, ft.tree.map(lambda x, r=r, j=j: x[r, :, j], mine)) for r in range(world) for j in range(microbatches)]
    weight = (rows["targets"] != -100).sum()
    expected = ft.tree.map(lambda *leaves: sum(x.double() for x in leaves) / weight, *parts)

    def step(state: Any, rows: Any) -> Any:
        return ft.accumulate(model.loss_fn, microbatches, precision=precision)(state["params"], rows)[1]

    found = whole(ft.jit(step, plan=plan_of(stage, world))({"params": params}, rows))
    for path, (f, e) in ft.tree.leaves_with_path(ft.tree.map(lambda f, e: (f, e), found, expected), is_leaf=lambda x: type(x) is tuple):
        assert float((f - e).norm() / e.norm()) < 1e-6, path


# ---- functions used more than once


def twice(remat: bool) -> Any:
    """A loss that uses each block, and the head's norm, twice."""

    def block(p: Any, x: torch.Tensor) -> torch.Tensor:
        h = F.layer_norm(x, (model.WIDTH,), p["ln2"]["w"], p["ln2"]["b"])
        return x + F.linear(F.gelu(F.linear(h, p["mlp"]["up"])), p["mlp"]["down"])

    again = ft.remat(block) if remat else block

    def loss(params: Any, rows: Any) -> ft.Mean:
        repeated = {**params, "blocks": params["blocks"] * 2}
        x = model.logits(repeated, rows["tokens"])
        for p in repeated["blocks"]:
            x = F.linear(again(p, F.embedding(rows["tokens"], params["wte"])), params["head"]) + x
        return ft.losses.cross_entropy(x, rows["targets"])

    return loss


@each_plan
@pytest.mark.parametrize("remat", [False, True])
def test_a_block_used_twice(stage: int, world: int, remat: bool) -> None:
    expected = run(model.train_step(ADAM, loss=twice(False)), first_state(ADAM), BATCHES)
    assert_same(model.train_step(ADAM, loss=twice(remat)), first_state(ADAM), BATCHES, plan_of(stage, world), expected)


@each_plan
def test_gradients_that_the_caller_sums(stage: int, world: int) -> None:
    def total(params: Any, rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
        mean = model.loss_fn(params, rows)
        return mean.total, mean.weight

    def step(state: Any, rows: Any) -> Any:
        value, weight, grads = 0.0, 0.0, ft.tree.map(torch.zeros_like, state.params)
        for j in range(3):
            (one, n), found = ft.value_and_grad(total, has_aux=True)(state.params, {name: x[j::3] for name, x in rows.items()})
            value, weight, grads = value + one, weight + n, ft.tree.map(torch.add, grads, found)
        grads = ft.tree.map(lambda g: g / weight, grads)
        return state.apply_gradients(grads, ADAM), {"loss": value / weight, "norm": ft.tree.global_norm(grads)}

    batches = [model.batch(i, rows=18) for i in range(3)]
    assert_same(step, first_state(ADAM), batches, plan_of(stage, world), run(model.train_step(ADAM), first_state(ADAM), batches))


# ---- replays, and steps side by side


@each_plan
def test_replays_are_bitwise_equal(stage: int, world: int) -> None:
    steps = [ft.jit(model.train_step(ADAM, 2), plan=plan_of(stage, world)) for _ in range(2)]
    first, *others = [run(step, first_state(ADAM), BATCHES) for step in (steps[0], steps[0], steps[1])]
    for other in others:
        assert_trees_equal(other, first)


def test_steps_of_other_meshes_and_plans_take_turns() -> None:
    plans = [plan_of(1, 2), plan_of(3, 3), plan_of(3, 4, data=2, model=2), None]
    steps = [ft.jit(model.train_step(ADAM), plan=plan, donate="state") for plan in plans]
    alone = [run(step, first_state(ADAM), BATCHES) for step in steps]
    states = [first_state(ADAM) for _ in steps]
    results: list[list[Any]] = [[] for _ in steps]
    for rows in BATCHES:
        for i, step in enumerate(steps):
            states[i], found = step(states[i], rows)
            results[i].append(whole(found))
    for i, (state, found) in enumerate(alone):
        assert_trees_equal((whole(states[i]), results[i]), (state, found))
    for state, found in alone[:-1]:
        assert_trees_close((state, found), alone[-1])


@pytest.mark.parametrize("stage", range(4))
def test_a_plan_that_says_it_all_is_strict(stage: int) -> None:
    step = ft.jit(model.train_step(ADAM, accumulate=2), plan=plan_of(stage, 3), strict=True)
    step(first_state(ADAM), BATCHES[0])


# ---- operations on arrays

OPERATIONS: dict[str, Any] = {
    "arithmetic": lambda x, y: 2 * x - y / 4 + 1,
    "powers": lambda x, y: abs(x) ** 2 - (-y),
    "compare": lambda x, y: (x < y) | (x == 0),
    "where": lambda x, y: torch.where(x > y, x, y),
    "matmul": lambda x, y: x @ y.t(),
    "softmax": lambda x, y: torch.softmax(x, 1) + torch.log_softmax(y, 0),
    "sums": lambda x, y: x.sum() + y.mean(),
    "sum of rows": lambda x, y: x.sum(1, keepdim=True) * y.amax(0),
    "norm": lambda x, y: x.norm() + y.square().sum(0).sqrt(),
    "row norms": lambda x, y: x.norm(dim=1) - y.sum(1),
    "column norms": lambda x, y: x.norm(dim=0, keepdim=True) - y.abs().sum(0),
    "views": lambda x, y: x.t().reshape(-1) + y.reshape(-1),
    "items": lambda x, y: x[1:, ::2] * y[0, :1],
    "cat": lambda x, y: torch.cat([x, y], 1).flip(0),
    "stack": lambda x, y: torch.stack([x, y]).transpose(0, 1),
    "cumsum": lambda x, y: x.cumsum(0) - y.cumsum(1),
    "argmax": lambda x, y: x.argmax(1) + y.argmin(1),
    "sort": lambda x, y: operator.add(*(z.sort(1).values for z in (x, y))),
    "layer norm": lambda x, y: F.layer_norm(x, y.shape[1:]) * F.gelu(y),
    "cast": lambda x, y: x.double() + y.to(torch.float64).clamp(-1, 1),
}
EXAMPLES = int(os.environ.get("EXAMPLES", "6"))
MESHES = [{"a": 2}, {"a": 3}, {"a": 2, "b": 2}, {"a": 3, "b": 2}]


@st.composite
def shardings(draw: Any, axes: dict[str, int]) -> P:
    """Each axis of a mesh splits a dimension of a matrix, or none."""
    entries: list[list[str]] = [[], []]
    for axis in axes:
        dim = draw(st.integers(0, 2))
        if dim < 2:
            entries[dim].append(axis)
    return P(*map(tuple, entries))


def assert_operation(operation: Any, data: Any, *shapes: Sequence[int]) -> None:
    """Two arrays of random values and shardings give what two tensors give."""
    axes = data.draw(st.sampled_from(MESHES))
    specs = [data.draw(shardings(axes)) for _ in shapes]
    mesh, generator = ft.make_mesh(axes, simulate=True), torch.Generator().manual_seed(0)
    values = [torch.randn(list(shape), generator=generator) for shape in shapes]
    found = operation(*(place(x, Sharding(mesh, spec)) for x, spec in zip(values, specs, strict=True)))
    assert isinstance(found, ft.Array)
    wanted = operation(*values)
    assert found.dtype == wanted.dtype
    assert_trees_close(whole(found), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data(), shape=st.tuples(st.integers(2, 7), st.integers(1, 7)))
def test_operations_on_arrays_are_those_on_tensors(name: str, data: Any, shape: tuple[int, int]) -> None:
    assert_operation(OPERATIONS[name], data, shape, shape)


@settings(max_examples=4 * EXAMPLES, deadline=None)
@given(data=st.data(), shape=st.tuples(st.integers(1, 7), st.integers(1, 7)), ones=st.tuples(st.booleans(), st.booleans()))
def test_arrays_are_broadcast(data: Any, shape: tuple[int, int], ones: tuple[bool, bool]) -> None:
    small = [1 if one else n for one, n in zip(ones, shape, strict=True)]
    assert_operation(operator.add, data, *data.draw(st.permutations([shape, small])))
