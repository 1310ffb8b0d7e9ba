"""Rematerialized functions have the derivatives of the plain ones, keep less, and compute again what they did not keep."""

import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from functrain import random, tree
from functrain.compile.jit import jit
from functrain.precision import Precision
from functrain.remat import remat, remat_policies
from functrain.torch_internals import TorchDispatchMode
from functrain.transforms import grad, jvp, value_and_grad, vjp, vmap
from tests.helpers import assert_trees_close, assert_trees_equal

POLICIES = [
    None,
    remat_policies.nothing_saveable,
    remat_policies.dots_saveable,
    remat_policies.dots_with_no_batch_dims_saveable,
    remat_policies.everything_saveable,
]


def make(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


W, X = make(0, 4, 4), make(1, 5, 4)


def block(params: Any, x: torch.Tensor) -> Any:
    """Two products and some curves; a view and an in-place change on the way, as models have them."""
    hidden = torch.tanh(x @ params["w"]).view(-1, 4)
    hidden = hidden @ params["w"] * 1.5
    hidden.add_(x)
    return {"y": torch.sin(hidden), "shift": params["b"]}


def loss(wrap: Callable[[Any], Any]) -> Callable[..., torch.Tensor]:
    def total(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            out = wrap(block)({"w": w, "b": w.sum()}, x)
            x = out["y"] + out["shift"]
        return (x**2).sum()

    return total


DERIVATIVES: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "value and gradients": lambda f: value_and_grad(f, argnums=(0, 1))(W, X),
    "grad of grad": lambda f: grad(grad(lambda s: f(s * W, X)))(torch.tensor(0.3, dtype=torch.float64)),
    "gradient penalty": lambda f: grad(lambda w: (grad(f, argnums=1)(w, X) ** 2).sum())(W),
    "vmap of grad": lambda f: vmap(grad(f), in_axes=(None, 0))(W, X[:, None]),
    "grad of vmap": lambda f: grad(lambda w: vmap(f, in_axes=(None, 0))(w, X[:, None]).sum())(W),
    "jvp": lambda f: jvp(f, (W, X), (X[:4], X)),
    "Hessian times a vector": lambda f: jvp(grad(f), (W, X), (X[:4], X)),
    "a pullback used twice": lambda f: (lambda out, pull: (pull(out), pull(2 * out)))(*vjp(f, W, X)),  # noqa: PLC3002
    "Jacobian by vmap of a pullback": lambda f: vmap(vjp(lambda w: f(w, X)[None] * torch.ones(2, dtype=torch.float64), W)[1])(
        torch.eye(2, dtype=torch.float64)
    ),
    "no derivative": lambda f: f(W, X),
}


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: getattr(p, "__name__", "None"))
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_are_those_of_the_plain_function(name: str, policy: Any) -> None:
    found = DERIVATIVES[name](loss(lambda f: remat(f, policy)))
    assert_trees_close(found, DERIVATIVES[name](loss(lambda f: f)), rtol=1e-12, atol=1e-12)
    assert not any(x.requires_grad for x in tree.tensors(found))


def test_it_agrees_with_jax() -> None:
    with jax.enable_x64(True):
        w, x = jnp.asarray(W.numpy()), jnp.asarray(X.numpy())
        expected = jax.grad(lambda w: (jax.checkpoint(lambda w: jnp.tanh(x @ w) @ w)(w) ** 2).sum())(w)
        found = grad(lambda w: (remat(lambda w: torch.tanh(X @ w) @ w)(w) ** 2).sum())(W)
        assert_trees_close(found, expected, rtol=1e-12, atol=1e-12)


def test_gradients_reach_what_the_function_closes_over() -> None:
    def closed(wrap: Callable[[Any], Any]) -> Any:
        return grad(lambda w: (wrap(lambda x: torch.tanh(x @ w) @ w)(X) ** 2).sum())(W)

    assert_trees_equal(closed(remat), closed(lambda f: f))


def test_remats_nest_and_hold_gradients() -> None:
    inner = lambda w: torch.sin(torch.tanh(w @ W)).sum()  # noqa: E731
    plain = grad(lambda w: (grad(inner)(w) ** 2).sum() + inner(w))(W)
    nested = grad(remat(lambda w: (grad(remat(inner))(w) ** 2).sum() + remat(remat(inner))(w)))(W)
    assert_trees_close(nested, plain, rtol=1e-12, atol=1e-12)


INSIDE: dict[str, Callable[..., Any]] = {
    "vmap": lambda w: vmap(lambda x: torch.sin(torch.sin(x @ w)))(X),
    "vmap of grad": lambda w: vmap(grad(lambda x: torch.sin(torch.sin(x @ w)).sum()))(X),
    "vmap of grad of remat": lambda w: vmap(grad(lambda x: remat(torch.sin)(torch.sin(x @ w)).sum()))(X),
    "jvp": lambda w: jvp(lambda x: torch.sin(torch.sin(x @ w)), (X,), (X,))[1],
    "jvp of grad": lambda w: jvp(grad(lambda x: torch.sin(torch.sin(x @ w)).sum()), (X,), (X,))[1],
    "grad of vmap": lambda w: grad(lambda x: vmap(lambda x: torch.sin(torch.sin(x @ w)))(x).sum())(X),
}


@pytest.mark.parametrize("policy", [None, remat_policies.dots_saveable])
@pytest.mark.parametrize("name", INSIDE)
def test_every_transform_works_inside(name: str, policy: Any) -> None:
    def total(wrap: Callable[..., Any]) -> Callable[..., Any]:
        return lambda w: (wrap(lambda w: torch.sin(INSIDE[name](torch.sin(w))), policy)(w) ** 2).sum()

    def results(wrap: Callable[..., Any]) -> Any:
        return grad(total(wrap))(W), grad(lambda w: (grad(total(wrap))(w) ** 2).sum())(W)

    assert_trees_close(results(remat), results(lambda f, policy: f), rtol=1e-11, atol=1e-11)


@tree.struct
class Pair:
    a: Any
    b: Any
    name: str = tree.field(static=True, default="x")


def test_trees_structs_and_plain_leaves_pass_through() -> None:
    def swap(pair: Pair, *, scale: float) -> Any:
        return pair.replace(a=torch.sin(pair.b), b=pair.a * scale), scale, None, "text"

    def total(wrap: Callable[[Any], Any]) -> Callable[..., Any]:
        def run(pair: Pair) -> Any:
            swapped, scale, none, text = wrap(swap)(pair, scale=2.0)
            assert (scale, none, text, swapped.name) == (2.0, None, "text", "n")
            return (swapped.a * swapped.b).sum()

        return run

    pair = Pair(a=X, b=X + 1, name="n")
    assert_trees_equal(value_and_grad(total(remat))(pair), value_and_grad(total(lambda f: f))(pair))


# ---- what is kept, and what is computed again


class Count(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return operation(*args, **(kwargs or {}))


def products(policy: Any, wrap: Callable[..., Any] = remat) -> int:
    with Count() as count:
        grad(loss(lambda f: wrap(f, policy)))(W, X)
    return count.products


def test_the_function_runs_again_in_the_backward_pass() -> None:
    calls = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        return torch.sin(torch.sin(x))

    grad(lambda x: remat(traced)(x).sum())(X)
    assert len(calls) == 2
    remat(traced)(X)
    assert len(calls) == 3, "without a derivative it runs once"


def test_policies_decide_which_products_run_again() -> None:
    plain = products(None, wrap=lambda f, policy: f)
    # Two products forward and four backward a block; w is wanted alone, so the first block leaves one out.
    assert products(remat_policies.everything_saveable) == plain
    assert products(remat_policies.dots_saveable) == plain
    # Again: the first product of each block, and the second since its result is changed in place and wanted by sin.
    assert products(None) == products(remat_policies.nothing_saveable) == plain + 6
    own = lambda operation, *args, **kwargs: operation is torch.ops.aten.tanh.default  # noqa: E731
    assert products(own) == plain + 6


def test_a_kept_result_that_was_changed_in_place_is_computed_again() -> None:
    def changed(w: torch.Tensor) -> torch.Tensor:
        return torch.sin((X @ w).mul_(2)).sum()

    policy = remat_policies.dots_saveable
    assert_trees_equal(grad(remat(changed, policy))(W), grad(changed)(W))


def kept_bytes(function: Callable[..., Any], *args: Any) -> int:
    """Bytes that autograd keeps between the forward and the backward pass, inputs left out."""
    leaves = [x.detach().requires_grad_() for x in args]
    known = {x.untyped_storage().data_ptr() for x in leaves}
    kept: dict[int, int] = {}
    alive = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        alive.append(x)
        if x.untyped_storage().data_ptr() not in known:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        function(*leaves)
    return sum(kept.values())


def test_less_is_kept_for_the_backward_pass() -> None:
    def deep(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = torch.sin(x)
        return x

    x = make(0, 100)
    assert kept_bytes(lambda x: deep(deep(x)), x) == 15 * x.nbytes  # x itself is left out
    assert kept_bytes(lambda x: remat(deep)(remat(deep)(x)), x) == x.nbytes


def test_intermediates_are_freed_after_the_forward_pass() -> None:
    alive = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        hidden = torch.sin(x)
        alive.append(weakref.ref(hidden.untyped_storage()))
        hidden = torch.sin(hidden)
        return torch.sin(hidden)

    out, _pull = vjp(remat(traced), X)
    assert alive[0]() is None
    assert out.shape == X.shape


# ---- randomness


def test_an_explicit_key_draws_the_same_mask_again() -> None:
    def noisy(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return torch.sin(random.dropout(key, x, 0.5)) * x

    key = random.key(0)
    assert_trees_equal(grad(lambda x: remat(noisy)(x, key).sum())(X), grad(lambda x: noisy(x, key).sum())(X))


@pytest.mark.parametrize("policy", [None, remat_policies.dots_saveable])
def test_dropout_in_a_scope_draws_the_same_mask_again(policy: Any) -> None:
    dropout = torch.nn.Dropout(0.5)

    def noisy(x: torch.Tensor) -> torch.Tensor:
        return dropout(torch.sin(dropout(x @ W)) @ W) * x

    def total(wrap: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: torch.Tensor) -> torch.Tensor:
            with random.scope(random.key(7)):
                x = dropout(x)
                x = wrap(noisy, policy)(x)
                x = wrap(noisy, policy)(x)
                return dropout(x).sum()

        return run

    expected = value_and_grad(total(lambda f, policy: f))(X)
    assert_trees_equal(value_and_grad(total(remat))(X), expected)
    second = lambda wrap: grad(lambda x: (grad(total(wrap))(x) ** 2).sum())(X)  # noqa: E731
    assert_trees_close(second(remat), second(lambda f, policy: f), rtol=1e-12, atol=1e-12)


def test_torchs_own_generator_is_repeated_too() -> None:
    """Outside capture, without a scope, one mask serves both ways: value and gradient vanish in the same places."""

    def total(x: torch.Tensor) -> Any:
        y = remat(lambda x: torch.sin(torch.dropout(x, 0.5, True)))(x)
        return y.sum(), y

    gradient, value = grad(total, has_aux=True)(X)
    assert 0 < int((value != 0).sum()) < value.numel()
    assert_trees_equal(value != 0, gradient != 0)


def test_autocast_and_precision_hold_in_the_second_run() -> None:
    seen = []

    def cast(w: torch.Tensor) -> torch.Tensor:
        seen.append((X.float() @ w.float()).dtype)
        return torch.sin(X.float() @ w.float()).float().sum()

    def under(w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return remat(cast)(w)

    grad(under)(W)
    assert seen == [torch.bfloat16] * 2
    half = Precision(compute=torch.float32)
    assert_trees_equal(
        grad(remat(lambda w: torch.sin(X.float() @ w).sum()), precision=half)(W),
        grad(lambda w: torch.sin(X.float() @ w).sum(), precision=half)(W),
    )


def test_a_function_that_is_not_pure_is_told() -> None:
    calls = []

    def changing(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return torch.sin(x @ W if len(calls) == 1 else torch.addmm(x, x, W))

    with pytest.raises(RuntimeError, match="It must be pure"):
        grad(lambda x: remat(changing, remat_policies.dots_saveable)(x).sum())(W)


# ---- captured


def test_a_captured_step_computes_again_what_is_not_kept() -> None:
    def operations(policy: Any) -> int:
        lowered = jit(lambda w, x: grad(loss(lambda f: remat(f, policy)))(w, x), passes=()).lower(W, X)
        return lowered.as_text().count("aten.mm.default")

    plain = operations(remat_policies.everything_saveable)
    assert operations(remat_policies.dots_saveable) == plain
    assert operations(None) == plain + 6


@pytest.mark.parametrize("policy", [None, remat_policies.dots_saveable])
def test_captured_derivatives_are_those_of_the_plain_function(policy: Any) -> None:
    def derivatives(wrap: Callable[..., Any]) -> Callable[..., Any]:
        f = loss(lambda f: wrap(f, policy))
        return lambda w, x, key: {
            "value": value_and_grad(f, argnums=(0, 1))(w, x),
            "penalty": grad(lambda w: (grad(f, argnums=1)(w, x) ** 2).sum())(w),
            "vmap": vmap(grad(f), in_axes=(None, 0))(w, x[:, None]),
            "inside": grad(lambda w: wrap(lambda w: vmap(grad(lambda x: torch.sin(x @ w).sum()))(x), policy)(w).sum())(w),
            "scope": dropped(wrap, x, key),
        }

    def dropped(wrap: Callable[..., Any], x: torch.Tensor, key: torch.Tensor) -> Any:
        with random.scope(key):
            return grad(lambda x: wrap(lambda x: torch.sin(torch.dropout(x, 0.5, True)), policy)(x).sum())(x)

    found = jit(derivatives(remat))(W, X, random.key(0))
    assert_trees_close(found, derivatives(lambda f, policy: f)(W, X, random.key(0)), rtol=1e-12, atol=1e-12)
