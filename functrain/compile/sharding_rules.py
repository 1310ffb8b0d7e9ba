"""Rules of our own for how operations may be split, where DTensor has none or a wrong one: one row a rule.

A row says, for ONE mesh axis, how each tensor argument and each result is split; a rule is a list of rows. The partitioner takes, axis by
axis, the row that moves the fewest bytes. An int is a dimension that is split; None is whole; PARTIAL is a sum over ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from functrain.compile.values import Value
from functrain.torch_internals import OpOverload

aten = torch.ops.aten
PARTIAL = "partial"
Split = int | None | str


@dataclass(frozen=True)
class Row:
    """One way to split an operation along one mesh axis."""

    inputs: tuple[Split, ...]  # of the tensor arguments, in order
    outputs: tuple[Split, ...]  # of the tensor results, in order
    multiple: int = 1  # each piece of a split dimension must have a multiple of so many elements


Rule = Callable[[list[Value], Sequence[Any]], list[Row]]  # (tensor arguments, all positional arguments) -> rows


def _attention(inputs: int, outputs: int) -> Rule:
    """Attention splits by batch (dimension 0) and by head (dimension 1); a mask that is broadcast there stays whole."""

    def rule(values: list[Value], args: Sequence[Any]) -> list[Row]:
        rows = []
        for dim in (0, 1):
            extra = [dim if _has(v, dim, values[0]) else None for v in values[inputs:]]
            rows.append(Row((*[dim] * inputs, *extra), (dim,) * outputs))
        return rows

    return rule


def _has(mask: Value, dim: int, query: Value) -> bool:
    d = dim - (len(query.shape) - len(mask.shape))
    return d >= 0 and mask.shape[d] != 1 and len(mask.shape) == len(query.shape)


def _pointwise(values: list[Value], args: Sequence[Any]) -> list[Row]:
    """Elementwise: any dimension of the result, which arguments that are broadcast there do not have."""
    ndim = max(len(v.shape) for v in values)
    sizes = [max((v.shape[d - ndim + len(v.shape)] for v in values if d >= ndim - len(v.shape)), default=1) for d in range(ndim)]
    rows = []
    for dim in range(ndim):
        inputs = []
        for v in values:
            d = dim - (ndim - len(v.shape))
            inputs.append(d if d >= 0 and v.shape[d] == sizes[dim] else None)
        rows.append(Row(tuple(inputs), (dim,)))
    return rows


def _along_first(values: list[Value], args: Sequence[Any]) -> list[Row]:
    """One tensor, any dimension, kept."""
    return [Row((d,), (d,)) for d in range(len(values[0].shape))]


def _all_but(values: list[Value], dim: int, outputs: int = 1) -> list[Row]:
    """Every dimension but one that the operation works along; all arguments have the first one's rank."""
    ndim = len(values[0].shape)
    return [Row((d,) * len(values), (d,) * outputs) for d in range(ndim) if d != dim % max(ndim, 1)]


def _others(values: list[Value], dims: Sequence[int]) -> list[Row]:
    """One tensor; every dimension but some."""
    ndim = len(values[0].shape)
    return [Row((d,), (d,)) for d in range(ndim) if d not in {i % ndim for i in dims}]


def _along_second_argument(outputs: int = 1) -> Rule:
    """The dimension that the operation works along is its second argument."""
    return lambda values, args: _all_but(values, args[1], outputs)


def _along_argument(place: int, default: int, outputs: int = 1) -> Rule:
    return lambda values, args: _all_but(values, args[place] if len(args) > place else default, outputs)


def _adamw(values: list[Value], args: Sequence[Any]) -> list[Row]:
    """The fused update of (gradient, moments, param, coefficients): element by element, coefficients whole."""
    return [Row((d, d, d, d, None), (d, d, d)) for d in range(len(values[0].shape))]


def _slice(values: list[Value], args: Sequence[Any]) -> list[Row]:
    """Every dimension but the sliced one; that one too where a slice takes every k-th element of all, as microbatches do."""
    given = [*args, *[None, 0, None, None, 1][len(args) :]]
    dim, start, end, step = given[1:]
    size = len(values[0].shape)
    dim, start = dim % size, start or 0
    rows = [Row((d,), (d,)) for d in range(size) if d != dim]
    if 0 <= start < step and (end is None or end >= values[0].shape[dim]):
        rows.append(Row((dim,), (dim,), multiple=step))
    return rows


def _threefry(values: list[Value], args: Sequence[Any]) -> list[Row]:
    """A draw of several keys: each key's draw on its own."""
    return [Row((d,), (d,)) for d in range(len(values[0].shape) - 1)]


def _fold_in(values: list[Value], args: Sequence[Any]) -> list[Row]:
    """Keys [*batch, 2] and numbers [*batch]."""
    if len(values) < 2 or len(values[0].shape) - 1 != len(values[1].shape) or values[0].shape[:-1] != values[1].shape:
        return []
    return [Row((d, d), (d,)) for d in range(len(values[1].shape))]


def _matrices(values: list[Value], args: Sequence[Any]) -> list[Row]:
    """[batch, ..] times [batch, ..]: by batch, rows, columns or the summed dimension."""
    return [Row((0, 0), (0,)), Row((1, None), (1,)), Row((None, 2), (2,)), Row((2, 1), (PARTIAL,))]


ops = torch.ops.functrain
RULES: dict[Any, Rule] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention(3, 2),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention(6, 3),
    aten.cumsum.default: _along_second_argument(),
    aten.flip.default: lambda values, args: _others(values, args[1]),
    aten.roll.default: lambda values, args: _others(values, args[2] if len(args) > 2 and args[2] else range(len(values[0].shape))),
    aten.lift_fresh_copy.default: _along_first,
    aten.erf.default: _pointwise,
    ops.adamw.default: _adamw,
    ops.erfinv.default: _along_first,
    ops.threefry_fold_in.default: _fold_in,
    ops.threefry_bits.default: _threefry,
    ops.threefry_uniform.default: _threefry,
    ops.threefry_normal.default: _threefry,
    ops.threefry_bernoulli.default: _threefry,
    ops.threefry_integers.default: _threefry,
    aten.slice.Tensor: _slice,
    aten.bmm.default: _matrices,
    aten.sort.default: _along_argument(1, -1, 2),
    aten.topk.default: _along_argument(2, -1, 2),
}


def rows_for(target: Any, values: list[Value], args: Sequence[Any]) -> list[Row] | None:
    """Our rows for an operation, the whole one included; None where DTensor is to be asked."""
    rule = RULES.get(target)
    if rule is None:
        return None
    return [Row((None,) * len(values), ()), *rule(values, args)]


def pointwise_rows(target: Any, values: list[Value]) -> list[Row] | None:
    """Rows for an elementwise operation that DTensor does not know; None for any other."""
    if not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags or not values or len(target._schema.returns) != 1:
        return None
    return [Row((None,) * len(values), ()), *_pointwise(values, ())]


def choose(rows: Sequence[Row], values: Sequence[Value], mesh_sizes: Sequence[int]) -> list[Row]:
    """For each mesh axis the row that moves the fewest bytes; of equal ones the one that splits most."""
    chosen: list[Row] = []
    taken: dict[tuple[int, int], int] = {}  # (argument, dimension) -> into how many pieces the axes before split it
    for a, n in enumerate(mesh_sizes):
        possible = [row for row in rows if n > 1 and _divides(row, values, n, taken)] or [rows[0]]
        best = min(possible, key=lambda row: (_moved(row, values, a, n), sum(split is None for split in row.inputs)))
        chosen.append(best)
        for i, split in enumerate(best.inputs):
            if isinstance(split, int):
                taken[i, split] = taken.get((i, split), 1) * n
    return chosen


def _divides(row: Row, values: Sequence[Value], n: int, taken: dict[tuple[int, int], int]) -> bool:
    return all(
        not isinstance(split, int) or values[i].shape[split] % (n * taken.get((i, split), 1) * row.multiple) == 0
        for i, split in enumerate(row.inputs)
    )


def _moved(row: Row, values: Sequence[Value], a: int, n: int) -> float:
    """Bytes that a rank must send for the arguments to be split like the row; what is whole everywhere is computed whole everywhere."""
    if all(isinstance(v.placements[a], Replicate) for v in values):
        return float(any(split is not None for split in row.inputs))
    total = 0.0
    for split, value in zip(row.inputs, values, strict=True):
        size = value.local.numel() * value.local.element_size()
        have = value.placements[a]
        if isinstance(have, Replicate):
            total += 0.0 if split is None else 0.001 * size
        elif isinstance(have, Shard):
            total += 0.0 if have.dim == split else size * (n - 1) if split is None else size
        else:
            total += 2.0 * size if split is None else 0.0 if split == PARTIAL else size
    whole = all(split is None for split in row.inputs)
    return total + (0.002 * sum(v.local.numel() * v.local.element_size() for v in values) if whole else 0.0)


def as_placement(split: Split) -> Placement:
    """A row's entry as a placement."""
    if split is None:
        return Replicate()
    return Partial() if split == PARTIAL else Shard(int(split))
