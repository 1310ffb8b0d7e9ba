"""A function applied chunk by chunk, so that only one chunk's intermediates are in memory at a time: forward and backward."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from functrain import tree
from functrain.random.keys import fold_in
from functrain.remat import remat
from functrain.tree import Mean, PyTree


def tiled(function: Callable[..., Any], chunks: int, dim: int = 0, key_argnums: int | Sequence[int] = ()) -> Callable[..., Any]:
    """Apply a function to chunks of its first argument, one after another, and put the results together.

    For functions whose results along `dim` depend on the same places of the first argument only, such as an MLP over tokens. Each chunk is
    rematerialized, so the backward pass too holds the intermediates of one chunk. Derivatives are those of the whole, by the first
    argument, the others, and whatever the function closes over.

    Args:
        function: takes the first argument (a tree of tensors of one size along `dim`) and others, which every chunk gets whole. Returns a
            tree of tensors of the chunk's size along `dim`, which are concatenated; a `Mean` in it is summed.
        chunks: how many; sizes differ by at most one, and there are never more chunks than elements.
        dim: the dimension to cut along; may be negative.
        key_argnums: positional arguments that are random keys (or trees of keys): chunk j gets `fold_in(key, j)`.

    Raises:
        ValueError: the first argument's leaves differ in size along `dim`, or a result does not have the chunk's size; the message names
            the leaf and the shapes.

    Example:
        >>> mlp = tiled(lambda x, w: torch.relu(x @ w) @ w.T, chunks=3)
        >>> mlp(torch.ones(8, 2), torch.ones(2, 5)).shape
        torch.Size([8, 2])
    """
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1:
        raise ValueError(f"chunks must be an int of at least 1, not {chunks!r}")
    name = getattr(function, "__name__", type(function).__name__)
    one_chunk = remat(function)

    @functools.wraps(function)
    def in_chunks(first: PyTree, *others: Any, **kwargs: Any) -> Any:
        keys = _key_places(name, key_argnums, 1 + len(others))
        sizes = _sizes(_length(name, first, dim), chunks)
        parts = _cut(first, sizes, dim)
        results = [one_chunk(part, *_folded(others, keys, j), **kwargs) for j, part in enumerate(parts)]
        return _joined(name, results, sizes, dim)

    return in_chunks


def _length(name: str, first: PyTree, dim: int) -> int:
    """The size along `dim` that all tensors of the first argument have."""
    rows = [(path or "(the whole argument)", x) for path, x in tree.leaves_with_path(first) if isinstance(x, torch.Tensor)]
    if not rows:
        raise ValueError(f"tiled {name}: the first argument holds no tensor to cut")
    for path, x in rows:
        if not -x.dim() <= dim < x.dim():
            raise ValueError(f"tiled {name}: leaf {path} of shape {list(x.shape)} has no dimension {dim}")
        if x.shape[dim] != rows[0][1].shape[dim]:
            raise ValueError(
                f"tiled {name}: leaves differ in size along dimension {dim}: {rows[0][0]} has {list(rows[0][1].shape)}, {path} has "
                f"{list(x.shape)}. Pass what every chunk needs whole as a further argument"
            )
    length: int = rows[0][1].shape[dim]
    return length


def _sizes(length: int, chunks: int) -> list[int]:
    """Sizes that differ by at most one, larger ones first.

    >>> _sizes(8, 3), _sizes(2, 5), _sizes(0, 2)
    ([3, 3, 2], [1, 1], [0])
    """
    chunks = max(1, min(chunks, length))
    return [length // chunks + (i < length % chunks) for i in range(chunks)]


def _cut(first: PyTree, sizes: list[int], dim: int) -> list[PyTree]:
    """One tree a chunk. One split, not many slices: its gradient is one concatenation."""
    leaves, structure = tree.flatten(first)
    columns = [torch.split(x, sizes, dim) if isinstance(x, torch.Tensor) else (x,) * len(sizes) for x in leaves]
    return [tree.unflatten(structure, [column[j] for column in columns]) for j in range(len(sizes))]


def _key_places(name: str, key_argnums: int | Sequence[int], given: int) -> set[int]:
    numbers = key_argnums if isinstance(key_argnums, (tuple, list)) else (key_argnums,)
    for number in numbers:
        if not isinstance(number, int) or not -given <= number < given:
            raise ValueError(f"tiled {name}: key_argnums={number!r}, but the call had {given} positional arguments")
        if number % given == 0:
            raise ValueError(f"tiled {name}: the first argument is what is cut; a key must be a further argument")
    return {number % given for number in numbers}


def _folded(others: tuple[Any, ...], keys: set[int], j: int) -> list[Any]:
    return [tree.map(lambda key: fold_in(key, j), x) if i in keys else x for i, x in enumerate(others, start=1)]


def _joined(name: str, results: list[PyTree], sizes: list[int], dim: int) -> PyTree:
    def join(path: str, *parts: Any) -> Any:
        if isinstance(parts[0], Mean):
            return functools.reduce(lambda x, y: x + y, parts)
        if not isinstance(parts[0], torch.Tensor):
            return _same(name, path, parts)
        for part, size in zip(parts, sizes, strict=True):
            if not (-part.dim() <= dim < part.dim() and part.shape[dim] == size):
                raise ValueError(
                    f"tiled {name}: result {path or '(the whole result)'} of a chunk has shape {list(part.shape)}, but the chunk has size "
                    f"{size} along dimension {dim}. Return sums as ft.Mean(total, weight)"
                )
        return torch.cat(parts, dim)

    return tree.map_with_path(join, *results, is_leaf=lambda x: isinstance(x, Mean))


def _same(name: str, path: str, parts: Sequence[Any]) -> Any:
    if any(part != parts[0] for part in parts):
        raise ValueError(f"tiled {name}: result {path} is no tensor and differs between chunks: {parts[0]!r}, ...")
    return parts[0]
