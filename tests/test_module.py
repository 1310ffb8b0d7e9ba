"""A module as a pure function: nothing that goes in changes, what the forward changes comes out, and the way back."""

import collections
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import functrain as ft
from functrain import tree
from functrain.compile.graph import is_mutable
from functrain.module import Output, from_module
from tests.helpers import assert_trees_close, assert_trees_equal


class Tied(nn.Module):
    """Embedding and head are one matrix; a table that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(2)])
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.table
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2))


def snapshot(value: Any) -> Any:
    return tree.map(torch.clone, value)


def images(seed: int = 0) -> torch.Tensor:
    return torch.randn(6, 3, 5, 5, generator=torch.Generator().manual_seed(seed))


# ---- params and buffers


def test_paths_are_the_dotted_names_and_values_are_copies() -> None:
    module = Tied()
    model = from_module(module)
    assert tree.paths(model.params) == ["blocks/0/0/bias", "blocks/0/0/weight", "blocks/1/0/bias", "blocks/1/0/weight", "embed/weight"]
    assert tree.paths(model.buffers) == ["table"]
    for (path, x), name in zip(tree.leaves_with_path(model.params), sorted(dict(module.named_parameters())), strict=True):
        held = module.get_parameter(name)
        assert path == name.replace(".", "/")
        assert type(x) is torch.Tensor
        assert not x.requires_grad
        assert torch.equal(x, held)
        assert x.data_ptr() != held.data_ptr()


def test_tied_weights_appear_once_and_their_gradients_add_up() -> None:
    module = Tied().eval()
    model = from_module(module)
    tokens = torch.tensor([[1, 2, 3], [3, 0, 6]])
    loss = lambda p: F.cross_entropy(model.apply(p, model.buffers, tokens)[0].flatten(0, 1), tokens.flatten())  # noqa: E731
    F.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten()).backward()
    expected = {name.replace(".", "/"): p.grad for name, p in module.named_parameters()}
    assert_trees_close(dict(tree.leaves_with_path(ft.grad(loss)(model.params))), expected, rtol=1e-6, atol=1e-8)


def test_the_modules_own_weights_are_not_kept() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model = from_module(module)
    held = [weakref.ref(x) for x in (module[0].weight, module[1].running_mean)]
    del module
    gc.collect()
    assert [x() for x in held] == [None, None]
    assert model.apply(model.params, model.buffers, torch.ones(2, 3))[0].shape == (2, 3)


def test_donating_the_state_leaves_the_users_module_as_it_was() -> None:
    module = nn.Linear(3, 2)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    model = from_module(module)
    step = ft.jit(lambda params, x: tree.map(lambda p, g: p - g, params, ft.grad(lambda p: loss(p, x))(params)), donate="params")
    loss = lambda p, x: model.apply(p, model.buffers, x)[0].sum()  # noqa: E731
    step(model.params, torch.ones(4, 3))
    assert_trees_equal(dict(module.named_parameters()), before)


# ---- what a forward pass changes


@pytest.mark.parametrize("captured", [False, True])
def test_batch_statistics_come_back_as_new_values(captured: bool) -> None:
    module = convolutional()
    model = from_module(module)
    run = lambda p, b, x: model.apply(p, b, x, train=True)  # noqa: E731
    run = ft.jit(run) if captured else run
    params, buffers = snapshot(model.params), snapshot(model.buffers)
    given = buffers
    for seed in range(3):
        expected = module(images(seed))
        output, new = run(params, given, images(seed))
        assert_trees_close(output, expected.detach(), rtol=1e-6)
        given = new
    assert_trees_close(given, {"1": dict(module[1].named_buffers())}, rtol=1e-6)
    assert_trees_equal((params, buffers), (model.params, model.buffers))
    assert int(given["1"]["num_batches_tracked"]) == 3
    assert not torch.equal(given["1"]["running_mean"], buffers["1"]["running_mean"])


def test_a_convolutional_net_trains_as_in_plain_pytorch() -> None:
    module = convolutional()
    model = from_module(module)
    labels = torch.tensor([0, 1, 0, 1, 1, 0])

    def loss_fn(params: Any, buffers: Any, x: torch.Tensor) -> Any:
        output, buffers = model.apply(params, buffers, x, train=True)
        return F.cross_entropy(output, labels), buffers

    @ft.jit
    def step(params: Any, buffers: Any, x: torch.Tensor) -> Any:
        (loss, buffers), gradients = ft.value_and_grad(loss_fn, has_aux=True)(params, buffers, x)
        return tree.map(lambda p, g: p - 0.1 * g, params, gradients), buffers, loss

    nodes = step.lower(model.params, model.buffers, images()).captured.graph.nodes
    assert not [node for node in nodes if is_mutable(node)]
    params, buffers = model.params, model.buffers
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for seed in range(4):
        params, buffers, loss = step(params, buffers, images(seed))
        optimizer.zero_grad()
        expected = F.cross_entropy(module(images(seed)), labels)
        expected.backward()
        optimizer.step()
        assert_trees_close(loss, expected.detach(), rtol=1e-5)
    again = model.to_module(params, buffers)
    assert_trees_close(dict(again.state_dict()), dict(module.state_dict()), rtol=1e-4, atol=1e-6)


def test_in_eval_mode_statistics_are_used_and_handed_on_as_they_are() -> None:
    model = from_module(convolutional())
    _, trained = model.apply(model.params, model.buffers, images(), train=True)
    output, after = model.apply(model.params, trained, images(1))
    assert all(x is y for x, y in zip(tree.leaves(after), tree.leaves(trained), strict=True))
    assert not torch.equal(output, model.apply(model.params, model.buffers, images(1))[0])


class Counting(nn.Module):
    """Buffers that are written, replaced, and left alone; in any mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("written", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("left", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.written[0] += 1
        self.replaced = self.replaced + x.sum()
        return x * self.left


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("train", [False, True])
def test_buffers_that_are_written_or_replaced_come_back(captured: bool, train: bool) -> None:
    module = Counting()
    model = from_module(module)
    run = lambda b, x: model.apply({}, b, x, train=train)[1]  # noqa: E731
    run = ft.jit(run) if captured else run
    new = run(run(model.buffers, torch.ones(2)), torch.ones(2))
    assert_trees_equal(new, {"written": torch.tensor([2.0, 0]), "replaced": torch.full((2,), 4.0), "left": torch.ones(2)})
    assert_trees_equal(model.buffers, {"written": torch.zeros(2), "replaced": torch.zeros(2), "left": torch.ones(2)})
    assert int(module.written[0]) == 0


def test_under_inference_mode_and_transforms_buffers_come_back_too() -> None:
    model = from_module(Counting())
    with torch.inference_mode():
        assert float(model.apply({}, model.buffers, torch.ones(2))[1]["written"][0]) == 1
    _, _, new = ft.jvp(lambda x: model.apply({}, model.buffers, x), (torch.ones(2),), (torch.ones(2),), has_aux=True)
    assert_trees_equal(new["written"], torch.tensor([1.0, 0]))
    assert_trees_equal(model.buffers["written"], torch.zeros(2))


def test_per_sample_gradients_of_a_module() -> None:
    model = from_module(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    loss = lambda p, x: model.apply(p, model.buffers, x)[0].square().sum()  # noqa: E731
    found = ft.vmap(ft.grad(loss), in_axes=(None, 0))(model.params, x)
    expected = tree.map(lambda *rows: torch.stack(rows), *[ft.grad(loss)(model.params, row) for row in x])
    assert_trees_close(found, expected, rtol=1e-5)


# ---- modes


def test_each_call_has_its_own_mode_and_the_users_module_keeps_its_own() -> None:
    module = convolutional()
    model = from_module(module)
    module.eval()
    evaluated = model.apply(model.params, model.buffers, images())[0]
    trained = model.apply(model.params, model.buffers, images(), train=True)[0]
    assert not torch.equal(evaluated, trained)
    assert torch.equal(evaluated, model.apply(model.params, model.buffers, images())[0])
    assert not module.training
    assert torch.equal(evaluated, module(images()).detach())


def test_a_part_that_was_put_into_eval_mode_stays_there() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    module[0].eval()
    model = from_module(module)
    _, new = model.apply(model.params, model.buffers, torch.randn(4, 3), train=True)
    assert_trees_equal(new["0"], model.buffers["0"])
    assert int(new["1"]["num_batches_tracked"]) == 1
    whole = from_module(module.eval())
    assert int(whole.apply(whole.params, whole.buffers, torch.randn(4, 3), train=True)[1]["0"]["num_batches_tracked"]) == 1


def test_calls_from_several_threads_and_inside_each_other_do_not_meet() -> None:
    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, gate: Any) -> torch.Tensor:
            before = self.weight + 0
            gate()
            return before + self.weight

    model = from_module(Slow())
    barrier, results = threading.Barrier(2), {}

    def run(value: float) -> None:
        results[value] = float(model.apply({"weight": torch.tensor(value)}, {}, lambda: barrier.wait(10))[0])

    threads = [threading.Thread(target=run, args=(value,)) for value in (1.0, 5.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1.0: 2.0, 5.0: 10.0}
    inner = lambda: model.apply({"weight": torch.tensor(7.0)}, {}, lambda: None)  # noqa: E731
    assert float(model.apply({"weight": torch.tensor(2.0)}, {}, inner)[0]) == 4.0


def test_a_call_that_fails_leaves_nothing_behind() -> None:
    model = from_module(convolutional())
    expected = model.apply(model.params, model.buffers, images())[0]
    with pytest.raises(RuntimeError):
        model.apply(model.params, model.buffers, torch.ones(1, 9, 5, 5))
    assert torch.equal(model.apply(model.params, model.buffers, images())[0], expected)


# ---- randomness


def test_dropout_from_a_key_is_the_same_eagerly_and_captured() -> None:
    model = from_module(Tied())
    tokens = torch.tensor([[1, 2, 3]])
    run = lambda p, key: model.apply(p, model.buffers, tokens, key=key, train=True)[0].sum()  # noqa: E731
    eager = ft.value_and_grad(run)(model.params, ft.random.key(0))
    assert_trees_close(ft.jit(ft.value_and_grad(run))(model.params, ft.random.key(0)), eager, rtol=1e-6)
    assert_trees_equal(ft.value_and_grad(run)(model.params, ft.random.key(0)), eager)
    assert not torch.equal(run(model.params, ft.random.key(1)), eager[0])


def test_without_a_key_dropout_is_refused_by_name() -> None:
    model = from_module(Tied())
    tokens = torch.tensor([[1, 2, 3]])
    run = lambda p: model.apply(p, model.buffers, tokens, train=True)[0]  # noqa: E731
    for call in (run, ft.jit(run)):
        with pytest.raises(
            ValueError, match=r"Tied\.apply\(train=True\) draws random numbers for dropout blocks/0/1 with p=0\.5: pass `key=`"
        ):
            call(model.params)
    with ft.random.scope(ft.random.key(0)):
        drawn = run(model.params)
    assert torch.equal(drawn, model.apply(model.params, model.buffers, tokens, key=ft.random.key(0), train=True)[0])
    assert model.apply(model.params, model.buffers, tokens)[0].shape == (1, 3, 7)


def test_hidden_draws_are_refused_in_every_mode() -> None:
    class Noise(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.randn_like(x)

    model = from_module(Noise())
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"Noise\.apply draws random numbers \(aten\.randn_like.*\): pass `key=`"):
        model.apply({}, {}, torch.ones(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.apply({}, {}, torch.ones(2), key=ft.random.key(0))[0].shape == (2,)


# ---- frozen params


def test_frozen_params_stand_among_the_buffers_without_gradient_or_optimizer_state() -> None:
    module = convolutional()
    model = from_module(module, frozen=("0/**", "1/weight"))
    assert tree.paths(model.params) == ["1/bias", "4/bias", "4/weight"]
    assert {"0/weight", "0/bias", "1/weight", "1/running_mean"} <= set(tree.paths(model.buffers))
    state = ft.TrainState.create(params=model.params, tx=ft.optim.adam(1e-2), buffers=model.buffers)
    moments = [path for path in tree.paths(state.opt_state) if path.endswith("weight")]
    assert moments
    assert all(path.endswith("4/weight") for path in moments)
    module.eval()
    module(images()).square().sum().backward()
    gradients = ft.grad(lambda p: model.apply(p, model.buffers, images())[0].square().sum())(model.params)
    expected = {name.replace(".", "/"): p.grad for name, p in module.named_parameters()}
    assert_trees_close(dict(tree.leaves_with_path(gradients)), {path: expected[path] for path in tree.paths(model.params)}, rtol=1e-5)
    _, new = model.apply(model.params, model.buffers, images(), train=True)
    assert new["0"]["weight"] is model.buffers["0"]["weight"]


def test_params_that_require_no_gradient_are_frozen() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].requires_grad_(False)
    model = from_module(module)
    assert tree.paths(model.params) == ["1/bias", "1/weight"]
    assert [p.requires_grad for p in model.to_module(model.params).parameters()] == [False, False, True, True]


def test_frozen_params_follow_the_trained_ones_to_another_dtype() -> None:
    model = from_module(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), frozen="0/*")
    loss = lambda p, x: model.apply(p, model.buffers, x.bfloat16())[0].float().sum()  # noqa: E731
    value, gradients = ft.value_and_grad(loss, precision=ft.Precision(compute=torch.bfloat16))(model.params, torch.ones(3, 2))
    assert torch.isfinite(value)
    assert gradients["1"]["weight"].dtype == torch.float32
    assert model.buffers["0"]["weight"].dtype == torch.float32


def test_a_partition_of_the_params_freezes_as_well() -> None:
    model = from_module(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    frozen, trained = tree.partition(model.params, "0/*")
    loss = lambda p: model.apply(tree.combine(p, frozen), model.buffers, torch.ones(3, 2))[0].sum()  # noqa: E731
    assert tree.paths(ft.grad(loss)(trained)) == ["1/bias", "1/weight"]


def test_a_pattern_that_freezes_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"pattern 'vision/\*\*' matches no leaf; nearest paths: "):
        from_module(nn.Linear(2, 2), frozen="vision/**")


# ---- outputs, the way back, errors


class Record(collections.OrderedDict):  # type: ignore[type-arg]
    """An output class as model libraries have them."""


def test_output_classes_become_trees_with_attributes() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return Record(loss=x.sum(), inner=(Record(a=x), [x]), absent=None)

    model = from_module(Model())
    for run in (model.apply, ft.jit(model.apply)):
        output, _ = run({}, {}, torch.ones(2))
        assert type(output) is Output
        assert list(output) == ["loss", "inner", "absent"]
        assert float(output.loss) == 2
        assert type(output.inner[0]) is Output
        assert tree.paths(output) == ["inner/0/a", "inner/1/0", "loss"]
    with pytest.raises(AttributeError, match="the output has no 'logits'; it has loss, inner, absent"):
        _ = output.logits
    assert tree.map(lambda x: x + 1, output).loss == 3


def test_the_way_back_is_a_module_with_its_own_values_and_ties() -> None:
    module = Tied()
    model = from_module(module)
    params = tree.map(lambda x: x + 1, model.params)
    again = model.to_module(params, {"table": torch.zeros(4)})
    assert type(again) is Tied
    assert again.head.weight is again.embed.weight
    assert torch.equal(again.embed.weight, params["embed"]["weight"])
    assert not again.table.any()
    with torch.no_grad():
        again.embed.weight.zero_()
    assert params["embed"]["weight"].any()
    module.load_state_dict(model.to_module(params).state_dict())
    assert torch.equal(module.blocks[0][0].weight, params["blocks"]["0"]["0"]["weight"])


def test_a_tree_that_does_not_fit_is_named() -> None:
    model = from_module(convolutional())
    params = dict(model.params, extra=torch.ones(1))
    with pytest.raises(tree.StructureError, match=r"params do not fit Sequential: structures differ at the root.*extra"):
        model.apply(params, model.buffers, images())
    with pytest.raises(tree.StructureError, match=r"buffers do not fit Sequential.*1"):
        model.apply(model.params, {}, images())
    with pytest.raises(ValueError, match=r"param weight of LazyLinear has no shape yet"):
        from_module(nn.LazyLinear(3))
    assert repr(from_module(nn.Linear(2, 3))) == "PureModule(Linear, 9 trained values, 0 others)"


def test_a_module_without_data_gives_abstract_params() -> None:
    with torch.device("meta"):
        model = from_module(nn.Linear(2, 3))
    output, _ = model.apply(tree.map(lambda x: torch.ones(x.shape), model.params), {}, torch.ones(1, 2))
    assert_trees_equal(output, torch.full((1, 3), 3.0))
