"""Inductor on two real ranks: the numbers of one device, and every collective as without it."""

from typing import Any

import pytest
import torch

import functrain as ft
from functrain import P
from functrain.launch import launch
from tests.helpers import assert_trees_close
from tests.sharding import model
from tests.sharding.test_contract import gathered, one_device

pytestmark = pytest.mark.slow
TIMEOUT = 60.0  # seconds; a rank may compile so much longer than the other


def trained(stages: list[int]) -> list[Any]:
    """What one rank ends with at each stage: state, metrics, status."""
    torch.set_num_threads(1)
    results = []
    for stage in stages:
        plan = ft.Plan(ft.make_mesh({"data": 2}, timeout=TIMEOUT), ft.zero(stage, min_size=0), batch=P("data"))
        tx = model.OPTIMIZERS["adam"]()
        state = ft.init(lambda key, tx=tx: ft.TrainState.create(params=model.init(key), tx=tx), ft.random.key(0), plan=plan)
        step = ft.jit(model.train_step(tx, 2), plan=plan, donate="state", backend="inductor")
        metrics = []
        for i in range(10):
            state, found = step(state, model.batch(i))
            metrics.append({name: float(x) for name, x in found.items()})
        results.append((gathered(state), metrics, str(step.status)))
    return results


def test_training_gives_the_numbers_of_one_device() -> None:
    _, expected, wanted = one_device("adam")
    for rank, results in enumerate(launch(trained, [0, 3], nproc=2, stdout="quiet", timeout=400)):
        for state, metrics, status in results:
            assert status == "compiled (inductor)"
            assert_trees_close(state, expected, rank=rank)
            for found, want in zip(metrics, wanted, strict=True):
                assert_trees_close({k: torch.tensor(v) for k, v in found.items()}, want, rank=rank)


def every_collective(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """On a shard [4, 6]."""
    lax = ft.lax
    return {
        "sum": lax.psum(x * x, "data") * x,
        "max": lax.pmax(x, "data") + x,
        "gather": lax.all_gather(x * 2, "data", axis=1, tiled=True)[:, 3:9],
        "scatter": lax.reduce_scatter(x * 3, "data", scatter_dimension=1, tiled=True).repeat(1, 2),
        "exchange": lax.all_to_all(x + 1, "data", 1, 0, tiled=True).reshape(4, 6),
        "pass on": lax.ppermute(x, "data", [(0, 1), (1, 0)]),
        "pass once": lax.ppermute(x, "data", [(0, 1)]),
        "index": x * lax.axis_index("data"),
    }


def both_ways(_: None) -> tuple[Any, Any, str]:
    """The collectives, and a mask whose numbers depend on the global index, with Inductor and without."""
    torch.set_num_threads(1)
    plan = ft.Plan(ft.make_mesh({"data": 2}, timeout=TIMEOUT), batch=P("data"))
    mapped = ft.shard_map(every_collective, mesh=plan.mesh, in_specs=P("data"), out_specs=P("data"))

    def step(batch: torch.Tensor) -> Any:
        return mapped(batch), ft.random.dropout(ft.random.key(3), batch, 0.5), batch.sum()

    x, steps = torch.arange(48.0).reshape(8, 6) / 7, [ft.jit(step, plan=plan, backend=backend) for backend in ("inductor", "eager")]
    compiled, plain = ([ft.tree.map(lambda a: a.full(), run(batch=x * (1 + i))) for i in range(2)] for run in steps)
    return compiled, plain, str(steps[0].status)


def test_every_collective_is_what_it_is_without_inductor() -> None:
    for rank, (compiled, plain, status) in enumerate(launch(both_ways, None, nproc=2, stdout="quiet", timeout=300)):
        assert status == "compiled (inductor)"
        assert_trees_close(compiled, plain, rank=rank)


def test_virtual_ranks_say_that_they_run_operation_by_operation() -> None:
    plan = ft.Plan(ft.make_mesh({"data": 2}, simulate=True), batch=P("data"))
    step = ft.jit(lambda batch: batch * 2, plan=plan, backend="inductor")
    assert step(torch.ones(4)).full().tolist() == [2.0] * 4
    assert "virtual ranks run in lock step" in str(step.status)
