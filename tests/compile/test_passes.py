"""Each pass says what it did, leaves its argument alone, and changes no number."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import functrain as ft
from functrain.compile.analysis import memory_analysis
from functrain.compile.codegen import generate
from functrain.compile.passes import cleanup, donate, early_updates, fuse_adamw, merge_equal, own_outputs, reuse_buffers
from tests.compile.steps import data, make_step, mlp_loss, mlp_params
from tests.helpers import assert_trees_close, assert_trees_equal

ops = torch.ops.functrain


def captured_step(tx: Any, layers: int = 3, **options: Any) -> Any:
    state = ft.TrainState.create(params=mlp_params(layers=layers), tx=tx)
    lowered = ft.jit(make_step(tx), **options).lower(state, *data())
    return lowered.captured, ft.tree.leaves((state, *data()))


def count(graph: torch.fx.GraphModule, target: Any) -> int:
    return sum(n.target is target for n in graph.graph.nodes)


def run(graph: torch.fx.GraphModule, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    return generate(graph).call([x.clone() for x in leaves])


CHAINS = {
    "adamw": lambda: ft.optim.adamw(1e-2),
    "clipped": lambda: ft.optim.chain(ft.optim.clip_by_global_norm(0.05), ft.optim.adamw(1e-2)),
    "sgd": lambda: ft.optim.sgd(1e-2, momentum=0.9),
}
EVERYTHING = frozenset(range(1000))


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize(
    "make", [cleanup, merge_equal, fuse_adamw, early_updates(EVERYTHING), reuse_buffers(EVERYTHING), own_outputs(EVERYTHING)]
)
def test_a_pass_keeps_numbers_and_its_argument(chain: str, make: Any) -> None:
    graph, leaves = captured_step(CHAINS[chain]())
    text = str(graph.graph)
    after, report = make(graph)
    assert str(graph.graph) == text
    assert report.name == make.name
    # Folding the clip factor multiplies in another place: the last bit may differ there and nowhere else.
    assert_trees_close(
        run(after, leaves), run(graph, leaves), rtol=1e-6 if make is fuse_adamw else 0, atol=1e-9 if make is fuse_adamw else 0
    )


def test_one_fused_operation_for_each_leaf() -> None:
    graph, _ = captured_step(CHAINS["clipped"]())
    assert count(graph, ops.adamw.default) == 6
    after, report = fuse_adamw(graph)
    assert count(after, ops.adamw.default) == 0
    assert count(after, ops.adamw_apply.default) == 6
    assert all("scale" in line and "addition" in line for line in report.details)


def test_the_fused_operation_takes_half_precision_gradients() -> None:
    tx = ft.optim.adamw(1e-2)
    precision = ft.Precision(compute=torch.bfloat16)

    def step(state: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        def loss(params: Any) -> torch.Tensor:
            for name in sorted(params):
                x_ = F.linear(x.to(torch.bfloat16), params[name]["w"], params[name]["b"])
            return ((x_.float() - y) ** 2).mean()

        _, grads = ft.value_and_grad(loss, precision=precision)(state.params)
        return state.apply_gradients(grads, tx)

    state = ft.TrainState.create(params=mlp_params(layers=1), tx=tx)
    lowered = ft.jit(step, donate="state").lower(state, *data())
    fused = [n for n in lowered.graph.graph.nodes if n.target is ops.adamw_apply_.default]
    assert len(fused) == 2
    assert {n.args[3].meta["val"].dtype for n in fused} == {torch.bfloat16}


def test_donation_writes_in_place() -> None:
    graph, leaves = captured_step(CHAINS["adamw"]())
    fused, _ = fuse_adamw(cleanup(graph)[0])
    after, report = donate(EVERYTHING)(early_updates(EVERYTHING)(fused)[0])
    assert count(after, ops.adamw_apply_.default) == 6
    assert report.changed == 6
    assert any("state" in line for line in report.details)
    assert_trees_equal(run(after, leaves), run(fused, leaves))
    untouched, _ = donate(frozenset())(fused)
    assert count(untouched, ops.adamw_apply_.default) == 0


def test_updates_move_up_behind_their_gradients() -> None:
    graph, _ = captured_step(CHAINS["adamw"](), layers=4)
    fused, _ = fuse_adamw(cleanup(graph)[0])
    after, report = early_updates(EVERYTHING)(fused)
    order = [n for n in after.graph.nodes if n.op == "call_function"]
    last_backward = max(i for i, n in enumerate(order) if n.meta["phase"] == "backward")
    early = [i for i, n in enumerate(order) if n.target is ops.adamw_apply.default and i < last_backward]
    assert len(early) >= 4
    assert report.changed > 0


def test_early_updates_need_less_memory() -> None:
    width, layers = 64, 6
    tx = ft.optim.adamw(1e-2)
    state = ft.TrainState.create(params=mlp_params(width=width, layers=layers), tx=tx)
    graph = ft.jit(make_step(tx)).lower(state, *data(width=width)).captured
    fused, _ = fuse_adamw(cleanup(graph)[0])
    state_leaves = frozenset(range(len(ft.tree.leaves(state))))
    late = donate(state_leaves)(fused)[0]
    early = donate(state_leaves)(early_updates(state_leaves)(fused)[0])[0]
    saved = memory_analysis(late, state_leaves).peak - memory_analysis(early, state_leaves).peak
    assert saved >= (layers - 2) * width * width * 4


def test_buffers_are_reused_by_pointwise_operations() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(torch.sin(x) * 2 + 1) * 3

    lowered = ft.jit(function).lower(torch.ones(100))
    allocating = [n for n in lowered.graph.graph.nodes if n.op == "call_function" and "out" not in n.kwargs]
    assert [str(n.target) for n in allocating] == ["aten.sin.default"]
    assert_trees_equal(ft.jit(function)(torch.ones(100)), function(torch.ones(100)))


def test_a_buffer_that_is_read_again_is_not_reused() -> None:
    def function(x: torch.Tensor) -> Any:
        y = torch.sin(x)
        z = y.view(2, -1)
        w = y * 2
        return w.sum() + z[0].sum(), torch.cos(y)

    x = ft.random.normal(ft.random.key(0), (8,))
    assert_trees_equal(ft.jit(function)(x), function(x))


def test_a_buffer_whose_parts_are_read_again_is_not_reused() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        parts = y.split(2)
        return torch.cos(y) + torch.cat([torch.sin(part) for part in parts])

    x = ft.random.normal(ft.random.key(0), (6,))
    assert_trees_equal(ft.jit(function)(x), function(x))


def test_reading_through_another_layout_is_not_overwritten() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x)
        return y + y.t()

    x = ft.random.normal(ft.random.key(0), (5, 5))
    assert_trees_equal(ft.jit(function)(x), function(x))


def test_cleanup_drops_what_changes_nothing() -> None:
    graph, _ = captured_step(CHAINS["adamw"]())
    after, report = cleanup(graph)
    assert report.changed > 0
    assert count(after, torch.ops.aten.detach.default) == 0


def test_a_norm_that_is_also_a_metric_is_computed_once() -> None:
    tx = CHAINS["clipped"]()
    plain = make_step(tx)

    def step(state: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        _, grads = ft.value_and_grad(mlp_loss)(state.params, x, y)
        return state.apply_gradients(grads, tx), ft.tree.global_norm(grads)

    state = ft.TrainState.create(params=mlp_params(), tx=tx)
    leaves = len(ft.tree.leaves(state.params))
    lowered = ft.jit(step).lower(state, *data())
    norm = torch.ops.aten.linalg_vector_norm.default
    assert (count(lowered.captured, norm), count(lowered.graph, norm)) == (2 * (leaves + 1), leaves + 1)
    assert_trees_close(ft.jit(step)(state, *data())[0], plain(state, *data())[0], rtol=1e-6, atol=1e-9)


def test_equal_results_have_memory_of_their_own() -> None:
    one, two, three = ft.jit(lambda x: (x * 2, x * 2, x * 2.0))(torch.ones(3))
    assert len({t.data_ptr() for t in (one, two, three)}) == 3
    zeros = ft.jit(lambda x: (x + 0.0, torch.copysign(x, torch.full((), -0.0)), torch.copysign(x, torch.full((), 0.0))))(torch.ones(3))
    assert_trees_equal(zeros, (torch.ones(3), -torch.ones(3), torch.ones(3)))


def test_own_passes_can_be_given() -> None:
    step = ft.jit(lambda x: (x + 1).detach() * 2, passes=(cleanup,))
    assert float(step(torch.tensor(1.0))) == 4.0
    assert [p.name for p in step.report().compilations[0].passes] == ["own_outputs", "cleanup"]
    with pytest.raises(ValueError, match="passes='fast'"):
        ft.jit(lambda x: x, passes="fast")
