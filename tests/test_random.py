"""Draws equal `jax.random`'s; they batch, trace and differentiate; their statistics are right; misuse is named."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import functrain.random as random
from functrain.torch_internals import FakeTensorMode
from tests.helpers import assert_trees_close, assert_trees_equal, to_numpy

KEY = random.key(42)
SHAPES = [(), (3, 0), (7, 11, 13)]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
RANGES = [(0.0, 1.0), (-2.0, 3.0), (0.3, 0.7), (-1e-3, 5.1), (2.0, 2.0), (3.0, 1.0)]
TRUNCATIONS = [(-2.0, 2.0), (-5.0, 5.0), (0.0, 9.0), (-math.inf, -1.0), (-1.0, math.inf), (3.0, 4.0), (-0.1, 0.0)]


def in_jax(key: torch.Tensor) -> Any:
    return jax.random.wrap_key_data(jnp.asarray(key.numpy().astype(np.uint32)))


def key_data(keys: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(keys)).astype(np.int64)


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.fixture
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def rounds_each_operation(dtype: torch.dtype) -> bool:
    """Whether XLA on this machine rounds a product before it adds to it: in float16 that depends on what the processor computes in."""
    unit = jnp.linspace(0.0, 1.0, 2048, dtype=named(dtype))
    three, two = jnp.asarray(3.1, named(dtype)), jnp.asarray(2.3, named(dtype))
    compiled = jax.jit(lambda x: x * three - two)(unit)
    return not np.array_equal(compiled, (unit.astype("float32") * three.astype("float32") - two.astype("float32")).astype(named(dtype)))


def equal_to_jax(name: str, *args: Any, key: torch.Tensor = KEY, **kwargs: Any) -> None:
    """The function of the same name gives the same bits."""
    in_jax_terms = {k: named(v) if isinstance(v, torch.dtype) else v for k, v in kwargs.items()}
    assert_trees_equal(getattr(random, name)(key, *args, **kwargs), getattr(jax.random, name)(in_jax(key), *args, **in_jax_terms))


# ---- keys


@pytest.mark.parametrize("seed", [0, 1, 42, 2**31 - 1, 2**31, 2**32 - 1])
def test_key_of_32_bits_is_that_of_jax(seed: int) -> None:
    with jax.enable_x64(True):
        assert_trees_equal(random.key(seed), key_data(jax.random.key(seed)))
    assert_trees_equal(random.key(torch.tensor(seed)), random.key(seed))


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1, 123456789012345])
@pytest.mark.usefixtures("wide")
def test_key_keeps_64_bits_of_a_seed_as_jax_with_x64_does(seed: int) -> None:
    assert_trees_equal(random.key(seed), key_data(jax.random.key(seed)))
    assert_trees_equal(random.key(torch.tensor(seed)), random.key(seed))


@pytest.mark.parametrize("n", [0, 1, 2, 3, 1000, (2, 3), (4, 1, 2), ()])
def test_split_is_that_of_jax(n: Any) -> None:
    assert_trees_equal(random.split(KEY, n), key_data(jax.random.split(in_jax(KEY), n)))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), data=st.integers(0, 2**32 - 1))
def test_fold_in_is_that_of_jax(seed: int, data: int) -> None:
    key = random.key(seed)
    expected = key_data(jax.random.fold_in(in_jax(key), np.uint32(data)))
    assert_trees_equal(random.fold_in(key, data), expected)
    assert_trees_equal(random.fold_in(key, torch.tensor(data)), expected)


def test_fold_in_takes_the_low_32_bits_of_a_tensor() -> None:
    assert_trees_equal(random.fold_in(KEY, torch.tensor(-1, dtype=torch.int32)), random.fold_in(KEY, 2**32 - 1))
    assert_trees_equal(random.fold_in(KEY, torch.tensor(2**32 + 5)), random.fold_in(KEY, 5))


# ---- draws, against JAX


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32])
def test_bits_are_those_of_jax(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    equal_to_jax("bits", shape, dtype=dtype)
    signed = {torch.uint8: torch.int8, torch.uint16: torch.int16, torch.uint32: torch.int32}[dtype]
    assert_trees_equal(random.bits(KEY, shape, signed).view(dtype), random.bits(KEY, shape, dtype))


@pytest.mark.usefixtures("wide")
def test_bits_of_64_are_those_of_jax() -> None:
    equal_to_jax("bits", (1001,), dtype=torch.uint64)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_uniform_is_that_of_jax(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    equal_to_jax("uniform", shape, dtype=dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bounds", RANGES)
def test_uniform_in_a_range_is_that_of_jax(dtype: torch.dtype, bounds: tuple[float, float]) -> None:
    low, high = bounds
    if rounds_each_operation(dtype):
        expected = jax.random.uniform(in_jax(KEY), (10_007,), named(dtype), low, high)
        one_rounding = torch.finfo(dtype).eps * max(abs(low), abs(high))
        assert_trees_close(random.uniform(KEY, (10_007,), dtype, low, high), expected, rtol=0, atol=one_rounding)
    else:
        equal_to_jax("uniform", (10_007,), dtype=dtype, minval=low, maxval=high)
    of_tensors = random.uniform(KEY, (10_007,), dtype, torch.tensor(low), torch.tensor(high))
    assert_trees_equal(of_tensors, random.uniform(KEY, (10_007,), dtype, low, high))


def test_uniform_broadcasts_bounds() -> None:
    low, high = np.linspace(-1, 1, 5, dtype=np.float32), np.linspace(2, 9, 3, dtype=np.float32)[:, None]
    expected = jax.random.uniform(in_jax(KEY), (2, 3, 5), minval=low, maxval=high)
    assert_trees_equal(random.uniform(KEY, (2, 3, 5), None, torch.tensor(low), torch.tensor(high)), expected)
    mixed = jax.random.uniform(in_jax(KEY), (3, 5), minval=low, maxval=9.0)
    assert_trees_equal(random.uniform(KEY, (3, 5), minval=torch.tensor(low), maxval=9.0), mixed)


@pytest.mark.parametrize("bounds", RANGES)
@pytest.mark.usefixtures("wide")
def test_uniform_in_float64_is_that_of_jax(bounds: tuple[float, float]) -> None:
    low, high = bounds
    equal_to_jax("uniform", (50_001,), dtype=torch.float64, minval=low, maxval=high)
    of_tensors = random.uniform(KEY, (501,), torch.float64, torch.tensor(low, dtype=torch.float64), torch.tensor(high, dtype=torch.float64))
    assert_trees_equal(of_tensors, random.uniform(KEY, (501,), torch.float64, low, high))


@pytest.mark.parametrize("shape", SHAPES)
def test_normal_is_that_of_jax(shape: tuple[int, ...]) -> None:
    assert_trees_close(random.normal(KEY, shape), jax.random.normal(in_jax(KEY), shape), rtol=0, atol=1e-6)


def test_normal_is_that_of_jax_in_the_tails() -> None:
    drawn, expected = random.normal(KEY, (2_000_000,)), jax.random.normal(in_jax(KEY), (2_000_000,))
    assert drawn.abs().max() > 4.8
    assert_trees_close(drawn, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_normal_in_half_precision_is_that_of_jax(dtype: torch.dtype) -> None:
    equal_to_jax("normal", (20_001,), dtype=dtype)


@pytest.mark.usefixtures("wide")
def test_normal_in_float64_is_that_of_jax() -> None:
    expected = jax.random.normal(in_jax(KEY), (100_001,), "float64")
    assert_trees_close(random.normal(KEY, (100_001,), torch.float64), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("bounds", TRUNCATIONS)
def test_truncated_normal_is_that_of_jax(bounds: tuple[float, float]) -> None:
    drawn = random.truncated_normal(KEY, *bounds, (20_001,))
    assert_trees_close(drawn, jax.random.truncated_normal(in_jax(KEY), *bounds, (20_001,)), rtol=0, atol=1e-6)
    assert drawn.min() > bounds[0]
    assert drawn.max() < bounds[1]
    assert_trees_equal(random.truncated_normal(KEY, *map(torch.tensor, bounds), (20_001,)), drawn)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bounds", TRUNCATIONS)
def test_truncated_normal_in_half_precision_is_that_of_jax(dtype: torch.dtype, bounds: tuple[float, float]) -> None:
    drawn = random.truncated_normal(KEY, *bounds, (5_001,), dtype)
    expected = jax.random.truncated_normal(in_jax(KEY), *bounds, (5_001,), named(dtype))
    if rounds_each_operation(dtype):  # compared as probabilities: the tails stretch one rounding of the uniform value to many
        probability = [torch.erf(torch.as_tensor(to_numpy(x).astype(np.float64)) / math.sqrt(2)) for x in (drawn, expected)]
        assert_trees_close(*probability, rtol=0, atol=2 * torch.finfo(dtype).eps)
    else:
        assert_trees_close(drawn, expected, rtol=0, atol=1e-38)  # XLA flushes numbers below the smallest normal one


@pytest.mark.parametrize("bounds", TRUNCATIONS)
@pytest.mark.usefixtures("wide")
def test_truncated_normal_in_float64_is_that_of_jax(bounds: tuple[float, float]) -> None:
    expected = jax.random.truncated_normal(in_jax(KEY), *bounds, (20_001,), "float64")
    assert_trees_close(random.truncated_normal(KEY, *bounds, (20_001,), torch.float64), expected, rtol=1e-12, atol=1e-13)


def test_truncated_normal_takes_its_shape_from_the_bounds() -> None:
    low, high = np.array([-1.0, 0.0, 1.0], np.float32), np.array([[2.0], [3.0]], np.float32)
    expected = jax.random.truncated_normal(in_jax(KEY), low, high)
    assert_trees_close(random.truncated_normal(KEY, torch.tensor(low), torch.tensor(high)), expected, rtol=0, atol=1e-6)
    assert random.truncated_normal(KEY, -1.0, 1.0).shape == ()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9999999, 1.0])
def test_bernoulli_is_that_of_jax(shape: tuple[int, ...], p: float) -> None:
    equal_to_jax("bernoulli", p, shape)
    assert_trees_equal(random.bernoulli(KEY, torch.tensor(p), shape), random.bernoulli(KEY, p, shape))


@pytest.mark.parametrize("dtype", FLOATS)
def test_bernoulli_takes_probabilities(dtype: torch.dtype) -> None:
    p = torch.linspace(0, 1, 101).to(dtype)
    expected = jax.random.bernoulli(in_jax(KEY), jnp.asarray(to_numpy(p), named(dtype)))
    assert_trees_equal(random.bernoulli(KEY, p), expected)
    wider = jax.random.bernoulli(in_jax(KEY), jnp.asarray(to_numpy(p), named(dtype)), (3, 101))
    assert_trees_equal(random.bernoulli(KEY, p, (3, 101)), wider)


INTEGER_RANGES = [(0, 10), (-7, 8), (0, 1), (5, 5), (9, 3), (0, 2**31 - 1), (-(2**31), 2**31 - 1), (-(2**31), 2**31), (7, 2**31)]


@pytest.mark.parametrize("bounds", INTEGER_RANGES)
@pytest.mark.usefixtures("wide")
def test_randint_of_32_bits_is_that_of_jax(bounds: tuple[int, int]) -> None:
    equal_to_jax("randint", (3, 501), *bounds, dtype=torch.int32)
    assert_trees_equal(
        random.randint(KEY, (501,), *map(torch.tensor, bounds), torch.int32), random.randint(KEY, (501,), *bounds, torch.int32)
    )


@pytest.mark.parametrize(
    "bounds",
    [
        *INTEGER_RANGES,
        (0, 2**40),
        (0, 2**62 + 3),
        (0, 2**63 - 1),
        (-(2**63), 2**63 - 1),
        (-(2**62) - 9, 2**62 + 5),
        (-(2**63), -(2**63) + 7),
    ],
)
@pytest.mark.usefixtures("wide")
def test_randint_of_64_bits_is_that_of_jax(bounds: tuple[int, int]) -> None:
    equal_to_jax("randint", (3, 501), *bounds, dtype=torch.int64)
    assert_trees_equal(random.randint(KEY, (501,), *map(torch.tensor, bounds)), random.randint(KEY, (501,), *bounds))


def test_randint_of_all_64_bits() -> None:
    drawn = random.randint(KEY, (4096,), -(2**63), 2**63)
    assert_trees_equal(drawn, random.bits(random.split(KEY)[1], (4096,), torch.int64) + torch.tensor(-(2**63)))
    assert_trees_equal(random.randint(KEY, (4096,), torch.tensor(-(2**63)), 2**63), drawn)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
@pytest.mark.parametrize("bounds", [(0, 100), (0, 256), (-200, 90), (-5, -2), (300, 400), (-128, 128)])
def test_randint_of_few_bits_is_that_of_jax(dtype: torch.dtype, bounds: tuple[int, int]) -> None:
    equal_to_jax("randint", (1001,), *bounds, dtype=dtype)


def test_randint_broadcasts_bounds() -> None:
    low, high = np.arange(5, dtype=np.int32), np.array([[7], [100], [3]], np.int32)
    expected = jax.random.randint(in_jax(KEY), (3, 5), low, high)
    assert_trees_equal(random.randint(KEY, (3, 5), torch.tensor(low), torch.tensor(high), torch.int32), expected)
    assert_trees_equal(random.randint(KEY, (5,), torch.tensor(low), 9, torch.int32), jax.random.randint(in_jax(KEY), (5,), low, 9))


@pytest.mark.parametrize("n", [0, 1, 2, 10, 20_000])
def test_permutation_of_numbers_is_that_of_jax(n: int) -> None:
    equal_to_jax("permutation", n)


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("independent", [False, True])
def test_permutation_of_a_tensor_is_that_of_jax(axis: int, independent: bool) -> None:
    x = np.arange(4 * 5 * 6, dtype=np.float32).reshape(4, 5, 6)
    expected = jax.random.permutation(in_jax(KEY), x, axis, independent)
    assert_trees_equal(random.permutation(KEY, torch.tensor(x), axis, independent), expected)


def test_permutation_of_a_vector_is_that_of_jax() -> None:
    x = np.linspace(0, 1, 777, dtype=np.float32)
    assert_trees_equal(random.permutation(KEY, torch.tensor(x)), jax.random.permutation(in_jax(KEY), x))


@pytest.mark.parametrize("name", ["gumbel", "exponential"])
def test_logarithmic_draws_are_those_of_jax(name: str) -> None:
    drawn, expected = getattr(random, name)(KEY, (10_001,)), getattr(jax.random, name)(in_jax(KEY), (10_001,))
    assert_trees_close(drawn, expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(("axis", "prefix"), [(-1, None), (1, (2, 25))])
def test_categorical_is_that_of_jax(axis: int, prefix: tuple[int, ...] | None) -> None:
    logits = np.random.default_rng(0).normal(size=(6, 9, 11)).astype(np.float32)
    shape = None if prefix is None else (*prefix, *np.delete(logits.shape, axis))
    expected = jax.random.categorical(in_jax(KEY), logits, axis, shape)
    assert_trees_equal(random.categorical(KEY, torch.tensor(logits), axis, shape), expected)


@pytest.mark.parametrize("axis", [-1, 0])
def test_categorical_without_replacement_is_that_of_jax(axis: int) -> None:
    logits = np.random.default_rng(0).normal(size=(6, 11)).astype(np.float32)
    shape = (4, *np.delete(logits.shape, axis))
    expected = jax.random.categorical(in_jax(KEY), logits, axis, shape, replace=False)
    drawn = random.categorical(KEY, torch.tensor(logits), axis, shape, replace=False)
    assert_trees_equal(drawn, expected)
    assert all(len(set(column.tolist())) == 4 for column in drawn.T)


# ---- dropout


def test_dropout_keeps_what_bernoulli_keeps() -> None:
    x = torch.linspace(-3, 3, 1000).reshape(10, 100)
    keep = random.bernoulli(KEY, 0.7, (10, 100))
    assert_trees_equal(random.dropout(KEY, x, 0.3), torch.where(keep, x * (1 / 0.7), 0))
    assert_trees_close(random.dropout(KEY, x, torch.tensor(0.3)), random.dropout(KEY, x, 0.3))
    assert random.dropout(KEY, x.bfloat16(), 0.3).dtype == torch.bfloat16
    assert random.dropout(KEY, x.bfloat16(), torch.tensor(0.3)).dtype == torch.bfloat16


def test_dropout_at_its_ends() -> None:
    x = torch.ones(5)
    assert random.dropout(KEY, x, 0.0) is x
    assert random.dropout(KEY, x, 0.5, train=False) is x
    assert_trees_equal(random.dropout(KEY, x, 1.0), torch.zeros(5))
    assert_trees_equal(random.dropout(KEY, torch.full((5,), math.inf), 1.0), torch.zeros(5))


def test_dropout_gradient_is_the_mask() -> None:
    x = torch.linspace(1, 2, 1000, requires_grad=True)
    y = random.dropout(KEY, x, 0.25)
    y.sum().backward()
    assert_trees_close(x.grad, y.detach() / x.detach())


# ---- batching, tracing, derivatives


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "split": lambda key: random.split(key, 3),
    "fold_in": lambda key: random.fold_in(key, 7),
    "bits": lambda key: random.bits(key, (5,), torch.int32),
    "uniform": lambda key: random.uniform(key, (3, 5), None, -1.0, 4.0),
    "uniform of tensors": lambda key: random.uniform(key, (3, 5), None, torch.zeros(5), torch.ones(3, 1)),
    "normal": lambda key: random.normal(key, (700,)),
    "truncated_normal": lambda key: random.truncated_normal(key, -1.0, 2.0, (5,)),
    "truncated_normal of tensors": lambda key: random.truncated_normal(key, torch.zeros(5), torch.ones(3, 1)),
    "bernoulli": lambda key: random.bernoulli(key, 0.3, (5,)),
    "bernoulli of tensors": lambda key: random.bernoulli(key, torch.full((5,), 0.3)),
    "randint": lambda key: random.randint(key, (5,), 0, 1000),
    "randint of tensors": lambda key: random.randint(key, (5,), torch.tensor(2), torch.tensor(9), torch.int32),
    "permutation": lambda key: random.permutation(key, 9),
    "permutation of a tensor": lambda key: random.permutation(key, torch.arange(20.0).reshape(5, 4), 1),
    "independent permutation": lambda key: random.permutation(key, torch.arange(20.0).reshape(5, 4), 1, independent=True),
    "categorical": lambda key: random.categorical(key, torch.arange(5.0), shape=(6,)),
    "categorical without replacement": lambda key: random.categorical(key, torch.arange(5.0), shape=(3,), replace=False),
    "dropout": lambda key: random.dropout(key, torch.ones(9), 0.5),
    "key of a draw": lambda key: random.key(random.randint(key, (), 0, 1000)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_vmap_over_keys_gives_what_each_key_gives(name: str) -> None:
    keys = random.split(KEY, 4)
    assert_trees_equal(torch.vmap(DRAWS[name])(keys), torch.stack([DRAWS[name](key) for key in keys]))


@pytest.mark.parametrize("name", DRAWS)
def test_tracing_gives_the_same_bits(name: str) -> None:
    graph = make_fx(DRAWS[name], tracing_mode="fake", _allow_fake_constant=True)(random.key(0))
    assert_trees_equal(graph(KEY), DRAWS[name](KEY))


@pytest.mark.parametrize("name", ["uniform", "normal", "bernoulli", "split", "fold_in", "dropout"])
def test_a_draw_takes_few_nodes(name: str) -> None:
    graph = make_fx(DRAWS[name], tracing_mode="fake", _allow_fake_constant=True)(KEY)
    assert sum("functrain" in str(node.target) for node in graph.graph.nodes) == 1
    assert sum(node.op == "call_function" for node in graph.graph.nodes) <= 5


def test_fold_in_and_randint_take_traced_numbers() -> None:
    def draw(key: torch.Tensor, step: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        return random.randint(random.fold_in(key, step), (10,), 0, high)

    graph = make_fx(draw, tracing_mode="fake")(KEY, torch.tensor(0), torch.tensor(5))
    assert_trees_equal(graph(KEY, torch.tensor(3), torch.tensor(100)), random.randint(random.fold_in(KEY, 3), (10,), 0, 100))


def test_draws_on_fake_tensors_have_shape_and_dtype() -> None:
    with FakeTensorMode() as mode:
        key = mode.from_tensor(KEY)
        assert random.normal(key, (2, 3), torch.bfloat16).dtype == torch.bfloat16
        assert random.permutation(key, 7).shape == (7,)
        assert random.categorical(key, torch.zeros(3, 4)).shape == (3,)


def test_gradients_reach_bounds() -> None:
    def total(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        return random.truncated_normal(KEY, low, high, (50,)).sum() + random.uniform(KEY, (50,), None, low, high).sum()

    def total_jax(low: Any, high: Any) -> Any:
        key = in_jax(KEY)
        return jax.random.truncated_normal(key, low, high, (50,)).sum() + jax.random.uniform(key, (50,), minval=low, maxval=high).sum()

    drawn = torch.func.grad(total, argnums=(0, 1))(torch.tensor(-1.0), torch.tensor(0.5))
    assert_trees_close(drawn, jax.grad(total_jax, argnums=(0, 1))(-1.0, 0.5), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_compiled_draws_give_the_same_bits() -> None:
    names = ["uniform", "uniform of tensors", "normal", "truncated_normal", "randint", "categorical", "dropout"]

    def draw(key: torch.Tensor) -> list[torch.Tensor]:
        return [DRAWS[name](key) for name in names]

    assert_trees_equal(torch.compile(draw, fullgraph=True)(KEY), draw(KEY))


# ---- statistics


def test_moments() -> None:
    n = 200_000
    uniform, normal, exponential, gumbel = (
        f(KEY, (n,)).double() for f in (random.uniform, random.normal, random.exponential, random.gumbel)
    )
    for x, mean, variance in [(uniform, 0.5, 1 / 12), (normal, 0, 1), (exponential, 1, 1), (gumbel, 0.57721566, math.pi**2 / 6)]:
        assert abs(x.mean() - mean) < 4 * math.sqrt(variance / n)
        assert abs(x.var() / variance - 1) < 0.03
    assert abs((normal**4).mean() - 3) < 0.1
    assert abs((normal[1:] * normal[:-1]).mean()) < 4 / math.sqrt(n)


def test_integers_and_choices_are_even() -> None:
    n = 70_000
    counts = torch.bincount(random.randint(KEY, (n,), 0, 7), minlength=7)
    assert (counts - n / 7).abs().max() < 4 * math.sqrt(n / 7)
    probabilities = torch.tensor([0.1, 0.2, 0.7])
    drawn = torch.bincount(random.categorical(KEY, probabilities.log(), shape=(n,)), minlength=3)
    assert (drawn / n - probabilities).abs().max() < 4 * math.sqrt(0.25 / n)
    first = torch.vmap(lambda key: random.permutation(key, 5))(random.split(KEY, 5000))
    assert (torch.bincount(first[:, 2], minlength=5) - 1000).abs().max() < 4 * math.sqrt(1000)


def test_draws_of_different_keys_are_unrelated() -> None:
    one, two = (random.normal(key, (100_000,)) for key in random.split(KEY))
    assert abs((one * two).mean()) < 4 / math.sqrt(100_000)
    near = random.bits(random.fold_in(KEY, 1), (1000,), torch.int32) ^ random.bits(random.fold_in(KEY, 2), (1000,), torch.int32)
    ones = sum(((near >> i) & 1).sum() for i in range(32))
    assert abs(float(ones) / 32_000 - 0.5) < 0.015


# ---- misuse


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: random.normal(random.split(KEY), (3,)), ValueError, r"normal takes one key \[2\], not keys \[2, 2\]; use torch.vmap"),
        (lambda: random.normal(torch.zeros(2), (3,)), TypeError, "normal takes a key, an int64 tensor"),
        (lambda: random.uniform(0, (3,)), TypeError, "uniform takes a key"),
        (lambda: random.normal(KEY, (3,), torch.int32), TypeError, "normal draws one of torch.float64.*not torch.int32"),
        (lambda: random.bits(KEY, (3,), torch.float32), TypeError, "bits come in an integer dtype"),
        (lambda: random.randint(KEY, (3,), 0, 1.5), TypeError, "integer bounds"),
        (lambda: random.randint(KEY, (3,), 0, 5, torch.float32), TypeError, "randint draws one of"),
        (lambda: random.uniform(KEY, (3,), None, torch.zeros(2), 1.0), ValueError, r"uniform: parameters of shapes \(2,\).*shape \(3,\)"),
        (lambda: random.bernoulli(KEY, torch.zeros(2, 3), (3,)), ValueError, r"do not broadcast to the result's shape \(3,\)"),
        (lambda: random.bernoulli(KEY, torch.zeros(2, dtype=torch.int64)), TypeError, "bernoulli draws one of"),
        (lambda: random.truncated_normal(KEY, torch.zeros(2), 1.0, (3,)), ValueError, "truncated_normal: parameters"),
        (lambda: random.permutation(KEY, torch.tensor(3)), ValueError, "a Python number n or a tensor of at least one dimension"),
        (lambda: random.categorical(KEY, torch.zeros(3), shape=(4,), replace=False), ValueError, "4 different indices out of 3"),
        (lambda: random.categorical(KEY, torch.zeros(2, 3), shape=(4,)), ValueError, "categorical: parameters"),
        (lambda: random.dropout(KEY, torch.zeros(3), 1.5), ValueError, r"a dropout rate lies in \[0, 1\], not 1.5"),
        (lambda: random.fold_in(KEY, -1), ValueError, r"a number in \[0, 2\*\*32\), not -1"),
        (lambda: random.fold_in(KEY, torch.zeros(2, dtype=torch.int64)), ValueError, "a scalar integer"),
        (lambda: random.key(2**64), ValueError, "a seed has 64 bits"),
        (lambda: random.key(torch.zeros(2, dtype=torch.int64)), ValueError, "a seed is a scalar integer"),
    ],
)
def test_misuse_is_named(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
