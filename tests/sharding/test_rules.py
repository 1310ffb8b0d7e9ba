"""Each row of `sharding_rules.RULES`: arguments split as it says give, without a message, the one device's result split as it says."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch

import functrain as ft
from functrain import P, Sharding
from functrain.compile import sharding_rules
from functrain.compile.lower import Options
from functrain.compile.planned import PlannedJit
from functrain.compile.sharding_rules import PARTIAL, RULES, Row, rows_for
from functrain.compile.values import Value
from functrain.kernels.adamw import coefficients
from tests.helpers import assert_trees_close

aten, ops = torch.ops.aten, torch.ops.functrain
ATTENTION, ATTENTION_BACKWARD = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)


class Case(NamedTuple):
    """An operation, its tensor arguments in order, and the other arguments (in the tensors' places: None)."""

    target: Any
    tensors: Sequence[torch.Tensor]
    args: tuple[Any, ...] = ()  # after the tensors
    mask: bool = False  # whether the last tensor is the keyword `attn_mask`

    def call(self, *tensors: torch.Tensor) -> Any:
        """The operation on these tensors."""
        if self.mask:
            return self.target(*tensors[:-1], *self.args, attn_mask=tensors[-1])
        return self.target(*tensors, *self.args)

    def rows(self) -> list[Row]:
        """What the rule says, without the row that leaves all whole."""
        values: Any = [Value(None, (), tuple(x.shape)) for x in self.tensors]  # type: ignore[arg-type]
        rows = rows_for(self.target, values, (*self.tensors[: len(self.tensors) - self.mask], *self.args))
        return [row for row in rows or [] if any(split is not None for split in row.inputs)]


def make(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def attention(mask: torch.Tensor | None, causal: bool) -> dict[str, Case]:
    """Forward and backward."""
    q, k, v = (make(2, 4, 6, 8, seed=seed) for seed in range(3))
    extra = [] if mask is None else [mask]
    forward = Case(ATTENTION, [q, k, v, *extra], (0.0, causal), mask is not None)
    out, logsumexp = forward.call(*forward.tensors)
    back = Case(ATTENTION_BACKWARD, [make(2, 4, 6, 8, seed=5), q, k, v, out, logsumexp, *extra], (0.0, causal), mask is not None)
    return {"forward": forward, "backward": back}


def attention_cases() -> dict[str, Case]:
    masks = {
        "causal": (None, True),
        "full": (None, False),
        "mask of each row": (make(2, 1, 6, 6), False),
        "mask of each head": (make(1, 4, 6, 6), False),
        "mask of all": (make(6, 6), False),
    }
    return {f"attention {way}, {name}": case for name, given in masks.items() for way, case in attention(*given).items()}


KEYS = ft.random.split(ft.random.key(3), 4)
WINDOW = ((6, 2), (0, 0), (6, 2))
CASES: dict[str, Case] = {
    **attention_cases(),
    "cumsum": Case(aten.cumsum.default, [make(4, 6, 2)], (1,)),
    "flip": Case(aten.flip.default, [make(4, 6, 2)], ([1],)),
    "roll": Case(aten.roll.default, [make(4, 6, 2)], ([1], [-1])),
    "lift": Case(aten.lift_fresh_copy.default, [make(4, 6)]),
    "erf": Case(aten.erf.default, [make(4, 6)]),
    "adamw": Case(ops.adamw.default, [*(make(4, 6, seed=i).abs() for i in range(4)), coefficients(1e-3, b1=0.9, b2=0.95, step=3)]),
    "erfinv": Case(ops.erfinv.default, [make(4, 6).tanh()]),
    "fold in": Case(ops.threefry_fold_in.default, [KEYS, torch.arange(4)]),
    "bits": Case(ops.threefry_bits.default, [KEYS], (*WINDOW, 32)),
    "uniform": Case(ops.threefry_uniform.default, [KEYS], (*WINDOW, torch.float32, -1.0, 2.0)),
    "normal": Case(ops.threefry_normal.default, [KEYS], (*WINDOW, torch.float32)),
    "bernoulli": Case(ops.threefry_bernoulli.default, [KEYS], (*WINDOW, 0.3)),
    "integers": Case(ops.threefry_integers.default, [KEYS], (*WINDOW, 3, 11, 32)),
    "slice": Case(aten.slice.Tensor, [make(8, 6, 2)], (1, 1, 4)),
    "slice of every second": Case(aten.slice.Tensor, [make(8, 6, 2)], (0, 1, 8, 2)),
    "bmm": Case(aten.bmm.default, [make(2, 4, 6), make(2, 6, 8)]),
    "sort": Case(aten.sort.default, [make(4, 6, 2)], (1,)),
    "topk": Case(aten.topk.default, [make(4, 6, 2)], (2, 1)),
}
ROWS = [(name, i) for name, case in CASES.items() for i in range(len(case.rows()))]


def spec(split: Any) -> P:
    return P(*[None] * split, "a") if isinstance(split, int) else P()


def check(case: Case, row: Row) -> None:
    mesh = ft.make_mesh({"a": 2}, simulate=True)
    expected = ft.tree.leaves(case.call(*case.tensors))
    arrays = [ft.device_put(x, Sharding(mesh, spec(split))) for x, split in zip(case.tensors, row.inputs, strict=True)]
    run = PlannedJit(_listed(case), frozenset(), frozenset(), Options("eager", "auto", 0), ft.Plan(mesh), out_specs=[None] * len(expected))
    counts = run.lower(*arrays).partition.counts()  # type: ignore[attr-defined]
    assert counts == ({"all_reduce[a]": 1} if PARTIAL in row.outputs else {}), (row, counts)
    found = run(*arrays)
    assert [x.sharding.spec for x in found] == [spec(split) for split in row.outputs]
    assert_trees_close([x.full() for x in found], expected, rtol=1e-6, atol=1e-6)


def _listed(case: Case) -> Callable[..., list[torch.Tensor]]:
    return lambda *tensors: ft.tree.leaves(case.call(*tensors))


@pytest.mark.parametrize(("name", "i"), ROWS)
def test_a_row_is_right(name: str, i: int) -> None:
    check(CASES[name], CASES[name].rows()[i])


def test_every_rule_has_cases_with_rows() -> None:
    assert set(RULES) == {case.target for case in CASES.values()}
    assert {name for name, case in CASES.items() if not case.rows()} == set()


def test_a_wrong_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Row((1,), (1,))
    monkeypatch.setitem(sharding_rules.RULES, aten.cumsum.default, lambda values, args: [wrong])
    with pytest.raises(AssertionError, match="differ"):
        check(CASES["cumsum"], wrong)


def test_elementwise_operations_that_dtensor_does_not_know_split_by_the_results_dimensions() -> None:
    """`hypot` of [4, 1, 6] and [2, 6]: dimension 0 of the result is that of one argument only."""
    case = Case(aten.hypot.default, [make(4, 1, 6), make(2, 6)])
    values: Any = [Value(None, (), tuple(x.shape)) for x in case.tensors]  # type: ignore[arg-type]
    rows = [row for row in sharding_rules.pointwise_rows(case.target, values) or [] if any(s is not None for s in row.inputs)]
    assert rows == [Row((0, None), (0,)), Row((None, 0), (1,)), Row((2, 1), (2,))]
    for row in rows:
        check(case, row)
