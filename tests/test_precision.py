"""Dtypes of a step, loss scaling, and steps that overflow, against references by hand."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from functrain import tree
from functrain.compile.jit import jit
from functrain.precision import DynamicScale, Precision, StaticScale, all_finite, select
from functrain.state import TrainState
from functrain.transforms import grad, value_and_grad, vmap
from tests.helpers import assert_trees_close, assert_trees_equal


class Momentum:
    """Gradient descent with momentum: an optimizer whose state shows whether a step counted."""

    @staticmethod
    def init(params: Any) -> Any:
        return {"momentum": tree.map(torch.zeros_like, params), "count": torch.zeros((), dtype=torch.int32)}

    @staticmethod
    def update(grads: Any, state: Any, params: Any) -> Any:
        momentum = tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
        return tree.map(lambda m: -0.1 * m, momentum), {"momentum": momentum, "count": state["count"] + 1}


def params() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"w": torch.randn(3, 4, generator=generator), "b": torch.randn(4, generator=generator)}


# ---- Precision


@pytest.mark.parametrize("compute", [torch.float16, torch.bfloat16, torch.float64])
def test_params_are_cast_before_use_and_gradients_come_out_in_their_dtype(compute: torch.dtype) -> None:
    seen = {}

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        seen.update(w=p["w"].dtype, n=p["n"].dtype, x=x.dtype)
        return (x.to(compute) @ p["w"] + p["b"]).float().square().sum()

    p, x = params() | {"n": torch.tensor(1)}, torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
    value, gradients = value_and_grad(loss, precision=Precision(compute=compute))(p, x)
    assert seen == {"w": compute, "n": torch.int64, "x": torch.float32}
    cast = {name: leaf.to(compute) if leaf.is_floating_point() else leaf for name, leaf in p.items()}
    expected_value, expected = value_and_grad(loss)(cast, x)
    assert_trees_equal((value, gradients), (expected_value, {k: g.to(p[k].dtype) for k, g in expected.items()}))
    assert {k: g.dtype for k, g in gradients.items()} == {k: x.dtype for k, x in p.items()}


def test_gradients_pass_through_the_reduce_dtype() -> None:
    loss = lambda p: (p.double() * (1 + 2.0**-12)).sum().float()  # noqa: E731
    p = torch.ones(2, dtype=torch.float64)
    exact = grad(loss, precision=Precision(compute=torch.float64, reduce=torch.float64))(p)
    rounded = grad(loss, precision=Precision(compute=torch.float64, reduce=torch.bfloat16))(p)
    assert_trees_equal((exact, rounded), (torch.full((2,), 1 + 2.0**-12, dtype=torch.float64), torch.ones(2, dtype=torch.float64)))


def test_precision_is_plain_data() -> None:
    assert Precision() == Precision(torch.float32, torch.bfloat16, torch.float32)
    assert hash(Precision()) == hash(Precision())
    assert tree.leaves(Precision().to_compute({"x": torch.ones(2), "n": torch.ones(2, dtype=torch.int32)}))[1].dtype is torch.bfloat16
    with pytest.raises(TypeError, match=r"compute=...\) takes a floating-point torch dtype .* not 'half'"):
        Precision(compute="half")  # type: ignore[arg-type]


def test_precision_nests_in_derivatives() -> None:
    precision = Precision(compute=torch.float64)
    hessian = grad(grad(lambda x: x**4, precision=precision), precision=precision)(torch.tensor(2.0))
    assert hessian == 48.0
    assert hessian.dtype is torch.float32
    assert_trees_equal(vmap(grad(lambda x: x**2, precision=precision))(torch.arange(3.0)), 2 * torch.arange(3.0))


def test_autocast_in_a_loss_function_works() -> None:
    seen = []

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ p["w"]
        seen.append(y.dtype)
        return (y.float() + p["b"]).square().sum()

    x = torch.ones(2, 3)
    value, gradients = value_and_grad(loss)(params(), x)
    leaves = tree.map(lambda p: p.clone().requires_grad_(), params())
    expected = loss(leaves, x)
    expected.backward()
    assert seen[0] is torch.bfloat16
    assert_trees_equal((value, gradients), (expected, tree.map(lambda p: p.grad, leaves)))


# ---- scales


@settings(deadline=None, max_examples=30)
@given(st.lists(st.booleans(), max_size=30), st.integers(1, 4))
def test_a_dynamic_scale_follows_the_reference(outcomes: list[bool], interval: int) -> None:
    scale = DynamicScale(initial=8.0, growth_interval=interval, growth_factor=4.0, backoff=0.25, minimum=0.5, maximum=1024.0)
    value, streak = 8.0, 0
    for finite in outcomes:
        scale = scale.update(torch.tensor(finite))
        streak = streak + 1 if finite else 0
        if not finite:
            value = max(value / 4, 0.5)
        elif streak == interval:
            value, streak = min(value * 4, 1024.0), 0
        assert float(scale.scale) == value
        assert int(scale.counter) == streak
        assert bool(scale.finite) == finite


def test_scales_are_values_with_static_settings() -> None:
    assert tree.paths({"s": DynamicScale()}) == ["s/scale", "s/counter", "s/finite"]
    assert tree.paths(StaticScale(4.0)) == ["scale", "finite"]
    assert [x.dtype for x in tree.leaves(DynamicScale())] == [torch.float32, torch.int32, torch.bool]
    assert float(StaticScale(4.0).update(torch.tensor(False)).scale) == 4.0
    with pytest.raises(ValueError, match="backoff"):
        DynamicScale(backoff=1.5)
    with pytest.raises(ValueError, match="minimum"):
        DynamicScale(initial=0.5)


@pytest.mark.parametrize("scale", [StaticScale(2.0**10), DynamicScale()])
def test_a_scale_leaves_value_and_gradients_as_they_are(scale: Any) -> None:
    loss = lambda p: (p["w"] @ p["b"]).square().sum()  # noqa: E731
    assert_trees_equal(value_and_grad(loss, loss_scale=scale)(params()), value_and_grad(loss)(params()))  # powers of two are exact


def test_a_scale_saves_what_float16_would_lose() -> None:
    """A gradient of 2**-30 is zero in float16, and exact when it is scaled by 2**15 on its way."""
    loss = lambda p: p.float().sum() * 2.0**-30  # noqa: E731
    half = Precision(compute=torch.float16)
    assert_trees_equal(grad(loss, precision=half)(torch.ones(2)), torch.zeros(2))
    for precision in (half, Precision(compute=torch.float16, reduce=torch.float16)):
        assert_trees_equal(grad(loss, precision=precision, loss_scale=DynamicScale())(torch.ones(2)), torch.full((2,), 2.0**-30))


# ---- steps that overflow


def test_float16_training_with_overflows_follows_a_reference_by_hand() -> None:
    """A spike in the data overflows float16 twice: those steps leave everything but the scale; the others are plain momentum."""
    spikes = {2, 3}
    precision = Precision(compute=torch.float16)

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return ((x.half() @ p["w"] + p["b"]) * 0.5).float().square().mean()

    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, 3, generator=generator) * (1e4 if i in spikes else 1.0) for i in range(6)]
    state = TrainState.create(
        params=params(), tx=Momentum, loss_scale=DynamicScale(initial=2.0**10, growth_interval=2), seen=torch.zeros(())
    )
    reference, momentum, scale, streak, step = params(), tree.map(torch.zeros_like, params()), 2.0**10, 0, 0
    for i, x in enumerate(batches):
        before = state
        gradients = grad(loss, precision=precision, loss_scale=state.loss_scale)(state.params, x)
        state = state.apply_gradients(gradients, Momentum, seen=state.seen + 1)
        leaves = tree.map(lambda p: p.half().requires_grad_(), reference)
        (loss(leaves, x) * scale).backward()
        found = tree.map(lambda p, scale=scale: p.grad.float() / scale, leaves)
        if i in spikes:
            assert not all(g.isfinite().all() for g in found.values()), "the test must inject an overflow"
            scale, streak = scale / 2, 0
            assert_trees_equal(state.replace(loss_scale=None), before.replace(loss_scale=None))
        else:
            momentum = tree.map(lambda m, g: 0.9 * m + g, momentum, found)
            reference = tree.map(lambda p, m: p - 0.1 * m, reference, momentum)
            step, streak = step + 1, streak + 1
            scale, streak = (scale * 2, 0) if streak == 2 else (scale, streak)
        assert bool(state.loss_scale.finite) == (i not in spikes)
        assert float(state.loss_scale.scale) == scale
        assert int(state.step) == int(state.seen) == int(state.opt_state["count"]) == step
        assert_trees_close(state.params, reference, rtol=1e-6, atol=1e-7)
    assert step == 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("scale", [StaticScale(4.0), DynamicScale()])
def test_one_bad_element_undoes_the_step_bit_for_bit(bad: float, scale: Any) -> None:
    weird = torch.tensor([-0.0, 1e-45, float("nan"), 1.0])  # a NaN and a negative zero that were there stay there
    state = TrainState.create(
        params=params() | {"weird": weird}, tx=Momentum, loss_scale=scale, buffers={"mean": torch.zeros(2)}, key=torch.tensor([0, 1])
    )
    gradients = tree.map(torch.ones_like, state.params)
    gradients["w"][1, 2] = bad
    after = state.apply_gradients(gradients, Momentum, buffers={"mean": torch.ones(2)}, key=torch.tensor([5, 6]))
    old, new = tree.leaves(state.replace(loss_scale=None)), tree.leaves(after.replace(loss_scale=None))
    assert all(x.numpy().tobytes() == y.numpy().tobytes() for x, y in zip(old, new, strict=True))
    assert not bool(after.loss_scale.finite)
    assert float(after.loss_scale.scale) == (4.0 if isinstance(scale, StaticScale) else 2.0**14)


def test_without_a_scale_gradients_are_taken_as_they_come() -> None:
    state = TrainState.create(params={"w": torch.ones(2)}, tx=Momentum)
    after = state.apply_gradients({"w": torch.tensor([float("inf"), 1.0])}, Momentum)
    assert int(after.step) == 1
    assert_trees_close(after.params, {"w": torch.tensor([-float("inf"), 0.9])})


# ---- all_finite and select


def test_all_finite_looks_at_floats_only() -> None:
    fine = {"w": torch.ones(2), "n": torch.tensor([2**62]), "h": torch.tensor([65504.0], dtype=torch.float16), "none": None, "x": 3.0}
    assert bool(all_finite(fine))
    assert bool(all_finite({"n": torch.ones(2, dtype=torch.int64)}))
    for bad in (float("inf"), float("nan")):
        assert not bool(all_finite(fine | {"h": torch.tensor([bad], dtype=torch.float16)}))
        assert not bool(all_finite(fine | {"z": torch.tensor([complex(0, bad)])}))


def test_select_takes_one_side_whole() -> None:
    old, new = {"w": torch.zeros(2), "name": "a", "n": 3}, {"w": torch.tensor([float("nan"), 1.0]), "name": "a", "n": 3}
    assert_trees_equal(select(torch.tensor(True), new, old)["w"], new["w"])
    assert_trees_equal(select(torch.tensor(False), new, old)["w"], old["w"])
    assert select(torch.tensor(False), new, old)["name"] == "a"
    with pytest.raises(ValueError, match=r"leaf w changes from \[2\] torch.float32 to \[3\]"):
        select(torch.tensor(True), {"w": torch.zeros(3)}, {"w": torch.zeros(2)})
    with pytest.raises(ValueError, match="leaf n cannot be chosen by a tensor: 4 against 3"):
        select(torch.tensor(True), {"n": 4}, {"n": 3})
    with pytest.raises(tree.StructureError, match="only on the left: b"):
        select(torch.tensor(True), {"a": old["w"], "b": old["w"]}, {"a": old["w"]})


@pytest.mark.parametrize("factor", [1.0, float("inf")])
def test_a_captured_step_that_overflows_is_undone_as_the_eager_one(factor: float) -> None:
    def step(state: TrainState, x: torch.Tensor) -> TrainState:
        loss = lambda p: ((x.half() @ p["w"] + p["b"]).float() ** 2).mean()  # noqa: E731
        gradients = grad(loss, precision=Precision(compute=torch.float16), loss_scale=state.loss_scale)(state.params)
        return state.apply_gradients(gradients, Momentum, seen=state.seen + 1)

    state = TrainState.create(params=params(), tx=Momentum, loss_scale=DynamicScale(), seen=torch.zeros(()))
    x = torch.ones(2, 3) * factor
    captured = jit(step)(state, x)
    assert_trees_close(captured, step(state, x), rtol=1e-5, atol=1e-6)
    assert int(captured.step) == (factor == 1.0)
