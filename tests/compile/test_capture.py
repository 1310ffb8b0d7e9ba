"""A function becomes one graph: with the user's lines, without mutation, with one-device meaning."""

import inspect
import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import functrain as ft
from functrain.compile.graph import is_mutable
from tests.compile.steps import data, make_step, mlp_loss, mlp_params
from tests.helpers import assert_trees_close, assert_trees_equal


def mutations(graph: torch.fx.GraphModule) -> list[str]:
    return [str(n.target) for n in graph.graph.nodes if n.op == "call_function" and is_mutable(n)]


def test_the_whole_step_is_one_graph() -> None:
    tx = ft.optim.adamw(1e-3)
    state = ft.TrainState.create(params=mlp_params(), tx=tx)
    graph = ft.jit(make_step(tx)).lower(state, *data()).captured
    phases = {n.meta["phase"] for n in graph.graph.nodes if n.op == "call_function"}
    assert phases == {"forward", "backward", "update"}
    assert {n.op for n in graph.graph.nodes} <= {"placeholder", "call_function", "get_attr", "output"}
    assert not mutations(graph)


def test_backward_operations_carry_the_line_of_their_forward() -> None:
    tx = ft.optim.sgd(0.1)
    graph = ft.jit(make_step(tx)).lower(ft.TrainState.create(params=mlp_params(), tx=tx), *data()).captured
    lines, first = inspect.getsourcelines(mlp_loss)
    gelu_line = first + next(i for i, text in enumerate(lines) if "F.gelu" in text)
    backward = [n for n in graph.graph.nodes if n.target is torch.ops.aten.gelu_backward.default]
    assert len(backward) == 2
    for node in backward:
        assert (node.meta["source"].line, node.meta["source"].function) == (gelu_line, "mlp_loss")


def test_every_operation_has_a_line() -> None:
    tx = ft.optim.chain(ft.optim.clip_by_global_norm(1.0), ft.optim.adamw(1e-3))
    graph = ft.jit(make_step(tx)).lower(ft.TrainState.create(params=mlp_params(), tx=tx), *data()).captured
    nameless = [n.name for n in graph.graph.nodes if n.op == "call_function" and n.meta.get("source") is None]
    assert not nameless


def shift_labels(x: torch.Tensor) -> torch.Tensor:
    shifted = torch.zeros_like(x)
    shifted[:, 1:] = x[:, :-1].clone()
    shifted[:, 0] = 7.0
    return shifted * 2


def write_through_views(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    row = y.view(-1)
    row[::2] += 1
    y.t()[0].mul_(3)
    return y + row.view_as(y)


def fill_and_mask(x: torch.Tensor) -> torch.Tensor:
    mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu_(1)
    y = x.new_empty(x.shape).copy_(x)
    y.masked_fill_(x > 0, 0.5)
    return torch.softmax(mask[: x.shape[0]] + y, -1)


@pytest.mark.parametrize("function", [shift_labels, write_through_views, fill_and_mask])
def test_writes_into_own_tensors_are_made_functional(function: Any) -> None:
    x = ft.random.normal(ft.random.key(0), (3, 5))
    step = ft.jit(function)
    lowered = step.lower(x)
    assert not mutations(lowered.captured)
    before = x.clone()
    assert_trees_equal(step(x), function(before))
    assert_trees_equal(x, before)
    assert any(n.meta["source"].function == function.__name__ for n in lowered.captured.graph.nodes if n.op == "call_function")


def test_gradients_flow_through_writes() -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        y[:, 1:] = (x * w)[:, :-1]
        return (y**2).sum()

    w, x = torch.full((5,), 0.5), ft.random.normal(ft.random.key(1), (3, 5))
    assert_trees_equal(ft.jit(ft.grad(loss))(w, x), ft.grad(loss)(w, x))


def test_constants_are_folded_and_kept() -> None:
    table = torch.arange(6.0).view(2, 3)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x + (table * 2).sum(0) + torch.tensor([1.0, 2.0, 3.0])

    lowered = ft.jit(function).lower(torch.zeros(3))
    assert_trees_equal(ft.jit(function)(torch.zeros(3)), function(torch.zeros(3)))
    assert [n.target for n in lowered.captured.graph.nodes if n.op == "call_function"].count(torch.ops.aten.sum.dim_IntList) == 0


def test_tensors_computed_from_constants_may_be_written() -> None:
    table = torch.eye(3)

    def function(x: torch.Tensor) -> torch.Tensor:
        mask = table @ table
        mask.add_(1)
        mask[0].mul_(2)
        return x @ mask

    x = torch.arange(3.0)
    assert_trees_equal(ft.jit(function)(x), function(x))
    assert_trees_equal(table, torch.eye(3))


def test_operations_with_several_results() -> None:
    def function(x: torch.Tensor) -> Any:
        values, indices = torch.topk(x, 2)
        a, b = x.chunk(2)
        return {"top": values, "at": indices, "halves": [a * b, a.sum()], "name": "x", "n": 3, "none": None}

    x = ft.random.normal(ft.random.key(0), (4,))
    assert_trees_equal(ft.jit(function)(x)["top"], function(x)["top"])
    assert ft.jit(function)(x)["name"] == "x"
    assert ft.jit(function)(x)["none"] is None


def test_autocast_is_captured() -> None:
    def function(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = F.linear(x, w)
        return y.float().square().mean()

    w, x = ft.random.normal(ft.random.key(0), (8, 8)), ft.random.normal(ft.random.key(1), (4, 8))
    step = ft.jit(ft.value_and_grad(function))
    assert_trees_equal(step(w, x), ft.value_and_grad(function)(w, x))
    assert "bf16[4, 8]" in step.lower(w, x).as_text()


def test_ambient_autocast_is_part_of_the_key() -> None:
    step = ft.jit(F.linear)
    x, w = torch.ones(2, 4), torch.ones(4, 4)
    assert step(x, w).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert step(x, w).dtype == torch.bfloat16


UNARY = [
    torch.sin,
    torch.exp,
    F.gelu,
    lambda x: x * 0.5,
    lambda x: x.t().contiguous().t(),
    lambda x: x.reshape(-1).view(x.shape),
    torch.relu,
]
UNARY += [lambda x: torch.cat([torch.sin(part) for part in x.split(3)]), lambda x: torch.stack([a + 1 for a in x.unbind(1)], 1)]
UNARY += [lambda x: torch.cat(x.chunk(2)[::-1]), lambda x: x[:, ::2].repeat(1, 2), lambda x: x.expand(2, 4, 4)[1]]
BINARY = [torch.add, torch.mul, torch.sub, torch.maximum, lambda a, b: torch.where(a > b, a, b), lambda a, b: a @ b.t()]
IN_PLACE = [lambda a, b: a.add_(b), lambda a, b: a[1:].mul_(0.5), lambda a, b: a.t()[0].copy_(b[:, 0]), lambda a, b: a.clamp_(max=2.0)]


@st.composite
def programs(draw: Any) -> list[tuple[str, int, int, int]]:
    size = draw(st.integers(3, 12))
    kinds = st.sampled_from(["unary", "binary", "in_place"])
    return [(draw(kinds), draw(st.integers(0, 9)), draw(st.integers(0, 50)), draw(st.integers(0, 50))) for _ in range(size)]


def run_program(program: list[tuple[str, int, int, int]], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    values = [x.clone() for x in inputs]
    for kind, which, i, j in program:
        a, b = values[i % len(values)], values[j % len(values)]
        if kind == "unary":
            values.append(UNARY[which % len(UNARY)](a))
        elif kind == "binary":
            values.append(BINARY[which % len(BINARY)](a, b))
        else:
            IN_PLACE[which % len(IN_PLACE)](a, b.clone())
    return values[-3:]


@settings(max_examples=60, deadline=None)
@given(programs(), st.booleans())
def test_random_programs_with_views_and_writes_agree_bitwise(program: Any, donated: bool) -> None:
    inputs = [ft.random.normal(ft.random.key(i), (4, 4)) for i in range(3)]
    expected = run_program(program, inputs)

    def function(state: Any) -> Any:
        return run_program(program, state)

    given_state = [x.clone() for x in inputs]
    actual = ft.jit(function, donate="state" if donated else ())(given_state)
    assert_trees_equal(actual, expected)
    if not donated:
        assert_trees_equal(given_state, inputs)


def test_batch_norm_statistics_are_results() -> None:
    def function(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> Any:
        mean, variance = mean.clone(), variance.clone()
        return F.batch_norm(x, mean, variance, training=True), mean, variance

    args = (ft.random.normal(ft.random.key(0), (6, 3)), torch.zeros(3), torch.ones(3))
    step = ft.jit(function)
    assert_trees_equal(step(*args), function(*args))
    assert not mutations(step.lower(*args).captured)


def test_capture_is_linear_in_layers() -> None:
    tx = ft.optim.adamw(1e-3)

    def nodes(layers: int) -> int:
        state = ft.TrainState.create(params=mlp_params(layers=layers), tx=tx)
        return len(ft.jit(make_step(tx)).lower(state, *data()).captured.graph.nodes)

    assert nodes(9) - nodes(6) == nodes(6) - nodes(3)


def test_ten_steps_equal_eager() -> None:
    tx = ft.optim.chain(ft.optim.clip_by_global_norm(0.1), ft.optim.adamw(1e-2, weight_decay=0.1))
    train_step = make_step(tx)
    step = ft.jit(train_step, donate="state")
    one = ft.TrainState.create(params=mlp_params(), tx=tx)
    two = ft.tree.map(torch.clone, one)
    for i in range(10):
        one, _ = train_step(one, *data(seed=i))
        two, _ = step(two, *data(seed=i))
    assert_trees_close(two, one)


def test_getitem_of_a_tuple_result_is_a_node_of_its_own() -> None:
    graph = ft.jit(lambda x: torch.sort(x)[0] + 1).lower(torch.ones(4)).captured
    assert sum(n.target is operator.getitem for n in graph.graph.nodes) == 1
