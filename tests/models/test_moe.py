"""Routing, slots, outputs and gradients equal a mixture that loops over tokens; rows stand alone, and parts of a batch add up."""

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import functrain as ft
from functrain import tree
from functrain.models import gpt, moe
from tests.helpers import assert_trees_close, assert_trees_equal

SMALL = moe.Config(vocab_size=29, context=16, layers=2, d_model=16, heads=2, kv_heads=1, d_ff=12, experts=4, top_k=2, capacity_factor=0.8)
ROOMY = dataclasses.replace(SMALL, capacity_factor=float(SMALL.experts))
MIXTURES = {
    "two of four": SMALL,
    "one of four": dataclasses.replace(SMALL, top_k=1),
    "three of five": dataclasses.replace(SMALL, experts=5, top_k=3),
    "all of three": dataclasses.replace(SMALL, experts=3, top_k=3, capacity_factor=0.5),
    "no drops": ROOMY,
}
EXACT = {"rtol": 1e-5, "atol": 1e-9}  # in float64
CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # of whole models, whose norms are computed in float32


def make(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_params(config: moe.Config, dtype: torch.dtype = torch.float64) -> tree.PyTree:
    """Random params whose norms are not ones, and whose routers have preferences."""
    return tree.map(lambda x: x.to(dtype) + 0.3 * make(x.numel(), *x.shape).to(dtype), moe.init(config, ft.random.key(0)))


def make_batch(rows: int = 4, length: int = 8, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tokens; of the targets, fewer count from row to row, in the last row none."""
    tokens = torch.randint(0, SMALL.vocab_size, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    counts = torch.arange(length)[None] < torch.tensor([[length * (rows - 1 - row) // max(rows - 1, 1)] for row in range(rows)])
    return {"tokens": tokens[:, :-1], "targets": torch.where(counts, tokens[:, 1:], -100)}


# ---- the oracle: one token after another


def mixture_by_loops(params: tree.PyTree, x: torch.Tensor, config: moe.Config) -> tuple[torch.Tensor, moe.Routing]:
    """What `moe.mixture` computes, with Python's own lists; autograd differentiates it."""
    rows = [row_by_loops(params, row, config) for row in x]
    return torch.stack([result for result, _ in rows]), moe.Routing(
        *(torch.stack(list(c)) for c in zip(*[r for _, r in rows], strict=True))
    )


def row_by_loops(params: tree.PyTree, x: torch.Tensor, config: moe.Config) -> tuple[torch.Tensor, moe.Routing]:
    length = x.shape[0]
    capacity = math.ceil(Fraction(str(config.capacity_factor)) * length * config.top_k / config.experts)
    logits = [token @ params["router"] for token in x]
    probabilities = [row.exp() / row.exp().sum() for row in logits]
    choices = [sorted(range(config.experts), key=lambda e, p=p: -float(p[e].detach()))[: config.top_k] for p in probabilities]
    taken, results, dropped = [0] * config.experts, [torch.zeros_like(token) for token in x], 0
    for rank in range(config.top_k):
        for position in range(length):
            e = choices[position][rank]
            if taken[e] == capacity:
                dropped += 1
                continue
            taken[e] += 1
            gate = probabilities[position][e]
            if config.top_k > 1:
                gate = gate / torch.stack([probabilities[position][other] for other in choices[position]]).sum()
            own = {name: leaf[e] for name, leaf in params["experts"].items()}
            value = (F.silu(x[position] @ own["gate"]) * (x[position] @ own["up"])) @ own["down"]
            results[position] = results[position] + gate * value
    share = [sum(row.count(e) for row in choices) / (length * config.top_k) for e in range(config.experts)]
    mean = torch.stack(probabilities).mean(0)
    balance = config.experts * sum(share[e] * mean[e] for e in range(config.experts))
    z = torch.stack([row.exp().sum().log() ** 2 for row in logits]).mean()
    numbers = [torch.tensor(value, dtype=x.dtype) for value in (dropped / (length * config.top_k), share)]
    return torch.stack(results), moe.Routing(balance, z, *numbers)


Mixture = Callable[[tree.PyTree, torch.Tensor, moe.Config], tuple[torch.Tensor, moe.Routing]]


def with_gradients(mixture: Mixture, params: tree.PyTree, x: torch.Tensor, config: moe.Config) -> Any:
    """Result, routing, and the gradients of something that depends on all of them."""
    direction = make(5, *x.shape)

    def total(params: tree.PyTree, x: torch.Tensor) -> Any:
        result, routing = mixture(params, x, config)
        loss = (result * direction).sum() + (routing.balance * direction[:, 0, 0] + routing.z * direction[:, 0, 1]).sum()
        return loss, (result, routing)

    return ft.value_and_grad(total, argnums=(0, 1), has_aux=True)(params, x)


def mixture_params(config: moe.Config) -> tree.PyTree:
    return {name: leaf for name, leaf in make_params(config)["blocks"][0].items() if name in ("router", "experts")}


@pytest.mark.parametrize("config", MIXTURES.values(), ids=MIXTURES)
@pytest.mark.parametrize("length", [7, 1])
def test_results_routing_and_gradients_equal_a_loop_over_tokens(config: moe.Config, length: int) -> None:
    params, x = mixture_params(config), make(1, 3, length, config.d_model)
    found, wanted = (with_gradients(mixture, params, x, config) for mixture in (moe.mixture, mixture_by_loops))
    assert_trees_close(found, wanted, **EXACT)
    if length == 7:
        dropped = wanted[0][1][1].dropped
        assert (dropped > 0).any() == (config is not ROOMY)  # or slots would not be tested
        assert all(g.abs().max() > 1e-4 for g in tree.leaves(found[1]))  # the router learns, with one choice too


# ---- slots


def one_choice_config(capacity_factor: float, experts: int = 2, top_k: int = 1) -> moe.Config:
    return dataclasses.replace(SMALL, d_model=4, heads=1, experts=experts, top_k=top_k, capacity_factor=capacity_factor)


def steered(config: moe.Config, logits: list[list[float]]) -> tuple[torch.Tensor, moe.Routing]:
    """One row whose tokens' router logits are these; expert e answers e + 1."""
    count, d = config.experts, 4
    x = torch.zeros(1, len(logits), d, dtype=torch.float64)
    x[0, :, :count], x[0, :, 3] = torch.tensor(logits), 1.0
    router = torch.eye(d, count, dtype=torch.float64)
    router[3] = 0
    gate = torch.zeros(count, d, 1, dtype=torch.float64)
    gate[:, 3] = 30.0  # silu(30) is 30 to ten digits
    answers = torch.arange(1, count + 1, dtype=torch.float64)[:, None, None]
    down = answers.expand(count, 1, d) / 30
    up = torch.zeros_like(gate)
    up[:, 3] = 1.0
    return moe.mixture({"router": router, "experts": {"gate": gate, "up": up, "down": down}}, x, config)


def test_tokens_beyond_the_capacity_get_nothing_and_the_earlier_ones_stay() -> None:
    config = one_choice_config(capacity_factor=1.0)
    y, routing = steered(config, [[9, 0], [9, 0], [9, 0], [0, 9]])  # two slots an expert
    assert_trees_close(y[0, :, 0], torch.tensor([1.0, 1, 0, 2], dtype=torch.float64) * torch.tensor([9.0, 0]).double().softmax(0)[0])
    assert_trees_close(routing.dropped, torch.tensor([0.25]))
    assert_trees_close(routing.load, torch.tensor([[0.75, 0.25]]))


def test_a_late_first_choice_comes_before_an_early_second_choice() -> None:
    config = one_choice_config(capacity_factor=0.5, experts=2, top_k=2)  # one slot an expert, for two tokens
    y, routing = steered(config, [[5, 0], [0, 5]])
    first = torch.tensor([5.0, 0]).double().softmax(0)[0]
    assert_trees_close(y[0, :, 0], torch.stack([first, 2 * first]))  # no second choice has a slot, and the first's gate stays
    assert_trees_close(routing.dropped, torch.tensor([0.5]))


def test_the_capacity_rounds_up_and_is_at_most_one_slot_a_token() -> None:
    assert [one_choice_config(factor, experts=2).capacity(5) for factor in (0.1, 0.4, 0.5, 1.0, 9.0)] == [1, 1, 2, 3, 5]
    assert one_choice_config(1.1, experts=2, top_k=2).capacity(10) == 10
    assert dataclasses.replace(SMALL, experts=10, top_k=1, capacity_factor=1.1).capacity(100) == 11


@pytest.mark.parametrize("top_k", [2, 3])
def test_with_all_slots_it_is_the_mixture_that_runs_every_expert(top_k: int) -> None:
    config = dataclasses.replace(ROOMY, top_k=top_k)
    params, x = mixture_params(config), make(2, 3, 6, config.d_model)
    y, routing = moe.mixture(params, x, config)
    expected, all_rows = ft.layers.moe(params, x, top_k=top_k)
    assert_trees_close(y, expected, **EXACT)
    assert_trees_close(routing.load.mean(0), all_rows.load / all_rows.load.sum(), **EXACT)
    assert_trees_close(
        moe.mixture(params, x[:1], config)[1].balance[0], ft.layers.moe(params, x[:1], top_k=top_k)[1].balance_loss(), **EXACT
    )


def test_the_router_is_computed_in_float32() -> None:
    params, x = tree.cast(mixture_params(SMALL), torch.bfloat16), make(3, 2, 7, SMALL.d_model).bfloat16()
    y, routing = moe.mixture(params, x, SMALL)
    assert y.dtype == torch.bfloat16
    assert routing.balance.dtype == torch.float32
    exact = moe.mixture(tree.cast(params, torch.float64), x.double(), SMALL)
    assert_trees_close(routing, exact[1], rtol=1e-5)  # in bfloat16 it would be off by 1e-3
    assert_trees_close(y, exact[0], rtol=0.05, atol=0.05)


# ---- rows, and parts of a batch


def test_a_row_does_not_depend_on_the_others() -> None:
    params, batch = make_params(SMALL), make_batch()
    changed = {**batch, "tokens": batch["tokens"].clone()}
    changed["tokens"][1] = (changed["tokens"][1] + 7) % SMALL.vocab_size
    (before, routing), (after, routing_after) = (moe.hidden(params, b["tokens"], SMALL) for b in (batch, changed))
    others = [0, 2, 3]
    assert_trees_equal(after[others], before[others])
    assert_trees_equal([rows[others] for rows in routing_after], [rows[others] for rows in routing])
    assert not torch.equal(after[1], before[1])
    assert (routing.dropped > 0).any()  # rows would compete for slots, if they could


def test_a_dropped_token_still_sees_the_past_only() -> None:
    """An earlier token's second choice may lose its slot to a later token: with one choice there is no such way."""
    config = dataclasses.replace(SMALL, top_k=1)
    params, tokens = make_params(config), make_batch()["tokens"]
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 3) % SMALL.vocab_size
    before, after = (moe.apply(params, t, config) for t in (tokens, changed))
    assert_trees_close(after[:, :5], before[:, :5], **CLOSE)
    assert (after[:, 5:] - before[:, 5:]).abs().amax(-1).min() > 1e-3


def test_the_loss_is_entropy_plus_the_weighted_losses_of_the_routers() -> None:
    config = dataclasses.replace(SMALL, balance_weight=0.3, z_weight=0.2)
    params, batch = make_params(config), make_batch()
    total, metrics = moe.loss(params, batch, config)
    x, routing = moe.hidden(params, batch["tokens"], config)
    entropy = F.cross_entropy((x @ params["embed"].T).flatten(0, 1), batch["targets"].flatten())
    counts = (batch["targets"] != -100).sum(1).double()
    balance, z = ((counts[:, None] * rows).sum() / counts.sum() for rows in (routing.balance, routing.z))
    assert_trees_close(total.value(), entropy + 0.3 * balance + 0.2 * z, **CLOSE)
    assert int(total.weight) == int(counts.sum())
    assert_trees_close(metrics["entropy"].value(), entropy, **CLOSE)
    assert metrics["load"].value().shape == (2, 4)
    assert_trees_close(metrics["load"].value().sum(1), torch.ones(2).double(), **CLOSE)
    assert_trees_close(metrics["dropped"].value(), (counts[:, None] * routing.dropped).sum(0) / counts.sum(), **CLOSE)


@pytest.mark.parametrize("microbatches", [2, 4])
def test_microbatches_of_uneven_counts_give_the_gradients_of_the_whole(microbatches: int) -> None:
    config = dataclasses.replace(SMALL, balance_weight=0.3, z_weight=0.2)
    params, batch = make_params(config), make_batch()
    loss = lambda p, b: moe.loss(p, b, config)  # noqa: E731
    (value, metrics), grads = ft.value_and_grad(loss, has_aux=True)(params, batch)
    (parts_value, parts_metrics), parts_grads = ft.accumulate(loss, microbatches, has_aux=True)(params, batch)
    assert_trees_close((parts_value, parts_grads), (value, grads), **CLOSE)
    assert_trees_close({n: m.value() for n, m in parts_metrics.items()}, {n: m.value() for n, m in metrics.items()}, **CLOSE)


def test_a_batch_without_targets_gives_no_gradient() -> None:
    batch = make_batch()
    batch["targets"] = torch.full_like(batch["targets"], -100)
    (value, _), grads = ft.value_and_grad(lambda p: moe.loss(p, batch, SMALL), has_aux=True)(make_params(SMALL))
    assert value == 0
    assert all(not g.any() for g in tree.leaves(grads))


# ---- the model


def test_one_expert_with_all_slots_is_the_dense_model() -> None:
    config = dataclasses.replace(SMALL, experts=1, top_k=1, capacity_factor=1.0)
    params, tokens = make_params(config), make_batch()["tokens"]
    dense = dict(params, blocks=[{**block, **{n: leaf[0] for n, leaf in block["experts"].items()}} for block in params["blocks"]])
    assert_trees_close(moe.apply(params, tokens, config), gpt.apply(dense, tokens, config), **CLOSE)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_rematerialized_gradients_are_the_same(dropout: float) -> None:
    config = dataclasses.replace(SMALL, dropout=dropout)
    params, batch = make_params(config), make_batch()
    step = ft.value_and_grad(moe.loss, has_aux=True)
    plain, again = (step(params, batch, config, key=ft.random.key(3), remat=remat) for remat in (False, True))
    assert_trees_equal(again, plain)
    assert torch.equal(plain[0][0], step(params, batch, config)[0][0]) == (not dropout)


@pytest.mark.parametrize("name", ["two of four", "one of four"])
def test_captured_gradients_equal_eager_ones(name: str) -> None:
    config = MIXTURES[name]
    params, batch = make_params(config), make_batch()
    for step in (
        ft.value_and_grad(lambda p, b: moe.loss(p, b, config), has_aux=True),
        ft.accumulate(lambda p, b: moe.loss(p, b, config)[0], 2),
    ):
        captured = ft.jit(step)
        assert_trees_close(captured(params, batch), step(params, batch), **CLOSE)
        assert captured.status.state == "captured"


def test_training_lowers_the_loss_and_evens_the_load() -> None:
    config = dataclasses.replace(SMALL, capacity_factor=1.25)
    tx = ft.optim.adamw(1e-2)
    params = moe.init(config, ft.random.key(1))
    start = torch.randint(0, SMALL.vocab_size, (8, 1), generator=torch.Generator().manual_seed(0))
    text = (start + 3 * torch.arange(9)) % SMALL.vocab_size  # each token is the one before plus 3
    batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}

    def step(state: ft.TrainState, batch: dict[str, torch.Tensor]) -> tuple[ft.TrainState, Any]:
        (loss, metrics), grads = ft.value_and_grad(lambda p: moe.loss(p, batch, config), has_aux=True)(state.params)
        return state.apply_gradients(grads, tx), (loss, metrics)

    state, captured, history = ft.TrainState.create(params=params, tx=tx), ft.jit(step, donate="state"), []
    for _ in range(60):
        state, report = captured(state, batch)
        history.append(report)
    losses = [float(loss) for loss, _ in history]
    assert losses[0] > 3
    assert losses[-1] < 0.3
    assert float(history[-1][1]["balance"].value().max()) < 1.3


def test_init_depends_on_the_key_alone_and_has_the_stated_scale() -> None:
    config = moe.Config(layers=2, d_model=64, heads=2, d_ff=96)
    params = moe.init(config, ft.random.key(1))
    assert_trees_equal(params, moe.init(config, ft.random.key(1)))
    assert moe.count(config) == tree.size(params)
    block = params["blocks"][0]
    assert block["experts"]["gate"].std() == pytest.approx(64**-0.5, rel=0.02)
    assert block["experts"]["down"].std() == pytest.approx((4 * 96) ** -0.5, rel=0.02)
    assert block["router"].std() == pytest.approx(64**-0.5, rel=0.1)
    assert not torch.equal(block["experts"]["up"], params["blocks"][1]["experts"]["up"])
    assert not torch.equal(block["experts"]["up"][0], block["experts"]["up"][1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 5}, "top_k=5 must be between 1 and experts=4"),
        ({"top_k": 0}, "top_k=0 must be between 1"),
        ({"capacity_factor": 0.0}, r"capacity_factor=0.0 must be positive"),
        ({"z_weight": -1.0}, "not negative, but balance_weight=0.01, z_weight=-1.0"),
        ({"layers": 0}, "positive, not layers=0"),
    ],
)
def test_sizes_that_do_not_fit_are_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)
