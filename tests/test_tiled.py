"""Chunk by chunk is the same function with the same derivatives, in the memory of one chunk."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from functrain import random, tree
from functrain.compile.jit import jit
from functrain.random.keys import fold_in, key, split
from functrain.remat import remat
from functrain.tiled import tiled
from functrain.torch_internals import TorchDispatchMode
from functrain.transforms import grad, jvp, value_and_grad, vmap
from functrain.tree import Mean
from tests.helpers import assert_trees_close, assert_trees_equal

EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


def make(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mlp(x: torch.Tensor, params: Any) -> torch.Tensor:
    return torch.tanh(x @ params["up"]) @ params["down"]


def weights() -> dict[str, torch.Tensor]:
    return {"up": make(0, 3, 5), "down": make(1, 5, 3)}


@settings(deadline=None, max_examples=30)
@given(
    chunks=st.integers(1, 6),
    rows=st.integers(1, 7),
    columns=st.integers(1, 3),
    dim=st.sampled_from([0, 1, -2, -3]),
    factor=st.floats(-3, 3),
)
def test_value_and_gradients_are_those_of_the_whole(chunks: int, rows: int, columns: int, dim: int, factor: float) -> None:
    x = make(2, rows, columns, 3)

    def loss(wrap: Callable[[Any], Any]) -> Any:
        return value_and_grad(lambda x, p: (torch.sin(wrap(mlp)(x, p)) * factor).sum(), argnums=(0, 1))(x, weights())

    assert_trees_close(loss(lambda f: tiled(f, chunks, dim)), loss(lambda f: f), **EXACT)


def test_gradients_reach_what_the_function_closes_over() -> None:
    x = make(2, 7, 3)

    def loss(wrap: Callable[[Any], Any]) -> Any:
        return grad(lambda p: (wrap(lambda x: mlp(x, p))(x) ** 2).sum())(weights())

    assert_trees_close(loss(lambda f: tiled(f, 3)), loss(lambda f: f), **EXACT)


@pytest.mark.parametrize("chunks", [1, 2, 3, 7, 20])
def test_it_nests_with_every_transform(chunks: int) -> None:
    x, p = make(2, 7, 3), weights()

    def results(wrap: Callable[[Any], Any]) -> Any:
        f = wrap(mlp)
        total = lambda p, x: (f(x, p) ** 2).sum()  # noqa: E731
        return {
            "penalty": grad(lambda p: (grad(total, argnums=1)(p, x) ** 2).sum())(p),
            "per sample": vmap(grad(total), in_axes=(None, 0))(p, torch.stack([x, 2 * x])),
            "Hessian vector": jvp(grad(total), (p, x), (p, x)),
            "inside remat": grad(remat(total))(p, x),
            "of a gradient": wrap(lambda x, p: vmap(grad(lambda row, p: mlp(row, p).sum()), in_axes=(0, None))(x, p))(x, p),
        }

    assert_trees_close(results(lambda f: tiled(f, chunks)), results(lambda f: f), **EXACT)


def test_trees_are_cut_and_put_together() -> None:
    @tree.struct
    class Tokens:
        ids: Any
        values: Any
        name: str = tree.field(static=True, default="tokens")

    tokens = Tokens(ids=torch.arange(5), values=make(0, 5, 2))
    f = lambda t, scale: {"tokens": t.replace(values=t.values * scale), "sum": Mean(t.values.sum(), torch.tensor(len(t.ids))), "n": 3}  # noqa: E731
    found, expected = tiled(f, 3)(tokens, 2.0), f(tokens, 2.0)
    assert found["tokens"].name == "tokens"
    assert found["n"] == 3
    assert_trees_close(found, expected, **EXACT)


def test_a_tiled_mean_is_that_of_the_whole() -> None:
    x, mask = make(0, 7, 3), torch.tensor([1.0, 0, 0, 1, 1, 1, 0], dtype=torch.float64)
    f = lambda batch, w: Mean(((batch["x"] @ w) ** 2 * batch["mask"]).sum(), batch["mask"].sum())  # noqa: E731
    loss = lambda wrap: value_and_grad(lambda w: wrap(f)({"x": x, "mask": mask}, w))(make(1, 3))  # noqa: E731
    assert_trees_close(loss(lambda f: tiled(f, 4)), loss(lambda f: f), **EXACT)


def test_each_chunk_gets_its_own_key() -> None:
    def noisy(x: torch.Tensor, keys: Any, w: torch.Tensor) -> torch.Tensor:
        return torch.sin(random.dropout(keys["drop"], x * w, 0.5))

    x, keys = make(0, 7, 3), {"drop": key(3)}

    def by_hand(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.cat([noisy(part, {"drop": fold_in(key(3), j)}, w) for j, part in enumerate(torch.split(x, [3, 2, 2]))])

    in_tiles = tiled(noisy, 3, key_argnums=1)
    found = value_and_grad(lambda x, w: in_tiles(x, keys, w).sum(), argnums=(0, 1))(x, make(1, 3))
    assert_trees_close(found, value_and_grad(lambda x, w: by_hand(x, w).sum(), argnums=(0, 1))(x, make(1, 3)), **EXACT)
    w = make(1, 3)
    keyed = vmap(lambda x, k: in_tiles(x, {"drop": k}, w))(torch.stack([x, x]), split(key(0), 2))
    assert not torch.equal(keyed[0], keyed[1])


def test_dropout_in_a_scope_has_true_derivatives() -> None:
    def drawn(wrap: Callable[[Any], Any]) -> Any:
        def loss(x: torch.Tensor) -> torch.Tensor:
            with random.scope(key(1)):
                return wrap(lambda x: torch.sin(torch.dropout(x, 0.5, True)))(x).sum()

        return value_and_grad(loss)(make(0, 6, 3))

    by_hand = lambda f: lambda x: torch.cat([f(part) for part in torch.split(x, 2)])  # noqa: E731
    assert_trees_equal(drawn(lambda f: tiled(f, 3)), drawn(by_hand))


def test_a_batch_of_nothing_is_one_empty_chunk() -> None:
    value, gradient = value_and_grad(lambda x: tiled(torch.sin, 4)(x).sum())(torch.zeros(0, 3))
    assert_trees_equal((value, gradient), (torch.zeros(()), torch.zeros(0, 3)))


class Widest(TorchDispatchMode):
    """The most elements that live intermediates of one kind have at once, by the results of tanh and its derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        if operation in (torch.ops.aten.tanh.default, torch.ops.aten.tanh_backward.default):
            self.count(result)
        return result

    def count(self, x: torch.Tensor) -> None:
        size = x.numel()
        self.live += size
        self.peak = max(self.peak, self.live)

        class Gone:
            def __del__(gone) -> None:
                self.live -= size

        x.untyped_storage()._gone = Gone()  # type: ignore[attr-defined]


def test_only_one_chunk_of_intermediates_lives_at_a_time() -> None:
    x = make(2, 64, 3)

    def peak(chunks: int) -> int:
        with Widest() as widest:
            value_and_grad(lambda p: tiled(mlp, chunks)(x, p).sum())(weights())
        return widest.peak

    assert peak(1) >= 64 * 5
    assert peak(8) <= peak(1) / 7


def test_errors_name_the_leaf_and_the_shape() -> None:
    with pytest.raises(ValueError, match=r"differ in size along dimension 0: x has \[4, 2\], y has \[3\]"):
        tiled(lambda t: t, 2)({"x": torch.ones(4, 2), "y": torch.ones(3)})
    with pytest.raises(ValueError, match=r"leaf y of shape \[3\] has no dimension 1"):
        tiled(lambda t: t, 2, dim=1)({"x": torch.ones(4, 3), "y": torch.ones(3)})
    with pytest.raises(ValueError, match=r"result total .* has shape \[\], but the chunk has size 2 along dimension 0.*ft\.Mean"):
        tiled(lambda x: {"total": x.sum()}, 2)(torch.ones(4))
    with pytest.raises(ValueError, match=r"result \(the whole result\) of a chunk has shape \[3\]"):
        tiled(lambda x: x.sum(0), 2)(torch.ones(4, 3))
    with pytest.raises(ValueError, match="no tensor to cut"):
        tiled(lambda x: x, 2)(3)
    with pytest.raises(ValueError, match="chunks must be"):
        tiled(lambda x: x, 0)
    with pytest.raises(ValueError, match="result n is no tensor and differs"):
        tiled(lambda x: {"n": len(x)}, 2)(torch.ones(3))
    with pytest.raises(ValueError, match="key_argnums=4"):
        tiled(lambda x: x, 2, key_argnums=4)(torch.ones(3))
    with pytest.raises(ValueError, match="first argument"):
        tiled(lambda x: x, 2, key_argnums=0)(torch.ones(3))


def test_a_captured_function_has_the_same_numbers_and_holds_less() -> None:
    wide = {"up": make(0, 3, 64), "down": make(1, 64, 3)}

    def step(chunks: int) -> Any:
        return lambda x, p: value_and_grad(lambda p: (tiled(mlp, chunks)(x, p) ** 2).sum())(p)

    x = make(2, 65, 3)
    assert_trees_close(jit(step(4))(x, wide), step(1)(x, wide), **EXACT)
    temporaries = [jit(step(chunks)).lower(x, wide).memory_analysis().temporaries for chunks in (1, 8)]
    assert temporaries[1] < temporaries[0] / 2
