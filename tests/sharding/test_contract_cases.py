"""What a real run has and a plain one not: uneven batches, clipping, dropout, frozen, tied, odd params: on any mesh as on one device."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import functrain as ft
from tests.helpers import assert_trees_close
from tests.sharding import model
from tests.sharding.compare import STAGES, WORLDS, assert_same, first_state, plan_of, run

ADAM = model.OPTIMIZERS["adam"]()
BATCHES = [model.batch(i, rows=12) for i in range(3)]
each_plan = pytest.mark.parametrize(("stage", "world"), [(s, w) for s in STAGES for w in WORLDS])

# ---- batches


def uneven(counts: tuple[int, ...], world: int, microbatches: int = 2, rows: int = 10) -> dict[str, torch.Tensor]:
    """A batch in which microbatch j of rank r has `counts[r * microbatches + j]` valid tokens of 60."""
    found = model.batch(7, rows * world * microbatches)
    targets = found["targets"]
    for i, count in enumerate(counts):
        rank, j = divmod(i, microbatches)
        mine = torch.randint(0, model.VOCAB, (rows * model.SEQ,), generator=torch.Generator().manual_seed(i))
        mine[count:] = -100
        start = rank * rows * microbatches
        targets[start + j : start + rows * microbatches : microbatches] = mine.view(rows, model.SEQ)
    return found


@each_plan
def test_microbatches_of_very_different_weight(stage: int, world: int) -> None:
    counts = (60, 4, 30, 2, 0, 1)[: 2 * world]
    rows = uneven(counts, world)
    assert int((rows["targets"] != -100).sum()) == sum(counts)
    expected = run(model.train_step(ADAM), first_state(ADAM), [rows] * 3)
    assert_same(model.train_step(ADAM, accumulate=2), first_state(ADAM), [rows] * 3, plan_of(stage, world), expected)


@each_plan
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_without_a_valid_token(stage: int, world: int, accumulate: int) -> None:
    rows = uneven((0,) * 2 * world, world)
    state, results = assert_same(model.train_step(ADAM, accumulate), first_state(ADAM), [rows], plan_of(stage, world))
    assert [float(results[0][name]) for name in ("loss", "norm")] == [0.0, 0.0]
    assert_trees_close(state.params, first_state(ADAM).params, rtol=0, atol=0)


# ---- optimizers


@each_plan
@pytest.mark.parametrize("bound", [0.05, 100.0])
def test_clipping_by_the_norm_over_all_leaves(stage: int, world: int, bound: float) -> None:
    tx = ft.optim.chain(ft.optim.clip_by_global_norm(bound), ft.optim.sgd(0.1, momentum=0.9))
    _, results = assert_same(model.train_step(tx), first_state(tx), BATCHES, plan_of(stage, world))
    assert all((float(found["norm"]) > bound) == (bound < 1) for found in results)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_reported_norm_is_that_of_every_stage(accumulate: int) -> None:
    step = model.train_step(ADAM, accumulate)
    expected = run(model.train_step(ADAM), first_state(ADAM), BATCHES)
    for stage in range(4):
        assert_same(step, first_state(ADAM), BATCHES, plan_of(stage, 3), expected)


FREEZERS = {
    "multi_transform": lambda: ft.optim.multi_transform(
        {"adam": model.OPTIMIZERS["adam"](), "frozen": ft.optim.set_to_zero()}, {"blocks/**": "frozen", "wte": "frozen", "**": "adam"}
    ),
    "masked": lambda: ft.optim.chain(model.OPTIMIZERS["adam"](), ft.optim.masked(ft.optim.set_to_zero(), ["blocks/**", "wte"])),
}


@each_plan
@pytest.mark.parametrize("name", FREEZERS)
def test_frozen_sub_trees_stay_bitwise(stage: int, world: int, name: str) -> None:
    tx = FREEZERS[name]()
    state, _ = assert_same(model.train_step(tx), first_state(tx), BATCHES, plan_of(stage, world))
    before = first_state(tx).params
    for part in ("blocks", "wte"):
        assert_trees_close(state.params[part], before[part], rtol=0, atol=0)
    assert not torch.equal(state.params["head"], before["head"])


@each_plan
@pytest.mark.parametrize("remat", [False, True])
def test_a_gradient_of_a_part_of_the_params(stage: int, world: int, remat: bool) -> None:
    logits = ft.remat(model.logits) if remat else model.logits

    def step(state: Any, rows: Any) -> Any:
        frozen, trained = ft.tree.partition(state.params, "head", "ln_f/**", "blocks/*/mlp/**")[::-1]

        def loss(part: Any) -> ft.Mean:
            return ft.losses.cross_entropy(logits(ft.tree.combine(part, frozen), rows["tokens"]), rows["targets"])

        value, grads = ft.value_and_grad(loss)(trained)
        grads = ft.tree.combine(grads, ft.tree.map(torch.zeros_like, frozen))
        return state.apply_gradients(grads, ADAM), {"loss": value, "norm": ft.tree.global_norm(grads)}

    state, _ = assert_same(step, first_state(ADAM), BATCHES, plan_of(stage, world))
    before = first_state(ADAM).params
    assert torch.equal(state.params["wte"], before["wte"])
    assert not torch.equal(state.params["head"], before["head"])


# ---- params


def without_head(key: int = 0) -> dict[str, Any]:
    params = model.init(ft.random.key(key))
    del params["head"]
    return params


@each_plan
@pytest.mark.parametrize("accumulate", [1, 2])
def test_tied_weights(stage: int, world: int, accumulate: int) -> None:
    assert_same(model.train_step(ADAM, accumulate), first_state(ADAM, without_head()), BATCHES, plan_of(stage, world))


def odd_params() -> dict[str, Any]:
    """Scalars, one element, no element, and what no loss uses."""
    odd = {"scale": torch.tensor(1.5), "one": torch.ones(1), "empty": torch.zeros(0), "rows": torch.zeros(0, 5), "none": torch.zeros(3, 0)}
    return {**without_head(), **odd, "unused": {"w": torch.ones(5, 7), "s": torch.tensor(2.0)}}


def odd_loss(params: dict[str, Any], rows: dict[str, torch.Tensor]) -> ft.Mean:
    mean = ft.losses.cross_entropy(params["scale"] * model.logits(params, rows["tokens"]) + params["one"], rows["targets"])
    return ft.Mean(mean.total + params["empty"].sum() + params["rows"].sum() * params["scale"], mean.weight)


@each_plan
@pytest.mark.parametrize("accumulate", [1, 2])
def test_scalars_empty_leaves_and_params_without_use(stage: int, world: int, accumulate: int) -> None:
    def step(state: Any, rows: Any) -> Any:
        derive = ft.value_and_grad(odd_loss) if accumulate == 1 else ft.accumulate(odd_loss, accumulate)
        value, grads = derive(state.params, rows)
        return state.apply_gradients(grads, ADAM), {"loss": value, "grads": grads}

    _, results = assert_same(step, first_state(ADAM, odd_params()), BATCHES, plan_of(stage, world))
    assert not any(x.any() for x in ft.tree.leaves(results[0]["grads"]["unused"]))
    assert bool(results[0]["grads"]["scale"])


@functools.cache
def of_width(hidden: int) -> Any:
    return run(model.train_step(ADAM), first_state(ADAM, model.init(ft.random.key(0), hidden=hidden)), BATCHES)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("world", "hidden"), [(w, h) for w in (2, 3, 4) for h in sorted({1, w - 1, w, w + 1, 7})])
def test_any_hidden_width(stage: int, world: int, hidden: int) -> None:
    state = first_state(ADAM, model.init(ft.random.key(0), hidden=hidden))
    assert_same(model.train_step(ADAM), state, BATCHES, plan_of(stage, world), of_width(hidden))


@each_plan
def test_statistics_of_rows_and_columns(stage: int, world: int) -> None:
    def step(state: Any, rows: Any) -> Any:
        grads = ft.grad(model.loss_fn)(state.params, rows)
        matrices = [x for tree in (state.params, grads) for x in ft.tree.leaves(tree) if x.ndim == 2]
        statistics = [(x.norm(dim=1), x.square().mean(0), x.sum(0, keepdim=True), x.amax(1)) for x in matrices]
        return state.apply_gradients(grads, ADAM), statistics

    assert_same(step, first_state(ADAM), BATCHES[:1], plan_of(stage, world))


# ---- dropout


class Net(torch.nn.Module):
    """Draws from torch's generator, which a scope replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = torch.nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.drop(x), 0.1)


def dropped_loss(implicit: bool) -> Any:
    """A loss with two dropouts, whose numbers come from a key."""
    drop = Net()

    def loss(params: Any, rows: Any, key: torch.Tensor) -> ft.Mean:
        def dropped(x: torch.Tensor) -> torch.Tensor:
            if implicit:
                with ft.random.scope(ft.random.fold_in(key, 1)):
                    return drop(x)
            return ft.random.dropout(ft.random.fold_in(key, 1), x, 0.25)

        return ft.losses.cross_entropy(dropped(model.logits(params, rows["tokens"], dropped)), rows["targets"])

    return loss


@each_plan
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("implicit", [False, True])
def test_dropout_has_the_masks_of_one_device(stage: int, world: int, accumulate: int, implicit: bool) -> None:
    loss = dropped_loss(implicit)

    def step(state: Any, rows: Any) -> Any:
        derive = ft.value_and_grad(loss) if accumulate == 1 else ft.accumulate(loss, accumulate, key_argnums=2)
        value, grads = derive(state.params, rows, ft.random.fold_in(state.key, state.step))
        return state.apply_gradients(grads, ADAM), {"loss": value, "norm": ft.tree.global_norm(grads)}

    _, results = assert_same(step, first_state(ADAM, key=ft.random.key(3)), BATCHES, plan_of(stage, world))
    plain = run(model.train_step(ADAM), first_state(ADAM), BATCHES)[1]
    assert abs(float(results[0]["loss"]) - float(plain[0]["loss"])) > 1e-3  # something was dropped
