"""Arrays and DTensors: the same memory under two names."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import functrain as ft
from functrain import P, Sharding
from functrain.launch import launch
from functrain.sharding import place

VALUE = torch.arange(35.0).reshape(7, 5)
# (shape to cut from the value, spec, placements)
CASES: list[tuple[tuple[int, int], P, list[Any]]] = [
    ((6, 4), P(), [Replicate()]),
    ((6, 4), P("data"), [Shard(0)]),
    ((6, 4), P(None, "data"), [Shard(1)]),
    ((7, 5), P("data"), [Shard(0)]),
    ((7, 5), P(None, "data"), [Shard(1)]),
    ((1, 5), P("data"), [Shard(0)]),
]


def both_ways(mesh: Any, shape: tuple[int, int], spec: P, placements: list[Any]) -> None:
    """An array as a DTensor and back."""
    value = VALUE[: shape[0], : shape[1]].contiguous()
    array = place(value, Sharding(mesh, spec))
    dtensor = array.to_dtensor()
    assert type(dtensor) is DTensor
    assert list(dtensor.placements) == placements
    assert dtensor.shape == value.shape
    assert dtensor.stride() == value.stride()
    local = dtensor.to_local()
    whole = tuple(local.shape) == array.sharding.shard_shape(shape)
    assert local.numel() == 0 or local.data_ptr() == array.shards[0].data_ptr()
    assert torch.equal(dtensor.full_tensor(), value)
    again = ft.Array.from_dtensor(dtensor)
    assert again.layout == array.layout
    assert torch.equal(again.full(), value)
    assert whole == (again.shards[0].data_ptr() == array.shards[0].data_ptr())
    assert torch.equal(again.shards[0], array.shards[0])
    assert ft.Array.from_dtensor(dtensor, mesh).mesh is mesh


@pytest.mark.parametrize(("shape", "spec", "placements"), CASES)
def test_one_process_without_a_launcher(shape: tuple[int, int], spec: P, placements: list[Any]) -> None:
    both_ways(ft.make_mesh({"data": 1}), shape, spec, placements)


def test_a_write_to_one_is_seen_in_the_other() -> None:
    array = place(torch.zeros(4, 3), Sharding(ft.make_mesh({"data": 1, "model": 1}), P("model", "data")))
    dtensor = array.to_dtensor()
    assert dtensor.placements == (Shard(1), Shard(0))
    dtensor.to_local().fill_(2.0)
    assert torch.equal(array.full(), torch.full((4, 3), 2.0))


@pytest.mark.parametrize("kind", ["simulate", "abstract"])
def test_without_real_ranks_there_is_no_dtensor(kind: str) -> None:
    mesh = ft.make_mesh({"data": 2}, **{kind: True})
    with pytest.raises(ValueError, match=r"the mesh data=2 .* has no DeviceMesh and no DTensors"):
        place(torch.zeros(4), Sharding(mesh, P("data"))).to_dtensor()


def test_a_donated_array_has_no_dtensor() -> None:
    mesh = ft.make_mesh({"data": 1})
    array = place(torch.zeros(4), Sharding(mesh, P("data")))
    array.retire("state/w of step")
    with pytest.raises(ValueError, match="state/w of step was donated"):
        array.to_dtensor()


def on_two_ranks() -> list[str]:
    """Every case; the messages of what is refused."""
    torch.set_num_threads(1)
    mesh = ft.make_mesh({"data": 2})
    for case in CASES:
        both_ways(mesh, *case)
    wide = ft.make_mesh({"data": 2, "model": 1})
    both_ways(wide, (7, 5), P("data", "model"), [Shard(0), Shard(1)])
    both_ways(wide, (7, 5), P(("data", "model")), [Shard(0), Shard(0)])
    trained(mesh)
    refused = []
    device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    other = init_device_mesh("cpu", (2,))
    for dtensor, given in (
        (DTensor.from_local(VALUE, device_mesh, [Partial()]), None),
        (DTensor.from_local(VALUE, other, [Replicate()]), None),
        (DTensor.from_local(VALUE, device_mesh, [Replicate()]), wide),
    ):
        try:
            ft.Array.from_dtensor(dtensor, given)
        except ValueError as error:
            refused.append(str(error))
    return refused


def trained(mesh: Any) -> None:
    """A step takes an array that was a DTensor of somebody else's mesh."""
    theirs = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    weight = torch.full((5, 4), float(mesh.rank))
    params = {"w": ft.Array.from_dtensor(DTensor.from_local(weight, theirs, [Shard(0)]))}
    plan = ft.Plan(mesh, ft.zero(3, min_size=0), batch=P("data"))
    step = ft.jit(lambda params, x: ft.grad(lambda p: (x @ p["w"]).sum())(params), plan=plan)
    found = step(params, torch.ones(4, 10))["w"]
    assert torch.equal(found.to_dtensor().full_tensor(), torch.full((10, 4), 4.0))


@pytest.mark.slow
def test_two_ranks() -> None:
    for partial, unnamed, other in launch(on_two_ranks, nproc=2, stdout="quiet", timeout=120):
        assert "redistribute it to Shard or Replicate first" in partial
        assert "mesh_dim_names" in unnamed
        assert "lives on the mesh data=2 (real), not on data=2 x model=1 (real)" in other


def nested() -> str:
    torch.set_num_threads(1)
    mesh = ft.make_mesh({"pod": 2, "data": 2})
    for shape, spec, placements in (
        ((4, 5), P(("pod", "data")), [Shard(0), Shard(0)]),
        ((7, 5), P("data", "pod"), [Shard(1), Shard(0)]),
        ((7, 5), P("pod"), [Shard(0), Replicate()]),
    ):
        both_ways(mesh, shape, spec, placements)
    try:
        place(VALUE, Sharding(mesh, P(None, ("pod", "data")))).to_dtensor()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_four_ranks_on_two_axes() -> None:
    for refusal in launch(nested, nproc=4, stdout="quiet", timeout=120):
        assert "split by pod, data into 4 parts, which do not divide it" in refusal
