"""A value comes from any placement to any other, on any mesh, without a changed bit."""

import itertools
import math
import random
from typing import Any

import pytest
import torch
import torch.fx as fx
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

import functrain as ft
from functrain.compile.emitter import Emitter
from functrain.compile.values import Value, parts
from functrain.compile.virtual import VirtualProgram
from functrain.sharding import Mesh, P, Sharding
from tests.helpers import assert_trees_equal

AXES = ("a", "b", "c")
EXACT = 216  # numbers are multiples of it: no sum, and no division by 1 to 27 ranks, rounds

Pieces = dict[tuple[int, ...], torch.Tensor]  # coordinates -> what that rank holds


def cut(x: torch.Tensor, sizes: tuple[int, ...], placements: tuple[Placement, ...], generator: torch.Generator) -> Pieces:
    """Every rank's piece of a value; summands are random, and other ones for every line of ranks."""
    pieces: Pieces = {(): x}
    for n, placement in zip(sizes, placements, strict=True):
        finer: Pieces = {}
        for place, piece in pieces.items():
            if isinstance(placement, Shard):
                found = list(piece.chunk(n, placement.dim))
            elif isinstance(placement, Partial):
                found = [EXACT * torch.randint(-9, 9, piece.shape, generator=generator).double() for _ in range(n - 1)]
                found.append(piece - sum(found, torch.zeros_like(piece)))
            else:
                found = [piece] * n
            finer |= {(*place, i): part for i, part in enumerate(found)}
        pieces = finer
    return pieces


def join(pieces: Pieces, placements: tuple[Placement, ...]) -> torch.Tensor:
    """The value that the ranks hold together: sums first, then splits from the inside, then copies, which must be equal."""
    order = sorted(range(len(placements)), key=lambda a: (not isinstance(placements[a], Partial), isinstance(placements[a], Replicate), -a))
    left = list(range(len(placements)))
    for a in order:
        at = left.index(a)
        lines: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for place in sorted(pieces):
            lines.setdefault(place[:at] + place[at + 1 :], []).append(pieces[place])
        placement = placements[a]
        for copies in lines.values() if isinstance(placement, Replicate) else ():
            assert_trees_equal(copies[1:], [copies[0]] * (len(copies) - 1))
        pieces = {place: _joined(line, placement) for place, line in lines.items()}
        left.remove(a)
    return pieces[()]


def _joined(line: list[torch.Tensor], placement: Placement) -> torch.Tensor:
    if isinstance(placement, Shard):
        return torch.cat(line, placement.dim)
    return torch.stack(line).sum(0) if isinstance(placement, Partial) else line[0]


def moved(mesh: Mesh, have: tuple[Placement, ...], want: tuple[Placement, ...], shape: tuple[int, ...], pieces: Pieces) -> Pieces:
    """What `Emitter.redistribute` makes of the pieces, run on virtual ranks."""
    emitter = Emitter(mesh, torch.device("cpu"))
    node = emitter.graph.placeholder("x")
    local = [size // parts(have, mesh).get(dim, 1) for dim, size in enumerate(shape)]
    with emitter.fake_mode:
        node.meta["val"] = torch.empty(local, dtype=torch.float64)
    out = emitter.redistribute(Value(node, have, shape), want)
    assert out.placements == want
    emitter.graph.output((out.node,))
    places = list(itertools.product(*[range(n) for n in mesh.axis_sizes]))
    (found,) = VirtualProgram(fx.GraphModule({}, emitter.graph), mesh).call([[pieces[place] for place in places]])
    assert all(x.shape == out.local.shape for x in found)
    return dict(zip(places, found, strict=True))


def change(seed: int) -> tuple[Mesh, tuple[Placement, ...], tuple[Placement, ...], tuple[int, ...]]:
    """A random mesh, placements before and after, and a shape that every split divides."""
    rng = random.Random(seed)
    sizes = [rng.choice([1, 2, 3]) for _ in range(rng.choice([1, 2, 3]))]
    mesh = ft.make_mesh(dict(zip(AXES, sizes, strict=False)), simulate=True)
    dims = rng.choice([1, 2, 3])
    kinds = [Replicate(), Partial(), *(Shard(dim) for dim in range(dims))]
    have, want = (tuple(rng.choice(kinds) for _ in sizes) for _ in range(2))
    return mesh, have, want, (math.prod(sizes),) * dims


@pytest.mark.parametrize("block", range(10))
def test_placements_change_without_a_changed_bit(block: int) -> None:
    for seed in range(30 * block, 30 * block + 30):
        mesh, have, want, shape = change(seed)
        generator = torch.Generator().manual_seed(seed)
        x = EXACT * torch.randint(-99, 99, shape, generator=generator).double()
        pieces = cut(x, mesh.axis_sizes, have, generator)
        assert torch.equal(join(pieces, have), x)
        found = join(moved(mesh, have, want, shape, pieces), want)
        assert torch.equal(found, x), f"seed {seed}: {mesh}, {have} to {want}"


def test_the_random_changes_hold_every_kind_of_collective() -> None:
    counts: dict[str, int] = {}
    nested = 0
    for seed in range(300):
        mesh, have, want, shape = change(seed)
        emitter = Emitter(mesh, torch.device("cpu"))
        node = emitter.graph.placeholder("x")
        with emitter.fake_mode:
            node.meta["val"] = torch.empty([size // parts(have, mesh).get(dim, 1) for dim, size in enumerate(shape)])
        emitter.redistribute(Value(node, have, shape), want)
        for move in emitter.moves:
            counts[move.operation] = counts.get(move.operation, 0) + 1
        nested += any(row.count(p) > 1 for row in (have, want) for p in row if isinstance(p, Shard))
    assert all(counts[name] > 10 for name in ("all_gather", "all_reduce", "reduce_scatter", "all_to_all"))
    assert nested > 50


# ---- arrays: any spec to any spec, any shape


@st.composite
def moves(draw: Any) -> tuple[Mesh, tuple[int, ...], list[P]]:
    """A mesh, a shape of any sizes, and specs that it can have."""
    axes = {axis: draw(st.integers(1, 3)) for axis in AXES[: draw(st.integers(1, 3))]}
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    specs = []
    for _ in range(3):
        entries: list[list[str]] = [[] for _ in shape]
        for axis in axes:
            dim = draw(st.integers(-1, len(shape) - 1))
            if dim >= 0:
                entries[dim].append(axis)
        specs.append(P(*entries))
    return ft.make_mesh(axes, simulate=True), shape, specs


@settings(deadline=None, max_examples=60)
@given(moves(), st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16]))
def test_device_put_from_any_spec_to_any_spec_is_exact(case: tuple[Mesh, tuple[int, ...], list[P]], dtype: torch.dtype) -> None:
    mesh, shape, specs = case
    x = torch.arange(1, math.prod(shape) + 1).reshape(shape).to(dtype)
    array = ft.device_put(x, Sharding(mesh, specs[0]))
    for spec in specs:
        array = ft.device_put(array, Sharding(mesh, spec))
        assert array.sharding.spec == spec
        assert array.dtype == dtype
        assert {tuple(shard.shape) for shard in array.shards} == {array.sharding.shard_shape(shape)}
        assert_trees_equal(array.full(), x)


@settings(deadline=None, max_examples=20)
@given(moves())
def test_what_is_padded_does_not_show(case: tuple[Mesh, tuple[int, ...], list[P]]) -> None:
    """Sums and reshapes of arrays see the elements alone."""
    mesh, shape, specs = case
    x = torch.arange(1, math.prod(shape) + 1).reshape(shape).float()
    array = ft.device_put(x, Sharding(mesh, specs[0]))
    found = [array + 1.0, array * 2.0 - array, torch.exp(array * 0.0).sum(), (array - 100.0).reshape(-1)]
    wanted = [x + 1.0, x, torch.tensor(float(x.numel())), (x - 100.0).reshape(-1)]
    assert_trees_equal([y.full() for y in found], wanted)
