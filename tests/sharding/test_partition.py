"""What partitioning puts into a step: which collectives, how many, at what local sizes; and what it refuses."""

from collections import Counter
from typing import Any

import pytest
import torch

import functrain as ft
from functrain import P
from functrain.compile.errors import DonatedError, PartitionError
from tests.helpers import assert_trees_close, assert_trees_equal
from tests.sharding import model

TX = ft.optim.adam(3e-3, eps=1e-3)
TENSOR_PARALLEL = {
    **{f"params/**/attn/{name}": P("model", None) for name in ("q", "k", "v")},
    "params/**/up": P("model", None),
    "params/**/out": P(None, "model"),
    "params/**/down": P(None, "model"),
}


def state(layers: int = 1, hidden: int = model.HIDDEN) -> ft.TrainState:
    return ft.TrainState.create(params=model.init(ft.random.key(0), layers, hidden), tx=TX)


def virtual(**axes: int) -> ft.sharding.Mesh:
    return ft.make_mesh(axes, simulate=True)


def counted(lowered: Any) -> dict[str, int]:
    """Collectives of the finished graph."""
    kinds = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"}
    nodes = [n for n in lowered.graph.graph.nodes if n.op == "call_function" and getattr(n.target, "_opname", "") in kinds]
    return dict(Counter(f"{n.target._opname}[{n.args[1]}]" for n in nodes))


# ---- how many


@pytest.mark.parametrize("world", [2, 3])
def test_stage_3_gathers_and_reduces_each_leaf_once(world: int) -> None:
    first = state()
    leaves = len(ft.tree.leaves(first.params))
    plan = ft.Plan(virtual(data=world), ft.zero(3, min_size=0), batch=P("data"))
    lowered = ft.jit(model.train_step(TX), plan=plan).lower(first, model.batch(0))
    assert lowered.partition.counts() == {"all_gather[data]": leaves, "reduce_scatter[data]": leaves, "all_reduce[data]": leaves + 3}
    again = sum(n.meta.get("again", False) for n in lowered.graph.graph.nodes if n.name.startswith("all_gather"))
    found = counted(lowered)
    assert found["all_gather[data]"] == leaves + again
    assert 0 < again <= leaves
    assert found["reduce_scatter[data]"] == leaves
    assert found["all_reduce[data]"] == 3  # scalars: the total of the loss, its weight, and the norm over all leaves
    assert not lowered.partition.unplanned_large
    assert not lowered.partition.replicated


@pytest.mark.parametrize(("stage", "reductions"), [(1, {"all_reduce": 15}), (2, {"reduce_scatter": 4 * 15})])
def test_microbatches_reduce_once_or_each_time(stage: int, reductions: dict[str, int]) -> None:
    first = state()
    assert len(ft.tree.leaves(first.params)) == 15
    plan = ft.Plan(virtual(data=2), ft.zero(stage, min_size=0), batch=P("data"))
    moves = ft.jit(model.train_step(TX, accumulate=4), plan=plan).lower(first, model.batch(0)).partition.moves
    assert Counter(move.operation for move in moves if move.reason.startswith("gradient of")) == reductions


@pytest.mark.parametrize("layers", [1, 2])
def test_tensor_parallelism_has_four_reductions_a_block(layers: int) -> None:
    def loss_fn(params: Any, batch: Any) -> ft.Mean:
        def constrain(x: torch.Tensor) -> torch.Tensor:
            return ft.with_sharding_constraint(x, P("data"))

        return ft.losses.cross_entropy(model.logits(params, batch["tokens"], constrain), batch["targets"])

    first = state(layers, hidden=24)
    plan = ft.Plan(virtual(data=2, model=3), ft.Rules(TENSOR_PARALLEL), ft.zero(1, min_size=0), batch=P("data"))
    step = ft.jit(model.train_step(TX, loss=loss_fn), plan=plan)
    lowered = step.lower(first, model.batch(0))
    on_model = [move for move in lowered.partition.moves if move.axis == "model" and move.nbytes > 64]
    assert Counter(move.operation for move in on_model) == {"all_reduce": 4 * layers}, "\n".join(map(str, on_model))
    expected = ft.jit(model.train_step(TX))(first, model.batch(0))
    found = step(first, model.batch(0))
    assert_trees_close(ft.tree.map(lambda x: x.full(), found), expected)


def test_bytes_sent_are_those_of_the_stage() -> None:
    first = state()
    size = sum(x.numel() * 4 for x in ft.tree.leaves(first.params))
    for stage, times in ((0, 2.0), (1, 2.0 + 1), (2, 2.0), (3, 2.0)):
        plan = ft.Plan(virtual(data=2), ft.zero(stage, min_size=0), batch=P("data"))
        moves = ft.jit(model.train_step(TX), plan=plan).lower(first, model.batch(0)).partition.moves
        sent = sum(move.count_bytes for move in moves if move.nbytes > 8)
        assert sent == pytest.approx(times * size / 2, rel=0.05), stage  # padding of leaves that do not divide


# ---- local sizes


def test_fills_are_made_at_their_local_size() -> None:
    def step(params: Any, batch: torch.Tensor, key: torch.Tensor) -> Any:
        noise = ft.random.normal(key, (12, 6))
        positions = torch.arange(12)[:, None]
        return {"x": batch * noise + positions + torch.ones(12, 6) * (positions > 3)}

    plan = ft.Plan(virtual(data=3), batch={"batch": P("data")})
    jitted = ft.jit(step, plan=plan)
    key, batch = ft.random.key(1), torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
    lowered = jitted.lower({}, batch, key)
    sizes = [tuple(v.shape) for n in lowered.graph.graph.nodes if isinstance(v := n.meta.get("val"), torch.Tensor) and v.ndim]
    sizes = sizes[: -2 if sizes[-1] == (12, 6) else None]  # the result is gathered, as nothing says how it is split
    assert (12, 6) not in sizes
    assert (12,) not in sizes
    assert_trees_close(jitted({}, batch, key)["x"].full(), step({}, batch, key)["x"], rtol=0, atol=0)


@pytest.mark.parametrize("axes", [{"data": 1}, {"data": 3}, {"data": 2, "model": 2}])
def test_init_gives_the_same_values_on_any_mesh(axes: dict[str, int]) -> None:
    plan = ft.Plan(virtual(**axes), ft.zero(3, min_size=0))

    def make(key: torch.Tensor) -> ft.TrainState:
        return ft.TrainState.create(params=model.init(key), tx=TX, key=key)

    found = ft.init(make, ft.random.key(7), plan=plan)
    assert_trees_equal(ft.tree.map(lambda x: x.full(), found), make(ft.random.key(7)))
    assert {x.sharding.spec for x in ft.tree.leaves(found.params)} <= {P("data"), P(None, "data"), P()}


def test_init_never_holds_more_than_its_shards_and_a_leaf() -> None:
    def make(key: torch.Tensor) -> dict[str, Any]:
        keys = ft.random.split(key, 8)
        return {"params": {str(i): 0.02 * ft.random.normal(k, (64, 64)) for i, k in enumerate(keys)}}

    plan = ft.Plan(ft.make_mesh({"data": 8}, abstract=True), ft.zero(3))
    lowered = ft.jit(make, plan=plan).lower(ft.random.key(0))
    leaf = 64 * 64 * 4
    assert lowered.memory_analysis().peak <= 8 * leaf // 8 + leaf


# ---- what a call does


def test_donated_arrays_are_updated_where_they_lie_and_gone() -> None:
    plan = ft.Plan(virtual(data=2), ft.zero(3, min_size=0), batch=P("data"))
    step = ft.jit(model.train_step(TX), plan=plan, donate="state")
    first = ft.device_put(state(), plan)
    leaf = first.params["wte"]
    address = leaf.shards[1].data_ptr()
    after, _ = step(first, model.batch(0))
    assert after.params["wte"].shards[1].data_ptr() == address
    with pytest.raises((DonatedError, ValueError), match="state/params/wte of step was donated"):
        leaf.full()


def test_replays_are_bitwise_equal_and_two_steps_do_not_touch() -> None:
    mesh = virtual(data=2)
    steps = [ft.jit(model.train_step(TX), plan=ft.Plan(mesh, ft.zero(s, min_size=0), batch=P("data"))) for s in (1, 3)]
    runs: list[list[Any]] = [[], []]
    for _ in range(2):
        states = [ft.device_put(state(), step.plan) for step in steps]  # type: ignore[attr-defined]
        for i in range(3):
            states = [step(s, model.batch(i))[0] for step, s in zip(steps, states, strict=True)]
        for run, s in zip(runs, states, strict=True):
            run.append(ft.tree.map(lambda x: x.full(), s))
    for first, second in runs:
        assert_trees_equal(first, second)


def test_without_jit_the_numbers_are_the_same() -> None:
    plan = ft.Plan(virtual(data=2), ft.zero(3, min_size=0), batch=P("data"))
    step = ft.jit(model.train_step(TX), plan=plan)
    first = ft.device_put(state(), plan)
    with ft.disable_jit():
        plain, _ = step(first, model.batch(0))
    found, _ = step(first, model.batch(0))
    assert_trees_close(*(ft.tree.map(lambda x: x.full(), s) for s in (plain, found)))


# ---- reports and refusals


def wasteful(params: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.inv(x.transpose(0, 1) @ x) @ params["w"]


def test_what_the_plan_did_not_ask_for_is_told_with_its_line() -> None:
    plan = ft.Plan(virtual(data=2), batch=P("data"))
    report = ft.jit(wasteful, plan=plan).lower({"params": {"w": torch.ones(4, 4)}}["params"], torch.randn(8, 4)).partition
    assert "test_partition.py" in str(report)


def test_strict_turns_what_was_not_asked_for_into_an_error() -> None:
    plan = ft.Plan(virtual(data=2), batch=P("data"))
    sort = ft.jit(lambda params, x: x.sort(0).values + params["w"], plan=plan, strict=True)
    with pytest.raises(PartitionError, match=r"(?s)strict=True.*test_partition.py"):
        sort({"w": torch.ones(64)}, torch.randn(8, 64))


def test_a_batch_that_does_not_divide() -> None:
    plan = ft.Plan(virtual(data=4), batch=P("data"))
    with pytest.raises(PartitionError, match=r"rows/t.* of shape \[10, 6\].*4 ranks.*choose a multiple"):
        ft.jit(model.train_step(TX), plan=plan)(state(), model.batch(0, rows=10))


def test_an_array_of_another_mesh() -> None:
    other = ft.Plan(virtual(data=3), ft.zero(3, min_size=0))
    plan = ft.Plan(virtual(data=2), batch=P("data"))
    with pytest.raises(PartitionError, match="lives on the mesh data=3"):
        ft.jit(model.train_step(TX), plan=plan)(ft.device_put(state(), other), model.batch(0))


def test_an_abstract_mesh_plans_and_does_not_run() -> None:
    plan = ft.Plan(ft.make_mesh({"data": 1024}, abstract=True), ft.zero(3, min_size=0), batch=P("data"))
    step = ft.jit(model.train_step(TX), plan=plan)
    batch = {name: ft.ShapeDtypeStruct((4096, model.SEQ), torch.int64) for name in ("tokens", "targets")}
    lowered = step.lower(ft.eval_shape(lambda: state()), batch)
    assert lowered.partition.counts()["reduce_scatter[data]"] == 15
    assert "all_gather" in lowered.as_text()
    with pytest.raises(PartitionError, match="abstract mesh cannot run"):
        step(state(), {name: torch.zeros(1024, model.SEQ, dtype=torch.int64) for name in ("tokens", "targets")})
