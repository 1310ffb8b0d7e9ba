"""Every optimizer agrees with Optax for twenty steps, states included."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import torch
from optax._src import factorized

import functrain as ft
from functrain import optim, tree
from tests.helpers import assert_trees_close, assert_trees_equal, to_numpy

STEPS = 20
SHAPES = {"scalar": (), "vector": (7,), "matrix": (6, 4), "tall": (4, 9), "cube": (3, 4, 5), "none": (0,)}
MATRICES = {"a": (6, 4), "b": (4, 9), "c": (5, 5)}


def draws(shapes: dict[str, tuple[int, ...]], dtype: Any, seed: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {name: generator.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def decayed(params: Any) -> Any:
    return {name: name != "vector" for name in params}


def labels(params: Any) -> Any:
    return {name: "slow" if name in ("scalar", "vector") else "fast" for name in params}


def numbers(make: Any) -> Any:
    """A linear layer's weight, a stack of matrices, Adam for all else."""
    return lambda params: {name: {"matrix": make(1, 0), "cube": make(1, 2)}.get(name) for name in params}


def wide(schedule: Any) -> Any:
    """Optax's schedules compute in float32 from an int32 count, x64 or not; from a wide count they compute in the widest float."""
    return lambda count: schedule(count.astype(jnp.promote_types(count.dtype, jnp.zeros(0, int).dtype)))


O = optax  # noqa: E741

# name -> (ours, Optax's); each takes no argument
CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "sgd": (lambda: optim.sgd(0.1), lambda: O.sgd(0.1)),
    "momentum": (lambda: optim.sgd(0.1, momentum=0.9), lambda: O.sgd(0.1, momentum=0.9)),
    "nesterov": (lambda: optim.sgd(0.1, momentum=0.9, nesterov=True), lambda: O.sgd(0.1, momentum=0.9, nesterov=True)),
    "adam": (lambda: optim.adam(0.01), lambda: O.adam(0.01)),
    "adam options": (lambda: optim.adam(0.01, 0.8, 0.95, 1e-6, 1e-9), lambda: O.adam(0.01, 0.8, 0.95, 1e-6, 1e-9)),
    "nadam": (lambda: optim.adam(0.01, nesterov=True), lambda: O.adam(0.01, nesterov=True)),
    "adamw": (lambda: optim.adamw(0.01, weight_decay=0.1), lambda: O.adamw(0.01, weight_decay=0.1)),
    "adamw mask": (lambda: optim.adamw(0.01, weight_decay=0.1, mask=decayed), lambda: O.adamw(0.01, weight_decay=0.1, mask=decayed)),
    "nadamw": (lambda: optim.adamw(0.01, weight_decay=0.1, nesterov=True), lambda: O.adamw(0.01, weight_decay=0.1, nesterov=True)),
    "lion": (lambda: optim.lion(0.01, weight_decay=0.1), lambda: O.lion(0.01, weight_decay=0.1)),
    "lamb": (lambda: optim.lamb(0.01, weight_decay=0.1), lambda: O.lamb(0.01, weight_decay=0.1)),
    "adafactor": (lambda: optim.adafactor(0.01), lambda: O.adafactor(0.01)),
    "adafactor factored": (
        lambda: optim.adafactor(0.01, min_dim_size_to_factor=3, momentum=0.9, weight_decay_rate=0.01),
        lambda: O.adafactor(0.01, min_dim_size_to_factor=3, momentum=0.9, weight_decay_rate=0.01),
    ),
    "muon": (lambda: optim.muon(0.01, weight_decay=0.1), lambda: O.contrib.muon(0.01, weight_decay=0.1)),
    "muon options": (
        lambda: optim.muon(0.01, nesterov=False, adaptive=True, consistent_rms=0.2, adam_weight_decay=0.1, preconditioning="schatten"),
        lambda: O.contrib.muon(0.01, nesterov=False, adaptive=True, consistent_rms=0.2, adam_weight_decay=0.1, preconditioning="schatten"),
    ),
    "muon aol": (lambda: optim.muon(0.01, preconditioning="aol"), lambda: O.contrib.muon(0.01, preconditioning="aol")),
    "clip": (lambda: optim.chain(optim.clip(0.5), optim.sgd(0.1)), lambda: O.chain(O.clip(0.5), O.sgd(0.1))),
    "clip, adamw, schedule": (
        lambda: optim.chain(
            optim.clip_by_global_norm(0.5),
            optim.adamw(optim.warmup_cosine_decay_schedule(0.0, 0.01, 5, 20), weight_decay=0.1, mask=decayed),
        ),
        lambda: O.chain(
            O.clip_by_global_norm(0.5), O.adamw(wide(O.warmup_cosine_decay_schedule(0.0, 0.01, 5, 20)), weight_decay=0.1, mask=decayed)
        ),
    ),
    "pieces": (
        lambda: optim.chain(
            optim.scale_by_adam(), optim.add_decayed_weights(0.1, decayed), optim.scale_by_schedule(optim.exponential_decay(-0.03, 5, 0.5))
        ),
        lambda: O.chain(
            O.scale_by_adam(), O.add_decayed_weights(0.1, decayed), O.scale_by_schedule(wide(O.exponential_decay(-0.03, 5, 0.5)))
        ),
    ),
    "groups": (
        lambda: optim.multi_transform({"slow": optim.adamw(1e-3, weight_decay=0.0), "fast": optim.adamw(1e-2, weight_decay=0.1)}, labels),
        lambda: O.multi_transform({"slow": O.adamw(1e-3, weight_decay=0.0), "fast": O.adamw(1e-2, weight_decay=0.1)}, labels),
    ),
    "masked": (lambda: optim.masked(optim.adam(0.01), decayed), lambda: O.masked(O.adam(0.01), decayed)),
    "ema": (lambda: optim.chain(optim.ema(0.9), optim.scale(-0.1)), lambda: O.chain(O.ema(0.9), O.scale(-0.1))),
    "multi steps": (
        lambda: optim.multi_steps(optim.adamw(0.01), 3, accumulator_dtype=None),
        lambda: O.MultiSteps(O.adamw(0.01), 3, accumulator_dtype=None),
    ),
    "multi steps, scheduled": (
        lambda: optim.multi_steps(optim.sgd(0.1, 0.9), lambda done: 1 + done % 3, use_grad_mean=False, accumulator_dtype=None),
        lambda: O.MultiSteps(O.sgd(0.1, 0.9), lambda done: 1 + done % 3, use_grad_mean=False, accumulator_dtype=None),
    ),
    "multi steps, skipped": (
        lambda: optim.multi_steps(optim.adam(0.01), 2, should_skip_update_fn=optim.skip_not_finite, accumulator_dtype=None),
        lambda: O.MultiSteps(O.adam(0.01), 2, should_skip_update_fn=O.skip_not_finite, accumulator_dtype=None),
    ),
    "muon dimensions": (
        lambda: optim.muon(0.01, "dion", weight_decay=0.1, muon_weight_dimension_numbers=numbers(optim.MuonDimensionNumbers)),
        lambda: O.contrib.muon(0.01, "dion", weight_decay=0.1, muon_weight_dimension_numbers=numbers(O.contrib.MuonDimensionNumbers)),
    ),
    "hyperparams": (
        lambda: optim.inject_hyperparams(optim.adamw)(optim.linear_schedule(0.01, 0.0, 20), weight_decay=0.1),
        lambda: O.inject_hyperparams(O.adamw)(wide(O.linear_schedule(0.01, 0.0, 20)), weight_decay=0.1),
    ),
    "if finite": (lambda: optim.apply_if_finite(optim.adam(0.01), 2), lambda: O.apply_if_finite(O.adam(0.01), 2)),
}


def spoiled(grads: dict[str, np.ndarray], step: int) -> dict[str, np.ndarray]:
    """Gradients with a NaN or an infinity at some steps, three in a row among them."""
    if step in (3, 7, 8, 9):
        grads["vector"][2] = np.nan if step == 3 else np.inf
    return grads


def compare(case: str, dtype: Any, rtol: float, atol: float) -> None:
    ours, theirs = (make() for make in CASES[case])
    start = draws(SHAPES, dtype, 0)
    params, reference = {k: torch.from_numpy(v.copy()) for k, v in start.items()}, {k: jnp.asarray(v) for k, v in start.items()}
    state, reference_state = ours.init(params), theirs.init(reference)

    @jax.jit
    def jax_step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = theirs.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for step in range(STEPS):
        grads = draws(SHAPES, dtype, step + 1)
        grads = spoiled(grads, step) if case in ("if finite", "multi steps, skipped") else grads
        updates, state = ours.update({k: torch.from_numpy(v) for k, v in grads.items()}, state, params)
        params = optim.apply_updates(params, updates)
        reference, reference_state = jax_step(reference, reference_state, grads)
    assert_trees_close(params, reference, rtol, atol)
    compare_states(state, reference_state, rtol, atol)


# Names of fields that say how transformations are put together, and nothing about a value.
WRAPPERS = {"inner_state", "inner_states", "inner_opt_state", "hyperparams_states", "skip_state"}


def named(leaves: list[tuple[list[str], Any]], known: set[str]) -> dict[str, list[np.ndarray]]:
    """Values by name, such as `mu/matrix`: without places in chains, wrappers and groups; several of one name in their order."""
    found: dict[str, list[np.ndarray]] = {}
    for path, value in leaves:
        name = "count" if path[-1] == "count" else "/".join(part for part in path if not part.isdigit() and part not in WRAPPERS | known)
        found.setdefault(name, []).append(to_numpy(value))
    return found


def compare_states(
    ours: Any, theirs: Any, rtol: float, atol: float, groups: set[str] = frozenset({"slow", "fast", "muon", "adam"})
) -> None:
    """Every value agrees with the one of its name; counts agree as a set, for Optax keeps one more for a schedule."""
    ours_named = named([(path.split("/"), x) for path, x in tree.leaves_with_path(ours)], set(groups))
    flat, _ = jax.tree_util.tree_flatten_with_path(theirs)
    theirs_named = named(
        [([str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", "")))) for k in path], x) for path, x in flat], set(groups)
    )
    counts = [{int(x) for x in side.pop("count", [])} for side in (ours_named, theirs_named)]
    assert counts[0] == counts[1]
    assert ours_named.keys() == theirs_named.keys()
    for name, values in ours_named.items():
        assert len(values) == len(theirs_named[name]), name
        assert_trees_close({name: values}, {name: theirs_named[name]}, rtol, atol)


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_optax_in_float64(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Optax takes adafactor's decay in float32, whose last bit is the compiler's; here in the widest float, as ours.
    wide_decay = functools.partial(
        optax.scale_by_factored_rms, decay_rate_fn=lambda i, exponent: 1.0 - jnp.array(i + 1, float) ** (-exponent)
    )
    monkeypatch.setattr(factorized, "scale_by_factored_rms", wide_decay)
    with jax.enable_x64(True):
        compare(case, np.float64, 1e-12, 1e-12)


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_optax_in_float32(case: str) -> None:
    compare(case, np.float32, 1e-5, 2e-6)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (optim.constant_schedule(0.3), optax.constant_schedule(0.3)),
        (optim.linear_schedule(0.1, 0.9, 17, 3), optax.linear_schedule(0.1, 0.9, 17, 3)),
        (optim.polynomial_schedule(1.0, 0.1, 2.5, 40, 5), optax.polynomial_schedule(1.0, 0.1, 2.5, 40, 5)),
        (optim.exponential_decay(1.0, 10, 0.5), optax.exponential_decay(1.0, 10, 0.5)),
        (optim.exponential_decay(1.0, 10, 0.5, 7, True, 0.1), optax.exponential_decay(1.0, 10, 0.5, 7, True, 0.1)),
        (optim.cosine_decay_schedule(0.7, 50, 0.1, 1.5), optax.cosine_decay_schedule(0.7, 50, 0.1, 1.5)),
        (optim.warmup_cosine_decay_schedule(0.0, 1.0, 10, 60, 0.05), optax.warmup_cosine_decay_schedule(0.0, 1.0, 10, 60, 0.05)),
        (optim.piecewise_constant_schedule(1.0, {10: 0.5, 30: 0.1}), optax.piecewise_constant_schedule(1.0, {10: 0.5, 30: 0.1})),
        (
            optim.join_schedules([optim.linear_schedule(0, 1, 10), optim.constant_schedule(0.5)], [12]),
            optax.join_schedules([optax.linear_schedule(0, 1, 10), optax.constant_schedule(0.5)], [12]),
        ),
    ],
    ids=["constant", "linear", "polynomial", "exponential", "staircase", "cosine", "warmup cosine", "piecewise", "join"],
)
def test_schedules_agree_with_optax(ours: Any, theirs: Any) -> None:
    with jax.enable_x64(True):
        counts = [0, 1, 5, 9, 10, 11, 12, 29, 30, 59, 60, 1000]
        expected = [float(theirs(jnp.asarray(c, jnp.int64))) for c in counts]
    found = [float(ours(torch.tensor(c, dtype=torch.int32))) for c in counts]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("decay", "halfway"), [("linear", 0.55), ("cosine", 0.55), ("sqrt", 0.1 + 0.9 * (1 - math.sqrt(0.5)))])
def test_warmup_stable_decay(decay: str, halfway: float) -> None:
    schedule = optim.warmup_stable_decay_schedule(1.0, 10, 80, 20, init_value=0.2, end_value=0.1, decay=decay)
    found = [float(schedule(torch.tensor(c))) for c in (0, 5, 10, 50, 90, 100, 110, 500)]
    np.testing.assert_allclose(found, [0.2, 0.6, 1.0, 1.0, 1.0, halfway, 0.1, 0.1], rtol=1e-12)
    with pytest.raises(ValueError, match="'step' is unknown"):
        optim.warmup_stable_decay_schedule(1.0, 1, 1, 1, decay="step")


def test_half_precision_params_with_wide_moments() -> None:
    start = draws(MATRICES, np.float32, 0)
    params = {k: torch.from_numpy(v).bfloat16() for k, v in start.items()}
    reference = {k: jnp.asarray(v, jnp.bfloat16) for k, v in start.items()}
    ours, theirs = optim.adamw(0.01, mu_dtype=torch.float32), optax.adamw(0.01, mu_dtype=jnp.float32)
    state, reference_state = ours.init(params), theirs.init(reference)
    assert {x.dtype for x in tree.leaves(state.mu)} == {torch.float32}
    for step in range(5):
        grads = draws(MATRICES, np.float32, step + 1)
        updates, state = ours.update({k: torch.from_numpy(v).bfloat16() for k, v in grads.items()}, state, params)
        params = optim.apply_updates(params, updates)
        changes, reference_state = theirs.update({k: jnp.asarray(v, jnp.bfloat16) for k, v in grads.items()}, reference_state, reference)
        reference = optax.apply_updates(reference, changes)
    assert {x.dtype for x in tree.leaves(params)} == {torch.bfloat16}
    assert_trees_close(params, reference, rtol=2e-2, atol=1e-2)
    assert_trees_close(state.mu, reference_state[0].mu, rtol=1e-2, atol=1e-3)


def random_tree(seed: int = 0) -> Any:
    return {k: torch.from_numpy(v) for k, v in draws(SHAPES, np.float32, seed).items()}


def test_clipping_twice_equals_clipping_once() -> None:
    tx, grads = optim.clip_by_global_norm(0.7), random_tree()
    once, _ = tx.update(grads, tx.init(grads))
    twice, _ = tx.update(once, tx.init(grads))
    assert_trees_close(twice, once, rtol=1e-6, atol=0)
    assert float(tree.global_norm(once)) == pytest.approx(0.7, rel=1e-6)
    small = tree.map(lambda g: g * 1e-3, grads)
    assert_trees_equal(tx.update(small, tx.init(grads))[0], small)


def test_a_mask_of_nothing_is_the_identity() -> None:
    tx, grads = optim.masked(optim.adam(1.0), lambda params: tree.map(lambda _: False, params)), random_tree()
    updates, state = tx.update(grads, tx.init(grads), grads)
    assert_trees_equal(updates, grads)
    assert tree.size(state) == 1  # the count


def test_masks_and_labels_by_pattern() -> None:
    params = {"body": {"w": torch.ones(2), "b": torch.ones(2)}, "head": torch.ones(2)}
    tx = optim.adamw(1.0, weight_decay=0.5, mask=["**/w", "head"])
    updates, _ = tx.update(tree.map(torch.zeros_like, params), tx.init(params), params)
    assert [float(u[0]) for u in tree.leaves(updates)] == [0.0, -0.5, -0.5]
    groups = optim.multi_transform({"none": optim.scale(0.0), "one": optim.scale(-1.0)}, {"body/**": "none", "**": "one"})
    updates, _ = groups.update(params, groups.init(params))
    assert [float(u[0]) for u in tree.leaves(updates)] == [0.0, 0.0, -1.0]
    with pytest.raises(ValueError, match="nearest paths: head"):
        optim.masked(optim.adam(1.0), "heads").init(params)
    with pytest.raises(ValueError, match="body/b is in group 'three'"):
        optim.multi_transform({"one": optim.scale(1.0)}, {"**": "three"}).init(params)


def test_frozen_leaves_carry_no_state() -> None:
    params = {"frozen": None, "w": torch.ones(3)}
    tx = optim.adamw(0.1)
    state = tx.init(params)
    assert tree.paths(state) == ["count", "mu/w", "nu/w"]
    updates, _ = tx.update({"frozen": None, "w": torch.ones(3)}, state, params)
    assert updates["frozen"] is None


def test_hyperparameters_can_be_read_and_changed() -> None:
    tx = optim.inject_hyperparams(optim.adamw)(learning_rate=0.1, weight_decay=0.0)
    params = random_tree()
    state = tx.init(params)
    assert float(state.hyperparams["learning_rate"]) == pytest.approx(0.1)
    before, _ = tx.update(params, state, params)
    halved = state.replace(hyperparams={**state.hyperparams, "learning_rate": torch.tensor(0.05)})
    after, _ = tx.update(params, halved, params)
    assert_trees_close(after, tree.map(lambda u: u / 2, before), rtol=1e-6, atol=1e-9)


def test_missing_params_and_wrong_state_are_named() -> None:
    grads = random_tree()
    for tx in (optim.adamw(0.1), optim.lamb(0.1), optim.adafactor(0.1), optim.lion(0.1)):
        with pytest.raises(ValueError, match=r"needs the params: call update\(grads, state, params\)"):
            tx.update(grads, tx.init(grads))
    with pytest.raises(ValueError, match="chain has 2 transformations, but its state has 1"):
        optim.chain(optim.scale(1.0), optim.scale(1.0)).update(grads, (optim.EmptyState(),))


def test_updates_do_not_require_grad() -> None:
    params = tree.map(lambda p: p.clone().requires_grad_(), random_tree())
    tx = optim.adamw(0.1)
    state = tx.init(params)
    assert not any(x.requires_grad for x in tree.leaves(state))


@pytest.mark.parametrize("case", CASES)
def test_captured_equals_eager(case: str) -> None:
    tx = CASES[case][0]()

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    captured = ft.jit(step, passes=())
    params = random_tree()
    state = tx.init(params)
    for i in range(2):
        expected = step(params, state, random_tree(i + 1))
        params, state = captured(params, state, random_tree(i + 1))
        assert_trees_equal((params, state), expected)
