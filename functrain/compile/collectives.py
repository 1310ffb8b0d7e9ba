"""Collectives as functional operations named by mesh axis: one text for every rank. Who runs them is chosen at lowering.

`n` is the size of the axis and `dim` the dimension that is gathered or cut. Each only says what is meant (there is no implementation for
tensors): a back end binds the names to process groups, to virtual ranks, or to nothing. The markers stand in the captured graph, where
the partitioner reads them, and are the identity.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from functrain.differentiate import Markers

_OPERATORS = torch.library.Library("functrain", "FRAGMENT")


def _scaled(x: torch.Tensor, dim: int, times: int = 1, over: int = 1) -> torch.Tensor:
    shape = list(x.shape)
    if shape[dim] * times % over:
        raise ValueError(f"dimension {dim} of {shape} is not a multiple of {over}")
    shape[dim] = shape[dim] * times // over
    return x.new_empty(shape)


def _all_gather(x: torch.Tensor, axis: str, dim: int, n: int) -> torch.Tensor:
    return _scaled(x, dim, times=n)


def _reduce_scatter(x: torch.Tensor, axis: str, dim: int, n: int) -> torch.Tensor:
    return _scaled(x, dim, over=n)


def _all_reduce(x: torch.Tensor, axis: str, op: str, n: int) -> torch.Tensor:
    return x.new_empty(x.shape)


def _all_to_all(x: torch.Tensor, axis: str, split: int, join: int, n: int) -> torch.Tensor:
    return _scaled(_scaled(x, split, over=n), join, times=n)


def _permute(x: torch.Tensor, axis: str, source: Sequence[int], n: int) -> torch.Tensor:
    return x.new_empty(x.shape)


def _wait(x: torch.Tensor, held: Sequence[torch.Tensor]) -> torch.Tensor:
    return x.new_empty(x.shape)


def _enter_shards(x: torch.Tensor, where: str, pieces: Sequence[int]) -> torch.Tensor:
    return x.new_empty([size // n for size, n in zip(x.shape, pieces, strict=True)])


def _leave_shards(x: torch.Tensor, where: str, pieces: Sequence[int]) -> torch.Tensor:
    return x.new_empty([size * n for size, n in zip(x.shape, pieces, strict=True)])


def _axis_index(axes: Sequence[str], sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


# name -> (schema, shape rule)
_COLLECTIVES: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {
    "all_gather": ("(Tensor x, str axis, int dim, int n) -> Tensor", _all_gather),
    "reduce_scatter": ("(Tensor x, str axis, int dim, int n) -> Tensor", _reduce_scatter),
    "all_reduce": ("(Tensor x, str axis, str op, int n) -> Tensor", _all_reduce),
    "all_to_all": ("(Tensor x, str axis, int split, int join, int n) -> Tensor", _all_to_all),
    "permute": ("(Tensor x, str axis, int[] source, int n) -> Tensor", _permute),  # rank i gets from source[i]; zeros where it is -1
    "my_shard": ("(Tensor x, str axis, int dim, int n) -> Tensor", _reduce_scatter),  # this rank's piece: nothing is sent
    "wait": ("(Tensor x, Tensor[] held) -> Tensor", _wait),  # ends what started x; what that reads is held until here
}
# Of `shard_map`: outside them a captured graph has global shapes, between them one rank's. `where` is a mesh and a spec as text.
_SHARDS: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {
    "enter_shards": ("(Tensor x, str where, int[] pieces) -> Tensor", _enter_shards),  # dimension d is cut into pieces[d]
    "leave_shards": ("(Tensor x, str where, int[] pieces) -> Tensor", _leave_shards),
    "axis_index": ("(str[] axes, int[] sizes, Device device) -> Tensor", _axis_index),
}
_MARKERS = {
    "unshard": "(Tensor x) -> Tensor",  # a param leaves its storage
    "store_grad": "(Tensor g, Tensor like) -> Tensor",  # the gradient of `like` arrives in its storage
    "part_grad": "(Tensor g, Tensor like) -> Tensor",  # the gradient of one microbatch, to be summed with others
    "spread": "(Tensor x) -> Tensor",  # work that is to be divided among all ranks along dimension 0
    "spread_like": "(Tensor x, Tensor like) -> Tensor",  # its result, split as what it was made from
    "constrain": "(Tensor x, str spec) -> Tensor",  # a value that the user wants split so
}


def _copy(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.clone()


def _like(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x)


def _register() -> None:
    for name, (schema, shape) in (_COLLECTIVES | _SHARDS).items():
        _OPERATORS.define(name + schema)
        torch.library.register_fake(f"functrain::{name}", shape, lib=_OPERATORS)
    for name, schema in _MARKERS.items():
        _OPERATORS.define(name + schema)
        _OPERATORS.impl(name, _copy, "CompositeExplicitAutograd")
        torch.library.register_fake(f"functrain::{name}", _like, lib=_OPERATORS)


_register()

ops = torch.ops.functrain
SENT = frozenset(getattr(ops, name).default for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"))
LOCAL = frozenset((ops.my_shard.default, ops.wait.default))
MARKERS = frozenset(getattr(ops, name).default for name in _MARKERS)
AXIS_OPERATIONS = SENT | {ops.my_shard.default}
SHARD_OPERATIONS = SENT | {getattr(ops, name).default for name in _SHARDS}  # what `shard_map` leaves in a captured graph


def shard_start(axes: Sequence[str], sizes: Sequence[int], width: int) -> int:
    """Where this rank's piece of a dimension begins, in elements: a number that a back end fills in.

    Args:
        axes: the mesh axes that split the dimension, outermost first.
        sizes: of those axes.
        width: elements of a piece.
    """
    raise NotImplementedError("shard_start stands in a partitioned graph and is bound by a back end")


def place_along(coordinate: dict[str, int], axes: Sequence[str], sizes: Sequence[int]) -> int:
    """The number of a rank's piece where `axes` split a dimension together."""
    place = 0
    for axis, size in zip(axes, sizes, strict=True):
        place = place * size + coordinate[axis]
    return place


MARK = Markers(
    unshard=ops.unshard,
    store_grad=ops.store_grad,
    part_grad=ops.part_grad,
    constrain=ops.constrain,
    spread=ops.spread,
    spread_like=ops.spread_like,
)
