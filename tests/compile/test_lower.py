"""What a step will cost is told before anything runs, and agrees with what is measured."""

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import functrain as ft
from tests.compile.steps import data, make_step, mlp_params


def test_text_shows_shapes_lines_and_paths() -> None:
    tx = ft.optim.adamw(1e-3)
    text = ft.jit(make_step(tx)).lower(ft.TrainState.create(params=mlp_params(), tx=tx), *data()).as_text()
    assert "f32[8, 8] = input state/params/layer0/w" in text
    assert "forward, compile/steps.py" in text
    assert "backward, compile/steps.py" in text
    assert text.splitlines()[-1].startswith("return ")


def test_memory_by_liveness_of_a_chain() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        z = y @ y
        return (z @ z).sum()

    analysis = ft.jit(function).lower(torch.ones(16, 16)).memory_analysis()
    matrix = 16 * 16 * 4
    assert (analysis.arguments, analysis.outputs, analysis.temporaries, analysis.peak) == (matrix, 4, 2 * matrix, 3 * matrix)
    assert "test_lower.py" in analysis.peak_source


def test_donated_inputs_leave_the_peak_at_their_last_use() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        z = y @ y
        return z @ z

    kept = ft.jit(function).lower(torch.ones(16, 16)).memory_analysis()
    gone = ft.jit(function, donate="x").lower(torch.ones(16, 16)).memory_analysis()
    assert kept.peak - gone.peak == 16 * 16 * 4


class Counting(torch.utils._python_dispatch.TorchDispatchMode):
    """Measures the largest sum of storages alive that were made while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in args if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in {*self.known, *given}:
                self._born(x.untyped_storage())
        return result

    def _born(self, storage: Any) -> None:
        import weakref  # noqa: PLC0415

        size, name = storage.nbytes(), storage._cdata
        self.live += size
        self.peak = max(self.peak, self.live)

        def dies() -> None:
            self.live -= size
            self.known.pop(name, None)

        self.known[name] = weakref.finalize(storage, dies)


def test_planned_temporaries_are_what_a_run_allocates() -> None:
    tx = ft.optim.adamw(1e-3)
    state = ft.TrainState.create(params=mlp_params(width=32, layers=4), tx=tx)
    step = ft.jit(make_step(tx))
    inputs = (state, *data(width=32, rows=64))
    step(*inputs)
    planned = step.lower(*inputs).memory_analysis().temporaries
    gc.collect()
    counting = Counting()
    with counting:
        kept = step(*inputs)
    assert kept is not None
    assert counting.peak == pytest.approx(planned, rel=0.02)


def test_flops_of_matrix_products_forward_and_backward() -> None:
    w, x = torch.ones(16, 32), torch.ones(8, 32)
    forward = 2 * 8 * 16 * 32
    step = ft.jit(ft.grad(lambda w, x: F.linear(x, w).square().sum()))
    cost = step.lower(w, x).cost_analysis()
    assert cost.flops == 2 * forward  # the input's gradient is not needed
    assert cost.bytes_accessed > 3 * w.nbytes
    assert cost.by_operator[0][0].startswith("aten.mm")


def test_release_over_keeps_small_values_and_says_so() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        small = torch.sin(x[:2]).sum()
        big = torch.sin(x) @ x
        return big * small

    x = torch.ones(256)
    every = ft.jit(function)
    some = ft.jit(function, release_over=512)
    assert torch.equal(every(x), some(x))
    report = some.report().compilations[0]
    assert {r.nbytes >= 512 for r in report.released} == {True}
    assert len(report.kept) > 0
    assert every.report().compilations[0].kept == ()
    assert "test_lower.py" in some.report().released()


def test_eval_shape_allocates_nothing() -> None:
    shapes = ft.eval_shape(lambda key: {"w": ft.random.normal(key, (1 << 20, 1 << 20)), "n": 3}, ft.random.key(0))
    assert shapes["w"].shape == (1 << 20, 1 << 20)
    assert shapes["w"].nbytes == 4 << 40
    assert shapes["n"] == 3


def test_report_prints() -> None:
    step = ft.jit(lambda x: torch.sin(x) * 2)
    step(torch.ones(10))
    text = str(step.report())
    assert "compilation 0: first call" in text
    assert "pass reuse_buffers: 1 places" in text


def test_remat_lowers_the_peak_of_a_captured_gradient() -> None:
    def block(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(F.gelu(torch.sin(x @ w))) + x

    def loss(wrap: Any) -> Any:
        def function(ws: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            for w in ws:
                x = wrap(block)(w, x)
            return x.square().mean()

        return ft.jit(ft.grad(function))

    ws, x = [torch.eye(8) for _ in range(6)], torch.ones(1024, 8)
    plain, saving = loss(lambda f: f), loss(ft.remat)
    assert torch.equal(plain(ws, x)[0], saving(ws, x)[0])
    peaks = [step.lower(ws, x).memory_analysis().peak for step in (plain, saving)]
    assert peaks[1] < 0.6 * peaks[0]
    products = [sum(n.target is torch.ops.aten.mm.default for n in s.lower(ws, x).graph.graph.nodes) for s in (plain, saving)]
    assert products[1] == products[0] + 6
