"""A train state is a value: made once, replaced by every step."""

from typing import Any

import pytest
import torch

from functrain import tree
from functrain.precision import DynamicScale
from functrain.state import TrainState
from functrain.transforms import value_and_grad
from tests.helpers import assert_same_structure, assert_trees_close, assert_trees_equal


class Descent:
    """Gradient descent by 0.1 that counts."""

    @staticmethod
    def init(params: Any) -> Any:
        return {"count": torch.zeros((), dtype=torch.int32)}

    @staticmethod
    def update(grads: Any, state: Any, params: Any) -> Any:
        return tree.map(lambda g: -0.1 * g, grads), {"count": state["count"] + 1}


def state(**extra: Any) -> TrainState:
    return TrainState.create(params={"w": torch.ones(2), "h": torch.ones(2, dtype=torch.bfloat16)}, tx=Descent, **extra)


def ones(of: TrainState) -> Any:
    return tree.map(torch.ones_like, of.params)


def test_create_fills_the_fields() -> None:
    made = state(loss_scale=DynamicScale(), buffers={"mean": torch.zeros(2)}, key=torch.tensor([0, 1]), average=torch.ones(3))
    assert int(made.step) == 0
    assert made.step.dtype is torch.int32
    assert_trees_equal(made.average, torch.ones(3))
    assert tree.paths(made) == [
        *("params/h", "params/w", "opt_state/count", "step", "loss_scale/scale", "loss_scale/counter", "loss_scale/finite"),
        *("buffers/mean", "key", "extra/average"),
    ]
    assert tree.paths(state()) == ["params/h", "params/w", "opt_state/count", "step"], "what is absent is no leaf"


def test_a_step_updates_params_in_their_dtype_and_counts() -> None:
    wide = {"w": torch.ones(2), "h": torch.ones(2)}  # float32 updates for a bfloat16 param
    after = state().apply_gradients(wide, Descent)
    assert_trees_close(after.params, {"w": torch.full((2,), 0.9), "h": torch.full((2,), 0.9, dtype=torch.bfloat16)}, rtol=1e-2)
    assert after.params["h"].dtype is torch.bfloat16
    assert int(after.step) == int(after.opt_state["count"]) == 1
    assert_same_structure(after, state())


def test_a_step_leaves_the_old_state_alone() -> None:
    before = state(buffers=torch.zeros(2))
    before.apply_gradients(ones(before), Descent, buffers=torch.ones(2))
    assert_trees_equal(before, state(buffers=torch.zeros(2)))
    with pytest.raises(AttributeError):
        before.step = before.step + 1  # type: ignore[misc]


def test_training_is_a_loop_over_values() -> None:
    x = torch.randn(16, 2, generator=torch.Generator().manual_seed(0))
    now, losses = TrainState.create(params={"w": torch.zeros(2)}, tx=Descent), []
    for _ in range(60):
        value, gradients = value_and_grad(lambda p: ((x @ p["w"] - x @ torch.tensor([1.0, -2.0])) ** 2).mean())(now.params)
        now = now.apply_gradients(gradients, Descent)
        losses.append(float(value))
    assert losses[-1] < 1e-4 < losses[0]
    assert int(now.step) == 60


def test_replacements_and_extras() -> None:
    before = state(buffers=torch.zeros(2), average=torch.zeros(2))
    after = before.apply_gradients(ones(before), Descent, buffers=torch.ones(2), average=torch.full((2,), 3.0))
    assert_trees_equal((after.buffers, after.average), (torch.ones(2), torch.full((2,), 3.0)))
    again = after.replace(average=torch.zeros(2), step=torch.tensor(7, dtype=torch.int32))
    assert_trees_equal((again.average, int(again.step), again.buffers), (torch.zeros(2), 7, torch.ones(2)))
    assert_same_structure(again, before)


def test_errors_say_what_is_there() -> None:
    made = state(average=torch.zeros(2))
    with pytest.raises(tree.StructureError, match=r"gradients do not fit the params: .*only on the left: h"):
        made.apply_gradients({"w": torch.ones(2)}, Descent)
    with pytest.raises(TypeError, match=r"no 'ema' to replace; it has params, .*average.*TrainState.create"):
        made.replace(ema=1)
    with pytest.raises(TypeError, match="sets step itself"):
        made.apply_gradients(ones(made), Descent, step=1)
    with pytest.raises(TypeError, match="makes opt_state itself"):
        state(opt_state=3)
    with pytest.raises(AttributeError, match="no 'ema'; its extras are: average"):
        made.ema  # noqa: B018
