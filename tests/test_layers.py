"""Tiled layers are the untiled ones: the same values, masks and derivatives for any number of chunks, in the memory of one."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

import functrain as ft
from functrain.layers import Routing, mlp, moe, tiled_loss, tiled_mlp, tiled_moe
from functrain.losses import cross_entropy
from tests.helpers import assert_trees_close, assert_trees_equal

EXACT: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-12}
WIDTH, HIDDEN, EXPERTS = 3, 5, 4
SHAPES = st.one_of(st.tuples(st.integers(1, 9)), st.tuples(st.integers(1, 3), st.integers(1, 9)), st.just((2, 2, 3)))


def make(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mlp_params(gate: bool = True, *stacked: int) -> dict[str, torch.Tensor]:
    params = {"up": make(0, *stacked, WIDTH, HIDDEN), "down": make(1, *stacked, HIDDEN, WIDTH)}
    return params | ({"gate": make(2, *stacked, WIDTH, HIDDEN)} if gate else {})


def moe_params(gate: bool = True) -> dict[str, Any]:
    return {"router": make(3, WIDTH, EXPERTS), "experts": mlp_params(gate, EXPERTS)}


def derivatives(layer: Any, params: Any, x: torch.Tensor, factor: float) -> Any:
    """Value and gradients of a scalar made of the layer's result."""
    return ft.value_and_grad(lambda params, x: factor * torch.sin(layer(params, x)).sum(), argnums=(0, 1))(params, x)


# ---- MLP


@settings(deadline=None, max_examples=30)
@given(
    shape=SHAPES,
    chunks=st.integers(1, 11),
    gate=st.booleans(),
    rate=st.sampled_from([0.0, 0.4]),
    factor=st.floats(-3, 3),
    seed=st.integers(0, 9),
)
def test_a_tiled_mlp_is_the_mlp(shape: Any, chunks: int, gate: bool, rate: float, factor: float, seed: int) -> None:
    params, x, key = mlp_params(gate), make(9, *shape, WIDTH), ft.random.key(seed)
    tiled = lambda p, x: tiled_mlp(p, x, chunks=chunks, dropout_rate=rate, key=key)  # noqa: E731
    whole = lambda p, x: mlp(p, x, dropout_rate=rate, key=key)  # noqa: E731
    assert_trees_close(derivatives(tiled, params, x, factor), derivatives(whole, params, x, factor), **EXACT)


def test_an_mlp_is_gated_where_there_is_a_gate() -> None:
    x, params = make(9, 4, WIDTH), mlp_params()
    assert_trees_close(mlp(params, x), (F.silu(x @ params["gate"]) * (x @ params["up"])) @ params["down"], **EXACT)
    params.pop("gate")
    assert_trees_close(mlp(params, x, activation=torch.tanh), torch.tanh(x @ params["up"]) @ params["down"], **EXACT)


def test_dropout_zeroes_a_share_of_the_hidden_values_and_keeps_their_mean() -> None:
    params = {"up": torch.eye(64), "down": torch.eye(64)}
    drop = lambda seed: mlp(params, torch.ones(100, 64), activation=torch.relu, dropout_rate=0.25, key=ft.random.key(seed))  # noqa: E731
    kept = drop(0)
    assert_trees_close(kept.unique(), torch.tensor([0.0, 4 / 3]))
    assert abs((kept == 0).double().mean() - 0.25) < 0.02
    assert_trees_equal(kept, drop(0))
    assert not torch.equal(kept, drop(1))
    assert len({tuple(row.tolist()) for row in kept}) == 100  # tokens draw independently


def test_the_order_of_tokens_alone_decides_their_masks() -> None:
    params, x, key = mlp_params(), make(9, 2, 6, WIDTH), ft.random.key(3)
    rows = mlp(params, x.flatten(0, 1), dropout_rate=0.5, key=key)
    assert_trees_close(tiled_mlp(params, x, chunks=4, dropout_rate=0.5, key=key).flatten(0, 1), rows, **EXACT)


# ---- mixture of experts


@settings(deadline=None, max_examples=20)
@given(
    shape=SHAPES,
    chunks=st.integers(1, 11),
    top_k=st.integers(1, EXPERTS),
    gate=st.booleans(),
    rate=st.sampled_from([0.0, 0.4]),
    factor=st.floats(-3, 3),
)
def test_a_tiled_mixture_is_the_mixture(shape: Any, chunks: int, top_k: int, gate: bool, rate: float, factor: float) -> None:
    params, x = moe_params(gate), make(9, *shape, WIDTH)
    options: Any = {"top_k": top_k, "dropout_rate": rate, "key": ft.random.key(1)}

    def total(layer: Any) -> Any:
        def result(params: Any, x: torch.Tensor) -> torch.Tensor:
            y, routing = layer(params, x, **options)
            return y.sum() + 0.3 * routing.balance_loss()

        return derivatives(result, params, x, factor)

    assert_trees_close(total(lambda p, x, **o: tiled_moe(p, x, chunks=chunks, **o)), total(moe), **EXACT)
    assert_trees_close(tiled_moe(params, x, chunks=chunks, **options)[1], moe(params, x, **options)[1], **EXACT)


def test_each_token_passes_its_best_experts_by_their_shares() -> None:
    params, x = moe_params(), make(9, 7, WIDTH)
    y, routing = moe(params, x, top_k=2)
    load = [0.0] * EXPERTS
    for row, result in zip(x, y, strict=True):
        probabilities = torch.softmax(row @ params["router"], -1)
        best = probabilities.topk(2).indices.tolist()
        experts = [mlp({name: leaf[i] for name, leaf in params["experts"].items()}, row) for i in best]
        shares = [float(probabilities[i] / probabilities[best].sum()) for i in best]
        assert_trees_close(result, shares[0] * experts[0] + shares[1] * experts[1], **EXACT)
        for i in best:
            load[i] += 1
    assert routing.load.tolist() == load
    assert int(routing.tokens) == 7


def test_the_mixture_is_that_of_mixtral() -> None:
    config = hf.MixtralConfig(hidden_size=8, intermediate_size=12, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "batched_mm"
    block = MixtralSparseMoeBlock(config).double()
    for i, parameter in enumerate(block.parameters()):
        parameter.data = make(i, *parameter.shape) / 3
    gate, up = block.experts.gate_up_proj.detach().transpose(1, 2).chunk(2, -1)
    down = block.experts.down_proj.detach().transpose(1, 2)
    params = {"router": block.gate.weight.detach().T, "experts": {"gate": gate, "up": up, "down": down}}
    x = make(9, 2, 5, 8)
    assert_trees_close(tiled_moe(params, x, chunks=3, top_k=2)[0], block(x).detach(), rtol=1e-5, atol=1e-6)


def test_the_balance_loss_is_that_of_switch_transformers() -> None:
    probabilities = np.array([[0.6, 0.4], [0.7, 0.3], [0.2, 0.8]])
    routing = Routing(torch.tensor([2.0, 1.0]), torch.tensor(probabilities.sum(0), dtype=torch.float32), torch.tensor(3.0))
    assert_trees_close(routing.balance_loss(), np.float32(2 * (2 / 3 * 0.5 + 1 / 3 * 0.5)))
    even = Routing(torch.tensor([2.0, 2.0]), torch.tensor([2.0, 2.0]), torch.tensor(4.0))
    assert float(even.balance_loss()) == 1.0


# ---- loss


@settings(deadline=None, max_examples=25)
@given(shape=st.sampled_from([(7,), (2, 7), (3, 1)]), chunks=st.integers(1, 9), rate=st.sampled_from([0.0, 0.4]), factor=st.floats(-3, 3))
def test_a_tiled_loss_is_the_loss(shape: Any, chunks: int, rate: float, factor: float) -> None:
    targets = torch.arange(np.prod(shape)).reshape(shape) % 4 - 1
    tokens = {"targets": targets, "keys": ft.random.split(ft.random.key(0), shape)}

    def loss(tokens: Any, head: torch.Tensor) -> ft.Mean:
        drop = lambda key, x: ft.random.dropout(key, x, rate)  # noqa: E731
        hidden = torch.vmap(drop)(tokens["keys"].reshape(-1, 2), tokens["hidden"].reshape(-1, WIDTH))
        return cross_entropy(hidden @ head, tokens["targets"].reshape(-1), ignore_index=-1)

    def total(wrap: Any) -> Any:
        return ft.value_and_grad(lambda h, head: factor * wrap(loss)({**tokens, "hidden": h}, head).value(), argnums=(0, 1))(
            make(1, *shape, WIDTH), make(2, WIDTH, 3)
        )

    assert_trees_close(total(lambda f: tiled_loss(f, chunks, dim=len(shape) - 1)), total(lambda f: f), **EXACT)


def test_a_tiled_loss_wants_a_mean() -> None:
    with pytest.raises(TypeError, match=r"must return ft\.Mean\(total, weight\), not Tensor"):
        tiled_loss(lambda x: x.mean(), 2)(torch.ones(4))


# ---- all of them


@pytest.mark.parametrize("name", ["mlp", "moe"])
def test_captured_they_have_the_same_numbers(name: str) -> None:
    params, x = (mlp_params() if name == "mlp" else moe_params()), make(9, 2, 11, WIDTH)

    def step(params: Any, x: torch.Tensor, key: torch.Tensor) -> Any:
        options: Any = {"chunks": 8, "dropout_rate": 0.2, "key": key}
        y = lambda p, x: tiled_mlp(p, x, **options) if name == "mlp" else tiled_moe(p, x, top_k=2, **options)[0]  # noqa: E731
        return ft.value_and_grad(lambda p, x: y(p, x).square().sum(), argnums=(0, 1))(params, x)

    assert_trees_close(ft.jit(step)(params, x, ft.random.key(5)), step(params, x, ft.random.key(5)), **EXACT)


@pytest.mark.parametrize("name", ["mlp", "moe"])
def test_one_chunk_is_in_memory_at_a_time(name: str) -> None:
    width, hidden, tokens = 4, 64, 512
    params = {"up": make(0, width, hidden), "gate": make(1, width, hidden), "down": make(2, hidden, width)}
    if name == "moe":
        params = {"router": make(3, width, 2), "experts": ft.tree.map(lambda w: torch.stack([w, w]), params)}

    def temporaries(chunks: int) -> int:
        def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
            y = tiled_mlp(params, x, chunks=chunks) if name == "mlp" else tiled_moe(params, x, chunks=chunks, top_k=1)[0]
            return y.square().sum()

        return ft.jit(ft.grad(loss)).lower(params, make(9, tokens, width)).memory_analysis().temporaries

    assert temporaries(8) < temporaries(1) / 3


def test_they_nest_with_vmap() -> None:
    params, x, keys = mlp_params(), make(9, 3, 5, WIDTH), ft.random.split(ft.random.key(0), 3)
    run = lambda x, key: tiled_mlp(params, x, chunks=2, dropout_rate=0.5, key=key)  # noqa: E731
    assert_trees_close(ft.vmap(run)(x, keys), torch.stack([run(a, k) for a, k in zip(x, keys, strict=True)]), **EXACT)


def test_errors_say_what_to_change() -> None:
    x = torch.ones(4, WIDTH, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"dropout_rate=0\.5 needs random numbers: pass `key=`"):
        mlp(mlp_params(), x, dropout_rate=0.5)
    with pytest.raises(ValueError, match=r"dropout_rate must be in \[0, 1\), not 1"):
        tiled_mlp(mlp_params(), x, chunks=2, dropout_rate=1.0, key=ft.random.key(0))
    with pytest.raises(ValueError, match=r"x is \[\.\.\., tokens, d\], but it has shape \[3\]"):
        tiled_moe(moe_params(), x[0], chunks=2, top_k=1)
    with pytest.raises(ValueError, match="top_k=5 of 4 experts"):
        moe(moe_params(), x, top_k=5)
