"""Real processes over gloo: the numbers of one device, and what happens when ranks differ or die."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import functrain as ft
from functrain import P
from functrain.launch import LaunchError, launch
from tests.helpers import assert_trees_close
from tests.sharding import model
from tests.sharding.test_contract import gathered, one_device

pytestmark = pytest.mark.slow


def trained(axes: dict[str, int], stage: int, accumulate: int, optimizer: str, steps: int = 10) -> Any:
    """What one rank ends with: the whole state, and the metrics."""
    torch.set_num_threads(1)
    plan = ft.Plan(ft.make_mesh(axes), ft.zero(stage, min_size=0), batch=P("data"))
    tx = model.OPTIMIZERS[optimizer]()
    state = ft.init(lambda key: ft.TrainState.create(params=model.init(key), tx=tx), ft.random.key(0), plan=plan)
    step = ft.jit(model.train_step(tx, accumulate), plan=plan, donate="state")
    metrics = []
    for i in range(steps):
        state, found = step(state, model.batch(i))
        metrics.append({name: float(x) for name, x in found.items()})
    return gathered(state), metrics


def several(runs: list[tuple[Any, ...]]) -> list[Any]:
    return [trained(*run) for run in runs]


def test_two_processes_give_the_numbers_of_one_device() -> None:
    runs = [({"data": 2}, stage, accumulate, optimizer) for stage in range(4) for accumulate in (1, 2, 4) for optimizer in model.OPTIMIZERS]
    for rank, results in enumerate(launch(several, runs, nproc=2, stdout="quiet", timeout=300)):
        for run, (state, metrics) in zip(runs, results, strict=True):
            _, expected, wanted = one_device(run[3])
            assert_trees_close(state, expected, rank=rank)
            for found, want in zip(metrics, wanted, strict=True):
                assert_trees_close({k: torch.tensor(v) for k, v in found.items()}, want, rank=rank)


def overflow(folder: str) -> Any:
    """A float16 run in which an inf stands in the rows of rank 1 alone."""
    torch.set_num_threads(1)
    plan = ft.Plan(ft.make_mesh({"data": 2}), ft.zero(3, min_size=0), batch=P("data"))
    tx = ft.optim.adam(1e-3)
    precision = ft.Precision(compute=torch.float16)

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        return ((batch["x"].half() @ params["w"]) ** 2).float().mean()

    def step(state: Any, batch: Any) -> Any:
        loss, grads = ft.value_and_grad(loss_fn, precision=precision, loss_scale=state.loss_scale)(state.params, batch)
        return state.apply_gradients(grads, tx), loss

    first = ft.TrainState.create(params={"w": torch.ones(6, 5)}, tx=tx, loss_scale=ft.DynamicScale(1024.0))
    x = torch.ones(4, 6)
    x[3, 0] = float("inf")
    state, _ = ft.jit(step, plan=plan)(ft.device_put(first, plan), {"x": x})
    return gathered(state)


def test_an_overflow_on_one_rank_stops_the_step_on_all() -> None:
    one, two = launch(overflow, "", nproc=2, stdout="quiet", timeout=120)
    for state in (one, two):
        assert torch.equal(state.params["w"], torch.ones(6, 5))
        assert int(state.step) == 0
        assert not bool(state.loss_scale.finite)
        assert float(state.loss_scale.scale) < 1024


def different_plans() -> None:
    torch.set_num_threads(1)
    mesh = ft.make_mesh({"data": 2})
    plan = ft.Plan(mesh, ft.zero(mesh.rank + 1, min_size=0), batch=P("data"))
    tx = model.OPTIMIZERS["sgd"]()
    ft.jit(model.train_step(tx), plan=plan)(ft.TrainState.create(params=model.init(ft.random.key(0)), tx=tx), model.batch(0))


def test_ranks_with_different_plans_are_told_at_once() -> None:
    start = time.monotonic()
    with pytest.raises(LaunchError, match="the graph of rank 1 differs"):
        launch(different_plans, nproc=2, stdout="quiet", timeout=60)
    assert time.monotonic() - start < 30


def killed(folder: str) -> None:
    torch.set_num_threads(1)
    mesh = ft.make_mesh({"data": 2}, timeout=20)
    plan = ft.Plan(mesh, ft.zero(3, min_size=0), batch=P("data"))
    tx = model.OPTIMIZERS["sgd"]()
    state = ft.device_put(ft.TrainState.create(params=model.init(ft.random.key(0)), tx=tx), plan)
    step = ft.jit(model.train_step(tx), plan=plan)
    for i in range(10_000):
        state, _ = step(state, model.batch(i % 4))
        if mesh.rank == 1 and i == 20:
            Path(folder, "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_ends_the_others(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(LaunchError, match=r"rank 1 was ended by SIGKILL"):
        launch(killed, str(tmp_path), nproc=2, stdout="quiet", timeout=90)
    assert (tmp_path / "killed").exists()
    assert time.monotonic() - start < 60
