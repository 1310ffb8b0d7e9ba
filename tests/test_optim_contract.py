"""What every optimizer keeps to beside its numbers: names, dtypes, autograd, leaves left out, and what it emits when captured."""

import inspect
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.dialect.common.cse_pass import CSEPass

import functrain as ft
from functrain import optim, tree
from tests.helpers import assert_trees_close, assert_trees_equal
from tests.test_optim import CASES, SHAPES, random_tree

ADAMW = torch.ops.functrain.adamw.default
NORM = torch.ops.aten.linalg_vector_norm.default

# ---- names

# What Optax has and we have not: options for extra arguments of update, and variants nobody asked for.
LEFT_OUT = {"mask_compatible_extra_args", "decay_rate_fn", "mode", "smooth_beta"}


def public_names() -> list[str]:
    theirs = [n for n in vars(optim) if callable(getattr(optim, n)) and (hasattr(optax, n) or hasattr(optax.contrib, n))]
    return [n for n in theirs if not inspect.isclass(getattr(optim, n)) and n not in ("chain", "skip_not_finite", "skip_large_updates")]


@pytest.mark.parametrize("name", public_names())
def test_arguments_and_defaults_are_those_of_optax(name: str) -> None:
    theirs = getattr(optax, name, None) or getattr(optax.contrib, name)
    ours = {k: p for k, p in inspect.signature(getattr(optim, name)).parameters.items()}
    wanted = {k: p for k, p in inspect.signature(theirs).parameters.items() if k not in LEFT_OUT}
    assert list(ours) == list(wanted)
    for key, parameter in ours.items():
        if parameter.default is inspect.Parameter.empty and key == "learning_rate":
            continue  # a learning rate has no default
        default = jnp.float32 if parameter.default is torch.float32 else parameter.default
        assert (default, parameter.kind) == (wanted[key].default, wanted[key].kind), key


def test_multi_steps_takes_what_optax_multisteps_takes() -> None:
    assert list(inspect.signature(optim.multi_steps).parameters) == list(inspect.signature(optax.MultiSteps).parameters)


# ---- dtypes


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("stored", "computed"), [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)], ids=str)
def test_states_and_params_keep_their_dtypes_and_shapes(case: str, stored: torch.dtype, computed: torch.dtype) -> None:
    """A state that changed would be captured anew at every step."""
    tx, params = CASES[case][0](), tree.cast(random_tree(), stored)
    state = tx.init(params)
    updates, after = tx.update(tree.cast(random_tree(1), computed), state, params)
    kinds = [[(path, x.dtype, x.shape) for path, x in tree.leaves_with_path(s)] for s in (state, after)]
    assert kinds[0] == kinds[1]
    assert {x.dtype for x in tree.leaves(optim.apply_updates(params, updates))} == {stored}


@pytest.mark.parametrize("case", ["adam", "nadam", "adamw", "lamb", "muon"])
def test_half_precision_gradients_give_updates_in_the_dtype_of_the_params(case: str) -> None:
    tx, params = CASES[case][0](), random_tree()
    grads = tree.cast(random_tree(1), torch.bfloat16)
    updates, _ = tx.update(grads, tx.init(params), params)
    assert {x.dtype for x in tree.leaves(updates)} == {torch.float32}
    wide, _ = tx.update(tree.cast(grads, torch.float32), tx.init(params), params)
    assert_trees_close(updates, wide, rtol=1e-5, atol=1e-6) if case != "muon" else None


def test_a_float64_schedule_does_not_widen_a_scalar_leaf() -> None:
    params = {"scalar": torch.ones(()), "vector": torch.ones(2)}
    for tx in (optim.sgd(optim.constant_schedule(0.1)), optim.sgd(torch.tensor(0.1, dtype=torch.float64)), optim.clip_by_global_norm(0.1)):
        updates, _ = tx.update(params, tx.init(params))
        assert {x.dtype for x in tree.leaves(updates)} == {torch.float32}


# ---- autograd


@pytest.mark.parametrize("case", CASES)
def test_no_history_ties_one_step_to_the_next(case: str) -> None:
    tx = CASES[case][0]()
    params = tree.map(lambda p: p.requires_grad_(), random_tree())
    updates, state = tx.update(random_tree(1), tx.init(params), params)
    after = optim.apply_updates(params, updates)
    assert not any(x.requires_grad for x in tree.leaves((updates, state, after)))
    assert all(p.requires_grad for p in tree.leaves(params))


def test_a_derivative_through_an_update_is_jax_s() -> None:
    """The loss after one step, by the learning rate and by the params before it."""

    def after(rate: Any, w: Any, room: Any, grad: Callable[..., Any], name: str) -> Any:
        def loss(p: Any) -> Any:
            return (p["w"] ** 4).sum()

        tx = getattr(room, name)(rate)
        params = {"w": w}
        updates, _ = tx.update(grad(loss)(params), tx.init(params), params)
        return loss(room.apply_updates(params, updates))

    w = [0.5, -1.5, 2.0]
    for name in ("sgd", "adamw"):
        ours = ft.grad(lambda r, w, name=name: after(r, w, optim, ft.grad, name), argnums=(0, 1))(torch.tensor(0.1), torch.tensor(w))
        theirs = jax.grad(lambda r, w, name=name: after(r, w, optax, jax.grad, name), argnums=(0, 1))(jnp.asarray(0.1), jnp.asarray(w))
        assert float(ours[0]) != 0
        assert_trees_close(ours, theirs, rtol=1e-4, atol=1e-5)
        with_torch = torch.func.grad(lambda r, name=name: after(r, torch.tensor(w), optim, torch.func.grad, name))(torch.tensor(0.1))
        assert_trees_close(with_torch, theirs[0], rtol=1e-4, atol=1e-5)


# ---- leaves that are left out


@pytest.mark.parametrize("name", ["adam", "adamw", "lion", "lamb", "muon", "adafactor"])
def test_a_leaf_of_integers_is_an_error_that_names_it_and_a_mask_leaves_it_out(name: str) -> None:
    params = {"w": torch.ones(3), "steps": torch.tensor(3)}
    grads = {"w": torch.ones(3), "steps": torch.tensor(0)}
    with pytest.raises(TypeError, match=r"moves floating-point tensors, but leaf steps is int64: .*masked"):
        getattr(optim, name)(0.1).init(params)
    tx = optim.masked(getattr(optim, name)(0.1), lambda p: tree.map(torch.is_floating_point, p))
    updates, _ = tx.update(grads, tx.init(params), params)
    after = optim.apply_updates(params, updates)
    assert after["steps"].dtype == torch.int64
    assert int(after["steps"]) == 3
    assert not torch.equal(after["w"], params["w"])


def test_integers_do_not_decay() -> None:
    with pytest.raises(TypeError, match="add_decayed_weights moves floating-point tensors, but leaf n is int64"):
        optim.add_decayed_weights(0.1).update({"n": torch.tensor(0)}, optim.EmptyState(), {"n": torch.tensor(3)})


@pytest.mark.parametrize("case", CASES)
def test_none_stays_none_and_carries_nothing(case: str) -> None:
    if case == "muon dimensions":
        return  # its numbers name every leaf
    tx, params = CASES[case][0](), {**random_tree(), "frozen": None}
    updates, state = tx.update({**random_tree(1), "frozen": None}, tx.init(params), params)
    assert updates["frozen"] is None
    assert not any("frozen" in path for path in tree.paths(state))
    assert optim.apply_updates(params, updates)["frozen"] is None


def test_a_param_without_an_update_stays() -> None:
    params = {"w": torch.ones(2), "frozen": torch.ones(2)}
    assert optim.apply_updates(params, {"w": torch.ones(2), "frozen": None})["frozen"] is params["frozen"]


# ---- masks, groups


def test_the_first_pattern_of_a_table_wins() -> None:
    params = {"embed": torch.ones(2), "block": {"w": torch.ones(2), "b": torch.ones(2)}}
    decay = {"embed": False, "**/b": False, "**": True}
    updates, _ = optim.add_decayed_weights(1.0, decay).update(tree.map(torch.zeros_like, params), optim.EmptyState(), params)
    assert tree.map(lambda u: float(u[0]), updates) == {"embed": 0.0, "block": {"w": 1.0, "b": 0.0}}
    as_tree = {"embed": False, "block": {"w": True, "b": False}}
    assert_trees_equal(
        optim.add_decayed_weights(1.0, as_tree).update(tree.map(torch.zeros_like, params), optim.EmptyState(), params)[0], updates
    )
    above = {"embed": False, "block": True}  # keys of the params: a tree that stops above the leaves
    updates, _ = optim.add_decayed_weights(1.0, above).update(tree.map(torch.zeros_like, params), optim.EmptyState(), params)
    assert tree.map(lambda u: float(u[0]), updates) == {"embed": 0.0, "block": {"w": 1.0, "b": 1.0}}
    with pytest.raises(ValueError, match="no pattern of embed matches leaf block/b; end with '\\*\\*'"):
        optim.masked(optim.scale(1.0), {"embed": True}).init(params)


def test_groups_have_their_own_rates_and_frozen_ones_no_state() -> None:
    params = {"embed": torch.ones(2), "block": torch.ones(2)}
    tx = optim.multi_transform({"train": optim.adam(0.1), "freeze": optim.set_to_zero()}, {"embed": "freeze", "**": "train"})
    updates, state = tx.update(params, tx.init(params), params)
    assert_trees_equal(updates["embed"], torch.zeros(2))
    assert bool((updates["block"] < 0).all())
    assert tree.paths(state) == [f"inner_states/train/inner_state/{p}" for p in ("count", "mu/block", "nu/block")]


def test_patterns_say_which_leaves_muon_moves_and_how() -> None:
    params = {"embed": torch.ones(4, 3), "linear": torch.randn(8, 2), "bias": torch.ones(3)}
    tx = optim.muon(1.0, muon_weight_dimension_numbers={"linear": optim.MuonDimensionNumbers(1, 0), "**": None})
    updates, state = tx.update(params, tx.init(params), params)
    assert [p for p in tree.paths(state) if "muon" in p and "mu/" in p] == ["inner_states/muon/inner_state/0/mu/linear"]
    plain, _ = optim.muon(1.0).update(params, optim.muon(1.0).init(params), params)
    assert_trees_close(updates["linear"], 2 * plain["linear"], rtol=1e-4, atol=1e-5)  # sqrt(8 / 2), against sqrt(max(1, 2 / 8))
    bad = optim.muon(1.0, muon_weight_dimension_numbers={"**": optim.MuonDimensionNumbers()})
    with pytest.raises(ValueError, match="muon needs matrices, but a leaf has shape"):
        bad.update(params, bad.init(params), params)
    with pytest.raises(ValueError, match="ns_coeffs 'dio' is unknown; choose one of standard, dion"):
        optim.muon(1.0, "dio")


# ---- hyper-parameters


def test_injected_whole_numbers_that_shape_the_computation_stay_out_of_the_state() -> None:
    tx = optim.inject_hyperparams(optim.muon)(0.1)
    params = random_tree()
    state = tx.init(params)
    assert "ns_steps" not in state.hyperparams
    assert "beta" in state.hyperparams
    captured = ft.jit(lambda g, s, p: tx.update(g, s, p))
    assert_trees_close(captured(params, state, params), tx.update(params, state, params), rtol=1e-6, atol=1e-7)


def test_whole_numbers_stay_out_beside_other_static_arguments() -> None:
    state = optim.inject_hyperparams(optim.muon, static_args="beta")(0.1).init(random_tree())
    assert not {"ns_steps", "beta"} & state.hyperparams.keys()


def test_hyperparameters_are_as_wide_as_the_params_whatever_the_gradients() -> None:
    tx = optim.inject_hyperparams(optim.sgd)(optim.linear_schedule(0.1, 0.0, 7), momentum=0.9)
    params, grads = tree.cast(random_tree(), torch.float64), random_tree(1)
    state = tx.init(params)
    _, after = tx.update(grads, state, params)
    assert {x.dtype for x in tree.leaves((state.hyperparams, after.hyperparams))} == {torch.float64}
    assert float(after.hyperparams["momentum"]) == 0.9


def test_a_function_that_is_no_schedule_is_named() -> None:
    decayed = lambda params: {name: True for name in params.keys()}  # noqa: E731, SIM118
    with pytest.raises(TypeError, match=r"given as mask was taken for a schedule.*static_args"):
        optim.inject_hyperparams(optim.adamw)(0.1, mask=decayed).init(random_tree())
    optim.inject_hyperparams(optim.adamw, static_args="mask")(0.1, mask=decayed).init(random_tree())


# ---- what is emitted


def count(tx: Any, leaves: int, metric: bool = False) -> tuple[Counter, int]:
    """(operations by target, those on scalars) of `update` and `apply_updates`, captured on fake tensors."""
    params = {f"w{i}": torch.ones(3) for i in range(leaves)}
    flat, structure = tree.flatten((params, tx.init(params)))

    def step(*values: torch.Tensor) -> Any:
        params, state = tree.unflatten(structure, values)
        norm = tree.global_norm(params) if metric else None
        updates, state = tx.update(params, state, params)
        return tree.leaves((optim.apply_updates(params, updates), state, norm))

    graph = make_fx(step, tracing_mode="fake")(*flat)
    graph.graph.eliminate_dead_code()
    if metric:
        graph = CSEPass()(graph).graph_module
    operations = [n for n in graph.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    scalars = sum(isinstance(n.meta["val"], torch.Tensor) and n.meta["val"].shape != (3,) for n in operations)
    return Counter(n.target for n in operations), scalars


def test_adam_emits_one_fused_operation_and_one_addition_a_leaf_and_scalars_once() -> None:
    schedule = optim.warmup_cosine_decay_schedule(0.0, 0.01, 5, 20)
    for tx in (optim.adam(0.01), optim.adamw(0.01), optim.adamw(schedule, mask={"w0": False, "**": True}), optim.adamw(torch.tensor(0.1))):
        (few, few_scalars), (many, many_scalars) = count(tx, 2), count(tx, 7)
        assert (few[ADAMW], many[ADAMW]) == (2, 7)
        assert few_scalars == many_scalars
        assert sum(many.values()) - sum(few.values()) == 2 * 5


def test_groups_and_masks_keep_one_fused_operation_a_leaf() -> None:
    groups = {"a": optim.adamw(0.1, weight_decay=0.0), "b": optim.adamw(0.2, weight_decay=0.3)}
    assert count(optim.multi_transform(groups, {"w0": "a", "**": "b"}), 5)[0][ADAMW] == 5
    assert count(optim.masked(optim.adamw(0.1), {"w0": False, "**": True}), 5)[0][ADAMW] == 4
    assert count(optim.lamb(0.1), 5)[0][ADAMW] == 5


def test_nadam_computes_its_scalars_once() -> None:
    assert count(optim.adam(0.1, nesterov=True), 2)[1] == count(optim.adam(0.1, nesterov=True), 7)[1]


def test_clipping_multiplies_each_leaf_once_by_one_scalar() -> None:
    few, many = (count(optim.clip_by_global_norm(1.0), n)[0] for n in (2, 7))
    multiplications = torch.ops.aten.mul.Tensor
    assert many[multiplications] - few[multiplications] == 5
    assert many[NORM] == 7 + 1


def test_a_norm_beside_clipping_is_the_same_operations() -> None:
    """Merging equal operations leaves one norm a leaf and one of all, so a metric costs nothing more."""
    assert count(optim.clip_by_global_norm(1.0), 4, metric=True)[0][NORM] == 4 + 1


def test_adamw_is_torch_s() -> None:
    """The same twenty steps by torch.optim, an oracle that shares nothing with Optax."""
    params = {k: v for k, v in random_tree().items() if v.numel()}
    theirs = [p.clone().requires_grad_() for p in params.values()]
    reference = torch.optim.AdamW(theirs, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    tx = optim.adamw(0.01, 0.8, 0.95, 1e-6, weight_decay=0.1)
    state = tx.init(params)
    for step in range(20):
        grads = {k: v for k, v in random_tree(step + 1).items() if v.numel()}
        updates, state = tx.update(grads, state, params)
        params = optim.apply_updates(params, updates)
        for p, g in zip(theirs, grads.values(), strict=True):
            p.grad = g
        reference.step()
    assert_trees_close(list(params.values()), [p.detach() for p in theirs], rtol=1e-5, atol=2e-6)
    assert set(SHAPES) - set(params) == {"none"}
