"""Fused AdamW as operators: many leaves, errors, what the compiler relies on, derivatives, batches."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from functrain.kernels import adamw_torch
from functrain.kernels.adamw import coefficients
from tests.adamw_cases import GRADS, OPERATORS, USUAL, leaf
from tests.helpers import assert_trees_close, assert_trees_equal

# ---- many leaves


def many(dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    """Columns (params, mus, nus, grads) of leaves that differ in shape and dtype, an empty and a transposed one among them."""
    rows = [
        leaf(size, dtype, grad, seed)
        for seed, (size, grad) in enumerate([(3, GRADS[0]), (0, GRADS[0]), (40_000, GRADS[2]), (17, GRADS[2])])
    ]
    rows.append(tuple(x.t() for x in leaf((4, 6))))
    rows.append(leaf(9, torch.bfloat16))
    return [list(column) for column in zip(*rows, strict=True)]


def alike(dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    """Columns of leaves that share dtype and layout, and differ in shape."""
    rows = [leaf(shape, dtype, torch.bfloat16, seed) for seed, shape in enumerate([(3, 5), 40_000, (), (17,)])]
    return [list(column) for column in zip(*rows, strict=True)]


def crossed() -> list[list[Tensor]]:
    """As `alike`, but one gradient lies in memory in another order than its parameter."""
    params, mus, nus, grads = alike()
    return [params, mus, nus, [grads[0].t().contiguous().t(), *grads[1:]]]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("half", [None, torch.bfloat16])
@pytest.mark.parametrize("leaves", [many, alike, crossed])
def test_many_leaves_at_once_are_each_leaf_alone(leaves: Callable, half: torch.dtype | None, threads: int) -> None:
    torch.set_num_threads(threads)
    params, mus, nus, grads = leaves()
    models = [] if half is None else [torch.zeros(x.shape, dtype=half) for x in params]
    c = coefficients(**USUAL)
    expected = [OPERATORS.adamw_apply(*row, c) for row in zip(params, mus, nus, grads, strict=True)]
    assert OPERATORS.adamw_apply_many_(params, mus, nus, grads, c, models) is None
    assert_trees_equal([params, mus, nus], [list(column) for column in zip(*expected, strict=True)])
    assert_trees_equal(models, [x.to(half) for x in params] if half else [])


def test_no_leaves_are_no_work() -> None:
    OPERATORS.adamw_apply_many_([], [], [], [], coefficients(**USUAL), [])


@pytest.mark.parametrize("leaves", [many, alike])
def test_a_shape_that_differs_in_a_list_is_named(leaves: Callable) -> None:
    params, mus, nus, grads = leaves()
    mus[1] = torch.zeros(11)
    with pytest.raises(ValueError, match=r"mu \[11\]"):
        OPERATORS.adamw_apply_many_(params, mus, nus, grads, coefficients(**USUAL), [])


def test_lists_of_different_lengths_are_refused() -> None:
    params, mus, nus, grads = many()
    with pytest.raises(ValueError, match="different lengths"):
        OPERATORS.adamw_apply_many_(params, mus, nus, grads[:-1], coefficients(**USUAL), [])
    with pytest.raises(ValueError, match="different lengths"):
        OPERATORS.adamw_apply_many_(params, mus, nus, grads, coefficients(**USUAL), [params[0].bfloat16()])


# ---- errors


def test_a_shape_that_differs_is_named() -> None:
    param, mu, nu, grad = leaf((2, 3))
    c = coefficients(**USUAL)
    for call in (
        lambda: OPERATORS.adamw(grad, mu.t(), nu, param, c),
        lambda: OPERATORS.adamw_apply_(param, mu.t(), nu, grad, c),
        lambda: OPERATORS.adamw_apply_(param.bfloat16(), mu.t(), nu, grad, c),
    ):
        with pytest.raises(ValueError, match=r"param \[2, 3\], mu \[3, 2\]"):
            call()
    with pytest.raises(ValueError, match=r"model \[1\]"):
        OPERATORS.adamw_apply_(param, mu, nu, grad, c, torch.zeros(1, dtype=torch.bfloat16))


@pytest.mark.parametrize("wrong", [coefficients(**USUAL)[:8], coefficients(**USUAL).float(), coefficients(**USUAL)[None]])
def test_coefficients_of_another_form_are_refused(wrong: Tensor) -> None:
    param, mu, nu, grad = leaf(3)
    with pytest.raises(ValueError, match="9 float64 values"):
        OPERATORS.adamw(grad, mu, nu, param, wrong)


# ---- what the compiler relies on

EXAMPLES = {
    "adamw": lambda p, m, v, g, c: (g, m, v, p, c),
    "adamw_apply": lambda p, m, v, g, c: (p, m, v, g, c),
    "adamw_apply_": lambda p, m, v, g, c: (p, m, v, g, c, p.bfloat16()),
    "adamw_apply_many_": lambda p, m, v, g, c: ([p, p.clone()], [m, m.clone()], [v, v.clone()], [g, g], c, [p.bfloat16(), p.half()]),
}


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("layout", [torch.clone, Tensor.t], ids=["contiguous", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_opcheck(name: str, layout: Callable, dtype: torch.dtype) -> None:
    arguments = EXAMPLES[name](*(layout(x) for x in leaf((5, 7), dtype)), coefficients(**USUAL))
    results = torch.library.opcheck(getattr(OPERATORS, name).default, arguments)
    assert set(results.values()) == {"SUCCESS"}


def test_opcheck_of_a_parameter_that_requires_grad() -> None:
    param, mu, nu, grad = leaf((5, 7), torch.float64)
    torch.library.opcheck(OPERATORS.adamw.default, (grad, mu, nu, param.requires_grad_(), coefficients(**USUAL)))


def test_in_place_operators_survive_dead_code_elimination_and_functional_ones_do_not() -> None:
    graph = torch.fx.Graph()
    inputs = tuple(graph.placeholder(name) for name in ("param", "mu", "nu", "grad", "coefficients"))
    writes = graph.call_function(OPERATORS.adamw_apply_.default, inputs)
    writes_many = graph.call_function(OPERATORS.adamw_apply_many_.default, (*([x] for x in inputs[:4]), inputs[4], []))
    graph.call_function(OPERATORS.adamw_apply.default, inputs)
    graph.output(inputs[0])
    graph.eliminate_dead_code()
    assert [node for node in graph.nodes if node.op == "call_function"] == [writes, writes_many]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_the_operators_compile(backend: str) -> None:
    def step(param: Tensor, mu: Tensor, nu: Tensor, grad: Tensor, c: Tensor, model: Tensor) -> Tensor:
        update, _, _ = OPERATORS.adamw(grad * 2, mu, nu, param, c)
        OPERATORS.adamw_apply_(param, mu, nu, grad, c, model)
        OPERATORS.adamw_apply_many_([param], [mu], [nu], [grad], c, [])
        return update + param

    tensors, c = leaf((8, 16)), coefficients(**USUAL)
    results = []
    for run in (step, torch.compile(step, backend=backend, fullgraph=True)):
        mine = [*(x.clone() for x in tensors), c, torch.zeros(8, 16, dtype=torch.bfloat16)]
        results.append([run(*mine), *mine])
    assert_trees_close(results[1], results[0], rtol=1e-6)
    assert not torch.equal(results[1][1], tensors[0])


def test_writing_in_place_is_seen_by_autograd() -> None:
    param, mu, nu, grad = leaf(10)
    x = torch.ones(10, requires_grad=True)
    product = (x * param).sum()
    OPERATORS.adamw_apply_(param, mu, nu, grad, coefficients(**USUAL))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def objective(operator: Callable) -> Callable:
    return lambda *arguments: sum(x.square().sum() for x in operator(*arguments))


@pytest.mark.parametrize("argument", range(5))
def test_derivatives_are_those_of_the_torch_operations(argument: int) -> None:
    param, mu, nu, grad = leaf(6, torch.float64)
    arguments = (grad, mu, nu, param, coefficients(**USUAL))
    expected = torch.func.grad(objective(adamw_torch.adamw), argument)(*arguments)
    assert expected.abs().max() > 0
    assert_trees_close(torch.func.grad(objective(OPERATORS.adamw), argument)(*arguments), expected, rtol=1e-12)
    leaves = [x.clone().requires_grad_() for x in arguments]
    assert_trees_close(torch.autograd.grad(objective(OPERATORS.adamw)(*leaves), leaves[argument])[0], expected, rtol=1e-12)


def test_a_second_derivative_exists() -> None:
    param, mu, nu, grad = leaf(6, torch.float64)

    def curvature(operator: Callable) -> Tensor:
        inner = torch.func.grad(objective(operator))
        return torch.func.grad(lambda g: inner(g, mu, nu, param, coefficients(**USUAL)).square().sum())(grad)

    assert_trees_close(curvature(OPERATORS.adamw), curvature(adamw_torch.adamw), rtol=1e-12)


@pytest.mark.parametrize("in_dims", [(0, 0, 0, 0, None), (0, None, None, 1, None), (0, None, None, 0, 0)])
def test_a_batch_of_leaves_is_each_leaf(in_dims: tuple[int | None, ...]) -> None:
    stacked = leaf((4, 4))
    batched = [stacked[3], stacked[1], stacked[2], stacked[0], torch.stack([coefficients(0.1 * i, step=1) for i in range(4)])]
    arguments = [x[2] if d is None else x for x, d in zip(batched, in_dims, strict=True)]
    rows = [[x if d is None else x.select(d, i) for x, d in zip(arguments, in_dims, strict=True)] for i in range(4)]
    expected = [torch.stack(column) for column in zip(*(OPERATORS.adamw(*row) for row in rows), strict=True)]
    assert_trees_equal(list(torch.func.vmap(OPERATORS.adamw, in_dims)(*arguments)), expected)
