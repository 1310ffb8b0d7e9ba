"""Gradients of one big batch in the memory of a small one: microbatches are summed as totals and divided once."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from functrain import tree
from functrain.differentiate import Selection, of_microbatch, phase, pullback, select_arguments
from functrain.precision import LossScale, Precision
from functrain.random.keys import fold_in
from functrain.transforms import split_loss
from functrain.tree import Mean, PyTree


def accumulate(
    loss_fn: Callable[..., Any],
    microbatches: int,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    key_argnums: int | Sequence[int] = (),
    precision: Precision | None = None,
    loss_scale: LossScale | None = None,
) -> Callable[..., Any]:
    """What `value_and_grad(loss_fn)` returns, computed one microbatch after another, so that only one is in memory.

    Totals, weights and gradients of totals are summed in float32 (float64 where they are float64) and divided once: with a `Mean` the
    result is the weighted mean over the WHOLE batch, whatever each microbatch's weight. A scalar loss counts each microbatch alike.
    The first argument after the differentiated ones (that is no key) is the batch: microbatch j is rows `j::microbatches` of each of its
    leaves, a cut that keeps the batch's split over ranks.

    Args:
        loss_fn: as for `value_and_grad`. The weight of its `Mean` must not depend on the differentiated arguments.
        microbatches: how many; the number of rows must be a multiple of it.
        argnums: what to differentiate by, as for `value_and_grad`.
        has_aux: whether `loss_fn` returns (loss, aux). In aux a `Mean` is merged; other leaves are stacked along a new first axis.
        key_argnums: positional arguments that are random keys (or trees of keys): each microbatch gets `fold_in(key, j)`.
        precision: as for `value_and_grad`; params are cast once, not once a microbatch.
        loss_scale: as for `value_and_grad`. Each microbatch's scaled gradient is then that of its own mean, so that it fits into float16.

    Returns:
        A function like that of `value_and_grad`; the value is float32 at least.

    Raises:
        ValueError: the batch's rows do not divide, its leaves differ in rows, there is no batch, or a weight depends on the params.

    Example:
        >>> def loss_fn(w, batch):
        ...     return Mean((w * batch["x"] * batch["mask"]).sum(), batch["mask"].sum())
        >>> batch = {"x": torch.arange(4.0), "mask": torch.tensor([1.0, 1, 0, 1])}
        >>> accumulate(loss_fn, 2)(torch.tensor(3.0), batch)
        (tensor(4.), tensor(1.3333))
    """
    if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
        raise ValueError(f"microbatches must be an int of at least 1, not {microbatches!r}")
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)

    @functools.wraps(loss_fn)
    def accumulated(*args: Any, **kwargs: Any) -> Any:
        selection = select_arguments(name, args, argnums)
        keys = _places("key_argnums", key_argnums, len(args))
        place = _batch_place(name, selection, keys)
        _check_rows(args[place], microbatches)
        with phase("forward"):
            params = selection.tensors(precision)

        def parts() -> Iterator[_Part]:
            for j in range(microbatches):
                with phase("forward"):
                    cut = _microbatch(selection, place, keys, j, microbatches)
                yield _one(name, loss_fn, cut, params, kwargs, has_aux, loss_scale)

        mean, sums, auxes = _summed(parts())
        with phase("backward"):
            gradients = selection.gradients(sums, precision, _final_factor(mean, loss_scale))
        return ((mean.value(), _merged(auxes)) if has_aux else mean.value()), gradients

    return accumulated


class _Part(NamedTuple):
    """What one microbatch gives."""

    mean: Mean
    gradients: list[torch.Tensor]  # of the total
    aux: PyTree


def _one(
    name: str,
    loss_fn: Callable[..., Any],
    call: Selection,
    params: list[torch.Tensor],
    kwargs: dict[str, Any],
    has_aux: bool,
    loss_scale: LossScale | None,
) -> _Part:
    """Forward and backward of one microbatch."""

    def run(leaves: list[torch.Tensor]) -> tuple[list[torch.Tensor], PyTree]:
        loss, aux = split_loss(name, loss_fn(*call.arguments(leaves), **kwargs), has_aux)
        mean = loss if isinstance(loss, Mean) else Mean(loss, torch.ones_like(loss))
        _check_weight(name, mean.weight, leaves)
        return [mean.total], (mean.weight, aux)

    (total,), (weight, aux), pull = pullback(run, params)
    mean = Mean(_wide(total), _wide(weight))
    leaves = [call.leaves[i] for i in call.active]
    with phase("backward"):
        if loss_scale is None:
            gradients = pull([torch.ones_like(total)])
            return _Part(mean, [of_microbatch(_wide(g), x) for g, x in zip(gradients, leaves, strict=True)], aux)
        divisor = _nonzero(mean.weight).to(mean.total.dtype)
        gradients = pull([(loss_scale.scale / divisor).to(total)])
        return _Part(mean, [of_microbatch(_wide(g), x) * divisor for g, x in zip(gradients, leaves, strict=True)], aux)


def _summed(parts: Iterator[_Part]) -> tuple[Mean, list[torch.Tensor], list[PyTree]]:
    mean, gradients, aux = next(parts)
    sums, auxes = [_wide(gradients.pop()) for _ in range(len(gradients))][::-1], [aux]
    for part in parts:
        mean = mean + part.mean
        auxes.append(part.aux)
        with phase("backward"):
            for i in reversed(range(len(sums))):  # leaf by leaf: an old sum is freed as soon as the new one is there
                sums[i] = sums[i] + part.gradients.pop()  # the sum of float32 and half is float32
    return mean, sums, auxes


def _final_factor(mean: Mean, loss_scale: LossScale | None) -> torch.Tensor:
    """What the summed gradients are multiplied by: 1 / (weight * scale), and 0 where the weight is 0."""
    divisor = _nonzero(mean.weight).to(mean.total.dtype)
    factor = torch.where(mean.weight == 0, torch.zeros_like(divisor), 1 / divisor)
    return factor if loss_scale is None else factor / loss_scale.scale


def _nonzero(weight: torch.Tensor) -> torch.Tensor:
    return torch.where(weight == 0, torch.ones_like(weight), weight)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """float32 at least; integers stay."""
    return x.to(torch.promote_types(x.dtype, torch.float32)) if x.is_floating_point() or x.is_complex() else x


def _check_weight(name: str, weight: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    """Gradients of totals are summed and divided once, which is right for a weight that does not move with the params."""
    if not weight.requires_grad or not leaves:
        return
    if any(g is not None for g in torch.autograd.grad([weight], leaves, retain_graph=True, allow_unused=True)):
        raise ValueError(
            f"the weight of the ft.Mean that {name} returned depends on the arguments it is differentiated by, and accumulate takes it as "
            "fixed. Detach the weight, or use value_and_grad, which differentiates it"
        )


# ---- cutting the batch


def _places(what: str, numbers: int | Sequence[int], given: int) -> tuple[int, ...]:
    places = tuple(numbers) if isinstance(numbers, (tuple, list)) else (numbers,)
    for number in places:
        if not isinstance(number, int) or isinstance(number, bool) or not -given <= number < given:
            raise ValueError(f"{what}={number!r} names no argument: the call had {given} positional arguments")
    return tuple(number % given for number in places)


def _batch_place(name: str, selection: Selection, keys: tuple[int, ...]) -> int:
    for place in range(max(selection.argnums, default=-1) + 1, len(selection.args)):
        if place not in keys:
            return place
    raise ValueError(f"{name} was called without a batch: accumulate cuts the first positional argument after the params")


def _check_rows(batch: PyTree, microbatches: int) -> None:
    """Every leaf has the same number of rows, a multiple of `microbatches`."""
    rows = [(path or "(the whole batch)", x) for path, x in tree.leaves_with_path(batch) if _has_rows(x)]
    for path, x in rows:
        if len(x.shape) == 0:
            raise ValueError(f"batch leaf {path} is a scalar and has no rows to cut; pass it as another argument")
        if x.shape[0] % microbatches:
            raise ValueError(
                f"batch leaf {path} of shape {list(x.shape)} has {x.shape[0]} rows, which {microbatches} microbatches do not divide; "
                "choose a divisor, or pad the batch with rows of weight 0"
            )
        if x.shape[0] != rows[0][1].shape[0]:
            raise ValueError(f"batch leaves differ in rows: {rows[0][0]} has {list(rows[0][1].shape)}, {path} has {list(x.shape)}")
    if not rows:
        raise ValueError("the batch holds no tensor to cut into microbatches")


def _has_rows(x: Any) -> bool:
    return isinstance(x, torch.Tensor) or type(x).__module__ == "numpy"


def _microbatch(selection: Selection, place: int, keys: tuple[int, ...], j: int, microbatches: int) -> Selection:
    """The call's arguments for microbatch j: its rows, its keys."""
    args = list(selection.args)
    args[place] = tree.map(lambda x: x[j::microbatches] if _has_rows(x) else x, args[place])
    for key in keys:
        args[key] = tree.map(lambda x: fold_in(x, j), args[key])
    return dataclasses.replace(selection, args=tuple(args))


# ---- putting aux together


def _merged(auxes: list[PyTree]) -> PyTree:
    return tree.map(lambda *parts: _merge(parts), *auxes, is_leaf=lambda x: isinstance(x, Mean))


def _merge(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Mean):
        return functools.reduce(lambda x, y: x + y, (Mean(_wide(p.total), _wide(p.weight)) for p in parts))
    if isinstance(first, torch.Tensor):
        return torch.stack(list(parts))
    if isinstance(first, (bool, int, float)):
        return torch.tensor(parts)
    if all(part == first for part in parts):
        return first
    raise TypeError(
        f"aux of the microbatches holds {type(first).__name__} values that differ ({first!r}, {parts[1]!r}, ...); only tensors stack"
    )
