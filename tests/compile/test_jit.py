"""Calls of a captured step: what is captured again and why, what inlines, what the step says of itself."""

import logging
from typing import Any

import numpy as np
import pytest
import torch

import functrain as ft
from tests.compile.steps import data, make_step, mlp_loss, mlp_params
from tests.helpers import assert_trees_close, assert_trees_equal


def test_one_capture_for_each_signature(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def function(x: torch.Tensor) -> torch.Tensor:
        Calls.count += 1
        return x + 1

    class Calls:
        count = 0

    step = ft.jit(function)
    with caplog.at_level(logging.WARNING, "functrain"):
        for shape in ((2, 3), (2, 3), (3, 3), (2, 3)):
            calls.append(step(torch.zeros(shape)))
    assert Calls.count == 2
    assert len(step.report().compilations) == 2
    assert "x was [2, 3] float32 and is [3, 3] float32" in caplog.text


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ((torch.zeros(2, dtype=torch.float64),), "float64"),
        (([torch.zeros(2)],), "another structure"),
        ((torch.zeros(4)[::2],), "other strides"),
    ],
)
def test_the_report_says_what_changed(second: Any, says: str) -> None:
    step = ft.jit(lambda x: x)
    step(torch.zeros(2))
    step(*second)
    assert says in step.report().compilations[1].why


def test_static_arguments_make_graphs_of_their_own() -> None:
    step = ft.jit(lambda x, power, sign=1: sign * x**power, static_argnames=("power", "sign"))
    x = torch.tensor(3.0)
    assert float(step(x, 2)) == 9.0
    assert float(step(x, 3)) == 27.0
    assert float(step(x, power=2, sign=-1)) == -9.0
    assert "power=3 (was 2)" in step.report().compilations[1].why
    assert len(step.report().compilations) == 3


def test_numbers_and_arrays_are_traced_as_jax_does() -> None:
    step = ft.jit(lambda x, rate, flag: torch.where(flag, x * rate, x))
    x = torch.ones(2)
    assert_trees_equal(step(x, 0.5, True), torch.full((2,), 0.5))
    assert_trees_equal(step(x, 0.25, True), torch.full((2,), 0.25))
    assert_trees_equal(step(x, 2.0, False), x)
    assert_trees_equal(step(np.ones(2, np.float32), 2.0, True), torch.full((2,), 2.0))
    assert len(step.report().compilations) == 1


def test_keyword_arguments_and_defaults() -> None:
    def function(x: torch.Tensor, *, shift: Any = 1.0, **rest: torch.Tensor) -> Any:
        return {"y": x + shift, **{name: value * 2 for name, value in rest.items()}}

    step = ft.jit(function)
    assert float(step(torch.tensor(1.0))["y"]) == 2.0
    assert float(step(torch.tensor(1.0), shift=torch.tensor(5.0))["y"]) == 6.0
    assert float(step(torch.tensor(1.0), z=torch.tensor(4.0))["z"]) == 8.0


def test_a_result_never_shares_memory_with_an_input_or_another_result() -> None:
    def function(x: torch.Tensor) -> Any:
        y = x * 2
        return x, x.view(-1), y, y[0], y

    x = torch.ones(2, 3)
    results = ft.jit(function)(x)
    pointers = [r.untyped_storage().data_ptr() for r in (x, *results)]
    assert len(set(pointers)) == len(pointers)
    assert_trees_equal(results, function(x))
    assert results[3].untyped_storage().nbytes() == 12


def test_results_do_not_require_grad() -> None:
    x = torch.nn.Parameter(torch.ones(2))
    assert not ft.jit(lambda x: x * 2)(x).requires_grad


def test_disable_jit_gives_the_same_numbers() -> None:
    tx = ft.optim.adamw(1e-2)
    step = ft.jit(make_step(tx))
    state = ft.TrainState.create(params=mlp_params(), tx=tx)
    captured, _ = step(state, *data())
    with ft.disable_jit():
        eager, _ = step(state, *data())
        assert step.status.state == "disabled"
    assert_trees_close(captured, eager, rtol=1e-6, atol=1e-7)
    assert step.report().uncaptured == {"jit is disabled": 1}
    assert step.status.state == "captured"


def test_status_tells_the_truth() -> None:
    step = ft.jit(lambda x: x + 1)
    assert step.status.state == "not captured"
    step(torch.ones(1))
    assert (step.status.state, step.status.backend) == ("captured", "eager")


def test_a_jitted_function_inside_another_is_inlined() -> None:
    inner = ft.jit(lambda x: torch.sin(x))
    outer = ft.jit(lambda x: inner(x) * 2)
    x = torch.ones(3)
    assert_trees_equal(outer(x), torch.sin(x) * 2)
    assert not inner.report().compilations
    assert "aten.sin" in outer.lower(x).as_text()


def test_a_jitted_function_can_be_differentiated_and_mapped() -> None:
    inner = ft.jit(lambda w, x: (w * x).sum() ** 2)
    w, x = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    assert_trees_equal(ft.grad(inner)(w, x), 2 * (w * x).sum() * x)
    assert_trees_equal(ft.vmap(inner)(torch.stack([w, x]), torch.stack([x, w])), torch.stack([inner(w, x), inner(x, w)]))
    batch = ft.jit(ft.vmap(ft.grad(lambda w, x: (w * x).sum() ** 2), in_axes=(None, 0)))
    assert_trees_close(batch(w, torch.stack([x, w])), torch.stack([ft.grad(inner)(w, x), ft.grad(inner)(w, w)]))


def test_transforms_inside_jit() -> None:
    def function(w: torch.Tensor) -> torch.Tensor:
        return torch.sin(w).prod()

    w = torch.tensor([0.3, 0.7])
    hessian = lambda w: ft.vmap(lambda v: ft.jvp(ft.grad(function), (w,), (v,))[1])(torch.eye(2))  # noqa: E731
    assert_trees_close(ft.jit(hessian)(w), torch.autograd.functional.hessian(function, w))


def test_lower_runs_nothing_and_takes_abstract_arguments() -> None:
    tx = ft.optim.adamw(1e-3)
    abstract = ft.eval_shape(lambda: ft.TrainState.create(params=mlp_params(), tx=tx))
    step = ft.jit(make_step(tx))
    x = ft.ShapeDtypeStruct((4, 8), torch.float32)
    lowered = step.lower(abstract, x, x)
    assert "aten.gelu.default" in lowered.as_text()
    compiled = lowered.compile()
    state = ft.TrainState.create(params=mlp_params(), tx=tx)
    compiled(state, *data())
    assert len(step.report().compilations) == 1


def test_decorator_form_keeps_name_and_docs() -> None:
    @ft.jit
    def step(x: torch.Tensor) -> torch.Tensor:
        """Adds one."""
        return x + 1

    assert (step.__name__, step.__doc__) == ("step", "Adds one.")


def test_methods_and_partials() -> None:
    import functools  # noqa: PLC0415

    class Trainer:
        rate = 2.0

        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.rate

    assert float(ft.jit(Trainer().step)(torch.tensor(3.0))) == 6.0
    assert float(ft.jit(functools.partial(torch.mul, torch.tensor(2.0)))(torch.tensor(3.0))) == 6.0


def test_capture_does_not_change_torchs_generator() -> None:
    before = torch.get_rng_state()
    ft.jit(ft.grad(mlp_loss))(mlp_params(), *data())
    assert torch.equal(torch.get_rng_state(), before)


def test_two_steps_side_by_side() -> None:
    tx = ft.optim.adamw(1e-2)
    steps = [ft.jit(make_step(tx), donate="state") for _ in range(2)]
    states = [ft.TrainState.create(params=mlp_params(seed=i), tx=tx) for i in range(2)]
    alone = [ft.tree.map(torch.clone, s) for s in states]
    for i in range(3):
        for k in range(2):
            states[k], _ = steps[k](states[k], *data(seed=i))
    for k in range(2):
        for i in range(3):
            alone[k], _ = make_step(tx)(alone[k], *data(seed=i))
    assert_trees_close(states, alone)
