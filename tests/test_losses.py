"""Losses equal torch's and Optax's, and the chunked head equals the plain one in every derivative, in less memory."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import functrain as ft
from functrain.compile.graph import is_mutable
from functrain.losses import binary_cross_entropy, cross_entropy, linear_cross_entropy, mean_squared_error
from functrain.torch_internals import TorchDispatchMode
from functrain.tree import Mean
from tests.helpers import assert_trees_close, assert_trees_equal

EXACT: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-12}
OPTIONS = [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-2}, {"label_smoothing": 0.3, "z_loss": 1e-3, "ignore_index": 2}]


def make(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def labels(seed: int, *shape: int, classes: int = 11, ignored: int = -100) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, classes, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.3, ignored, drawn)


def head_inputs(*shape: int, bias: bool = True, ignored: int = -100) -> tuple[Any, torch.Tensor]:
    tensors = {"hidden": make(0, *shape, 5), "weight": make(1, 11, 5)} | ({"bias": make(2, 11)} if bias else {})
    return tensors, labels(3, *shape, ignored=ignored)


def plain(tensors: Any, targets: torch.Tensor, **options: Any) -> Mean:
    return cross_entropy(F.linear(tensors["hidden"], tensors["weight"], tensors.get("bias")), targets, **options)


def chunked(tensors: Any, targets: torch.Tensor, chunk_size: int | None = 4, **options: Any) -> Mean:
    return linear_cross_entropy(tensors["hidden"], tensors["weight"], targets, bias=tensors.get("bias"), chunk_size=chunk_size, **options)


# ---- cross-entropy


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("ignore_index", [-100, 0])
def test_cross_entropy_and_its_gradient_are_those_of_torch(label_smoothing: float, ignore_index: int) -> None:
    logits, targets = make(0, 3, 4, 11), labels(1, 3, 4, ignored=ignore_index)
    options: Any = {"label_smoothing": label_smoothing, "ignore_index": ignore_index}
    found = ft.value_and_grad(lambda x: cross_entropy(x, targets, **options))(logits)
    torchs = lambda x: F.cross_entropy(x.flatten(0, 1), targets.flatten(), **options)  # noqa: E731
    assert_trees_close(found, ft.value_and_grad(torchs)(logits), **EXACT)
    assert int(cross_entropy(logits, targets, **options).weight) == int((targets != ignore_index).sum())


def test_label_smoothing_is_that_of_optax() -> None:
    logits, targets = make(0, 6, 11, dtype=torch.float32), torch.arange(6)
    smooth = optax.smooth_labels(jnp.asarray(np.eye(11, dtype=np.float32)[:6]), 0.2)
    expected = optax.softmax_cross_entropy(jnp.asarray(logits.numpy()), smooth).sum()
    assert_trees_close(cross_entropy(logits, targets, label_smoothing=0.2).total, expected, rtol=2e-6)


def test_z_loss_adds_the_squared_log_normalizer_of_each_token_that_counts() -> None:
    logits, targets = make(0, 6, 11), labels(1, 6)
    total = lambda z: lambda x: cross_entropy(x, targets, z_loss=z).total  # noqa: E731
    by_hand = lambda x: total(0.0)(x) + 0.01 * (torch.logsumexp(x, -1) ** 2 * (targets != -100)).sum()  # noqa: E731
    assert_trees_close(ft.value_and_grad(total(0.01))(logits), ft.value_and_grad(by_hand)(logits), **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_summed_in_float32(dtype: torch.dtype) -> None:
    logits, targets = (10 * make(0, 64, 300)).to(dtype), labels(1, 64, classes=300)
    found = cross_entropy(logits, targets)
    assert found.total.dtype == torch.float32
    assert_trees_close(found, cross_entropy(logits.double(), targets), rtol=1e-6)


def test_a_batch_without_targets_has_loss_and_gradient_zero() -> None:
    targets = torch.full((3,), -100)
    found = ft.value_and_grad(lambda x: cross_entropy(x, targets))(make(0, 3, 4))
    assert_trees_equal(found, (torch.zeros((), dtype=torch.float64), torch.zeros(3, 4)))
    tensors, targets = head_inputs(2, 3)
    value, gradients = ft.value_and_grad(lambda t: chunked(t, torch.full_like(targets, -100)))(tensors)
    assert_trees_equal((value, gradients), (0 * value, ft.tree.map(torch.zeros_like, tensors)))


def test_parts_of_a_batch_add_up_to_the_whole() -> None:
    logits, targets = make(0, 7, 11), labels(1, 7)
    parts = cross_entropy(logits[:3], targets[:3]) + cross_entropy(logits[3:], targets[3:])
    assert_trees_close(parts.value(), F.cross_entropy(logits, targets), **EXACT)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_targets_of_any_integer_dtype_count(dtype: torch.dtype) -> None:
    tensors, targets = head_inputs(2, 3)
    for loss in (chunked, plain):
        found = ft.value_and_grad(lambda t, loss=loss: loss(t, targets.to(dtype)))(tensors)
        assert_trees_equal(found, ft.value_and_grad(lambda t, loss=loss: loss(t, targets))(tensors))


# ---- the chunked head


@settings(deadline=None, max_examples=25)
@given(
    shape=st.one_of(st.tuples(st.integers(0, 7)), st.tuples(st.integers(1, 3), st.integers(1, 7)), st.just((2, 2, 3))),
    chunk_size=st.integers(1, 20),
    bias=st.booleans(),
    options=st.sampled_from(OPTIONS),
    factor=st.floats(-3, 3),
)
def test_chunks_have_the_value_and_gradients_of_the_whole(shape: Any, chunk_size: int, bias: bool, options: Any, factor: float) -> None:
    tensors, targets = head_inputs(*shape, bias=bias, ignored=options.get("ignore_index", -100))
    found = ft.value_and_grad(lambda t: factor * chunked(t, targets, chunk_size, **options).total)(tensors)
    expected = ft.value_and_grad(lambda t: factor * plain(t, targets, **options).total)(tensors)
    assert_trees_close(found, expected, **EXACT)


@pytest.mark.parametrize("options", OPTIONS)
def test_the_head_nests_with_every_transform(options: Any) -> None:
    tensors, targets = head_inputs(2, 3, ignored=options.get("ignore_index", -100))
    stacked = ft.tree.map(lambda x: torch.stack([x, 2 * x]), tensors)

    def results(head: Any) -> Any:
        loss = lambda t: torch.sin(head(t, targets, **options).value())  # noqa: E731
        squared = lambda t: sum((g**2).sum() for g in ft.tree.leaves(ft.grad(loss)(t)))  # noqa: E731
        return {
            "gradient": ft.grad(loss)(tensors),
            "penalty": ft.grad(squared)(tensors),
            "third": ft.grad(lambda t: sum((g**3).sum() for g in ft.tree.leaves(ft.grad(squared)(t))))(tensors),
            "jvp": ft.jvp(loss, (tensors,), (ft.tree.map(torch.cos, tensors),)),
            "Hessian vector": ft.jvp(ft.grad(loss), (tensors,), (ft.tree.map(torch.cos, tensors),)),
            "vmap": ft.vmap(loss)(stacked),
            "per sample": ft.vmap(ft.grad(loss))(stacked),
            "vmap inside": ft.grad(lambda t: ft.vmap(loss)(t).sum())(stacked),
            "remat": ft.grad(ft.remat(loss))(tensors),
            "torch.func": torch.func.grad(loss)(tensors),
            "backward": backward(loss, tensors),
        }

    assert_trees_close(results(chunked), results(plain), rtol=1e-9, atol=1e-11)


def backward(loss: Any, tensors: Any) -> Any:
    leaves = ft.tree.map(lambda x: x.clone().requires_grad_(), tensors)
    loss(leaves).backward()
    return ft.tree.map(lambda x: x.grad, leaves)


@pytest.mark.parametrize("wanted", ["hidden", "weight", "bias"])
def test_only_the_gradients_that_are_wanted_are_computed(wanted: str) -> None:
    tensors, targets = head_inputs(2, 3)
    loss = lambda head: lambda x: head(tensors | {wanted: x}, targets).value()  # noqa: E731
    assert_trees_close(ft.grad(loss(chunked))(tensors[wanted]), ft.grad(loss(plain))(tensors[wanted]), **EXACT)
    with Products() as alone:
        ft.grad(loss(chunked))(tensors[wanted])
    with Products() as all_three:
        ft.grad(lambda t: chunked(t, targets).value())(tensors)
    assert alone.count < all_three.count


def test_a_forward_pass_alone_computes_no_gradients() -> None:
    tensors, targets = head_inputs(4, 4)
    with Products() as products:
        chunked(tensors, targets)
    assert products.count == 4


def test_the_backward_pass_makes_no_logits_again() -> None:
    tensors, targets = head_inputs(4, 4)
    leaves = ft.tree.map(lambda x: x.clone().requires_grad_(), tensors)
    loss = chunked(leaves, targets).value()
    with Products() as products:
        loss.backward()
    assert products.count == 0


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
        return operation(*args, **(kwargs or {}))


def test_rows_that_are_ignored_have_no_influence_even_where_they_are_nan() -> None:
    tensors, targets = head_inputs(2, 6)
    spoilt = tensors | {"hidden": torch.where((targets == -100)[..., None], torch.nan, tensors["hidden"])}
    loss = lambda t: chunked(t, targets).value()  # noqa: E731
    assert_trees_equal(ft.value_and_grad(loss)(spoilt), ft.value_and_grad(loss)(tensors))


def test_bfloat16_products_are_summed_in_float32() -> None:
    tensors, targets = head_inputs(8, 64)
    half = ft.tree.cast(tensors, torch.bfloat16)
    value, gradients = ft.value_and_grad(lambda t: chunked(t, targets, 32).value())(half)
    exact_value, exact = ft.value_and_grad(lambda t: plain(t, targets).value())(ft.tree.cast(half, torch.float64))
    assert value.dtype == torch.float32
    assert all(g.dtype == torch.bfloat16 for g in gradients.values())
    assert_trees_close(value, exact_value, rtol=2e-3)
    for path, gradient in gradients.items():  # logits, their gradient and the results are rounded to 8 bits
        assert (gradient.double() - exact[path]).abs().max() < 0.01 * exact[path].abs().max(), path


def test_it_follows_autocast_and_a_precision() -> None:
    tensors, targets = head_inputs(2, 6)
    single = ft.tree.cast(tensors, torch.float32)
    loss = lambda t: chunked(t, targets).value()  # noqa: E731

    def under_autocast(t: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss(t)

    found = ft.value_and_grad(under_autocast)(single)
    expected = ft.value_and_grad(loss, precision=ft.Precision(compute=torch.bfloat16))(single)
    assert_trees_close(found, expected, rtol=1e-2, atol=5e-3)
    assert not torch.equal(found[0], loss(single))
    assert all(g.dtype == torch.float32 for g in found[1].values())


@pytest.mark.parametrize("options", OPTIONS)
def test_captured_it_has_the_same_numbers_and_no_mutation(options: Any) -> None:
    tensors, targets = head_inputs(2, 7, ignored=options.get("ignore_index", -100))
    step = ft.value_and_grad(lambda t, targets: chunked(t, targets, **options))
    jitted = ft.jit(step)
    assert_trees_close(jitted(tensors, targets), step(tensors, targets), **EXACT)
    assert not any(is_mutable(node) for node in jitted.lower(tensors, targets).captured.graph.nodes)


def test_it_never_holds_all_logits() -> None:
    hidden, weight, targets = (
        make(0, 4, 128, 8, dtype=torch.float32),
        make(1, 2048, 8, dtype=torch.float32),
        labels(2, 4, 128, classes=2048),
    )
    logits = 4 * 128 * 2048 * 4  # bytes

    def temporaries(head: Any) -> int:
        step = ft.jit(ft.value_and_grad(lambda t, targets: head(t, targets)))
        return step.lower({"hidden": hidden, "weight": weight}, targets).memory_analysis().temporaries

    assert temporaries(plain) > logits
    assert temporaries(lambda t, targets: chunked(t, targets, 64)) < logits / 2
    shapes = [n.meta["val"].shape for n in captured(hidden, weight, targets) if isinstance(n.meta.get("val"), torch.Tensor)]
    assert max(shape.numel() for shape in shapes) <= 64 * 2048


def captured(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Any:
    step = ft.value_and_grad(lambda t, targets: chunked(t, targets, 64))
    return ft.jit(step).lower({"hidden": hidden, "weight": weight}, targets).captured.graph.nodes


def test_it_accumulates_over_microbatches_exactly() -> None:
    tensors, targets = head_inputs(4, 5)
    hidden = tensors.pop("hidden")
    loss = lambda p, batch: chunked(p | {"hidden": batch["hidden"]}, batch["targets"])  # noqa: E731
    batch = {"hidden": hidden, "targets": targets}
    assert_trees_close(ft.accumulate(loss, 2)(tensors, batch), ft.value_and_grad(loss)(tensors, batch), **EXACT)


# ---- losses of numbers


def test_squared_error_and_binary_cross_entropy_are_those_of_torch() -> None:
    x, y, mask = make(0, 3, 4), make(1, 3, 4), torch.tensor([True, False, True])[:, None]
    assert_trees_close(mean_squared_error(x, y).value(), F.mse_loss(x, y), **EXACT)
    assert_trees_close(mean_squared_error(x, y, mask=mask).value(), F.mse_loss(x[::2], y[::2]), **EXACT)
    spoilt = torch.where(mask, x, torch.nan)
    assert_trees_close(mean_squared_error(spoilt, y, mask=mask).value(), F.mse_loss(x[::2], y[::2]), **EXACT)
    expected = F.binary_cross_entropy_with_logits(x, (y > 0).double())
    assert_trees_close(binary_cross_entropy(x, y > 0).value(), expected, **EXACT)
    weights = torch.rand(3, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert_trees_close(mean_squared_error(x, y, mask=weights).value(), (weights * (x - y) ** 2).sum() / weights.sum(), **EXACT)


def test_errors_name_shapes_and_remedies() -> None:
    x, targets = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"logits of shape \[2, 3, 4\] want targets of shape \[2, 3\], not \[6\]"):
        cross_entropy(x, targets.flatten())
    with pytest.raises(TypeError, match=r"class indices, so integers, not torch\.float32"):
        cross_entropy(x, targets.float())
    with pytest.raises(TypeError, match="logits must be floating-point"):
        cross_entropy(x.long(), targets)
    with pytest.raises(ValueError, match=r"label_smoothing must be in \[0, 1\], not 2"):
        cross_entropy(x, targets, label_smoothing=2)
    with pytest.raises(ValueError, match="z_loss must not be negative"):
        cross_entropy(x, targets, z_loss=-1.0)
    with pytest.raises(ValueError, match=r"weight is \[classes, 4\].*not \[4, 7\]"):
        linear_cross_entropy(x, torch.zeros(4, 7), targets)
    with pytest.raises(ValueError, match=r"bias is \[7\].*not \[4\]"):
        linear_cross_entropy(x, torch.zeros(7, 4), targets, bias=torch.zeros(4))
    with pytest.raises(ValueError, match="chunk_size must be an int of at least 1"):
        linear_cross_entropy(x, torch.zeros(7, 4), targets, chunk_size=0)
    with pytest.raises(ValueError, match=r"shapes .* differ"):
        mean_squared_error(torch.zeros(3), torch.zeros(3, 1))
