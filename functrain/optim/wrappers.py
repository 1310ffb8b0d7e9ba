"""Transformations around others: skip what is not finite, hyper-parameters as state."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from functrain import tree
from functrain.optim.accumulation import choose
from functrain.optim.base import GradientTransformation, increment, transformation, widest, zero_count
from functrain.tree import PyTree, struct


@struct
class ApplyIfFiniteState:
    """How often gradients were not finite."""

    notfinite_count: torch.Tensor  # in a row, int32 scalar
    last_finite: torch.Tensor  # whether the last ones were, bool scalar
    total_notfinite: torch.Tensor  # in all, int32 scalar
    inner_state: PyTree


def apply_if_finite(inner: GradientTransformation, max_consecutive_errors: int) -> GradientTransformation:
    """Leave out updates whose gradients hold inf or NaN, as long as there were at most so many in a row.

    >>> from functrain.optim import scale
    >>> tx = apply_if_finite(scale(-1.0), 3)
    >>> updates, state = tx.update({"w": torch.tensor([float("nan")])}, tx.init({"w": torch.zeros(1)}))
    >>> updates["w"], int(state.total_notfinite)
    (tensor([0.]), 1)
    """

    def init(params: PyTree) -> ApplyIfFiniteState:
        zero = zero_count(params)
        return ApplyIfFiniteState(zero, torch.ones_like(zero, dtype=torch.bool), zero.clone(), inner.init(params))

    def update(grads: PyTree, state: ApplyIfFiniteState, params: PyTree = None) -> tuple[PyTree, ApplyIfFiniteState]:
        finite = [torch.isfinite(g).all() for g in tree.tensors(grads)]
        good = torch.stack(finite).all() if finite else torch.ones_like(state.last_finite)
        in_a_row = torch.where(good, torch.zeros_like(state.notfinite_count), increment(state.notfinite_count))
        accept = good | (in_a_row > max_consecutive_errors)
        candidate, stepped = inner.update(grads, state.inner_state, params)
        return tree.map(lambda u: torch.where(accept, u, torch.zeros_like(u)), candidate), ApplyIfFiniteState(
            in_a_row,
            good,
            torch.where(good, state.total_notfinite, increment(state.total_notfinite)),
            choose(accept, stepped, state.inner_state),
        )

    return transformation(init, update)


@struct
class InjectHyperparamsState:
    """Hyper-parameters as values: read them for metrics, replace them between steps."""

    count: torch.Tensor  # updates so far, int32 scalar
    hyperparams: dict[str, torch.Tensor]  # by name, scalars
    inner_state: PyTree


def inject_hyperparams(
    inner_factory: Callable[..., GradientTransformation], static_args: str | Iterable[str] = (), hyperparam_dtype: torch.dtype | None = None
) -> Callable[..., GradientTransformation]:
    """Turn the numbers that a factory takes into state, and schedules into their value at each step.

    Args:
        inner_factory: such as `adamw`.
        static_args: names of arguments to leave as they are (functions that are no schedules, such as masks). Arguments declared as
            `int`, such as muon's `ns_steps`, shape the computation and stay as they are too.
        hyperparam_dtype: of the values; the params' widest floating dtype where None.

    >>> from functrain.optim import sgd
    >>> tx = inject_hyperparams(sgd)(learning_rate=0.5)
    >>> state = tx.init({"w": torch.zeros(1)})
    >>> state = state.replace(hyperparams={"learning_rate": torch.tensor(0.25)})
    >>> tx.update({"w": torch.ones(1)}, state)[0]["w"]
    tensor([-0.2500])
    """
    static = {static_args} if isinstance(static_args, str) else set(static_args)
    signature = inspect.signature(inner_factory)
    if unknown := sorted(static - set(signature.parameters)):
        raise ValueError(f"static_args names {', '.join(unknown)}, which {inner_factory.__name__} does not take")
    static |= {name for name, parameter in signature.parameters.items() if parameter.annotation in (int, "int")}

    @functools.wraps(inner_factory)
    def make(*args: Any, **kwargs: Any) -> GradientTransformation:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        numbers, schedules, rest = _sorted(bound.arguments, static)

        def scheduled(count: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
            return {name: _asked(name, schedule, count).to(dtype) for name, schedule in schedules.items()}

        def init(params: PyTree) -> InjectHyperparamsState:
            count, dtype = zero_count(params), hyperparam_dtype or widest(params)
            values = {name: _value(number, dtype, count.device) for name, number in numbers.items()} | scheduled(count, dtype)
            return InjectHyperparamsState(count, values, inner_factory(**rest, **values).init(params))

        def update(grads: PyTree, state: InjectHyperparamsState, params: PyTree = None) -> tuple[PyTree, InjectHyperparamsState]:
            dtype = hyperparam_dtype or widest(grads if params is None else params)
            given = {name: _value(x, dtype, state.count.device) for name, x in state.hyperparams.items()}
            values = {**given, **scheduled(state.count, dtype)}
            updates, inner = inner_factory(**rest, **values).update(grads, state.inner_state, params)
            return updates, InjectHyperparamsState(increment(state.count), values, inner)

        return transformation(init, update)

    return make


def _sorted(arguments: dict[str, Any], static: set[str]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(numbers, schedules, the rest)."""
    numbers: dict[str, Any] = {}
    schedules: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in static or isinstance(value, (bool, torch.dtype)):
            rest[name] = value
        elif callable(value):
            schedules[name] = value
        elif isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0):
            numbers[name] = value
        else:
            rest[name] = value
    return numbers, schedules, rest


def _asked(name: str, schedule: Callable[[torch.Tensor], Any], count: torch.Tensor) -> torch.Tensor:
    """A schedule's value. A mask would often run on a count and give a bool, which is no value of a hyper-parameter."""
    advice = f"the function given as {name} was taken for a schedule, and failed as one; if it is none, name it in static_args"
    try:
        value = torch.as_tensor(schedule(count))
    except Exception as error:
        raise TypeError(advice) from error
    if value.dtype == torch.bool:
        raise TypeError(f"{advice} (it returned a bool)")
    return value


def _value(number: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if isinstance(number, torch.Tensor):
        return number.to(device=device, dtype=dtype if number.is_floating_point() else None)
    return torch.full((), number, dtype=dtype if isinstance(number, float) else torch.int32, device=device)
