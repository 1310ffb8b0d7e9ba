"""Microbatches give what the whole batch gives, in the memory of one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from functrain import tree
from functrain.accumulate import accumulate
from functrain.compile.jit import jit
from functrain.precision import DynamicScale, Precision, StaticScale
from functrain.random.keys import fold_in, key
from functrain.transforms import grad, value_and_grad, vmap
from functrain.tree import Mean
from tests.helpers import assert_trees_close, assert_trees_equal


def make(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def params(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {"w": make(0, 5, 7, dtype=dtype), "b": make(1, 7, dtype=dtype)}


def batch(rows: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Rows with very different numbers of tokens that count; one has none."""
    mask = (torch.arange(6) < torch.arange(rows)[:, None] % 7).to(dtype)
    return {"x": make(2, rows, 6, 5, dtype=dtype), "y": torch.arange(rows * 6).reshape(rows, 6) % 7, "mask": mask}


def masked_loss(params: Any, batch: Any) -> Mean:
    logits = batch["x"].to(params["w"].dtype) @ params["w"] + params["b"]
    losses = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch["y"].flatten(), reduction="none")
    if params["w"].dtype == torch.float64:
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="none")
    return Mean((losses * batch["mask"].flatten()).sum(), batch["mask"].sum())


def plain_loss(params: Any, batch: Any) -> torch.Tensor:
    return ((batch["x"] @ params["w"] + params["b"]) ** 2).mean()


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 4), st.integers(1, 4))
def test_a_weighted_mean_equals_that_of_the_whole_batch(microbatches: int, rows_each: int) -> None:
    whole = batch(microbatches * rows_each)
    assert_trees_close(accumulate(masked_loss, microbatches)(params(), whole), value_and_grad(masked_loss)(params(), whole))


def test_in_float64_it_is_exact_to_rounding() -> None:
    p, whole = params(torch.float64), batch(12, torch.float64)
    value, gradients = accumulate(masked_loss, 4)(p, whole)
    assert value.dtype is torch.float64
    assert_trees_close((value, gradients), value_and_grad(masked_loss)(p, whole), rtol=1e-13, atol=1e-15)


def test_a_scalar_loss_counts_each_microbatch_alike() -> None:
    whole = batch(8)
    assert_trees_close(accumulate(plain_loss, 4)(params(), whole), value_and_grad(plain_loss)(params(), whole))
    by_hand = [value_and_grad(plain_loss)(params(), tree.map(lambda x, j=j: x[j::4], whole)) for j in range(4)]
    assert_trees_close(accumulate(plain_loss, 4)(params(), whole), tree.map(lambda *parts: sum(parts) / 4, *by_hand))


def test_microbatch_j_is_rows_j_and_every_kth_after() -> None:
    seen = []

    def loss(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        seen.append(x.tolist())
        return (p * x).sum()

    accumulate(loss, 3)(torch.ones(()), torch.arange(6.0))
    assert seen == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_nothing_that_counts_gives_zero() -> None:
    whole = batch(4) | {"mask": torch.zeros(4, 6)}
    value, gradients = accumulate(masked_loss, 2)(params(), whole)
    assert_trees_equal((value, gradients), (torch.zeros(()), tree.map(torch.zeros_like, params())))
    value, gradients = accumulate(lambda p, x: Mean((p * x).sum(), torch.zeros((), dtype=torch.int64)), 2)(torch.ones(()), torch.ones(4))
    assert_trees_equal((value, gradients), (torch.zeros(()), torch.zeros(())))


def test_gradients_of_half_precision_are_summed_in_float32() -> None:
    """1 + 1/512 + ... in bfloat16 would stay 1: the sum over microbatches must not."""
    x = torch.tensor([1.0] + [1 / 512] * 7)
    gradient = accumulate(lambda p, x: Mean((p.to(torch.bfloat16) * x.to(torch.bfloat16)).sum().float(), torch.ones(())), 8)
    assert gradient(torch.ones(()), x)[1] * 8 == 1 + 7 / 512
    precision = Precision(compute=torch.bfloat16)
    gradient = accumulate(lambda p, x: Mean((p * x.to(p.dtype)).sum(), torch.ones((), dtype=torch.bfloat16)), 8, precision=precision)
    value, found = gradient(torch.ones(()), x)
    assert found.dtype is torch.float32
    assert value.dtype is torch.float32
    assert found * 8 == 1 + 7 / 512
    assert value * 8 == 1 + 7 / 512


def test_params_are_cast_once_and_losses_see_the_compute_dtype() -> None:
    seen = []

    def loss(p: Any, batch: Any) -> Mean:
        seen.append(p["w"])
        return masked_loss(p, batch)

    _, gradients = accumulate(loss, 4, precision=Precision())(params(), batch(8))
    assert {x.dtype for x in seen} == {torch.bfloat16}
    assert len({x.data_ptr() for x in seen}) == 1
    assert {g.dtype for g in tree.leaves(gradients)} == {torch.float32}
    assert_trees_close(gradients, value_and_grad(masked_loss)(params(), batch(8))[1], rtol=0.05, atol=3e-3)


def test_argnums_are_those_of_value_and_grad() -> None:
    loss = lambda p, q, x, scale: Mean((p * q["q"] * x).sum() * scale, torch.tensor(float(len(x))))  # noqa: E731
    args = (torch.tensor(2.0), {"q": torch.tensor(3.0)}, torch.arange(6.0), 0.5)
    assert_trees_close(accumulate(loss, 3, argnums=(0, 1))(*args), value_and_grad(loss, argnums=(0, 1))(*args))
    assert_trees_close(accumulate(loss, 3, argnums=1)(*args), value_and_grad(loss, argnums=1)(*args))


def test_integer_and_unused_params_get_zeros() -> None:
    p = {"w": torch.ones(()), "n": torch.tensor(3), "unused": torch.ones(2)}
    _, gradients = accumulate(lambda p, x: (p["w"] * x).sum(), 2)(p, torch.ones(4))
    assert_trees_equal(gradients, {"w": torch.tensor(2.0), "n": torch.tensor(0), "unused": torch.zeros(2)})


def test_each_microbatch_gets_its_own_key() -> None:
    seen = []

    def loss(p: torch.Tensor, keys: Any, x: torch.Tensor) -> torch.Tensor:
        seen.append(keys)
        return (p * x).sum()

    accumulate(loss, 3, key_argnums=1)(torch.ones(()), {"dropout": key(5), "none": None}, torch.ones(6))
    assert_trees_equal(seen, [{"dropout": fold_in(key(5), j), "none": None} for j in range(3)])


def test_a_mean_in_aux_is_merged_and_the_rest_is_stacked() -> None:
    def loss(p: torch.Tensor, x: torch.Tensor) -> Any:
        aux = {"accuracy": Mean((x > 2).sum(), torch.tensor(len(x))), "rows": x, "first": x[0], "n": len(x), "name": "a"}
        return (p * x).sum(), aux

    (_, aux), _ = accumulate(loss, 2, has_aux=True)(torch.ones(()), torch.arange(6.0))
    rows = torch.tensor([[0.0, 2, 4], [1, 3, 5]])
    expected = {"accuracy": Mean(torch.tensor(3), torch.tensor(6)), "rows": rows, "first": rows[:, 0], "n": torch.tensor([3, 3])}
    assert aux.pop("name") == "a"
    assert_trees_equal(aux, expected)
    assert not any(x.requires_grad for x in tree.tensors(aux))


@pytest.mark.parametrize("scale", [StaticScale(1024.0), DynamicScale()])
def test_a_loss_scale_changes_nothing_that_is_finite(scale: Any) -> None:
    whole = batch(8)
    assert_trees_close(accumulate(masked_loss, 4, loss_scale=scale)(params(), whole), value_and_grad(masked_loss)(params(), whole))


def test_a_scaled_microbatch_in_float16_overflows_no_sooner_than_the_whole_batch() -> None:
    """The sum of 4,000 gradients of 1, times 32,768, is beyond float16; that of their mean is not."""
    loss = lambda p, x: Mean((p * x).sum(dtype=torch.float32), torch.tensor(float(len(x))))  # noqa: E731
    _, gradient = accumulate(loss, 2, precision=Precision(compute=torch.float16), loss_scale=StaticScale(2.0**15))(
        torch.ones(()), torch.ones(8000)
    )
    assert gradient == 1.0


@pytest.mark.parametrize("argument", ["params", "batch"])
def test_it_can_be_differentiated_and_batched(argument: str) -> None:
    p, x = make(0, 3, dtype=torch.float64), make(1, 4, 3, dtype=torch.float64)
    loss = lambda p, x: Mean((torch.sin(p * x) * x.abs()).sum(), x.abs().sum())  # noqa: E731

    def penalty(transform: Callable[..., Any]) -> Any:
        return grad(lambda p, x: (transform(loss)(p, x)[1] ** 2).sum(), argnums=0 if argument == "params" else 1)(p, x)

    assert_trees_close(penalty(lambda f: accumulate(f, 2)), penalty(value_and_grad), rtol=1e-12, atol=1e-14)
    many = torch.stack([x, 2 * x])
    batched = vmap(accumulate(loss, 2), in_axes=(None, 0))(p, many)
    assert_trees_close(batched, vmap(value_and_grad(loss), in_axes=(None, 0))(p, many), rtol=1e-12, atol=1e-14)


def test_only_one_microbatch_is_kept_for_the_backward_pass() -> None:
    """Bytes that autograd holds at once fall with the number of microbatches."""

    def held(microbatches: int) -> int:
        live, peak = 0, 0

        class Held:
            def __init__(self, x: torch.Tensor) -> None:
                nonlocal live, peak
                self.x, self.size = x, x.numel() * x.element_size()
                live += self.size
                peak = max(peak, live)

            def __del__(self) -> None:
                nonlocal live
                live -= self.size

        loss = lambda p, x: torch.tanh(torch.tanh(x @ p) @ p).sum()  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.x):
            accumulate(loss, microbatches)(torch.ones(4, 4), torch.ones(256, 4))
        return peak

    assert held(8) < held(1) / 6


# ---- errors


def test_errors_name_the_leaf_and_the_shape() -> None:
    loss = lambda p, batch: p * batch["x"].sum()  # noqa: E731
    p = torch.ones(())
    with pytest.raises(ValueError, match=r"leaf x of shape \[6, 2\] has 6 rows, which 4 microbatches do not divide"):
        accumulate(loss, 4)(p, {"x": torch.ones(6, 2)})
    with pytest.raises(ValueError, match=r"leaf x is a scalar"):
        accumulate(loss, 2)(p, {"x": torch.ones(())})
    with pytest.raises(ValueError, match=r"differ in rows: x has \[4, 2\], y has \[2\]"):
        accumulate(loss, 2)(p, {"x": torch.ones(4, 2), "y": torch.ones(2)})
    with pytest.raises(ValueError, match="without a batch"):
        accumulate(loss, 2)(p, batch={"x": torch.ones(4)})
    with pytest.raises(ValueError, match="no tensor to cut"):
        accumulate(loss, 2)(p, {"x": 3})
    with pytest.raises(ValueError, match="microbatches must be"):
        accumulate(loss, 0)
    with pytest.raises(ValueError, match="key_argnums=3"):
        accumulate(loss, 2, key_argnums=3)(p, {"x": torch.ones(4)})
    with pytest.raises(ValueError, match=r"weight of the ft\.Mean"):
        accumulate(lambda p, x: Mean((p * x).sum(), p * 2), 2)(p, torch.ones(4))
    with pytest.raises(TypeError, match="str values that differ"):
        accumulate(lambda p, x: (p * x.sum(), str(x[0].item())), 2, has_aux=True)(p, torch.arange(4.0))


def test_a_captured_step_with_a_loss_scale_equals_the_eager_one() -> None:
    def step(p: Any, scale: DynamicScale, x: Any) -> Any:
        return accumulate(masked_loss, 4, precision=Precision(), loss_scale=scale)(p, x)

    args = (params(), DynamicScale(), batch(8))
    assert_trees_close(jit(step)(*args), step(*args), rtol=1e-6, atol=1e-7)
