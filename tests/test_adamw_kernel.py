"""The numbers of fused AdamW: torch operations, float64, Optax and torch.optim as oracles."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from functrain.kernels import adamw_torch
from functrain.kernels.adamw import coefficients
from tests.adamw_cases import GRADS, HALVES, OPERATORS, STREAMED, USUAL, assert_near, leaf, needs_library
from tests.helpers import assert_trees_close, assert_trees_equal


def formula(param: Tensor, mu: Tensor, nu: Tensor, grad: Tensor, c: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(update, mu, nu) in float64 numpy."""
    p, m, v, g = (x.double().numpy() for x in (param, mu, nu, grad))
    lr, b1, b2, eps, eps_root, decay, c1, c2, scale = c.tolist()
    g = g * scale
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    return -lr * ((m / c1) / (np.sqrt(v / c2 + eps_root) + eps) + decay * p), m, v


@needs_library
@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 700), st.sampled_from([torch.float32, torch.float64]), st.sampled_from(GRADS), st.floats(0.01, 2.0), st.integers(0, 99)
)
def test_cpp_is_the_torch_operations(size: int, dtype: torch.dtype, grad_dtype: torch.dtype, scale: float, seed: int) -> None:
    param, mu, nu, grad = leaf(size, dtype, grad_dtype, seed)
    c = coefficients(**USUAL, grad_scale=scale)
    update, *moments = OPERATORS.adamw(grad, mu, nu, param, c)
    expected, *expected_moments = adamw_torch.adamw(grad, mu, nu, param, c)
    assert_trees_equal(moments, expected_moments)
    if size:
        assert_near(update, expected)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 2e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("implementation", [lambda *a: OPERATORS.adamw(*a), adamw_torch.adamw], ids=["operator", "torch"])
def test_the_formula_holds(implementation: Callable, dtype: torch.dtype, rtol: float) -> None:
    param, mu, nu, grad = leaf((31, 17), dtype)
    c = coefficients(3e-3, step=7, b1=0.8, b2=0.95, eps=1e-5, eps_root=1e-6, weight_decay=0.05, grad_scale=0.7)
    assert_trees_close(implementation(grad, mu, nu, param, c), formula(param, mu, nu, grad, c), rtol=rtol, atol=rtol * 1e-2)


def gradients(steps: int, dtype: torch.dtype) -> Iterator[Tensor]:
    rng = torch.Generator().manual_seed(1)
    return (torch.randn(40, generator=rng, dtype=torch.float64).to(dtype) for _ in range(steps))


@pytest.mark.parametrize(("dtype", "rtol", "atol"), [(torch.float64, 1e-12, 1e-14), (torch.float32, 1e-5, 2e-6)])
def test_twenty_steps_are_those_of_optax(dtype: torch.dtype, rtol: float, atol: float) -> None:
    param = leaf(40, dtype)[0]
    mu, nu = torch.zeros_like(param), torch.zeros_like(param)
    with jax.enable_x64(dtype == torch.float64):
        tx = optax.adamw(1e-2, b1=0.8, b2=0.99, eps=1e-6, eps_root=1e-9, weight_decay=0.1)
        expected = jnp.asarray(param.numpy())
        state = tx.init(expected)
        for step, grad in enumerate(gradients(20, dtype), 1):
            c = coefficients(1e-2, step=step, b1=0.8, b2=0.99, eps=1e-6, eps_root=1e-9, weight_decay=0.1)
            OPERATORS.adamw_apply_(param, mu, nu, grad, c)
            updates, state = tx.update(jnp.asarray(grad.numpy()), state, expected)
            expected = optax.apply_updates(expected, updates)
        assert_trees_close([param, mu, nu], [expected, state[0].mu, state[0].nu], rtol, atol)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("dtype", "rtol", "atol"), [(torch.float64, 1e-12, 1e-14), (torch.float32, 1e-5, 2e-6)])
def test_twenty_steps_are_those_of_torch_optim(fused: bool, dtype: torch.dtype, rtol: float, atol: float) -> None:
    param = leaf(40, dtype)[0]
    mu, nu = torch.zeros_like(param), torch.zeros_like(param)
    expected = torch.nn.Parameter(param.clone())
    optimizer = torch.optim.AdamW([expected], lr=1e-2, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1, fused=fused)
    for step, grad in enumerate(gradients(20, dtype), 1):
        OPERATORS.adamw_apply_(param, mu, nu, grad, coefficients(1e-2, step=step, b1=0.8, b2=0.99, eps=1e-6, weight_decay=0.1))
        expected.grad = grad
        optimizer.step()
    state = optimizer.state[expected]
    assert_trees_close([param, mu, nu], [expected, state["exp_avg"], state["exp_avg_sq"]], rtol, atol)


@pytest.mark.parametrize("size", [1, 300, STREAMED])
@pytest.mark.parametrize("grad_dtype", GRADS)
def test_in_place_and_functional_forms_agree_bit_for_bit(size: int, grad_dtype: torch.dtype) -> None:
    param, mu, nu, grad = leaf(size, grad=grad_dtype)
    before, c = [x.clone() for x in (param, mu, nu)], coefficients(**USUAL)
    update, *moments = OPERATORS.adamw(grad, mu, nu, param, c)
    applied = OPERATORS.adamw_apply(param, mu, nu, grad, c)
    assert_trees_equal([param, mu, nu], before)
    assert OPERATORS.adamw_apply_(param, mu, nu, grad, c) is None
    assert_trees_equal([param, mu, nu], [before[0] + update, *moments])
    assert_trees_equal(list(applied), [param, mu, nu])


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [5, STREAMED])
def test_the_half_precision_copy_is_the_rounded_parameter(size: int, dtype: torch.dtype, half: torch.dtype) -> None:
    param, mu, nu, grad = leaf(size, dtype, half)
    model = torch.zeros(size, dtype=half)
    OPERATORS.adamw_apply_(param, mu, nu, grad, coefficients(**USUAL), model)
    assert_trees_equal(model, param.to(half))


# lr 0 and no decay: the parameter stays; b1 0: the first moment is the gradient.
STILL = torch.tensor([0, 0, 0, 1, 0, 0, 1, 1, 1], dtype=torch.float64)


@pytest.mark.parametrize("half", HALVES)
def test_every_half_precision_number_is_widened_exactly(half: torch.dtype) -> None:
    grad = torch.arange(1 << 16).to(torch.uint16).view(half)
    zero = torch.zeros(1 << 16)
    _, mu, _ = OPERATORS.adamw(grad, zero, zero, zero, STILL)
    assert_trees_equal(mu, grad.float())


@pytest.mark.parametrize("half", HALVES)
def test_float32_is_rounded_to_half_as_torch_rounds_it(half: torch.dtype) -> None:
    low = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x5000, 0x7FFF, 0x8000, 0x8001, 0xE000, 0xF000, 0xFFFF])
    bits = (torch.arange(1 << 16)[:, None] * (1 << 16) + low).flatten()
    param = torch.where(bits < 1 << 31, bits, bits - (1 << 32)).to(torch.int32).view(torch.float32)
    param = param[param.isfinite()]
    zero, model = torch.zeros_like(param), torch.zeros_like(param, dtype=half)
    expected = param.to(half)
    OPERATORS.adamw_apply_(param, zero.clone(), zero.clone(), zero, STILL, model)
    assert_trees_equal(model.view(torch.int16), expected.view(torch.int16))
    nan = torch.full((40,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # rounding up its mantissa would run into the sign
    OPERATORS.adamw_apply_(nan, *(torch.zeros(40) for _ in range(3)), STILL, model[:40])
    assert model[:40].isnan().all()


def test_a_folded_scale_is_a_scale_before() -> None:
    param, mu, nu, grad = leaf(1000, grad=torch.bfloat16)
    folded = OPERATORS.adamw_apply(param, mu, nu, grad, coefficients(**USUAL, grad_scale=1 / 1024))
    assert_trees_equal(list(folded), list(OPERATORS.adamw_apply(param, mu, nu, grad.float() * (1 / 1024), coefficients(**USUAL))))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", range(4))
def test_nan_and_infinity_spread_as_in_torch(bad: float, place: int) -> None:
    tensors = leaf(300)
    tensors[place][[0, 130, 299]] = bad
    param, mu, nu, grad = tensors
    c = coefficients(**USUAL)
    actual, expected = OPERATORS.adamw(grad, mu, nu, param, c), adamw_torch.adamw(grad, mu, nu, param, c)
    for a, e in zip(actual, expected, strict=True):
        assert_near(a, e)
    assert not torch.stack(actual)[:, [0, 130, 299]].isfinite().all(0).any()


def test_a_shard_is_updated_as_the_whole_is() -> None:
    tensors, c = leaf(5000), coefficients(**USUAL)
    whole = OPERATORS.adamw_apply(*tensors, c)
    parts = [OPERATORS.adamw_apply(*(x[a:b] for x in tensors), c) for a, b in [(0, 1), (1, 1234), (1234, 3000), (3000, 5000)]]
    assert_trees_equal([torch.cat(column) for column in zip(*parts, strict=True)], list(whole))


@pytest.mark.parametrize("dtypes", [(torch.bfloat16,) * 3, (torch.float32, torch.bfloat16, torch.float32), (torch.float16,) * 3])
def test_other_state_dtypes_are_computed_in_float32(dtypes: tuple[torch.dtype, ...]) -> None:
    *state, grad = leaf(300)
    old = [x.to(d) for x, d in zip(state, dtypes, strict=True)]
    c = coefficients(**USUAL)
    wide = OPERATORS.adamw_apply(*(x.float() for x in old), grad, c)
    new = OPERATORS.adamw_apply(*old, grad, c)
    assert [x.dtype for x in new] == list(dtypes)
    assert_trees_close(list(new), [x.to(d) for x, d in zip(wide, dtypes, strict=True)], rtol=1e-7)
    OPERATORS.adamw_apply_(*old, grad, c)
    assert_trees_equal(old, list(new))


# ---- layouts


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def transposed(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def with_gaps(x: Tensor) -> Tensor:
    return torch.stack([x, torch.full_like(x, 7)], -1)[..., 0]


@pytest.mark.parametrize("state", [channels_last, transposed, with_gaps, torch.clone])
@pytest.mark.parametrize("gradient", [channels_last, transposed, with_gaps, torch.clone])
def test_any_layout_gives_the_same_numbers_and_keeps_its_layout(state: Callable, gradient: Callable) -> None:
    plain, c = leaf((3, 4, 5, 6), grad=torch.bfloat16), coefficients(**USUAL)
    expected = OPERATORS.adamw_apply(*plain, c)
    old, grad = [state(x) for x in plain[:3]], gradient(plain[3])
    new = OPERATORS.adamw_apply(*old, grad, c)
    assert_trees_equal(list(new), list(expected))
    assert [x.stride() for x in new] == [torch.empty_like(x).stride() for x in old]
    strides, model = old[0].stride(), torch.zeros(3, 4, 5, 6, dtype=torch.bfloat16)
    OPERATORS.adamw_apply_(*old, grad, c, model)
    assert_trees_equal([*old, model], [*expected, expected[0].bfloat16()])
    assert old[0].stride() == strides


@pytest.mark.parametrize("offset", [1, 3])
def test_views_at_odd_addresses_change_nothing_around_them(offset: int) -> None:
    plain, c = leaf(STREAMED), coefficients(**USUAL)
    around = [torch.full((STREAMED + 8,), 7.0) for _ in plain]
    views = [a[offset : offset + STREAMED].copy_(x) for a, x in zip(around, plain, strict=True)]
    model = torch.full((STREAMED + 8,), 7.0, dtype=torch.bfloat16)
    OPERATORS.adamw_apply_(*views, c, model[offset : offset + STREAMED])
    assert_trees_equal(views[:3], list(OPERATORS.adamw_apply(*plain, c)))
    for a in (*around, model):
        assert (a[:offset] == 7).all()
        assert (a[offset + STREAMED :] == 7).all()


def test_coefficients_may_be_a_strided_view() -> None:
    tensors, c = leaf(10), coefficients(**USUAL)
    assert_trees_equal(list(OPERATORS.adamw_apply(*tensors, torch.stack([c, -c], 1)[:, 0])), list(OPERATORS.adamw_apply(*tensors, c)))


def test_a_scalar_parameter_stays_a_scalar() -> None:
    tensors, c = leaf(()), coefficients(**USUAL)
    for implementation in (OPERATORS.adamw_apply, adamw_torch.adamw_apply):
        new = implementation(*tensors, c)
        assert [(x.shape, x.dtype) for x in new] == [(torch.Size([]), torch.float32)] * 3


# ---- coefficients


def test_coefficients_take_tensors_as_well_as_numbers() -> None:
    numbers = coefficients(1e-3, step=5, b1=0.8, weight_decay=0.1, grad_scale=0.5)
    tensors = coefficients(
        torch.tensor(1e-3, dtype=torch.float64),
        step=torch.tensor(5),
        b1=torch.tensor(0.8, dtype=torch.float64),
        weight_decay=0.1,
        grad_scale=torch.tensor(0.5),
    )
    assert_trees_close(tensors, numbers, rtol=1e-15, atol=0)
    expected = torch.tensor([1e-3, 0.8, 0.999, 1e-8, 0, 0.1, 1 - 0.8**5, 1 - 0.999**5, 0.5], dtype=torch.float64)
    assert_trees_close(numbers, expected, rtol=1e-14, atol=0)
