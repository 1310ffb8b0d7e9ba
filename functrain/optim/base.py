"""The one concept of this room: a gradient transformation is a pair of pure functions, (init, update), as in Optax."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from functrain import tree
from functrain.tree import PyTree, struct

Schedule = Callable[[torch.Tensor], torch.Tensor | float]
ScalarOrSchedule = float | torch.Tensor | Schedule


class GradientTransformation(NamedTuple):
    """A pair of pure functions.

    Example:
        >>> halve = GradientTransformation(lambda params: (), lambda grads, state, params=None: (tree.map(lambda g: g / 2, grads), state))
        >>> halve.update({"w": torch.ones(2)}, halve.init({}))[0]["w"]
        tensor([0.5000, 0.5000])
    """

    init: Callable[[PyTree], PyTree]  # params -> state
    update: Callable[..., tuple[PyTree, PyTree]]  # (grads, state, params=None) -> (updates, state)


@struct
class EmptyState:
    """The state of a transformation that remembers nothing."""


def stateless(function: Callable[[PyTree, PyTree], PyTree]) -> GradientTransformation:
    """A transformation that remembers nothing, from `function(grads, params) -> updates`.

    >>> stateless(lambda grads, params: tree.map(torch.neg, grads)).update({"w": torch.ones(1)}, EmptyState())[0]["w"]
    tensor([-1.])
    """

    def update(grads: PyTree, state: EmptyState, params: PyTree = None) -> tuple[PyTree, EmptyState]:
        return function(grads, params), state

    return GradientTransformation(lambda params: EmptyState(), update)


def identity() -> GradientTransformation:
    """Passes gradients through.

    >>> identity().update({"w": torch.ones(1)}, EmptyState())[0]["w"]
    tensor([1.])
    """
    return stateless(lambda grads, params: grads)


def chain(*transformations: GradientTransformation) -> GradientTransformation:
    """Apply transformations one after the other; the state is the tuple of theirs.

    >>> chain(scale(2.0), scale(3.0)).update({"w": torch.ones(1)}, (EmptyState(), EmptyState()))[0]["w"]
    tensor([6.])
    """

    def init(params: PyTree) -> tuple[PyTree, ...]:
        return tuple(t.init(params) for t in transformations)

    def update(grads: PyTree, state: tuple[PyTree, ...], params: PyTree = None) -> tuple[PyTree, tuple[PyTree, ...]]:
        if len(state) != len(transformations):
            raise ValueError(f"chain has {len(transformations)} transformations, but its state has {len(state)}: call init of this chain")
        new = []
        for transformation, one in zip(transformations, state, strict=True):
            grads, changed = transformation.update(grads, one, params)
            new.append(changed)
        return grads, tuple(new)

    return GradientTransformation(init, update)


def scale(factor: float | torch.Tensor) -> GradientTransformation:
    """Multiply every update by a number.

    >>> scale(-0.5).update({"w": torch.ones(1)}, EmptyState())[0]["w"]
    tensor([-0.5000])
    """
    return stateless(lambda grads, params: tree.map(lambda g: g * factor, grads))


def apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """The params plus their updates, each in its param's dtype.

    Raises:
        StructureError: the trees differ; names the path.

    >>> apply_updates({"w": torch.ones(2)}, {"w": torch.tensor([1.0, -1.0])})["w"]
    tensor([2., 0.])
    """
    return tree.map(lambda p, u: (p + u).to(p.dtype), params, updates)


def need_params(name: str, params: PyTree) -> PyTree:
    """The params, or an error that says who needs them."""
    if params is None:
        raise ValueError(f"{name} needs the params: call update(grads, state, params)")
    return params


def increment(count: torch.Tensor) -> torch.Tensor:
    """The next count; it stays at the largest int32 instead of overflowing, as Optax's does."""
    largest = torch.iinfo(torch.int32).max
    return torch.where(count < largest, count + 1, count)


def zero_count(params: PyTree) -> torch.Tensor:
    """A count of 0, int32, on the params' device."""
    device = next((x.device for x in tree.tensors(params)), None)
    return torch.zeros((), dtype=torch.int32, device=device)


def value_at(rate: ScalarOrSchedule, count: torch.Tensor) -> Any:
    """A learning rate's value: a schedule is called with the count."""
    return rate(count) if callable(rate) else rate


def map_rows(function: Callable[..., tuple[Any, ...]], width: int, *trees: PyTree) -> tuple[PyTree, ...]:
    """Map a function of several results over trees: one tree for each place of the tuple that it returns."""
    rows: list[tuple[Any, ...]] = []
    tree.map(lambda *leaves: rows.append(function(*leaves)), *trees)
    return tree.transpose(tree.structure(trees[0]), rows, width)


def like(params: PyTree, dtype: torch.dtype | None = None) -> PyTree:
    """Zeros in the shapes of the params, in their dtype or another."""
    return tree.map(lambda p: torch.zeros_like(p, dtype=dtype or p.dtype, requires_grad=False), params)
