"""Models on meshes, unchanged: gradients and steps are those of plain PyTorch, or of one device, with uneven valid tokens."""

from collections import Counter
from typing import Any

import pytest
import torch

import functrain as ft
from functrain import P, tree
from functrain.launch import launch
from functrain.models import gpt, moe, vla
from functrain.module import from_module
from tests import reference_models as reference
from tests.helpers import assert_trees_close
from tests.sharding.compare import STAGES, assert_same, assert_trees_equal, first_state, plan_of, whole

each_stage = pytest.mark.parametrize("stage", STAGES)

# ---- Hugging Face models

ROWS = 4


def words(*shape: int) -> torch.Tensor:
    return torch.randint(3, reference.VOCAB, shape, generator=torch.Generator().manual_seed(3))


def valid(rows: int, length: int) -> torch.Tensor:
    """Which positions count: all of the first row, ever fewer of the next; the ranks' shares are very uneven."""
    return torch.arange(length) < torch.tensor([[max(1, length >> row)] for row in range(rows)])


def decoder_batch() -> dict[str, torch.Tensor]:
    tokens = words(ROWS, 8)
    return {"input_ids": tokens, "labels": tokens.where(valid(ROWS, 8), -100)}


def masked_batch() -> dict[str, torch.Tensor]:
    tokens, mask = words(ROWS, 8), valid(ROWS, 8)
    return {"input_ids": tokens.where(mask, 0), "attention_mask": mask.long(), "labels": tokens.where(mask, -100)}


def translation_batch() -> dict[str, torch.Tensor]:
    labels = words(ROWS, 7)
    return {"input_ids": words(ROWS, 10), "labels": labels.where(valid(ROWS, 7), -100)}


HUGGINGFACE = {"llama": decoder_batch, "bert": masked_batch, "gpt2": masked_batch, "t5": translation_batch, "mixtral": decoder_batch}


@pytest.mark.parametrize("world", [2, 4])
@each_stage
@pytest.mark.parametrize("name", HUGGINGFACE)
def test_huggingface_gradients_are_those_of_plain_pytorch(name: str, stage: int, world: int) -> None:
    module, batch = reference.example(name).module, HUGGINGFACE[name]()
    model = from_module(module)

    def loss_fn(params: Any, rows: Any) -> torch.Tensor:
        return model.apply(params, model.buffers, **rows)[0].loss

    loss, gradients = ft.jit(ft.value_and_grad(loss_fn), plan=plan_of(stage, world))(model.params, batch)
    expected = module(**batch).loss
    expected.backward()
    torch.testing.assert_close(loss.full(), expected.detach(), rtol=1e-6, atol=0)
    wanted = {name.replace(".", "/"): p.grad for name, p in module.named_parameters()}
    found = dict(tree.leaves_with_path(gradients))
    assert sorted(found) == sorted(wanted)
    largest = max(x.abs().max() for x in wanted.values())
    for path, gradient in found.items():
        assert isinstance(gradient, ft.Array)
        scale = wanted[path].abs().max().clamp_min(1e-3 * largest)  # a key bias's gradient is rounding
        error = (whole(gradient) - wanted[path]).abs().max() / scale
        assert error <= 1e-5, f"{path}: {float(error):.1e} of its largest gradient"


# ---- a mixture of experts

MOE = moe.Config(vocab_size=29, context=16, layers=2, d_model=16, heads=2, kv_heads=1, d_ff=12, experts=4, top_k=2, capacity_factor=0.9)


def moe_params(config: moe.Config) -> Any:
    """Routers with preferences: their params are four times as large as `moe.init` makes them."""
    params = moe.init(config, ft.random.key(0))
    for i, block in enumerate(params["blocks"]):
        block["router"] = ft.random.normal(ft.random.key(10 + i), tuple(block["router"].shape))
    return params


def moe_batch(i: int, rows: int = 12, length: int = 7) -> dict[str, torch.Tensor]:
    """Each half of the rows is made of three tokens, so that its experts are others; how many targets count differs from row to row."""
    generator = torch.Generator().manual_seed(i)
    tokens = torch.randint(0, 3, (rows, length + 1), generator=generator) + 9 * (2 * torch.arange(rows)[:, None] // rows)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:].where(torch.arange(length) < 1 + torch.arange(rows)[:, None] % length, -100)}


def moe_step(tx: Any, config: moe.Config, accumulate: int = 1) -> Any:
    def loss_fn(params: Any, rows: Any) -> Any:
        return moe.loss(params, rows, config)

    def step(state: Any, rows: Any) -> Any:
        derive = ft.accumulate(loss_fn, accumulate, has_aux=True) if accumulate > 1 else ft.value_and_grad(loss_fn, has_aux=True)
        (loss, found), grads = derive(state.params, rows)
        return state.apply_gradients(grads, tx), {"loss": loss, "norm": ft.tree.global_norm(grads), **found}

    return step


MOE_PLANS: dict[str, tuple[dict[str, int], bool]] = {
    "plain leaves": ({"data": 2}, False),
    "plain leaves, three ranks": ({"data": 3}, False),
    "an expert axis alone": ({"expert": 2}, True),
    "data and expert": ({"data": 2, "expert": 2}, True),
}


def moe_plan(name: str, stage: int, exchange: bool = True, simulate: bool = True) -> ft.Plan:
    """Experts as ZeRO splits them, or over an axis of their own; `exchange` says where tokens go, else the partitioner decides."""
    axes, split = MOE_PLANS[name]
    mesh, every = ft.make_mesh(axes, simulate=simulate), tuple(axes)
    zero, batch = ft.zero(stage, every, min_size=0), P(every)
    if not split:
        return ft.Plan(mesh, zero, batch=batch)
    activations = {"slots": P(None, every), "experts": P("expert", *(axis for axis in every if axis != "expert"))} if exchange else {}
    return ft.Plan(mesh, moe.EXPERT_PARALLEL, zero, batch=batch, activations=activations)


MOE_CASES = [(name, accumulate, True) for name in MOE_PLANS for accumulate in (1, 2)]
MOE_CASES += [(name, 1, False) for name, (_, split) in MOE_PLANS.items() if split]


@each_stage
@pytest.mark.parametrize(("name", "accumulate", "exchange"), MOE_CASES)
def test_a_mixture_of_experts_is_that_of_one_device(name: str, stage: int, accumulate: int, exchange: bool) -> None:
    tx = ft.optim.adam(3e-3, eps=1e-3)
    step = moe_step(tx, MOE, accumulate)
    batches = [moe_batch(i) for i in range(10)]
    _, metrics = assert_same(step, first_state(tx, moe_params(MOE)), batches, moe_plan(name, stage, exchange))
    assert metrics[0]["dropped"].value().max() > 0  # or slots would not matter


def test_ranks_use_different_experts() -> None:
    """Or the test above would say little: each half of the rows has an expert that it uses more than twice as much as the other half."""
    load = moe.hidden(moe_params(MOE), moe_batch(0)["tokens"], MOE)[1].load[:, 0]
    first, second = load[:6].mean(0), load[6:].mean(0)
    assert (first > 2 * second).any(), (first, second)
    assert (second > 2 * first).any(), (first, second)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", [name for name, (_, split) in MOE_PLANS.items() if split])
def test_experts_cost_four_exchanges_a_block_and_nothing_else(name: str, stage: int) -> None:
    tx = ft.optim.adam(3e-3)
    lowered = ft.jit(moe_step(tx, MOE), plan=moe_plan(name, stage)).lower(first_state(tx, moe_params(MOE)), moe_batch(0))
    assert lowered.partition.counts()["all_to_all[expert]"] == 4 * MOE.layers
    assert not lowered.partition.unplanned_large
    assert not lowered.partition.replicated


def moe_on_a_rank(names: list[str], steps: int) -> list[Any]:
    torch.set_num_threads(1)
    tx, results = ft.optim.adam(3e-3, eps=1e-3), []
    for name in names:
        plan = moe_plan(name, 3, simulate=False)
        state = ft.device_put(first_state(tx, moe_params(MOE)), plan)
        step = ft.jit(moe_step(tx, MOE, 2), plan=plan, donate="state")
        for i in range(steps):
            state, metrics = step(state, moe_batch(i))
        results.append(tree.map(lambda x: x.full(), (state, metrics)))
    return results


@pytest.mark.slow
def test_a_mixture_of_experts_on_two_processes() -> None:
    tx, names = ft.optim.adam(3e-3, eps=1e-3), [name for name, (axes, _) in MOE_PLANS.items() if list(axes.values()) == [2]]
    state, step = first_state(tx, moe_params(MOE)), moe_step(tx, MOE, 2)
    for i in range(10):
        state, metrics = step(state, moe_batch(i))
    for rank, results in enumerate(launch(moe_on_a_rank, names, 10, nproc=2, stdout="quiet", timeout=200)):
        assert len(results) == 2
        for found in results:
            assert_trees_close(found, (state, metrics), rank=rank)


# ---- the reference GPT

GPT = gpt.Config(vocab_size=29, context=16, layers=2, d_model=16, heads=4, kv_heads=2, d_ff=20)


def gpt_step(tx: Any) -> Any:
    def step(state: Any, rows: Any) -> Any:
        loss, grads = ft.value_and_grad(lambda params, rows: gpt.loss(params, rows, GPT))(state.params, rows)
        return state.apply_gradients(grads, tx), {"loss": loss, "norm": ft.tree.global_norm(grads)}

    return step


@each_stage
def test_the_reference_plan_costs_four_reductions_a_block_on_model(stage: int) -> None:
    mesh = ft.make_mesh({"data": 2, "model": 2}, simulate=True)
    zero = ft.zero(stage, min_size=0)
    plan = ft.Plan(mesh, gpt.TENSOR_PARALLEL, zero, batch=P("data"), activations={"hidden": P("data")})
    tx = ft.optim.adam(3e-3, eps=1e-3)
    state = first_state(tx, gpt.init(GPT, ft.random.key(0)))
    report = ft.jit(gpt_step(tx), plan=plan).lower(state, moe_batch(0)).partition
    large = [move for move in report.moves if move.axis == "model" and move.nbytes > 64]
    assert Counter(move.operation for move in large) == {"all_reduce": 4 * GPT.layers}, "\n".join(map(str, large))
    assert not report.unplanned_large
    assert not report.replicated
    assert_same(gpt_step(tx), state, [moe_batch(i) for i in range(10)], plan)


# ---- a vision-language-action model

VLA = vla.Config(
    image=8, patch=4, vision_layers=1, vision_width=12, vocab_size=23, state_dim=5, layers=2, d_model=16, heads=2, kv_heads=2, d_ff=20,
    horizon=3, action_dim=2, bins=7,
)  # fmt: skip
WIDE, NARROW = P(None, "model"), P("model")
TENSOR = ft.Rules({"params/trunk/**/gate": WIDE, "params/trunk/**/up": WIDE, "params/trunk/**/down": NARROW})
VLA_PLANS: dict[str, Any] = {
    "data": ({"data": 2}, (), P("data")),
    "three ranks": ({"data": 3}, (), P("data")),
    "data and model": ({"data": 2, "model": 2}, (TENSOR,), P("data")),
    "hybrid": ({"pod": 2, "data": 2}, (), P(("pod", "data"))),
}


def vla_step(tx: Any, accumulate: int, remat: bool) -> Any:
    """Two losses; the frozen tower is split as the other params are, and has no gradient."""

    def step(state: Any, rows: Any) -> Any:
        frozen, trained = tree.partition(state.params, "vision/**")
        counts = vla.count_targets(rows)

        def loss_fn(trained: Any, rows: Any) -> Any:
            return vla.loss(tree.combine(trained, frozen), rows, VLA, counts=counts, remat=remat)

        derive = ft.accumulate(loss_fn, accumulate, has_aux=True) if accumulate > 1 else ft.value_and_grad(loss_fn, has_aux=True)
        (loss, found), grads = derive(trained, rows)
        grads = tree.combine(grads, tree.map(torch.zeros_like, frozen))
        return state.apply_gradients(grads, tx), {"loss": loss, "norm": ft.tree.global_norm(grads), **found}

    return step


@pytest.mark.parametrize(("accumulate", "remat"), [(1, False), (2, True)])
@each_stage
@pytest.mark.parametrize("name", VLA_PLANS)
def test_a_vision_language_action_model_is_that_of_one_device(name: str, stage: int, accumulate: int, remat: bool) -> None:
    axes, rules, batch = VLA_PLANS[name]
    plan = ft.Plan(ft.make_mesh(axes, simulate=True), *rules, ft.zero(stage, min_size=0), batch=batch)
    tx = ft.optim.multi_transform(
        {"adam": ft.optim.adam(3e-3, eps=1e-3), "frozen": ft.optim.set_to_zero()}, {"vision/**": "frozen", "**": "adam"}
    )
    params = vla.init(VLA, ft.random.key(0))
    params["query"] = 10 * params["query"]  # at its own scale the first norm makes its gradient 50 times as large, and rounding with it
    state = first_state(tx, params)
    batches = [vla.example_batch(VLA, ft.random.key(i), rows=12) for i in range(10)]
    after, _ = assert_same(vla_step(tx, accumulate, remat), state, batches, plan)
    assert_trees_equal(after.params["vision"], state.params["vision"])
    assert not torch.equal(after.params["connector"]["up"], state.params["connector"]["up"])
