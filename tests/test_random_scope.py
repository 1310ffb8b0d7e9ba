"""Inside `scope(key)` torch's implicit randomness comes from the key, wherever the code runs; what cannot, says so."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import functrain.random as random
from functrain.random.scoping import checkpoint_contexts, current_scope, is_random, resume, scope, scope_state
from functrain.remat import remat
from functrain.torch_internals import FakeTensorMode, load_forward_mode_rules
from tests.helpers import assert_trees_close, assert_trees_equal

KEY = random.key(1)
X = torch.linspace(-2, 2, 24).reshape(4, 6)
PROBABILITIES = torch.tensor([0.0, 1.0, 0.5, 0.5])


def drawn(function: Callable[..., Any], *args: Any, key: torch.Tensor = KEY) -> Any:
    with scope(key):
        return function(*args)


def first_key() -> torch.Tensor:
    return random.fold_in(KEY, 0)


# ---- what is drawn


def attention(rate: float) -> torch.Tensor:
    heads = X.reshape(1, 2, 2, 6)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=rate)


# Everything random that a module or function of torch may do, and how many draws it takes.
CALLS: dict[str, tuple[Callable[[], Any], int]] = {
    "dropout": (lambda: F.dropout(X, 0.3), 1),
    "dropout module": (lambda: nn.Dropout(0.3)(X), 1),
    "dropout in place": (lambda: F.dropout(X.clone(), 0.3, inplace=True), 1),
    "alpha dropout": (lambda: F.alpha_dropout(X, 0.3, training=True), 1),
    "feature dropout": (lambda: F.dropout2d(X[None, :, :, None], 0.5), 1),
    "native_dropout": (lambda: torch.native_dropout(X, 0.5, True), 1),
    "attention": (lambda: attention(0.5), 1),
    "rand": (lambda: torch.rand(3, 2), 1),
    "rand float64": (lambda: torch.rand(3, dtype=torch.float64), 1),
    "randn bfloat16": (lambda: torch.randn(3, 2, dtype=torch.bfloat16), 1),
    "randint": (lambda: torch.randint(3, 9, (5,)), 1),
    "randint int32": (lambda: torch.randint(9, (5,), dtype=torch.int32), 1),
    "rand_like": (lambda: torch.rand_like(X, dtype=torch.float64), 1),
    "randn_like": (lambda: torch.randn_like(X), 1),
    "randint_like": (lambda: torch.randint_like(X, 4), 1),
    "randint_like from": (lambda: torch.randint_like(X, 2, 4), 1),
    "randperm": (lambda: torch.randperm(9), 1),
    "normal_": (lambda: torch.empty(3).normal_(2, 0.1), 1),
    "uniform_": (lambda: torch.empty(3).uniform_(2, 3), 1),
    "bernoulli_": (lambda: torch.empty(4).bernoulli_(0.3), 1),
    "bernoulli_ of a tensor": (lambda: torch.empty(4).bernoulli_(PROBABILITIES), 1),
    "bernoulli": (lambda: torch.bernoulli(PROBABILITIES), 1),
    "bernoulli of p": (lambda: torch.bernoulli(X, 0.5), 1),
    "exponential_": (lambda: torch.empty(4).exponential_(2.0), 1),
    "log_normal_": (lambda: torch.empty(4).log_normal_(), 1),
    "cauchy_": (lambda: torch.empty(4).cauchy_(), 1),
    "geometric_": (lambda: torch.empty(4).geometric_(0.3), 1),
    "random_": (lambda: torch.empty(4).random_(), 1),
    "random_ of int8": (lambda: torch.empty(4, dtype=torch.int8).random_(), 1),
    "random_ to": (lambda: torch.empty(4).random_(6), 1),
    "random_ from": (lambda: torch.empty(4).random_(3, 6), 1),
    "normal": (lambda: torch.normal(0.0, 1.0, (3,)), 1),
    "normal of means": (lambda: torch.normal(X, 1.0), 1),
    "normal of deviations": (lambda: torch.normal(1.0, X.abs()), 1),
    "normal of both": (lambda: torch.normal(X[0], X.abs()), 1),
    "multinomial": (lambda: torch.multinomial(PROBABILITIES, 2), 1),
    "multinomial of rows": (lambda: torch.multinomial(X.abs(), 5, replacement=True), 1),
    "linear": (lambda: nn.Linear(6, 3).weight.detach(), 2),
    "initialisation": (lambda: nn.init.kaiming_normal_(torch.empty(6, 6)), 1),
    "multi-head attention": (lambda: nn.MultiheadAttention(6, 2, dropout=0.5)(X, X, X)[0].detach(), 4),
    "lstm": (lambda: nn.LSTM(6, 6, 2, dropout=0.5)(X)[0].detach(), 9),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_scope_makes_it_a_function_of_the_key(name: str) -> None:
    call, draws = CALLS[name]
    before = torch.get_rng_state()
    with scope(KEY) as active:
        one = call()
        assert active.counter == draws
        later = call()
    assert_trees_equal(drawn(call), one)
    other = drawn(call, key=random.key(2))
    differs = [not torch.equal(a, b) for a, b in zip(leaves(one), leaves(other), strict=True)]
    again = [not torch.equal(a, b) for a, b in zip(leaves(one), leaves(later), strict=True)]
    assert any(differs), "another key gives the same"
    assert any(again), "the second draw repeats the first"
    assert torch.equal(torch.get_rng_state(), before), "torch's own generator was used"


def leaves(x: Any) -> list[torch.Tensor]:
    return [x] if isinstance(x, torch.Tensor) else list(x)


def test_draw_number_i_uses_the_key_folded_with_i() -> None:
    with scope(KEY):
        noise, mask, order = torch.randn(3, 4), torch.empty(7).bernoulli_(0.4), torch.randperm(5)
        between = torch.empty(6).uniform_(-1, 4)
    assert_trees_equal(noise, random.normal(random.fold_in(KEY, 0), (3, 4)))
    assert_trees_equal(mask, random.bernoulli(random.fold_in(KEY, 1), 0.4, (7,)).float())
    assert_trees_equal(order, random.permutation(random.fold_in(KEY, 2), 5))
    assert_trees_equal(between, random.uniform(random.fold_in(KEY, 3), (6,), None, -1.0, 4.0))


def test_dropout_in_a_scope_is_dropout_of_its_key() -> None:
    assert_trees_close(drawn(F.dropout, X, 0.3), random.dropout(first_key(), X, 0.3))
    y, mask = drawn(torch.native_dropout, X, 0.3, True)
    assert_trees_close(y, random.dropout(first_key(), X, 0.3))
    assert_trees_equal(mask, random.bernoulli(first_key(), 0.7, (4, 6)))


def test_what_is_not_random_stays_as_it_is() -> None:
    with scope(KEY) as active:
        assert F.dropout(X, 0.5, training=False) is X
        assert_trees_equal(attention(0.0), attention(0.0))
        assert active.counter == 0


def test_results_have_the_dtype_shape_and_strides_that_torch_gives() -> None:
    for name, (call, _) in CALLS.items():
        for ours, theirs in zip(leaves(drawn(call)), leaves(call()), strict=True):
            assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride()), name
    transposed = drawn(torch.randn_like, X.T)
    assert transposed.stride() == X.T.stride()
    channels = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert drawn(torch.rand_like, channels).is_contiguous(memory_format=torch.channels_last)


def test_statistics() -> None:
    n = 100_000
    cases = [
        (torch.empty(n).exponential_, (2.0,), 0.5, 0.25),
        (torch.empty(n).geometric_, (0.25,), 4.0, 12.0),
        (torch.empty(n).log_normal_, (0.0, 0.5), 1.1331, 0.3647),
        (torch.empty(n).normal_, (3.0, 2.0), 3.0, 4.0),
        (torch.empty(n).random_, (2, 8), 4.5, 35 / 12),
        (torch.empty(n, dtype=torch.float64).uniform_, (-1.0, 5.0), 2.0, 3.0),
    ]
    for fill, arguments, mean, variance in cases:
        values = drawn(fill, *arguments).double()
        assert abs(values.mean() - mean) < 5 * (variance / n) ** 0.5, fill
        assert abs(values.var() / variance - 1) < 0.06, fill
    assert abs(drawn(torch.empty(n).cauchy_).median()) < 0.02
    counts = torch.bincount(drawn(lambda: torch.multinomial(torch.tensor([1.0, 2.0, 7.0]), n, replacement=True)), minlength=3)
    assert (counts / n - torch.tensor([0.1, 0.2, 0.7])).abs().max() < 0.01


def test_scopes_nest() -> None:
    def both() -> tuple[torch.Tensor, ...]:
        before = torch.randn(3)
        with scope(random.key(9)):
            inside = torch.randn(3)
        return before, inside, torch.randn(3)

    before, inside, after = drawn(both)
    assert_trees_equal(drawn(lambda: (torch.randn(3), torch.randn(3))), (before, after))
    assert_trees_equal(drawn(torch.randn, 3, key=random.key(9)), inside)
    assert current_scope() is None


# ---- where it works


def noisy(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    with scope(key):
        return F.dropout(x * 2, 0.5) * torch.randn(6) + torch.rand_like(x)


def test_gradients_go_through_the_mask() -> None:
    x = X.clone().requires_grad_()
    noisy(x, KEY).sum().backward()
    expected = random.dropout(random.fold_in(KEY, 0), torch.full((4, 6), 2.0), 0.5) * random.normal(random.fold_in(KEY, 1), (6,))
    assert_trees_close(x.grad, expected)
    assert_trees_close(torch.func.grad(lambda x: noisy(x, KEY).sum())(X), expected)
    assert_trees_close(torch.func.grad(lambda x, key: noisy(x, key).sum())(X, KEY), expected)  # the key passes through the transform


def test_forward_mode() -> None:
    load_forward_mode_rules()
    _, tangent = torch.func.jvp(lambda x: noisy(x, KEY), (X,), (torch.ones_like(X),))
    assert_trees_close(tangent, torch.func.grad(lambda x: noisy(x, KEY).sum())(X))


def test_vmap_over_keys_gives_what_each_key_gives() -> None:
    keys = random.split(KEY, 4)
    alone = torch.stack([noisy(x, key) for x, key in zip(X, keys, strict=True)])
    vmap = lambda f, in_dims=0: torch.vmap(f, in_dims, randomness="different")  # noqa: E731
    assert_trees_equal(vmap(noisy)(X, keys), alone)
    assert_trees_equal(vmap(noisy, (0, 1))(X, keys.T), alone)
    assert_trees_equal(vmap(vmap(noisy))(X[None], keys[None])[0], alone)
    assert_trees_equal(vmap(vmap(noisy), (0, None))(torch.stack([X, X]), keys), torch.stack([alone, alone]))
    grid = random.split(KEY, (3, 2))
    crossed = torch.stack([torch.stack([noisy(X[0], grid[i, j]) for i in range(3)]) for j in range(2)])
    assert_trees_equal(vmap(vmap(noisy, (None, 0)), (None, 1))(X[0], grid), crossed)
    table = torch.stack([torch.stack([noisy(x, key) for x in X]) for key in keys])
    assert_trees_equal(vmap(vmap(noisy, (0, None)))(X.expand(4, 4, 6), keys), table)


def test_vmap_with_one_key_gives_every_slice_the_same_draws() -> None:
    alone = torch.stack([noisy(x, KEY) for x in X])
    for randomness in ("different", "same"):
        assert_trees_equal(torch.vmap(noisy, (0, None), randomness=randomness)(X, KEY), alone)


def test_vmap_inside_a_scope_draws_for_the_whole_batch() -> None:
    each = drawn(torch.vmap(lambda x: F.dropout(x, 0.5), randomness="different"), torch.ones(64, 8))
    assert_trees_equal(each, drawn(F.dropout, torch.ones(64, 8), 0.5))
    with pytest.raises(RuntimeError, match="randomness error mode"):
        drawn(torch.vmap(lambda x: F.dropout(x, 0.5)), X)


def test_per_example_gradients_with_a_key_for_each() -> None:
    gradient = torch.func.grad(lambda x, key: noisy(x, key).square().sum())
    keys = random.split(KEY, 4)
    expected = torch.stack([gradient(x, key) for x, key in zip(X, keys, strict=True)])
    assert_trees_close(torch.vmap(gradient, randomness="different")(X, keys), expected)


def test_integers_for_every_key_of_a_vmap() -> None:
    def draw(key: torch.Tensor) -> torch.Tensor:
        with scope(key):
            return torch.randint(0, 100, (5,))

    keys = random.split(KEY, 3)
    assert_trees_equal(torch.vmap(draw, randomness="different")(keys), torch.stack([draw(key) for key in keys]))


@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors_and_tracing(name: str) -> None:
    call, _ = CALLS[name]
    real = drawn(call)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = drawn(call, key=mode.from_tensor(KEY))
    for a, b in zip(leaves(fake), leaves(real), strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
    graph = make_fx(lambda key: drawn(call, key=key), tracing_mode="fake", _allow_non_fake_inputs=True, _allow_fake_constant=True)(KEY)
    assert not any(node.op == "call_function" and is_random(node.target, node.args, node.kwargs) for node in graph.graph.nodes)
    assert_trees_equal(graph(KEY), real)


# ---- recomputation


class Recomputed:
    """A small network with dropout in a part that is computed again in the backward pass."""

    def __init__(self) -> None:
        self.layer = drawn(nn.Linear, 6, 6)

    def part(self, h: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.relu(self.layer(h)), 0.5).sin() * torch.randn(6)

    def gradients(self, wrap: Callable[..., torch.Tensor], *, backward_inside: bool) -> Any:
        x = X.clone().requires_grad_()
        self.layer.zero_grad()
        with scope(KEY) as active:
            h = F.dropout(wrap(self.part, wrap(self.part, F.dropout(x, 0.2))), 0.2)
            if backward_inside:
                h.square().sum().backward()
            after = torch.randn(2)
        if not backward_inside:
            h.square().sum().backward()
        return [h.detach(), x.grad, self.layer.weight.grad.clone(), after, torch.tensor(active.counter)]


def call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def with_contexts(function: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False, context_fn=checkpoint_contexts)


def with_states(function: Callable[..., Any], *args: Any) -> Any:
    """The pieces by hand: a state is kept, and resumed for each run."""
    state = scope_state()
    result = checkpoint(lambda *args: _run(function, state, *args), *args, use_reentrant=False)
    current_scope().state = _advanced(function, state, *args)
    return result


def _run(function: Callable[..., Any], state: Any, *args: Any) -> Any:
    with resume(state):
        return function(*args)


def _advanced(function: Callable[..., Any], state: Any, *args: Any) -> Any:
    with resume(state), torch.no_grad():
        function(*args)
        return scope_state()


@pytest.mark.parametrize("backward_inside", [True, False])
@pytest.mark.parametrize(
    "wrap",
    [with_contexts, with_states, lambda f, *args: with_contexts(lambda *a: with_contexts(f, *a), *args), lambda f, *args: remat(f)(*args)],
)
def test_a_recomputation_draws_the_same_numbers(wrap: Callable[..., Any], backward_inside: bool) -> None:
    network = Recomputed()
    expected = network.gradients(call, backward_inside=True)
    assert_trees_equal(network.gradients(wrap, backward_inside=backward_inside), expected)


def test_a_scope_inside_the_recomputed_part_needs_nothing() -> None:
    def part(h: torch.Tensor) -> torch.Tensor:
        return drawn(lambda: F.dropout(h, 0.5).sin())

    def gradient(wrap: Callable[..., Any]) -> torch.Tensor:
        x = X.clone().requires_grad_()
        wrap(part, x).sum().backward()
        return x.grad

    assert_trees_equal(gradient(lambda f, x: checkpoint(f, x, use_reentrant=False)), gradient(call))


@pytest.mark.parametrize(("reentrant", "message"), [(False, "inside torch.utils.checkpoint"), (True, "in a backward pass")])
def test_a_recomputation_that_would_draw_other_numbers_is_refused(reentrant: bool, message: str) -> None:
    with pytest.raises(RuntimeError, match=f"bernoulli_.*{message}.*functrain.remat.*checkpoint_contexts"):
        Recomputed().gradients(lambda f, *args: checkpoint(f, *args, use_reentrant=reentrant), backward_inside=True)


def test_states_are_values() -> None:
    assert scope_state() is None
    with scope(KEY):
        state = scope_state()
        first = torch.randn(3)
        assert (state.counter, scope_state().counter) == (0, 1)
        with resume(state) as again:
            assert current_scope() is again
            assert_trees_equal(torch.randn(3), first)
        assert scope_state().counter == 1
    with resume(None) as nothing:
        assert nothing is None
    assert all(isinstance(context, contextlib.AbstractContextManager) for context in checkpoint_contexts())


# ---- what it refuses


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: torch.poisson(X.abs()), NotImplementedError, "aten.poisson.default draws random numbers that"),
        (lambda: F.rrelu(X, training=True), NotImplementedError, "aten.rrelu_with_noise"),
        (lambda: torch.rand(2, out=torch.empty(2)), NotImplementedError, "aten.rand.out.*Call functrain.random with a key"),
        (lambda: torch.rand(2, generator=torch.Generator()), ValueError, r"aten.rand.generator.*torch.Generator of its own"),
        (lambda: torch.empty(2).normal_(generator=torch.Generator()), ValueError, "aten.normal_.*torch.Generator of its own"),
        (lambda: torch.randn(2, dtype=torch.complex64), NotImplementedError, "complex random numbers"),
    ],
)
def test_unknown_randomness_is_refused_by_name(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        drawn(call)


def test_keys_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="scope takes one key"):
        drawn(torch.rand, 2, key=random.split(KEY))
    with pytest.raises(ValueError, match='use randomness="different"'):
        torch.vmap(noisy, randomness="same")(X, random.split(KEY, 4))

    def order(key: torch.Tensor) -> torch.Tensor:
        return drawn(torch.randperm, 5, key=key)

    with pytest.raises(NotImplementedError, match=r"torch.randperm inside `random.scope` inside vmap"):
        torch.vmap(order, randomness="different")(random.split(KEY, 4))


# ---- which operations are random


def test_is_random() -> None:
    aten = torch.ops.aten
    for operation in (aten.randn.default, aten.bernoulli_.float, aten.randperm.default, aten.poisson.default):
        assert is_random(operation)
    for operation in (aten.add.Tensor, aten._fused_sdp_choice.default, torch.ops.functrain.threefry_normal.default):
        assert not is_random(operation)
    heads = X.reshape(1, 2, 2, 6)
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert not is_random(flash, (heads, heads, heads))
    assert not is_random(flash, (heads, heads, heads, 0.0, True))
    on_device = aten._scaled_dot_product_flash_attention.default
    assert not is_random(on_device, (heads, heads, heads), {"dropout_p": 0.0})
    assert is_random(on_device, (heads, heads, heads, 0.1))
    assert not is_random(aten._scaled_dot_product_cudnn_attention_backward.default)
    assert is_random(aten.native_dropout.default, (X, 0.5, True))
    assert not is_random(aten.native_dropout.default, (X, 0.5, False))
    assert is_random(aten.rrelu_with_noise.default, (X, X), {"training": True})
    assert not is_random(aten.rrelu_with_noise.default, (X, X))


def test_every_known_operation_is_random() -> None:
    from functrain.random.implicit import HANDLERS  # noqa: PLC0415

    assert all(torch.Tag.nondeterministic_seeded in operation.tags for operation in HANDLERS)
