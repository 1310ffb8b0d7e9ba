"""What `ft.jit` sees of an optimizer: one fused operation and one addition a leaf, and scalars once for all leaves."""

import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import functrain as ft
from functrain import optim
from functrain.compile.passes import fuse_adamw

ADAMW, ADD, MUL = torch.ops.functrain.adamw.default, torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor


def captured(tx: optim.GradientTransformation, leaves: int) -> Any:
    params = {f"w{i}": torch.ones(3) for i in range(leaves)}

    def step(grads: Any, params: Any, state: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    return ft.jit(step).lower(params, params, tx.init(params)).captured


def counts(graph: Any) -> tuple[Counter, int]:
    """(operations on leaves by target, number of operations on scalars)."""
    nodes = [n for n in graph.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    scalar = [n for n in nodes if isinstance(n.meta["val"], torch.Tensor) and n.meta["val"].shape != (3,)]
    return Counter(n.target for n in nodes if n not in scalar), len(scalar)


SCHEDULE = optim.warmup_cosine_decay_schedule(0.0, 0.01, 5, 20)
MAKERS: dict[str, Callable[[], optim.GradientTransformation]] = {
    "adam": lambda: optim.adam(0.01),
    "adamw": lambda: optim.adamw(0.01, weight_decay=0.1),
    "adamw, schedule, mask": lambda: optim.adamw(SCHEDULE, weight_decay=0.1, mask={"w0": False, "**": True}),
    "adamw, tensor": lambda: optim.adamw(torch.tensor(0.01)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_leaf_is_one_fused_operation_and_one_addition(name: str) -> None:
    (few, few_scalars), (many, many_scalars) = (counts(captured(MAKERS[name](), leaves)) for leaves in (2, 7))
    assert few == {ADAMW: 2, ADD: 2}
    assert many == {ADAMW: 7, ADD: 7}
    assert few_scalars == many_scalars


def test_clipping_adds_one_multiplication_a_leaf_by_one_shared_scalar() -> None:
    graph = captured(optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.01)), 5)
    assert counts(graph)[0] == {MUL: 5, ADAMW: 5, ADD: 5}
    factors = {n.args[1] for n in graph.graph.nodes if n.target is MUL and n.meta["val"].shape == (3,)}
    assert [(f.meta["val"].shape, f.meta["val"].dtype) for f in factors] == [((), torch.float32)]


@pytest.mark.parametrize("name", MAKERS)
def test_the_addition_of_every_leaf_is_fused(name: str) -> None:
    """Adam without decay as well: it is given the params, so their addition is the operation's own."""
    fused, _ = fuse_adamw(captured(MAKERS[name](), 3))
    targets = Counter(n.target for n in fused.graph.nodes)
    assert targets[torch.ops.functrain.adamw_apply.default] == 3
    assert targets[ADAMW] == 0
