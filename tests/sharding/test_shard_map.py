"""`shard_map`: each collective and its gradient against one device and against JAX, in training steps, and what is refused."""

import itertools
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import functrain as ft
from functrain import P, lax
from functrain.compile.errors import CaptureError, PartitionError
from functrain.launch import launch
from functrain.tree import StructureError
from tests.helpers import assert_trees_close, assert_trees_equal
from tests.sharding.shard_cases import GRID, global_shape, label, local, out_axes, ring

Pieces = list[torch.Tensor]  # of the ranks along one axis


def virtual(**axes: int) -> ft.sharding.Mesh:
    return ft.make_mesh(axes, simulate=True)


# ---- one device: what a collective does to the list of all ranks' shards


class Lists:
    """The collectives as functions of lists over ranks, for autograd on one device."""

    def __init__(self, n: int) -> None:
        self.n = n

    def psum(self, x: Pieces) -> Pieces:
        return [sum(x[1:], x[0])] * self.n

    def all_gather(self, x: Pieces, dim: int, tiled: bool = False) -> Pieces:
        return [torch.cat(x, dim) if tiled else torch.stack(x, dim)] * self.n

    def reduce_scatter(self, x: Pieces, dim: int, tiled: bool = False) -> Pieces:
        total = self.psum(x)[0]
        return list(total.chunk(self.n, dim)) if tiled else list(total.unbind(dim))

    def all_to_all(self, x: Pieces, split: int, join: int, tiled: bool = False) -> Pieces:
        pieces = [piece.chunk(self.n, split) if tiled else piece.unbind(split) for piece in x]
        return [(torch.cat if tiled else torch.stack)([piece[i] for piece in pieces], join) for i in range(self.n)]

    def ppermute(self, x: Pieces, perm: list[tuple[int, int]]) -> Pieces:
        found = [torch.zeros_like(piece) for piece in x]
        for come_from, to in perm:
            found[to] = x[come_from]
        return found


def times(x: Pieces, y: Any) -> Pieces:
    return [a * b for a, b in zip(x, y, strict=True)]


LISTS: dict[str, Callable[[Lists, Pieces, int], Pieces]] = {
    "psum": lambda of, x, n: of.psum(times(x, x)),
    "psum_of_a_number": lambda of, x, n: times(of.psum(x), [3.0 * n] * n),
    "psum_used_unequally": lambda of, x, n: times(times(x, of.psum(times(x, x))), range(1, n + 1)),
    "pmean": lambda of, x, n: times(of.psum(times(x, x)), [1 / n] * n),
    "all_gather": lambda of, x, n: of.all_gather(times(x, x), 1),
    "all_gather_last": lambda of, x, n: of.all_gather(times(x, x), -1),
    "all_gather_tiled": lambda of, x, n: of.all_gather(times(x, x), 1, tiled=True),
    "all_gather_used_unequally": lambda of, x, n: times(of.all_gather(times(x, x), 0, tiled=True), range(1, n + 1)),
    "reduce_scatter": lambda of, x, n: of.reduce_scatter(times(x, x), 1),
    "reduce_scatter_tiled": lambda of, x, n: of.reduce_scatter(times(x, x), 0, tiled=True),
    "axis_index": lambda of, x, n: times(x, range(n)),
    "axis_size": lambda of, x, n: times(x, [n] * n),
    "all_to_all": lambda of, x, n: of.all_to_all(times(x, x), 1, 0),
    "all_to_all_last": lambda of, x, n: of.all_to_all(times(x, x), 1, 2),
    "all_to_all_tiled": lambda of, x, n: of.all_to_all(times(x, x), 0, 1, tiled=True),
    "all_to_all_in_place": lambda of, x, n: of.all_to_all(times(x, x), 0, 0, tiled=True),
    "ppermute_ring": lambda of, x, n: of.ppermute(times(x, x), ring(n)),
    "ppermute_once": lambda of, x, n: of.ppermute(times(x, x), [(0, n - 1)]),
}


def on_one_device(case: Any, x: torch.Tensor) -> torch.Tensor:
    """The global result: cut, the collective along each line of ranks, and what differs laid side by side."""
    name, mesh, axes = case
    pieces = dict(zip(itertools.product(*map(range, mesh.values())), x.chunk(math.prod(mesh.values())), strict=True))
    lines: dict[Any, list[Any]] = {}
    names = list(mesh)
    for place in pieces:
        lines.setdefault(tuple(c for axis, c in zip(names, place, strict=True) if axis not in axes), []).append(place)
    found = {}
    for line in lines.values():
        line.sort(key=lambda place: [place[names.index(axis)] for axis in axes])
        results = LISTS[name](Lists(len(line)), [pieces[place] for place in line], len(line))
        found.update(zip(line, results, strict=True))
    kept = [place for place in pieces if all(c == 0 or axis in out_axes(case) for axis, c in zip(names, place, strict=True))]
    return torch.cat([found[place] for place in kept])


def on_the_mesh(case: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    mesh = virtual(**case[1])
    return ft.shard_map(local(case, lax), mesh, P(tuple(case[1])), P(out_axes(case)))


def given(case: Any) -> torch.Tensor:
    shape = global_shape(case)
    return torch.sin(torch.arange(math.prod(shape), dtype=torch.float32)).reshape(shape)


def weighted(y: torch.Tensor) -> torch.Tensor:
    return (y * torch.cos(torch.arange(y.numel(), dtype=torch.float32)).reshape(y.shape)).sum()


def gradient_on_the_mesh(case: Any, x: torch.Tensor) -> torch.Tensor:
    f = on_the_mesh(case)
    step = ft.jit(ft.grad(lambda x: weighted(f(x))), plan=ft.Plan(virtual(**case[1])))
    return step(x).full()


@pytest.mark.parametrize("case", GRID, ids=label)
def test_a_collective_and_its_gradient_are_those_of_one_device(case: Any) -> None:
    x = given(case)
    assert_trees_close(on_the_mesh(case)(x).full(), on_one_device(case, x))
    x.requires_grad_()
    weighted(on_one_device(case, x)).backward()
    assert_trees_close(gradient_on_the_mesh(case, x.detach()), x.grad)


@pytest.fixture(scope="module")
def by_jax(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("jax") / "shards.npz"
    subprocess.run([sys.executable, "-m", "tests.sharding.jax_shards", str(path)], check=True, cwd=Path(__file__).parents[2])
    return np.load(path)


@pytest.mark.slow
@pytest.mark.parametrize("case", GRID, ids=label)
def test_jax_says_the_same(case: Any, by_jax: Any) -> None:
    x = given(case)
    assert_trees_close(on_the_mesh(case)(x).full(), by_jax[f"{label(case)}/y"])
    if f"{label(case)}/gradient" in by_jax:
        assert_trees_close(gradient_on_the_mesh(case, x), by_jax[f"{label(case)}/gradient"])


# ---- gradients through copies


@pytest.mark.parametrize("axes", [{"a": 3}, {"a": 2, "b": 2}], ids=str)
def test_the_gradient_of_an_argument_that_all_ranks_have_is_summed(axes: dict[str, int]) -> None:
    mesh = virtual(**axes)
    x, w = torch.randn(12, 5, generator=torch.Generator().manual_seed(0)), torch.linspace(-1, 1, 15).reshape(5, 3)

    def loss(w: torch.Tensor, x: torch.Tensor, y: Callable[..., torch.Tensor]) -> torch.Tensor:
        return weighted(y(w, x))

    f = ft.shard_map(lambda w, x: torch.tanh(x @ w), mesh, (P(), P("a")), P("a"))
    found = ft.jit(ft.grad(lambda w, x: loss(w, x, f)), plan=ft.Plan(mesh))(w, x)
    assert_trees_close(found.full(), ft.grad(lambda w, x: loss(w, x, lambda w, x: torch.tanh(x @ w)))(w, x))


def test_derivatives_of_derivatives() -> None:
    mesh = virtual(a=2)
    f = ft.shard_map(lambda x: lax.psum((x**3).sum(), "a") * x, mesh, P("a"), P("a"))

    def slope(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda x: (ft.grad(lambda x: f(x).sum())(x) ** 2).sum()

    x = torch.linspace(0.1, 1, 4)
    found = ft.jit(ft.grad(slope(f)), plan=ft.Plan(mesh))(x)
    assert_trees_close(found.full(), ft.grad(slope(lambda x: (x**3).sum() * x))(x))


def test_a_derivative_inside_is_of_one_rank() -> None:
    mesh = virtual(a=2)
    f = ft.shard_map(lambda x: ft.grad(lambda x: (x**3).sum() * x.shape[0])(x), mesh, P("a"), P("a"))
    assert_trees_close(f(torch.arange(4.0)).full(), 6 * torch.arange(4.0) ** 2)


@pytest.mark.parametrize("inside", [True, False])
def test_remat_gives_the_same_gradient(inside: bool) -> None:
    mesh = virtual(a=2)

    def body(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(lax.all_gather(torch.sin(x), "a", tiled=True).sum() * x)

    f = ft.shard_map(ft.remat(body) if inside else body, mesh, P("a"), P("a"))
    f = f if inside else ft.remat(f)
    found = ft.jit(ft.grad(lambda x: f(x).sum()), plan=ft.Plan(mesh))(torch.arange(4.0))
    assert_trees_close(found.full(), ft.grad(lambda x: torch.sin(torch.sin(x).sum() * x).sum())(torch.arange(4.0)))


def test_pmax_is_the_maximum_and_has_no_gradient() -> None:
    mesh = virtual(a=2, b=2)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    f = ft.shard_map(lambda x: lax.pmax(x, ("a", "b")), mesh, P(("a", "b")), P())
    assert_trees_equal(f(x).full(), torch.maximum(torch.maximum(x[:2], x[2:4]), torch.maximum(x[4:6], x[6:])))
    with pytest.raises(NotImplementedError, match=r"test_shard_map.py.*pmax has no derivative.*x.detach\(\)"):
        ft.jit(ft.grad(lambda x: f(x).sum()), plan=ft.Plan(mesh))(x)


def test_a_softmax_over_split_classes() -> None:
    mesh = virtual(a=3)

    def body(x: torch.Tensor) -> torch.Tensor:
        largest = lax.pmax(x.detach().amax(1, keepdim=True), "a")
        exponentials = torch.exp(x - largest)
        return exponentials / lax.psum(exponentials.sum(1, keepdim=True), "a")

    f = ft.shard_map(body, mesh, P(None, "a"), P(None, "a"))
    x = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    found = ft.jit(ft.value_and_grad(lambda x: weighted(f(x))), plan=ft.Plan(mesh))(x)
    assert_trees_close([v.full() for v in found], ft.value_and_grad(lambda x: weighted(torch.softmax(x, 1)))(x))


# ---- in training steps


def make_state(seed: int = 0) -> ft.TrainState:
    keys = ft.random.split(ft.random.key(seed), 3)
    params = {
        "up": 0.3 * ft.random.normal(keys[0], (6, 12)),
        "bias": torch.zeros(12),
        "down": 0.3 * ft.random.normal(keys[1], (12, 5)),
        "experts": 0.3 * ft.random.normal(keys[2], (4, 6, 6)),
    }
    return ft.TrainState.create(params=params, tx=TX)


TX = ft.optim.adam(3e-2, eps=1e-3)
MLP = {"up": P(None, "model"), "bias": P("model"), "down": P("model")}


def plain_mlp(params: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ params["up"] + params["bias"]) @ params["down"]


def plain_experts(experts: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Row i of x goes to expert i % 4."""
    return torch.einsum("red,edf->ref", x.reshape(-1, 4, 6), experts).reshape(x.shape)


def plain_mixing(x: torch.Tensor) -> torch.Tensor:
    """Each row takes the mean of all rows."""
    return x - 0.5 * x.mean(0, keepdim=True)


def exchanged(experts: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Experts [4 / n, 6, 6] and rows [rows / n, 6] of a rank: rows go to their expert's rank and come back."""
    rows = x.reshape(-1, 4, 6).transpose(0, 1)
    sent = lax.all_to_all(rows, "data", 0, 1, tiled=True)
    return lax.all_to_all(torch.einsum("erd,edf->erf", sent, experts), "data", 1, 0, tiled=True).transpose(0, 1).reshape(x.shape)


def mixed_by_ring(x: torch.Tensor) -> torch.Tensor:
    """The sum over ranks, piece by piece around a ring."""
    n = lax.axis_size("data")
    total = moving = x.sum(0, keepdim=True)
    for _ in range(n - 1):
        moving = lax.ppermute(moving, "data", ring(n))
        total = total + moving
    return x - 0.5 * total / (x.shape[0] * n)


def by_hand(mesh: ft.sharding.Mesh) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    rows = P("data")
    model = "model" in mesh.axis_names
    mlp = ft.shard_map(lambda p, x: lax.psum(plain_mlp(p, x), "model"), mesh, (MLP, rows), rows) if model else plain_mlp
    return mlp, ft.shard_map(exchanged, mesh, (rows, rows), rows), ft.shard_map(mixed_by_ring, mesh, rows, rows)


def train_step(mlp: Callable[..., Any], experts: Callable[..., Any], mixing: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        x = mixing(experts(params["experts"], batch["x"]))
        return ((mlp({name: params[name] for name in MLP}, x) - batch["y"]) ** 2).mean()

    def step(state: ft.TrainState, batch: Any) -> Any:
        loss, grads = ft.value_and_grad(loss_fn, **options)(state.params, batch)
        return state.apply_gradients(grads, TX), {"loss": loss}

    return step


def batch(i: int) -> dict[str, torch.Tensor]:
    x = ft.random.normal(ft.random.key(100 + i), (16, 6))
    return {"x": x, "y": torch.sin(x[:, :5] * 2)}


def run(step: Callable[..., Any], state: Any, steps: int = 5) -> Any:
    losses = []
    for i in range(steps):
        state, metrics = step(state, batch(i))
        losses.append(float(metrics["loss"]))
    return ft.tree.map(lambda x: x.full() if isinstance(x, ft.Array) else x, state), torch.tensor(losses)


@pytest.fixture(scope="module")
def expected() -> Any:
    torch.set_num_threads(1)
    return run(train_step(plain_mlp, plain_experts, plain_mixing), make_state())


@pytest.mark.parametrize(
    ("axes", "rules"),
    [
        ({"data": 2}, {}),
        ({"data": 4}, {}),
        ({"data": 2, "model": 2}, {}),
        ({"model": 3, "data": 2}, {}),
        ({"data": 2, "model": 2}, {f"params/{name}": spec for name, spec in MLP.items()}),
    ],
    ids=str,
)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_by_hand_is_that_of_one_device(axes: dict[str, int], rules: dict[str, P], stage: int, expected: Any) -> None:
    mesh = virtual(**axes)
    plan = ft.Plan(mesh, *([ft.Rules(rules)] if rules else []), ft.zero(stage, min_size=0), batch=P("data"))
    step = ft.jit(train_step(*by_hand(mesh)), plan=plan, donate="state")
    assert_trees_close(run(step, ft.device_put(make_state(), plan)), expected)


def test_collectives_that_are_asked_for_are_counted_and_planned() -> None:
    mesh = virtual(data=2, model=2)
    plan = ft.Plan(mesh, ft.Rules({f"params/{name}": spec for name, spec in MLP.items()}), ft.zero(0, min_size=0), batch=P("data"))
    report = ft.jit(train_step(*by_hand(mesh)), plan=plan).lower(make_state(), batch(0)).partition
    assert report.counts()["all_to_all[data]"] == 3  # two forward, one back: the batch has no gradient
    assert report.counts()["permute[data]"] == 2
    psums = [move for move in report.moves if move.axis == "model" and move.operation == "all_reduce"]
    # Forward the one that is written; back its transpose, and one for each argument of which several ranks have copies.
    assert Counter(move.phase for move in psums) == {"forward": 1, "backward": 1 + 3}
    assert {move.planned for move in psums} == {True}
    assert [move.count_bytes for move in report.moves if move.operation == "permute"] == [6 * 4] * 2
    assert not report.unplanned_large
    assert not report.replicated


def test_microbatches_and_half_precision() -> None:
    mesh = virtual(data=2)

    def step(mixing: Callable[..., Any], experts: Callable[..., Any]) -> Callable[..., Any]:
        def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
            return (mixing(experts(params["w"], x)).float() ** 2).mean()

        precision = ft.Precision(compute=torch.bfloat16)
        return lambda params, x: ft.accumulate(loss_fn, 2, precision=precision)(params, x.bfloat16())

    params, x = {"w": make_state().params["experts"]}, batch(0)["x"]
    _, experts, mixing = by_hand(mesh)
    found = ft.jit(step(mixing, experts), plan=ft.Plan(mesh, ft.zero(3, min_size=0), batch=P("data")))(params, x)
    want = ft.jit(step(plain_mixing, plain_experts))(params, x)
    assert_trees_close(ft.tree.map(lambda x: x.full(), found), want, rtol=0.02, atol=0.002)


# ---- what comes in and goes out


def test_specs_are_prefixes_of_trees() -> None:
    mesh = virtual(a=2)

    def f(tree: Any, scale: Any, nothing: None) -> Any:
        assert tree["x"].shape == (2, 3)
        assert nothing is None
        return {"y": [tree["x"] * scale, tree["z"]], "rank": lax.axis_index("a")[None], "two": 2.0, "six": lax.psum(torch.tensor(3), "a")}

    out = {"y": P("a"), "rank": P("a"), "two": P(), "six": P()}
    sharded = ft.shard_map(f, mesh, (P("a"), P(), P()), out)
    x = torch.arange(12.0).reshape(4, 3)
    found = sharded({"x": x, "z": torch.arange(2)}, 3.0, None)
    want = {"y": [3 * x, torch.arange(2)], "rank": torch.arange(2), "two": torch.tensor(2.0), "six": torch.tensor(6)}
    assert_trees_equal(ft.tree.map(lambda x: x.full(), found), want)
    assert found["y"][0].sharding.spec == P("a")


def test_arrays_go_in_as_they_lie() -> None:
    mesh = virtual(a=2, b=2)
    x = torch.arange(32.0).reshape(8, 4)
    f = ft.shard_map(lambda x: lax.psum(x, "b"), mesh, P("a", "b"), P("a"))
    for spec in (P(), P("a", "b"), P("b", "a"), P(("a", "b"))):
        array = ft.device_put(x, ft.Sharding(mesh, spec))
        assert_trees_equal(f(array).full(), x[:, :2] + x[:, 2:])
    lowered = f.lower(ft.device_put(x, ft.Sharding(mesh, P("a", "b"))))
    assert lowered.partition.counts() == {"all_reduce[b]": 1}


def test_what_the_function_makes_itself_is_a_shard() -> None:
    mesh = virtual(a=2)
    constant = torch.arange(3.0)

    def f(key: torch.Tensor, x: torch.Tensor) -> Any:
        copy = x.clone()
        copy[0] = 7.0
        own = ft.random.normal(ft.random.fold_in(key, lax.axis_index("a")), (3,))
        return torch.ones(3) + torch.arange(3), ft.random.normal(key, (3,)), own, lax.psum(constant, "a"), copy

    key = ft.random.key(5)
    found = ft.shard_map(f, mesh, (P(), P("a")), (P("a"), P("a"), P("a"), P(), P("a")))(key, torch.zeros(6))
    ones, same, own, sums, copy = (x.full() for x in found)
    assert_trees_equal(ones, (torch.ones(3) + torch.arange(3)).repeat(2))
    assert_trees_equal(same, ft.random.normal(key, (3,)).repeat(2))
    assert_trees_equal(own, torch.cat([ft.random.normal(ft.random.fold_in(key, i), (3,)) for i in range(2)]))
    assert_trees_equal(sums, 2 * constant)
    assert_trees_equal(copy, torch.tensor([7.0, 0, 0, 7, 0, 0]))


def test_a_value_whose_storage_is_padded_comes_in_without_padding() -> None:
    mesh = virtual(data=4)
    x = torch.arange(7.0)
    array = ft.device_put(x, ft.Sharding(mesh, P("data")))
    assert_trees_equal(ft.shard_map(lambda x: x * 2, mesh, P(), P())(array).full(), 2 * x)
    plan = ft.Plan(mesh, ft.zero(3, min_size=0))
    f = ft.shard_map(lambda w: w.sum() + lax.psum(w.sum(), "data"), mesh, P(), P())
    step = ft.jit(lambda params: ft.grad(lambda p: f(p["w"]))(params), plan=plan)
    assert_trees_close(step({"w": torch.arange(7.0)})["w"].full(), torch.full((7,), 5.0))


def test_a_constraint_inside_says_nothing() -> None:
    mesh = virtual(a=2)
    f = ft.shard_map(lambda x: lax.psum(ft.with_sharding_constraint(x, P("a")) * 2, "a"), mesh, P("a"), P())
    assert_trees_equal(f(torch.arange(4.0)).full(), torch.tensor([4.0, 8.0]))


def test_several_axes_are_counted_in_the_order_asked_for() -> None:
    mesh = virtual(a=2, b=3)
    f = ft.shard_map(lambda: torch.stack([lax.axis_index(("a", "b")), lax.axis_index(("b", "a"))])[None], mesh, (), P(("a", "b")))
    assert f().full().tolist() == [[0, 0], [1, 2], [2, 4], [3, 1], [4, 3], [5, 5]]


def test_a_mesh_of_one_rank_needs_no_plan() -> None:
    mesh = ft.make_mesh({"a": 1})
    f = ft.shard_map(lambda x: lax.psum(x * x, "a") + lax.axis_index("a"), mesh, P("a"), P())
    x = torch.arange(3.0)
    for gradient in (ft.grad(lambda x: f(x).sum()), ft.jit(ft.grad(lambda x: f(x).sum()))):
        assert_trees_equal(gradient(x), 2 * x)
    assert_trees_equal(ft.jit(f)(x), x * x)
    assert_trees_equal(ft.vmap(f)(x[:, None]), (x * x)[:, None])
    assert_trees_equal(f(x).full(), x * x)
    assert_trees_equal(ft.jit(lambda x: f(x), plan=ft.Plan(mesh))(x).full(), x * x)
    with ft.disable_jit():
        assert_trees_equal(f(x), x * x)


# ---- what is refused


MESH = virtual(a=2)
SPLIT, WHOLE = P("a"), P()
X = torch.arange(8.0).reshape(4, 2)


def simple(x: torch.Tensor) -> torch.Tensor:
    return lax.psum(x, "a")


def mapped(function: Callable[..., Any] = simple, in_specs: Any = SPLIT, out_specs: Any = WHOLE, mesh: Any = MESH) -> Any:
    return ft.shard_map(function, mesh, in_specs, out_specs)


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "axis of a spec": (lambda: mapped(in_specs=(P("c"),)), ValueError, r"in_specs/0 .*P\('c'\).*no axis 'c'; its axes are a=2"),
    "axis of a result": (lambda: mapped(out_specs=P("c")), ValueError, r"out_specs of shard_map .*no axis 'c'"),
    "no spec": (lambda: mapped(in_specs=("a",)), TypeError, r"in_specs/0 of shard_map is 'a', not an ft.P"),
    "axis of a collective": (lambda: mapped(lambda x: lax.psum(x, "c"))(X), ValueError, r"psum over 'c'.*its axes are a=2"),
    "structure": (lambda: mapped(in_specs=(P("a"), P()))(X), StructureError, "in_specs.*at the root: tuple of 2 against tuple of 1"),
    "structure below": (
        lambda: mapped(lambda x: x["w"], in_specs=({"w": P(), "v": P()},))({"w": X}),
        StructureError,
        r"in_specs of shard_map: structures differ at 0",
    ),
    "structure of a result": (lambda: mapped(out_specs=(P(), P()))(X), StructureError, r"out_specs of shard_map: structures differ"),
    "does not divide": (
        lambda: mapped(lambda batch: lax.psum(batch["x"], "a"))({"x": X[:3]}),
        PartitionError,
        r"test_shard_map.py.*batch/x of shape \[3, 2\] has 3 along dimension 0, which 2 ranks \(a=2\) do not divide: choose a multiple",
    ),
    "too many entries": (lambda: mapped(in_specs=P(None, None, "a"))(X), ValueError, r"x of shape \[4, 2\] has 2 dimensions"),
    "too many entries of a result": (lambda: mapped(lambda x: x.sum(), out_specs=P("a"))(X), ValueError, r"result of shape \[\]"),
    "outside": (lambda: lax.psum(X, "a"), CaptureError, r"psum over 'a' is called outside ft.shard_map"),
    "outside, in a step": (lambda: ft.jit(lambda x: lax.pmean(x, "a"))(X), CaptureError, "outside ft.shard_map"),
    "index outside": (lambda: lax.axis_index("a"), CaptureError, r"axis_index over 'a' is called outside"),
    "no plan": (lambda: ft.jit(lambda x: mapped()(x))(X), CaptureError, r"simple is a shard_map over a=2 \(virtual\).*plan=ft.Plan\(mesh"),
    "derivative without a step": (lambda: ft.grad(lambda x: mapped()(x).sum())(X), CaptureError, r"plan=ft.Plan\(mesh"),
    "vmap": (lambda: ft.jit(ft.vmap(mapped()), plan=ft.Plan(MESH))(X), CaptureError, "ft.vmap or ft.jvp around it"),
    "vmap inside": (lambda: mapped(ft.vmap(simple))(X), CaptureError, r"ft.vmap and ft.jvp cannot go through a collective"),
    "another mesh": (
        lambda: ft.jit(lambda x: mapped()(x), plan=ft.Plan(virtual(a=4)))(X),
        PartitionError,
        r"test_shard_map.py.*for the mesh a=2 \(virtual\), but the plan of the step is for a=4 \(virtual\)",
    ),
    "a shard_map inside": (lambda: mapped(lambda x: mapped()(x))(X), CaptureError, "a shard_map inside another"),
    "names": (lambda: mapped()(x=X), TypeError, r"simple under shard_map takes positional arguments only"),
    "reduce_scatter": (
        lambda: mapped(lambda x: lax.reduce_scatter(x[:1], "a"))(X),
        ValueError,
        r"\[1, 2\] has 1 along dimension 0.*tiled=True",
    ),
    "tiled": (
        lambda: mapped(lambda x: lax.all_to_all(x.repeat(3, 1)[:3], "a", 0, 1, tiled=True))(X),
        ValueError,
        r"all_to_all: a shard of shape \[3, 2\] has 3 along dimension 0, which 2 ranks \(a=2\) do not divide",
    ),
    "dimension": (lambda: mapped(lambda x: lax.all_gather(x, "a", axis=3))(X), ValueError, r"dimension 3 is not one of a shard of shape"),
    "place": (lambda: mapped(lambda x: lax.ppermute(x, "a", [(0, 2)]))(X), ValueError, r"\(0, 2\) is outside the axis 'a'"),
    "place twice": (lambda: mapped(lambda x: lax.ppermute(x, "a", [(0, 1), (0, 0)]))(X), ValueError, "names a place twice on one side"),
    "two axes": (lambda: mapped(lambda x: lax.ppermute(x, ("a", "b"), []), mesh=virtual(a=2, b=1))(X), ValueError, "one mesh axis"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_told_in_one_sentence(name: str) -> None:
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()


def test_disable_jit_is_refused_on_several_ranks() -> None:
    with ft.disable_jit(), pytest.raises(CaptureError, match="jit is disabled"):
        mapped()(X)


@pytest.mark.parametrize("differentiated", [False, True])
def test_a_traced_value_from_outside_must_be_an_argument(differentiated: bool) -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return mapped(lambda x: lax.psum(x @ w, "a"))(x).sum()

    with pytest.raises(PartitionError, match=r"test_shard_map.py.*uses w.*Pass it as an argument, with P\(\)"):
        ft.jit(ft.grad(loss) if differentiated else loss, plan=ft.Plan(MESH))(torch.ones(2, 2), X)


def test_a_shard_that_gets_out_is_refused() -> None:
    def step(x: torch.Tensor) -> Any:
        kept = []
        mapped(lambda x: kept.append(x * 2) or lax.psum(x, "a"))(x)
        return kept[0]

    with pytest.raises(PartitionError, match="left its shard_map other than as a result"):
        ft.jit(step, plan=ft.Plan(MESH))(X)


# ---- real ranks


def two_processes(steps: int) -> Any:
    torch.set_num_threads(1)
    mesh = ft.make_mesh({"data": 2})
    plan = ft.Plan(mesh, ft.zero(3, min_size=0), batch=P("data"))
    trained = run(ft.jit(train_step(*by_hand(mesh)), plan=plan, donate="state"), ft.device_put(make_state(), plan), steps)
    found = {}
    for case in GRID:
        if case[1] == {"a": 2}:
            f = ft.shard_map(local(case, lax), ft.make_mesh({"a": 2}), P("a"), P(out_axes(case)))
            step = ft.jit(ft.value_and_grad(lambda x, f=f: (y := f(x)).sum() + weighted(y)), plan=ft.Plan(ft.make_mesh({"a": 2})))
            found[label(case)] = [x.full() for x in step(given(case))]
    return trained, found


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one_device(expected: Any) -> None:
    for rank, (trained, found) in enumerate(launch(two_processes, 5, nproc=2, stdout="quiet", timeout=300)):
        assert_trees_close(trained, expected, rank=rank)
        for case in GRID:
            if label(case) in found:
                want = ft.value_and_grad(lambda x, case=case: (y := on_one_device(case, x)).sum() + weighted(y))(given(case))
                assert_trees_close(found[label(case)], list(want), rank=rank)
