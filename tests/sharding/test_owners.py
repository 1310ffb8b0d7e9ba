"""Every operation of one rank's graph says its phase, the user's line, and the leaf and block that it belongs to."""

from collections import Counter
from typing import Any

import pytest
import torch

import functrain as ft
from functrain import P
from functrain.models import gpt
from tests.sharding import model
from tests.sharding.compare import first_state, plan_of

TX = ft.optim.adam(3e-3)
BLOCKS = {"wte", "wpe", "blocks/0", "blocks/1", "ln_f", "head"}


def nodes_of(stage: int, step: Any = None, layers: int = 2) -> list[Any]:
    state = first_state(TX, model.init(ft.random.key(0), layers))
    lowered = ft.jit(step or model.train_step(TX), plan=plan_of(stage, 2)).lower(state, model.batch(0))
    return [n for n in lowered.graph.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("stage", [0, 3])
def test_every_operation_says_its_phase_and_line(stage: int) -> None:
    nodes = nodes_of(stage)
    assert {n.meta["phase"] for n in nodes} == {"forward", "backward", "update"}
    assert not [n for n in nodes if n.meta["phase"] != "update" and n.meta["source"] is None]


@pytest.mark.parametrize("remat", [False, True])
def test_products_belong_to_the_block_whose_weights_they_take(remat: bool) -> None:
    loss = ft.remat(model.loss_fn) if remat else model.loss_fn
    nodes = nodes_of(0, model.train_step(TX, loss=loss))
    products = [n for n in nodes if n.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)]
    count = Counter((n.meta["phase"], n.meta["block"]) for n in products)
    assert set(count) == {(phase, block) for phase in ("forward", "backward") for block in ("blocks/0", "blocks/1", "head")}
    for block in ("blocks/0", "blocks/1", "head"):
        forward = 6 if block != "head" else 1
        assert count["forward", block] == forward
        assert count["backward", block] == (3 if remat else 2) * forward
    leaves = Counter(n.meta["param"] for n in products if n.meta["phase"] == "forward" and n.meta["block"] == "blocks/1")
    assert leaves == {f"blocks/1/{name}": 1 for name in ("attn/q", "attn/k", "attn/v", "attn/out", "mlp/up", "mlp/down")}


def test_what_takes_no_weight_belongs_to_the_block_before_it() -> None:
    nodes = nodes_of(0)
    attention = [n.meta["block"] for n in nodes if "scaled_dot_product" in str(n.target) and "backward" not in str(n.target)]
    back = [n.meta["block"] for n in nodes if "scaled_dot_product" in str(n.target) and "backward" in str(n.target)]
    assert attention == ["blocks/0", "blocks/1"]
    assert back == ["blocks/1", "blocks/0"]


def test_collectives_and_updates_belong_to_their_leaf() -> None:
    nodes = nodes_of(3)
    starts = [n for n in nodes if "reduce_scatter" in str(n.target)]
    assert len({n.meta["param"] for n in starts}) == len(starts) == len(ft.tree.leaves(model.init(ft.random.key(0), 2)))
    assert {n.meta["block"] for n in starts} == BLOCKS
    updates = [n for n in nodes if "adamw" in str(n.target) or (n.meta["phase"] == "update" and n.meta["param"] is not None)]
    assert {n.meta["block"] for n in updates} == BLOCKS


def test_the_text_of_a_graph_shows_them() -> None:
    config = gpt.Config(vocab_size=29, layers=2, d_model=16, heads=2, kv_heads=1, d_ff=20)

    def step(state: ft.TrainState, rows: Any) -> ft.TrainState:
        _, grads = ft.value_and_grad(lambda params, rows: gpt.loss(params, rows, config))(state.params, rows)
        return state.apply_gradients(grads, TX)

    plan = ft.Plan(ft.make_mesh({"data": 1024}, abstract=True), ft.zero(3, min_size=0), batch=P("data"))
    rows = {name: ft.ShapeDtypeStruct((1024, 8), torch.int64) for name in ("tokens", "targets")}
    text = ft.jit(step, plan=plan).lower(first_state(TX, gpt.init(config, ft.random.key(0))), rows).as_text()
    assert "# backward, blocks/1/down, models/gpt.py:" in text
    assert "# forward, blocks/0, " in text
