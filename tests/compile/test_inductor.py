"""The same graph through torch's compiler: same numbers, and the truth where it fails."""

from typing import Any

import pytest
import torch

import functrain as ft
from functrain.compile import lower
from tests.compile.steps import data, make_step, mlp_params
from tests.helpers import assert_trees_close, assert_trees_equal


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("donated", [False, True])
def test_inductor_agrees_with_eager(donated: bool) -> None:
    tx = ft.optim.chain(ft.optim.clip_by_global_norm(0.05), ft.optim.adamw(1e-2))
    state = ft.TrainState.create(params=mlp_params(), tx=tx)
    copy = ft.tree.map(torch.clone, state)
    step = ft.jit(make_step(tx), backend="inductor", donate="state" if donated else ())
    for i in range(5):
        state, _ = make_step(tx)(state, *data(seed=i))
        old = copy
        copy, _ = step(copy, *data(seed=i))
        if not donated:
            assert_trees_equal(ft.tree.map(torch.clone, old), old)
    assert_trees_close(copy, state)
    assert (step.status.state, step.status.backend) == ("compiled", "inductor")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_keyed_randomness_is_the_same_compiled() -> None:
    def function(key: torch.Tensor) -> torch.Tensor:
        return ft.random.uniform(key, (33,)) + ft.random.bernoulli(key, 0.3, (33,))

    key = ft.random.key(7)
    assert_trees_equal(ft.jit(function, backend="inductor")(key), function(key))


def test_a_failing_compiler_falls_back_and_says_why(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(graph: Any) -> Any:
        raise RuntimeError("no compiler here\nsecond line")

    monkeypatch.setattr(lower, "compile_graph", broken)
    step = ft.jit(lambda x: x + 1, backend="inductor")
    assert float(step(torch.tensor(1.0))) == 2.0
    assert (step.status.state, step.status.backend) == ("fallen back", "eager")
    assert step.status.reason == "Inductor raised RuntimeError: no compiler here"
    assert "no compiler here" in caplog.text
