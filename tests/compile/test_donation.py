"""Donated leaves are updated where they lie; using one again is an error by name; memory is free after the last use."""

import gc
import weakref
from typing import Any

import pytest
import torch

import functrain as ft
from functrain.compile.errors import DonatedError
from tests.compile.steps import data, make_step, mlp_params
from tests.helpers import assert_trees_close, assert_trees_equal


def fresh_state(tx: Any) -> Any:
    return ft.TrainState.create(params=mlp_params(), tx=tx)


def test_parameters_and_moments_keep_their_memory() -> None:
    tx = ft.optim.adamw(1e-2)
    state = fresh_state(tx)
    before = {path: leaf.data_ptr() for path, leaf in ft.tree.leaves_with_path((state.params, state.opt_state.mu, state.opt_state.nu))}
    state, _ = ft.jit(make_step(tx), donate="state")(state, *data())
    after = {path: leaf.data_ptr() for path, leaf in ft.tree.leaves_with_path((state.params, state.opt_state.mu, state.opt_state.nu))}
    assert before == after


def test_without_donation_the_input_stays() -> None:
    tx = ft.optim.adamw(1e-2)
    state = fresh_state(tx)
    copy = ft.tree.map(torch.clone, state)
    new, _ = ft.jit(make_step(tx))(state, *data())
    assert_trees_equal(state, copy)
    donated, _ = ft.jit(make_step(tx), donate="state")(copy, *data())
    assert_trees_close(donated, new, rtol=1e-6, atol=1e-7)


def test_using_a_donated_leaf_again_names_it() -> None:
    tx = ft.optim.adamw(1e-2)
    old = fresh_state(tx)
    step = ft.jit(make_step(tx), donate="state")
    step(old, *data())
    leaf = old.params["layer0"]["w"]
    says = "state/params/layer0/w of train_step was donated"
    for use in (lambda: leaf + 1, lambda: leaf.shape, lambda: torch.stack([leaf]), lambda: step(old, *data()), lambda: float(old.step)):
        with pytest.raises(DonatedError, match="was donated"):
            use()
    with pytest.raises(DonatedError, match=says):
        leaf.sum()
    assert says.split(" was", maxsplit=1)[0] in repr(leaf)


def test_the_same_tensor_twice() -> None:
    x = torch.ones(3)
    step = ft.jit(lambda state, other: {"w": state["w"] + other}, donate="state")
    with pytest.raises(DonatedError, match=r"state/w and other|other and state/w"):
        step({"w": x}, x)
    assert_trees_equal(x + 0, torch.ones(3))


def test_overlapping_memory() -> None:
    x = torch.ones(4)
    step = ft.jit(lambda state, other: {"w": state["w"] * 2 + other.sum()}, donate="state")
    with pytest.raises(DonatedError, match="share memory"):
        step({"w": x[:3]}, x[2:])
    step({"w": x[:2]}, x[2:].clone())


def test_a_donated_leaf_that_is_passed_through() -> None:
    step = ft.jit(lambda state: {"kept": state["kept"], "n": state["n"] + 1}, donate="state")
    state = {"kept": torch.arange(3.0), "n": torch.zeros(())}
    pointer = state["kept"].data_ptr()
    old = state["kept"]
    for _ in range(3):
        state = step(state)
    assert state["kept"].data_ptr() == pointer
    assert_trees_equal(state, {"kept": torch.arange(3.0), "n": torch.tensor(3.0)})
    with pytest.raises(DonatedError, match="state/kept"):
        old + 1


def test_memory_of_a_dropped_leaf_is_free() -> None:
    step = ft.jit(lambda state: state["big"].sum(), donate="state")
    state = {"big": torch.ones(1000)}
    storage = weakref.ref(state["big"].untyped_storage())
    result = step(state)
    gc.collect()
    assert storage() is None or storage().nbytes() == 0
    assert float(result) == 1000


def test_old_values_that_are_read_after_the_update_are_right() -> None:
    tx = ft.optim.adamw(0.1)

    def function(state: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        new, _ = make_step(tx)(state, x, y)
        moved = ft.tree.map(lambda a, b: (a - b).abs().sum(), new.params, state.params)
        return new, moved

    state = fresh_state(tx)
    expected = function(state, *data())
    actual = ft.jit(function, donate="state")(ft.tree.map(torch.clone, state), *data())
    assert_trees_close(actual, expected, rtol=1e-6, atol=1e-7)


def test_the_old_state_selected_by_where_survives_donation() -> None:
    def function(state: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
        return torch.where(finite, state * 2 + 1, state)

    step = ft.jit(function, donate="state")
    assert_trees_equal(step(torch.arange(4.0), torch.tensor(False)), torch.arange(4.0))
    assert_trees_equal(step(torch.arange(4.0), torch.tensor(True)), torch.arange(4.0) * 2 + 1)


def test_parameters_of_modules_can_be_donated() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    new = ft.jit(lambda w: w * 2, donate="w")(weight)
    assert type(new) is torch.Tensor
    with pytest.raises(DonatedError):
        weight + 1


def test_a_failing_check_leaves_the_arguments_usable() -> None:
    def function(state: torch.Tensor) -> torch.Tensor:
        if state.sum() > 0:
            return state
        return -state

    x = torch.ones(2)
    with pytest.raises(ft.CaptureError):
        ft.jit(function, donate="state")(x)
    assert_trees_equal(x + 0, torch.ones(2))
