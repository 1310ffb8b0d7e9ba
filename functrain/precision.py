"""Number formats of a step, and loss scaling for float16: plain data, and values that live in the state.

Nothing here branches on a value: a step whose gradients overflowed is undone by `select`, leaf by leaf.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from functrain import tree
from functrain.tree import PyTree, field, struct


@dataclass(frozen=True)
class Precision:
    """Which dtypes a step stores, computes and reduces in; an argument of `value_and_grad` and `accumulate`.

    Float params are cast to `compute` before the loss function sees them (and before they are gathered from their shards); other
    arguments are left as they are. Gradients are brought to `reduce` where they are summed over ranks, and come out in the dtype that
    their param is stored in.

    Example:
        >>> Precision().compute, Precision().to_param({"w": torch.zeros(1, dtype=torch.float16)})["w"].dtype
        (torch.bfloat16, torch.float32)
    """

    param: torch.dtype = torch.float32  # what params are stored in: see `to_param`
    compute: torch.dtype = torch.bfloat16  # what the loss function gets its params in
    reduce: torch.dtype = torch.float32  # what gradients are summed over ranks in

    def __post_init__(self) -> None:
        for name in ("param", "compute", "reduce"):
            dtype = getattr(self, name)
            if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise TypeError(f"Precision({name}=...) takes a floating-point torch dtype such as torch.bfloat16, not {dtype!r}")

    def to_param(self, params: PyTree) -> PyTree:
        """Params in the dtype they are stored in; other leaves pass through."""
        return tree.cast(params, self.param)

    def to_compute(self, inputs: PyTree) -> PyTree:
        """Inputs in the compute dtype, for a loss function whose batch holds floats that should follow the params."""
        return tree.cast(inputs, self.compute)


class LossScale(Protocol):
    """What `value_and_grad`, `accumulate` and `TrainState` need of a loss scale."""

    @property
    def scale(self) -> torch.Tensor:
        """What the loss is multiplied by, and gradients divided by: float32 scalar."""

    @property
    def finite(self) -> torch.Tensor:
        """Whether the last step's gradients were all finite: bool scalar."""

    def update(self, finite: torch.Tensor) -> "LossScale":
        """The scale for the next step."""


@struct
class StaticScale:
    """A loss scale that stays as it is; steps with gradients that are not finite are still skipped and told by `finite`.

    Example:
        >>> StaticScale(128).scale
        tensor(128.)
    """

    scale: Any  # float32 scalar tensor; a number becomes one
    finite: torch.Tensor = True  # type: ignore[assignment]  # bool scalar: whether the last step counted

    def __post_init__(self) -> None:
        _as_scalar(self, "scale", torch.float32)
        _as_scalar(self, "finite", torch.bool)

    def update(self, finite: torch.Tensor) -> "StaticScale":
        """The same scale, with the outcome of this step."""
        return StaticScale(self.scale, finite)


@struct
class DynamicScale:
    """A loss scale that falls when gradients overflow and grows after a while without (Micikevicius et al. 2018, arXiv 1710.03740, 3.2).

    Each step whose gradients are not finite multiplies the scale by `backoff`; after `growth_interval` finite steps in a row it is
    multiplied by `growth_factor`.

    Example:
        >>> DynamicScale().update(torch.tensor(False)).scale
        tensor(16384.)
    """

    initial: float = field(static=True, default=2.0**15)
    growth_interval: int = field(static=True, default=2000)  # finite steps in a row
    growth_factor: float = field(static=True, default=2.0)
    backoff: float = field(static=True, default=0.5)
    minimum: float = field(static=True, default=1.0)
    maximum: float = field(static=True, default=2.0**24)
    scale: torch.Tensor = None  # type: ignore[assignment]  # float32 scalar; None stands for `initial`
    counter: torch.Tensor = 0  # type: ignore[assignment]  # finite steps since the scale changed, int32 scalar
    finite: torch.Tensor = True  # type: ignore[assignment]  # bool scalar: whether the last step counted

    def __post_init__(self) -> None:
        if not (self.growth_factor >= 1 and 0 < self.backoff < 1 and self.growth_interval >= 1):
            raise ValueError(
                f"DynamicScale needs growth_factor >= 1, 0 < backoff < 1 and growth_interval >= 1, not {self.growth_factor}, "
                f"{self.backoff} and {self.growth_interval}"
            )
        if not 0 < self.minimum <= self.initial <= self.maximum:
            raise ValueError(f"DynamicScale needs 0 < minimum <= initial <= maximum, not {self.minimum}, {self.initial}, {self.maximum}")
        if self.scale is None:
            object.__setattr__(self, "scale", self.initial)
        _as_scalar(self, "scale", torch.float32)
        _as_scalar(self, "counter", torch.int32)
        _as_scalar(self, "finite", torch.bool)

    def update(self, finite: torch.Tensor) -> "DynamicScale":
        """The scale for the next step: lower after an overflow, higher after `growth_interval` finite steps in a row."""
        counted = self.counter + 1
        grow = counted >= self.growth_interval
        grown = torch.where(grow, (self.scale * self.growth_factor).clamp(max=self.maximum), self.scale)
        lowered = (self.scale * self.backoff).clamp(min=self.minimum)
        reset = torch.logical_or(grow, torch.logical_not(finite))
        return dataclasses.replace(
            self,
            scale=torch.where(finite, grown, lowered),
            counter=torch.where(reset, torch.zeros_like(self.counter), counted),
            finite=finite,
        )


def _as_scalar(node: Any, name: str, dtype: torch.dtype) -> None:
    """Turn a Python number in a field into a 0-dim tensor; anything else (a tensor, a place in an abstract tree) stays."""
    value = getattr(node, name)
    if isinstance(value, (bool, int, float)):
        object.__setattr__(node, name, torch.full((), value, dtype=dtype))


def all_finite(values: PyTree) -> torch.Tensor:
    """Whether no floating-point tensor of a tree holds an infinity or a NaN, as a bool scalar tensor.

    Example:
        >>> all_finite({"w": torch.ones(3), "b": torch.tensor([1.0, float("inf")])})
        tensor(False)
    """
    flags = [torch.isfinite(x).all() for x in tree.tensors(values) if x.is_floating_point() or x.is_complex()]
    return torch.stack(flags).all() if flags else torch.ones((), dtype=torch.bool)


def select(condition: torch.Tensor, accepted: PyTree, rejected: PyTree) -> PyTree:
    """`accepted` where the condition holds, else `rejected`, for every leaf and bit for bit, without a branch.

    Args:
        condition: bool scalar.
        accepted: a tree of tensors.
        rejected: a tree of the same structure; leaves that are not tensors must be equal on both sides.

    Raises:
        StructureError: the trees differ in structure.
        ValueError: a leaf has another shape or dtype in one tree, or is no tensor and differs.

    Example:
        >>> select(torch.tensor(False), {"w": torch.ones(2)}, {"w": torch.zeros(2)})
        {'w': tensor([0., 0.])}
    """
    return tree.map_with_path(lambda path, new, old: _select_leaf(condition, path, new, old), accepted, rejected)


def _select_leaf(condition: torch.Tensor, path: str, new: Any, old: Any) -> Any:
    if new is old:
        return new
    if not (isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor)):
        if type(new) is type(old) and not isinstance(new, torch.Tensor) and new == old:
            return new
        raise ValueError(f"leaf {path} cannot be chosen by a tensor: {new!r} against {old!r}. Make it a tensor, or a static field")
    if new.shape != old.shape or new.dtype != old.dtype:
        raise ValueError(f"leaf {path} changes from {list(old.shape)} {old.dtype} to {list(new.shape)} {new.dtype}; both must be the same")
    return torch.where(condition, new, old)
