"""What tests share: one way to compare trees, that says where and by how much."""

from typing import Any

import chex
import numpy as np
import torch

from functrain import tree


def to_numpy(leaf: Any) -> np.ndarray:
    """Any array-like (torch, jax, numpy, number) as numpy; bf16 goes through float32."""
    if isinstance(leaf, torch.Tensor):
        leaf = leaf.detach().cpu()
        return (leaf.float() if leaf.dtype in (torch.bfloat16, torch.float16) else leaf).numpy()
    array = np.asarray(leaf)
    return array.astype(np.float32) if array.dtype.name in ("bfloat16", "float16") else array


def assert_trees_close(actual: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-6, rank: int | None = None) -> None:
    """Leaves agree pairwise in shape and value; a mismatch prints path, rank, index and both values."""
    found, wanted = tree.leaves_with_path(actual), tree.leaves(expected)
    if len(found) != len(wanted):
        raise AssertionError(f"{len(found)} leaves against {len(wanted)}: {tree.mismatch(expected, actual)}")
    lines = [line for (path, a), e in zip(found, wanted, strict=True) if (line := _difference(path, a, e, rtol, atol, rank))]
    if lines:
        raise AssertionError(f"{len(lines)} of {len(found)} leaves differ:\n" + "\n".join(lines[:10]))


def assert_trees_equal(actual: Any, expected: Any) -> None:
    """Leaves agree pairwise bit for bit (NaN equals NaN)."""
    assert_trees_close(actual, expected, rtol=0.0, atol=0.0)


def _difference(path: str, actual: Any, expected: Any, rtol: float, atol: float, rank: int | None) -> str | None:
    a, e = to_numpy(actual), to_numpy(expected)
    where = f"{path or '(root)'}" + (f" rank {rank}" if rank is not None else "")
    if a.shape != e.shape:
        return f"{where}: shape {a.shape} against {e.shape}"
    exact = a.dtype.kind not in "fc"
    wrong = a != e if exact else ~np.isclose(a, e, rtol=rtol, atol=atol, equal_nan=True)
    if not wrong.any():
        return None
    gap = np.abs(a.astype(np.float64) - e.astype(np.float64)) if a.dtype.kind != "b" else wrong.astype(float)
    index = np.unravel_index(np.nanargmax(np.where(wrong, np.nan_to_num(gap, nan=np.inf), -1)), a.shape)
    return f"{where} index {tuple(int(i) for i in index)}: {a[index]!r} against {e[index]!r} ({int(wrong.sum())} of {wrong.size} differ)"


def assert_same_structure(actual: Any, expected: Any) -> None:
    """Both trees have the same node types, keys, shapes and dtypes."""
    difference = tree.mismatch(expected, actual)
    if difference:
        raise AssertionError(difference)
    chex.assert_equal([tuple(x.shape) for x in tree.tensors(actual)], [tuple(x.shape) for x in tree.tensors(expected)])
