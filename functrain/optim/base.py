"""The one concept of this room: a gradient transformation is a pair of pure functions, (init, update), as in Optax."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from functrain import tree
from functrain.torch_internals import current_annotation, derivative_transform_is_active
from functrain.tree import PyTree, struct

Schedule = Callable[[torch.Tensor], torch.Tensor | float]
ScalarOrSchedule = float | torch.Tensor | Schedule


class GradientTransformation(NamedTuple):
    """A pair of pure functions.

    Trees may hold ``None`` where a leaf is left out (masked, frozen): nothing is kept for it, and None comes out. Leaves are moved in
    floating point: one of integers is an error that names it, unless a mask leaves it out.

    The updates of this room carry no autograd history, so that params that require grad do not tie one step's graph to the next.
    Inside `ft.grad` and torch.func's transforms, where a derivative through an update may be what is asked for, they do carry it.

    Example:
        >>> halve = GradientTransformation(lambda params: (), lambda grads, state, params=None: (tree.map(lambda g: g / 2, grads), state))
        >>> halve.update({"w": torch.ones(2)}, halve.init({}))[0]["w"]
        tensor([0.5000, 0.5000])
    """

    init: Callable[[PyTree], PyTree]  # params -> state
    update: Callable[..., tuple[PyTree, PyTree]]  # (grads, state, params=None) -> (updates, state)


def without_history(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, recording nothing for autograd unless it runs inside a derivative.

    >>> w = torch.ones(1, requires_grad=True)
    >>> without_history(lambda x: 2 * x)(w).requires_grad
    False
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or derivative_transform_is_active() or "phase" in current_annotation():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return run


def transformation(init: Callable[[PyTree], PyTree], update: Callable[..., tuple[PyTree, PyTree]]) -> GradientTransformation:
    """The pair, its update without autograd history."""
    return GradientTransformation(init, without_history(update))


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

    return transformation(lambda params: EmptyState(), update)


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

    return transformation(init, update)


def set_to_zero() -> GradientTransformation:
    """Zero updates: what it is given stays as it is.

    >>> set_to_zero().update({"w": torch.ones(1)}, EmptyState())[0]["w"]
    tensor([0.])
    """
    return stateless(lambda grads, params: tree.map(torch.zeros_like, grads))


def scale(step_size: float | torch.Tensor) -> GradientTransformation:
    """Multiply every update by a number or a 0-dim tensor.

    >>> scale(-0.5).update({"w": torch.ones(1)}, EmptyState())[0]["w"]
    tensor([-0.5000])
    """
    return stateless(lambda grads, params: times(grads, step_size))


def times(values: PyTree, factor: float | torch.Tensor) -> PyTree:
    """Every leaf times one scalar, in the leaf's own dtype. One multiplication a leaf, which the compiler folds into fused optimizers.

    >>> times({"w": torch.ones(1, dtype=torch.bfloat16)}, torch.tensor(2.0))["w"]
    tensor([2.], dtype=torch.bfloat16)
    """
    if not isinstance(factor, torch.Tensor):
        return tree.map(lambda x: x * factor, values)
    return tree.map(lambda x: (x * factor).to(x.dtype), values)  # a 0-dim leaf would take the factor's dtype


@without_history
def apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """The params plus their updates, each in its param's dtype; where the update is None, the param as it is.

    Raises:
        StructureError: the trees differ; names the path.

    >>> apply_updates({"w": torch.ones(2), "frozen": torch.ones(1)}, {"w": torch.tensor([1.0, -1.0]), "frozen": None})
    {'w': tensor([2., 0.]), 'frozen': tensor([1.])}
    """
    return tree.map(lambda p, u: p if u is None else torch.add(p, u).to(p.dtype), params, updates)


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


def zeros(name: str, params: PyTree, dtype: torch.dtype | None = None) -> PyTree:
    """Zeros in the shapes of the params, in their dtype or another.

    Args:
        name: the transformation that keeps them, for the error.
        params: tree of floating-point tensors.
        dtype: of the zeros; each param's own where None.

    Raises:
        TypeError: a leaf is no floating-point tensor; names it.
    """

    def one(path: str, param: Any) -> torch.Tensor:
        need_float(name, path, param)
        return torch.zeros_like(param, dtype=dtype or param.dtype, requires_grad=False)

    return tree.map_with_path(one, params)


def need_float(name: str, path: str, param: Any) -> None:
    """Raise TypeError, with the remedy, for what cannot be moved by small steps."""
    if isinstance(param, torch.Tensor) and param.is_floating_point():
        return
    kind = str(param.dtype).removeprefix("torch.") if isinstance(param, torch.Tensor) else type(param).__name__
    raise TypeError(
        f"{name} moves floating-point tensors, but leaf {path or '(the root)'} is {kind}: keep it outside of the params, or leave it out "
        "with optim.masked(..., lambda params: tree.map(torch.is_floating_point, params))"
    )


def widest(values: PyTree) -> torch.dtype:
    """The floating dtype that holds those of all leaves: at least float32, and float64 where there is one.

    >>> widest({"w": torch.ones(1, dtype=torch.float16)})
    torch.float32
    """
    dtypes = {x.dtype for x in tree.tensors(values) if x.is_floating_point()}
    return functools.reduce(torch.promote_types, dtypes, torch.float32)
