"""Specs, meshes, arrays, rules and plans: what they say, and how they refuse."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functrain as ft
from functrain import P, Sharding
from functrain.sharding import place


def virtual(**axes: int) -> ft.sharding.Mesh:
    return ft.make_mesh(axes, simulate=True)


# ---- specs and meshes


def test_a_spec_uses_an_axis_once() -> None:
    with pytest.raises(ValueError, match="uses the mesh axis 'data' twice"):
        P("data", "data")
    with pytest.raises(TypeError, match="name of a mesh axis"):
        P(3)  # type: ignore[arg-type]


def test_specs_that_split_alike_are_equal() -> None:
    assert P("data") == P("data", None) == P(("data",), None)
    assert hash(P("data")) == hash(P("data", None))
    assert P.of_plain(P(None, ("a", "b")).to_plain()) == P(None, ("a", "b"))


def test_a_mesh_numbers_ranks_row_major() -> None:
    mesh = virtual(pod=2, data=3)
    assert [mesh.coordinate(r) for r in range(6)] == [{"pod": p, "data": d} for p in range(2) for d in range(3)]
    assert mesh.peers(4, "data") == [3, 4, 5]
    assert mesh.peers(4, "pod") == [1, 4]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({}, "at least one axis"),
        ({"data": 0}, "must be a positive int"),
        ({"a-b": 2}, "name of letters"),
        ({"a": -1, "b": -1}, "at most one axis"),
        ({"data": 7}, "does not fill the world"),
    ],
)
def test_a_mesh_that_cannot_be(axes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ft.make_mesh(axes)


def test_without_a_launcher_the_world_is_one_process() -> None:
    assert ft.make_mesh({"data": -1}).shape == {"data": 1}


def test_an_axis_that_the_mesh_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="no axis 'model'; its axes are data=2"):
        Sharding(virtual(data=2), P("model"))
    with pytest.raises(ValueError, match="name them in that order"):
        Sharding(virtual(a=2, b=2), P(("b", "a")))


def test_a_spec_longer_than_the_leaf_is_named() -> None:
    with pytest.raises(ValueError, match=r"the leaf of shape \[3\] has 1 dimensions, but its spec"):
        place(torch.zeros(3), Sharding(virtual(data=2), P(None, "data")))


# ---- arrays


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 7), max_size=3),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dims=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_shards_put_together_are_the_value(shape: list[int], sizes: tuple[int, int], dims: tuple[int, int]) -> None:
    entries: list[list[str]] = [[] for _ in shape]
    for axis, dim in zip("ab", dims, strict=True):
        if dim < len(shape):
            entries[dim].append(axis)
    sharding = Sharding(virtual(a=sizes[0], b=sizes[1]), P(*map(tuple, entries)))
    value = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    array = place(value, sharding)
    assert torch.equal(array.full(), value)
    assert {tuple(shard.shape) for shard in array.shards} == {sharding.shard_shape(shape)}
    for rank, shard in enumerate(array.shards):
        box = sharding.shard_box(shape, sharding.mesh.coordinate(rank))
        piece = value[tuple(slice(*edge) for edge in box)]
        assert torch.equal(shard[tuple(slice(0, n) for n in piece.shape)], piece)


def test_an_array_reads_as_its_value() -> None:
    array = place(torch.tensor([[1.0, 2.0, 3.0]]), Sharding(virtual(data=2), P(None, "data")))
    assert array.tolist() == [[1.0, 2.0, 3.0]]
    assert repr(array) == "Array([1, 3], float32, P(None, 'data') on data=2 (virtual))"
    assert "0:1 x 2:3" in array._repr_html_()
    assert float(place(torch.tensor(2.5), Sharding(virtual(data=2), P()))) == 2.5


OPERATIONS = {
    "add": lambda x: 1 + x * 2 - x / 3,
    "matmul": lambda x: x @ torch.ones(5, 2),
    "function": lambda x: torch.softmax(x, -1).sum(0),
    "method": lambda x: x.mean(),
    "item": lambda x: x[1, 2:],
    "compare": lambda x: (x > 0.5) & (x < 3),
    "views": lambda x: x.t().reshape(-1),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("spec", [P("data"), P(None, "data"), P()])
def test_operations_on_arrays(name: str, spec: P) -> None:
    value = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    found = OPERATIONS[name](place(value, Sharding(virtual(data=2), spec)))
    assert isinstance(found, ft.Array)
    torch.testing.assert_close(found.full(), OPERATIONS[name](value))


def test_rows_of_each_rank_are_one_array() -> None:
    rows = [{"x": torch.full((2, 3), float(r))} for r in range(3)]
    array = ft.from_local(rows, virtual(data=3), P("data"))["x"]
    assert array.shape == (6, 3)
    assert array.full()[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    with pytest.raises(ValueError, match="x differs between ranks"):
        ft.from_local([{"x": torch.zeros(2)}, {"x": torch.zeros(3)}], virtual(data=2), P("data"))


def test_every_move_between_two_shardings() -> None:
    mesh = virtual(a=2, b=3)
    specs = [P(), P("a"), P("b"), P(None, "a"), P("a", "b"), P(("a", "b")), P(None, ("a", "b"))]
    value = torch.arange(35.0).reshape(7, 5)
    for source, target in itertools.product(specs, specs):
        moved = ft.device_put(place(value, Sharding(mesh, source)), Sharding(mesh, target))
        assert moved.sharding.spec == target
        assert torch.equal(moved.full(), value), (source, target)


# ---- rules and plans

STATE = {
    "params": {"blocks": [{"up": (8, 4), "down": (4, 8)}], "embed": (9, 4)},
    "opt_state": {"mu": {"blocks": [{"up": (8, 4)}]}},
    "step": (),
}


def test_the_first_rule_that_matches_decides() -> None:
    plan = ft.Plan(virtual(model=2), ft.Rules({"params/**/up": P("model"), "params/**": P(None, "model")}))
    layout = plan.layout(STATE)
    assert layout.spec("params/blocks/0/up", (8, 4)) == P("model")
    assert layout.spec("params/embed", (9, 4)) == P(None, "model")
    assert layout.spec("opt_state/mu/blocks/0/up", (8, 4)) == P("model")  # as its param
    assert layout.spec("step", ()) == P()


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    plan = ft.Plan(virtual(model=2), ft.Rules({"params/**/upp": P("model")}))
    with pytest.raises(ValueError, match="matches no leaf; nearest paths: params/blocks/0/up"):
        plan.layout(STATE)


@pytest.mark.parametrize(("stage", "split"), [(0, ""), (1, "o"), (2, "og"), (3, "ogp")])
def test_what_each_stage_splits(stage: int, split: str) -> None:
    layout = ft.Plan(virtual(data=2), ft.zero(stage, min_size=0)).layout(STATE)
    path = "blocks/0/up"
    assert (layout.spec(f"params/{path}", (8, 4)) == P("data")) == ("p" in split)
    assert (layout.gradient(f"params/{path}", (8, 4)) == P("data")) == ("g" in split)
    assert (layout.spec(f"opt_state/mu/{path}", (8, 4)) == P("data")) == ("o" in split)
    assert layout.used(f"params/{path}") == P()


def test_a_dimension_that_divides_is_preferred() -> None:
    layout = ft.Plan(virtual(data=2), ft.zero(3, min_size=0)).layout(STATE)
    assert layout.spec("params/embed", (9, 4)) == P(None, "data")
    small = ft.Plan(virtual(data=2), ft.zero(3, min_size=40)).layout(STATE)
    assert small.spec("params/embed", (9, 4)) == P()


def test_a_plan_is_plain_data() -> None:
    plan = ft.Plan(
        virtual(data=2, model=2),
        ft.Rules({"params/**/up": P("model")}),
        ft.zero(3, min_size=7, only="blocks/**"),
        ft.zero(1),
        batch=P("data"),
        activations={"hidden": P("data", None, None)},
    )
    again = ft.Plan.of_toml(plan.to_toml(), simulate=True)
    assert again.to_plain() == plan.to_plain()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mesh = {data = 2", "is no TOML"),
        ("batch = ['data']", "needs a mesh"),
        ("mesh = {data = 2}\nbach = ['data']", "no key 'bach'"),
        ("mesh = {data = 2}\n[[zero]]\nstage = 4", "stages 0, 1, 2 and 3"),
        ("mesh = {data = 2}\n[[zero]]\nstge = 3", "zero or rules table"),
        ("mesh = {data = 2}\nbatch = ['model']", "no axis 'model'"),
    ],
)
def test_a_plan_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ft.Plan.of_toml(text, simulate=True)


def test_a_plan_explains_itself() -> None:
    state = ft.TrainState.create(params={"w": torch.zeros(8, 6)}, tx=ft.optim.adam(1e-3))
    text = ft.Plan(virtual(data=4), ft.zero(1, min_size=0)).explain(state)
    assert "params/w         8x6     P()        device           192" in text
    assert "total opt_state: 100 bytes a rank of 388" in text


def test_state_bytes_fall_with_the_ranks() -> None:
    state = ft.TrainState.create(params={"w": torch.zeros(12, 6)}, tx=ft.optim.adam(1e-3))
    for world in (1, 2, 3, 4):
        put = ft.device_put(state, ft.Plan(virtual(data=world), ft.zero(3, min_size=0)))
        held = sum(x.shards[0].numel() * x.shards[0].element_size() for x in ft.tree.leaves(put) if x.ndim)
        assert held * world == 3 * 12 * 6 * 4


def test_what_is_not_there_yet_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="offload"):
        ft.Plan(virtual(data=2), offload={"opt_state/**": "nvme"})  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="tier 'nvme'"):
        Sharding(virtual(data=2), P(), "nvme")
