"""Leaves that have a shape but no values, and what a function would return for them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from functrain import tree
from functrain.torch_internals import FakeTensorMode


@dataclass(frozen=True)
class ShapeDtypeStruct:
    """A tensor's shape, dtype and device without its values, as JAX's class of this name.

    >>> ShapeDtypeStruct((2, 3), torch.float32)
    ShapeDtypeStruct(shape=(2, 3), dtype=torch.float32, device=device(type='cpu'))
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def stride(self) -> tuple[int, ...]:
        """Elements between neighbours along each dimension, row-major."""
        strides, step = [], 1
        for size in reversed(self.shape):
            strides.append(step)
            step *= max(size, 1)
        return tuple(reversed(strides))

    def is_contiguous(self) -> bool:
        """True: an abstract leaf is row-major."""
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def abstract(leaf: Any) -> Any:
    """A tensor as `ShapeDtypeStruct`; other leaves as they are."""
    return ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else leaf


def eval_shape(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `function(*args, **kwargs)` would return, as shapes: nothing is computed and no memory is taken.

    Args:
        function: any traceable function.
        args: trees of tensors, numbers or `ShapeDtypeStruct`.
        kwargs: as `args`.

    Returns:
        The result's tree with a `ShapeDtypeStruct` for each tensor.

    >>> eval_shape(lambda x: {"y": x @ x.T}, ShapeDtypeStruct((4, 8), torch.float32))["y"].shape
    (4, 4)
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(leaf: Any) -> Any:
        if isinstance(leaf, (torch.Tensor, ShapeDtypeStruct)):
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
        return leaf

    with mode:
        args, kwargs = tree.map(fake, (args, kwargs))
        return tree.map(abstract, function(*args, **kwargs))
