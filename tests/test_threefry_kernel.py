"""The fills: known answers, windows, C++ against torch operations, and what tracing and batching see of them."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from functrain.kernels import library, threefry, threefry_torch
from functrain.torch_internals import FakeTensorMode, load_forward_mode_rules

OPERATORS = torch.ops.functrain
KEY = torch.tensor([123456789, 3987654321])

# Each fill with what follows the window in its arguments.
FILLS: dict[str, tuple[Any, Callable[..., torch.Tensor], tuple[Any, ...]]] = {
    "bits 32": (OPERATORS.threefry_bits, threefry_torch.bits, (32,)),
    "bits 64": (OPERATORS.threefry_bits, threefry_torch.bits, (64,)),
    "uniform": (OPERATORS.threefry_uniform, threefry_torch.uniform, (torch.float32, 0.0, 1.0)),
    "uniform in a range": (OPERATORS.threefry_uniform, threefry_torch.uniform, (torch.float32, -0.3, 1.7)),
    "uniform float64": (OPERATORS.threefry_uniform, threefry_torch.uniform, (torch.float64, -0.3, 1.7)),
    "uniform bfloat16": (OPERATORS.threefry_uniform, threefry_torch.uniform, (torch.bfloat16, -0.3, 1.7)),
    "normal": (OPERATORS.threefry_normal, threefry_torch.normal, (torch.float32,)),
    "normal float64": (OPERATORS.threefry_normal, threefry_torch.normal, (torch.float64,)),
    "normal float16": (OPERATORS.threefry_normal, threefry_torch.normal, (torch.float16,)),
    "bernoulli": (OPERATORS.threefry_bernoulli, threefry_torch.bernoulli, (0.3,)),
    "integers 32": (OPERATORS.threefry_integers, threefry_torch.integers, (-7, 1000, 32)),
    "integers 64": (OPERATORS.threefry_integers, threefry_torch.integers, (5, 2**40 + 3, 64)),
    "integers of all": (OPERATORS.threefry_integers, threefry_torch.integers, (-(2**63), 0, 64)),
    "integers of most": (OPERATORS.threefry_integers, threefry_torch.integers, (-(2**63), -9, 64)),
}
every_fill = pytest.mark.parametrize("name", FILLS)


def whole(name: str, key: torch.Tensor, shape: list[int]) -> torch.Tensor:
    operator, _, rest = FILLS[name]
    return operator(key, shape, [0] * len(shape), shape, *rest)


def words(x: torch.Tensor) -> list[int]:
    return (x.to(torch.int64) & 0xFFFFFFFF).flatten().tolist()


# ---- the cipher


@pytest.mark.parametrize(
    ("key", "count", "answer"),
    [  # Random123's known answers for threefry2x32-20
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_cipher_gives_the_known_answers(key: tuple[int, int], count: tuple[int, int], answer: tuple[int, int]) -> None:
    data = torch.tensor(count[0] << 32 | count[1] if count[0] < 2**31 else (count[0] << 32 | count[1]) - 2**64)
    for fold_in in (OPERATORS.threefry_fold_in, threefry_torch.fold_in):
        assert tuple(fold_in(torch.tensor(key), data).tolist()) == answer


@pytest.mark.parametrize("first", [0, 2**31 - 3, 2**32 - 3, 2**32, 5 * 2**32 - 2, 2**40 + 7])
def test_counts_beyond_32_bits_are_those_of_jax(first: int) -> None:
    counts = first + np.arange(8, dtype=np.uint64)
    one, two = (np.uint32(word) for word in KEY.tolist())
    high, low = (counts >> np.uint64(32)).astype(np.uint32), counts.astype(np.uint32)
    expected = np.bitwise_xor(*map(np.asarray, jax.extend.random.threefry2x32_p.bind(one, two, high, low)))
    for fill in (OPERATORS.threefry_bits, threefry_torch.bits):
        assert words(fill(KEY, [2**41], [first], [8], 32)) == expected.tolist()


@pytest.mark.skipif(not library.available(), reason="the C++ kernels are not built")
@every_fill
def test_cpp_and_torch_operations_give_the_same_bits(name: str) -> None:
    operator, by_torch, rest = FILLS[name]
    for shape in ([], [0], [3, 0], [1], [255], [256], [257], [7, 11, 13], [20_000]):
        arguments = (KEY, shape, [0] * len(shape), shape, *rest)
        assert torch.equal(operator(*arguments), by_torch(*arguments)), shape


@pytest.mark.skipif(not library.available(), reason="the C++ kernels are not built")
def test_cpp_erfinv_equals_torch_operations_on_every_uniform_value() -> None:
    steps = torch.arange(0, 2**32, 2**9 * 7).to(torch.int32)
    x = threefry_torch.from_words_uniform(steps, torch.float32, torch.finfo(torch.float32).eps / 2 - 1, 1.0)
    x = torch.cat([x, torch.tensor([-1.0, 1.0, 0.0, -0.0, 1e-30, -1e-45])])
    assert torch.equal(threefry.erfinv(x), threefry_torch.erfinv(x))


@every_fill
def test_without_kernels_large_fills_are_made_in_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = whole(name, KEY, [3, 40_000]), whole(name, torch.stack([KEY, KEY + 1]), [70_000])
    monkeypatch.setattr(threefry, "_function", lambda name: None)
    assert torch.equal(whole(name, KEY, [3, 40_000]), expected[0])
    assert torch.equal(whole(name, torch.stack([KEY, KEY + 1]), [70_000]), expected[1])


def test_threads_do_not_change_a_fill() -> None:
    one = whole("normal", KEY, [300_001])
    torch.set_num_threads(2)
    assert torch.equal(whole("normal", KEY, [300_001]), one)


# ---- windows


@st.composite
def windows(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    shape = draw(st.lists(st.integers(1, 12), min_size=0, max_size=4))
    start = [draw(st.integers(0, n)) for n in shape]
    return shape, start, [draw(st.integers(0, n - s)) for n, s in zip(shape, start, strict=True)]


@every_fill
@settings(max_examples=25, deadline=None)
@given(window=windows())
def test_a_window_is_the_slice_of_the_whole(name: str, window: tuple[list[int], list[int], list[int]]) -> None:
    shape, start, size = window
    operator, by_torch, rest = FILLS[name]
    expected = whole(name, KEY, shape)[tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))]
    assert torch.equal(operator(KEY, shape, start, size, *rest), expected)
    assert torch.equal(by_torch(KEY, shape, start, size, *rest), expected)


@every_fill
def test_windows_of_a_huge_draw_meet(name: str) -> None:
    operator, by_torch, rest = FILLS[name]
    shape, edge = [3, 2**33], 2**32
    together = operator(KEY, shape, [1, edge - 300], [2, 700], *rest)
    left, right = operator(KEY, shape, [1, edge - 300], [2, 300], *rest), operator(KEY, shape, [1, edge], [2, 400], *rest)
    assert torch.equal(torch.cat([left, right], dim=1), together)
    assert torch.equal(by_torch(KEY, shape, [1, edge - 300], [2, 700], *rest), together)


# ---- batches of keys


@every_fill
def test_many_keys_give_what_each_gives_alone(name: str) -> None:
    keys = torch.stack([KEY, KEY + 1, torch.tensor([0, 0])])
    alone = torch.stack([whole(name, key, [5, 70]) for key in keys])
    assert torch.equal(whole(name, keys, [5, 70]), alone)
    assert torch.equal(torch.vmap(lambda key: whole(name, key, [5, 70]))(keys), alone)
    assert torch.equal(torch.vmap(lambda key: whole(name, key, [5, 70]), in_dims=1)(keys.T), alone)
    assert torch.equal(torch.vmap(torch.vmap(lambda key: whole(name, key, [5, 70])))(keys[None])[0], alone)


def test_fold_in_broadcasts_and_batches() -> None:
    fold_in, keys, data = OPERATORS.threefry_fold_in, torch.stack([KEY, KEY + 1]), torch.arange(3)
    table = torch.stack([torch.stack([fold_in(key, n) for n in data]) for key in keys])
    assert torch.equal(fold_in(keys[:, None], data), table)
    assert torch.equal(torch.vmap(fold_in, in_dims=(0, None))(keys, data), table)
    assert torch.equal(torch.vmap(lambda n: fold_in(keys, n), out_dims=1)(data), table)
    assert torch.equal(torch.vmap(lambda key: torch.vmap(lambda n: fold_in(key, n))(data))(keys), table)


# ---- the operators as torch sees them


@every_fill
def test_opcheck_of_fills(name: str) -> None:
    operator, _, rest = FILLS[name]
    torch.library.opcheck(operator.default, (KEY, [4, 6], [1, 0], [3, 6], *rest))


def test_opcheck_of_the_rest() -> None:
    torch.library.opcheck(OPERATORS.threefry_fold_in.default, (KEY, torch.arange(3)))
    torch.library.opcheck(OPERATORS.erfinv.default, (torch.linspace(-0.9, 0.9, 7),))


@every_fill
def test_a_fill_is_one_node_and_traces_to_the_same_bits(name: str) -> None:
    graph = make_fx(lambda key: whole(name, key, [30, 30]), tracing_mode="fake")(KEY)
    assert sum(node.op == "call_function" for node in graph.graph.nodes) == 1
    assert torch.equal(graph(KEY), whole(name, KEY, [30, 30]))


@every_fill
def test_decompositions_replace_every_operator(name: str) -> None:
    graph = make_fx(lambda key: whole(name, key, [30, 30]), decomposition_table=threefry.decompositions())(KEY)
    assert not any("functrain" in str(node.target) for node in graph.graph.nodes)
    assert torch.equal(graph(KEY), whole(name, KEY, [30, 30]))


def test_fakes_know_shape_and_dtype_and_refuse_what_is_no_key() -> None:
    expected = {name: whole(name, KEY, [4, 5]) for name in FILLS}
    with FakeTensorMode() as mode:
        key = mode.from_tensor(KEY)
        for name, real in expected.items():
            fake = whole(name, key, [4, 5])
            assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
        with pytest.raises(ValueError, match=r"a key is an int64 tensor \[\.\.\., 2\]"):
            whole("normal", mode.from_tensor(torch.zeros(3)), [4])
        with pytest.raises(ValueError, match="differ in rank"):
            OPERATORS.threefry_normal(key, [4, 4], [0], [4], torch.float32)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_inductor_gives_the_same_bits_with_the_node_and_without() -> None:
    def draw(key: torch.Tensor) -> torch.Tensor:
        return whole("normal", key, [1003])

    decomposed = make_fx(draw, decomposition_table=threefry.decompositions())(KEY)
    for compiled in (torch.compile(draw, fullgraph=True), torch.compile(decomposed, fullgraph=True)):
        assert torch.equal(compiled(KEY), draw(KEY))


# ---- the inverse of the error function


def test_erfinv_derivatives() -> None:
    x = torch.linspace(-0.97, 0.97, 9, dtype=torch.float64, requires_grad=True)
    load_forward_mode_rules()
    assert torch.autograd.gradcheck(threefry.erfinv, (x,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(threefry.erfinv, (x,))
    per_element = torch.vmap(torch.func.grad(threefry.erfinv))(x.detach())
    assert torch.allclose(per_element, torch.autograd.grad(threefry.erfinv(x).sum(), x)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_erfinv_undoes_erf(dtype: torch.dtype) -> None:
    x = torch.linspace(-2, 2, 1001, dtype=dtype)
    tolerance = 2e-5 if dtype == torch.float32 else 1e-13
    assert torch.allclose(threefry.erfinv(torch.erf(x)), x, rtol=0, atol=tolerance)
    ends = threefry.erfinv(torch.tensor([-1.0, 0.0, 1.0, 1.5], dtype=dtype))
    assert ends[:3].tolist() == [-math.inf, 0.0, math.inf]
    assert math.isnan(ends[3])
