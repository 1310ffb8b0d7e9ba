"""Modules of many kinds as pure functions: what runs again in a backward pass, what is refused, what nests."""

import collections
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import functrain as ft
from functrain import tree
from functrain.module import PureModule, from_module
from functrain.random import checkpoint_contexts
from tests.helpers import assert_trees_close, assert_trees_equal


def made(make: Any, seed: int = 0) -> Any:
    """A module, or a tensor, from torch's generator."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def inputs(*shape: int, seed: int = 1) -> torch.Tensor:
    return made(lambda: torch.randn(*shape), seed)


def gradients_of(module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Plain PyTorch's gradients of the summed squares of the output, by path."""
    module.zero_grad()
    module(x).square().sum().backward()
    return {name.replace(".", "/"): p.grad for name, p in module.named_parameters()}


def loss_of(model: PureModule, **options: Any) -> Any:
    return lambda params, x: model.apply(params, model.buffers, x, **options)[0].square().sum()


def assert_same_gradients(model: PureModule, module: nn.Module, x: torch.Tensor, **options: Any) -> None:
    step, expected = ft.grad(loss_of(model, **options)), gradients_of(module, x)
    for run in (step, ft.jit(step)):
        assert_trees_close(dict(tree.leaves_with_path(run(model.params, x))), expected, rtol=1e-5, atol=1e-6)


def network(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(dropout), nn.Linear(4, 2))


# ---- what a pure function must not do


class Clamped(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


@pytest.mark.parametrize(
    ("make", "x"),
    [(lambda: nn.Embedding(4, 3, max_norm=0.1), torch.tensor([0, 3])), (lambda: Clamped(3, 3), inputs(2, 3))],
    ids=["max_norm", "data"],
)
def test_a_forward_that_writes_into_a_param_is_refused_before_it_does(make: Any, x: torch.Tensor) -> None:
    for frozen in ((), "**"):
        model = from_module(made(make), frozen=frozen)
        before = tree.map(torch.clone, (model.params, model.buffers))
        with pytest.raises(ValueError, match=r"forward writes into its param weight \(aten\."):
            model.apply(model.params, model.buffers, x)
        assert_trees_equal((model.params, model.buffers), before)


# ---- parts of the forward that run again


class Checkpointed(nn.Module):
    """Rematerializes its block itself, as models from elsewhere do."""

    def __init__(self, dropout: float = 0.0, **options: Any) -> None:
        super().__init__()
        self.first, self.block, self.options = nn.Linear(3, 3), network(dropout), options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, torch.tanh(self.first(x)), use_reentrant=False, **self.options)


def test_checkpoints_inside_a_module_work() -> None:
    module = made(Checkpointed)
    model = from_module(module)
    for _ in range(2):
        assert_same_gradients(model, module, inputs(5, 3))
    assert_same_gradients(model, module, inputs(5, 3), train=True)


def test_checkpoints_inside_a_module_draw_the_same_again() -> None:
    module = made(lambda: Checkpointed(0.5, context_fn=checkpoint_contexts, preserve_rng_state=False))
    plain = nn.Sequential(module.first, nn.Tanh(), module.block)
    key, x = ft.random.key(3), inputs(5, 3)
    results = [ft.value_and_grad(loss_of(m, train=True, key=key))(m.params, x) for m in (from_module(module), from_module(plain))]
    assert_trees_close(results[0][0], results[1][0])
    assert_trees_close(tree.leaves(results[0][1]["block"]), tree.leaves(results[1][1]["2"]))
    forgetful = from_module(made(lambda: Checkpointed(0.5, preserve_rng_state=False)))
    with pytest.raises(RuntimeError, match="checkpoint_contexts"):
        ft.grad(loss_of(forgetful, train=True, key=key))(forgetful.params, x)


def test_a_call_inside_remat_is_the_same_call() -> None:
    model, x, key = from_module(made(lambda: network(0.5))), inputs(5, 3), ft.random.key(1)
    loss = loss_of(model, train=True, key=key)
    assert_trees_equal(ft.grad(ft.remat(loss))(model.params, x), ft.grad(loss)(model.params, x))


@pytest.mark.parametrize("make", [network, Checkpointed])
def test_no_call_keeps_values_alive(make: Any) -> None:
    model = from_module(made(make))
    params = tree.map(torch.clone, model.params)
    alive = [weakref.ref(x) for x in tree.leaves(params)]
    ft.grad(loss_of(model))(params, inputs(5, 3))
    del params
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)


# ---- modules of many kinds


class Pair(collections.namedtuple("Pair", "left right")):
    __slots__ = ()


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> Any:
        return {"pair": Pair(x * self.w, None), "other": collections.UserDict({"list": [x, (self.w, 1.5)], "name": "x"})}


def test_outputs_are_trees_of_any_kind() -> None:
    model, x = from_module(Many()), inputs(3)
    for run in (lambda p: model.apply(p, model.buffers, x)[0], ft.jit(lambda p: model.apply(p, model.buffers, x)[0])):
        output = run(model.params)
        assert_trees_equal(output["pair"].left, x)
        assert output["pair"].right is None
        assert output["other"].name == "x"
        assert output["other"].list[1][1] == 1.5
    with pytest.raises(AttributeError, match=r"the output has no 'logits'; it has list, name"):
        _ = output["other"].logits


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0])


def test_a_module_that_keeps_its_weights_in_a_list_uses_those_it_is_given() -> None:
    module = made(Recurrent)
    model, x = from_module(module), inputs(2, 5, 3)
    doubled = tree.map(lambda w: 2 * w, model.params)
    gradients = ft.grad(loss_of(model))(doubled, x)
    assert_trees_close(dict(tree.leaves_with_path(gradients)), gradients_of(model.to_module(doubled), x))


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrizations_work(name: str) -> None:
    module = made(lambda: getattr(nn.utils.parametrizations, name)(nn.Linear(3, 3)))
    model, x = from_module(module), inputs(2, 3)
    output, buffers = model.apply(model.params, model.buffers, x, train=True)
    assert_trees_close(output, module(x).detach())
    assert_trees_close(dict(tree.leaves_with_path(buffers)), {k.replace(".", "/"): v for k, v in module.named_buffers()})


class Unregistered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.table = nn.Parameter(torch.ones(3)), torch.arange(3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w * self.table


def test_tensors_that_are_no_buffers_are_constants() -> None:
    model, x = from_module(Unregistered()), inputs(3)
    run = lambda params: model.apply(params, model.buffers, x)[0]  # noqa: E731
    assert_trees_equal(ft.jit(run)(model.params), x * torch.arange(3.0))
    assert_trees_equal(run(model.params), x * torch.arange(3.0))


def test_it_nests_with_transforms() -> None:
    model, x = from_module(made(network)), inputs(5, 3)
    loss = loss_of(model)
    per_example = ft.vmap(ft.grad(loss), in_axes=(None, 0))(model.params, x)
    assert_trees_close(per_example, tree.map(lambda *g: torch.stack(g), *[ft.grad(loss)(model.params, row) for row in x]))
    ensemble = tree.map(lambda w: torch.stack([w, 2 * w]), model.params)
    expected = torch.stack([loss(model.params, x), loss(tree.map(lambda w: 2 * w, model.params), x)])
    assert_trees_close(ft.vmap(lambda p: loss(p, x))(ensemble), expected)
    along = ft.jvp(lambda p: loss(p, x), (model.params,), (model.params,))[1]
    products = tree.map(lambda g, w: (g * w).sum(), ft.grad(loss)(model.params, x), model.params)
    assert_trees_close(along, torch.stack(tree.leaves(products)).sum())


def test_a_module_is_made_in_shapes_alone_or_inside_a_captured_function() -> None:
    shapes = ft.eval_shape(lambda: from_module(network()).params)
    assert shapes["0"]["weight"].shape == (4, 3)
    with torch.device("meta"):
        assert from_module(network()).params["0"]["weight"].is_meta

    def make(key: torch.Tensor) -> Any:
        with ft.random.scope(key):
            return from_module(network()).params

    assert_trees_equal(ft.jit(make)(ft.random.key(0)), make(ft.random.key(0)))


# ---- errors


def test_what_cannot_be_copied_is_named() -> None:
    module = made(network)
    module.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"a part of it cannot be copied: cannot pickle '_thread\.lock' object\. Keep such parts"):
        from_module(module)
