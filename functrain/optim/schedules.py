"""Learning rates as functions of the step: pure, of a traced count, with Optax's names and meaning."""

import math
from collections.abc import Sequence

import torch

from functrain.optim.base import Schedule


def _number(count: torch.Tensor | int) -> torch.Tensor:
    """The count in double precision: a schedule is a few scalars, and float32 would round large counts."""
    return torch.as_tensor(count).to(torch.float64)


def constant_schedule(value: float) -> Schedule:
    """Always the same value.

    >>> float(constant_schedule(0.1)(torch.tensor(7)))
    0.1
    """
    return lambda count: torch.full_like(_number(count), value)


def polynomial_schedule(init_value: float, end_value: float, power: float, transition_steps: int, transition_begin: int = 0) -> Schedule:
    """From `init_value` to `end_value` in `transition_steps` steps after `transition_begin`, as ``(1 - progress) ** power``.

    >>> float(polynomial_schedule(1.0, 0.0, 2, 10)(torch.tensor(5)))
    0.25
    """
    if transition_steps <= 0:
        return constant_schedule(init_value)

    def schedule(count: torch.Tensor) -> torch.Tensor:
        progress = torch.clamp(_number(count) - max(transition_begin, 0), 0, transition_steps) / transition_steps
        return (init_value - end_value) * (1 - progress) ** power + end_value

    return schedule


def linear_schedule(init_value: float, end_value: float, transition_steps: int, transition_begin: int = 0) -> Schedule:
    """A straight line from `init_value` to `end_value`, constant before and after.

    >>> float(linear_schedule(0.0, 1.0, 10)(torch.tensor(5)))
    0.5
    """
    return polynomial_schedule(init_value, end_value, 1, transition_steps, transition_begin)


def exponential_decay(
    init_value: float,
    transition_steps: int,
    decay_rate: float,
    transition_begin: int = 0,
    staircase: bool = False,
    end_value: float | None = None,
) -> Schedule:
    """``init_value * decay_rate ** ((count - transition_begin) / transition_steps)``.

    Args:
        init_value: until step `transition_begin`.
        transition_steps: in how many steps the value falls by `decay_rate` once.
        decay_rate: the factor.
        transition_begin: where the decay begins.
        staircase: fall in whole steps only.
        end_value: where the decay ends: a lower bound for a rate below 1, else an upper one.

    >>> float(exponential_decay(1.0, 10, 0.5)(torch.tensor(20)))
    0.25
    """
    if transition_steps <= 0 or decay_rate == 0:
        return constant_schedule(init_value)

    def schedule(count: torch.Tensor) -> torch.Tensor:
        progress = torch.clamp(_number(count) - max(transition_begin, 0), min=0) / transition_steps
        progress = torch.floor(progress) if staircase else progress
        value = init_value * torch.full_like(progress, decay_rate) ** progress
        if end_value is None:
            return value
        return torch.clamp(value, min=end_value) if decay_rate < 1 else torch.clamp(value, max=end_value)

    return schedule


def cosine_decay_schedule(init_value: float, decay_steps: int, alpha: float = 0.0, exponent: float = 1.0) -> Schedule:
    """Half a cosine from `init_value` to ``alpha * init_value`` in `decay_steps` steps (Loshchilov and Hutter 2017, arXiv 1608.03983).

    Raises:
        ValueError: `decay_steps` is not positive.

    >>> round(float(cosine_decay_schedule(1.0, 10)(torch.tensor(5))), 6)
    0.5
    """
    if decay_steps <= 0:
        raise ValueError(f"cosine_decay_schedule needs a positive decay_steps, not {decay_steps}")

    def schedule(count: torch.Tensor) -> torch.Tensor:
        progress = torch.clamp(_number(count), max=decay_steps) / decay_steps
        cosine = 0.5 * (1 + torch.cos(math.pi * progress))
        return init_value * ((1 - alpha) * cosine**exponent + alpha)

    return schedule


def warmup_cosine_decay_schedule(
    init_value: float, peak_value: float, warmup_steps: int, decay_steps: int, end_value: float = 0.0, exponent: float = 1.0
) -> Schedule:
    """A line up to `peak_value`, then a cosine down to `end_value`.

    Args:
        init_value: at step 0.
        peak_value: at step `warmup_steps`.
        warmup_steps: length of the line.
        decay_steps: length of the whole schedule, the line included.
        end_value: from step `decay_steps` on.
        exponent: of the cosine.

    >>> schedule = warmup_cosine_decay_schedule(0.0, 1.0, 10, 110)
    >>> [round(float(schedule(torch.tensor(step))), 6) for step in (0, 5, 10, 60, 110)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    alpha = 0.0 if peak_value == 0 else end_value / peak_value
    line = linear_schedule(init_value, peak_value, warmup_steps)
    return join_schedules([line, cosine_decay_schedule(peak_value, decay_steps - warmup_steps, alpha, exponent)], [warmup_steps])


def warmup_stable_decay_schedule(
    peak_value: float,
    warmup_steps: int,
    stable_steps: int,
    decay_steps: int,
    init_value: float = 0.0,
    end_value: float = 0.0,
    decay: str = "linear",
) -> Schedule:
    """A line up, a plateau, and a fall (Hu et al. 2024, MiniCPM, arXiv 2404.06395; Hägele et al. 2024, arXiv 2405.18392).

    Args:
        peak_value: of the plateau.
        warmup_steps: length of the line up from `init_value`.
        stable_steps: length of the plateau.
        decay_steps: length of the fall to `end_value`.
        init_value: at step 0.
        end_value: after the fall.
        decay: "linear", "cosine", or "sqrt" (``1 - sqrt(progress)``).

    Raises:
        ValueError: an unknown `decay`.

    >>> schedule = warmup_stable_decay_schedule(1.0, 10, 80, 10)
    >>> [round(float(schedule(torch.tensor(step))), 6) for step in (0, 5, 50, 95, 100)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    shapes = {"linear": lambda p: 1 - p, "cosine": lambda p: 0.5 * (1 + torch.cos(math.pi * p)), "sqrt": lambda p: 1 - p.sqrt()}
    if decay not in shapes:
        raise ValueError(f"decay {decay!r} is unknown; choose one of {', '.join(shapes)}")

    def fall(count: torch.Tensor) -> torch.Tensor:
        progress = torch.clamp(_number(count), 0, decay_steps) / max(decay_steps, 1)
        return end_value + (peak_value - end_value) * shapes[decay](progress)

    plateau = [linear_schedule(init_value, peak_value, warmup_steps), constant_schedule(peak_value), fall]
    return join_schedules(plateau, [warmup_steps, warmup_steps + stable_steps])


def piecewise_constant_schedule(init_value: float, boundaries_and_scales: dict[int, float] | None = None) -> Schedule:
    """`init_value`, multiplied by each scale from its boundary on.

    >>> float(piecewise_constant_schedule(1.0, {10: 0.5})(torch.tensor(10)))
    0.5
    """

    def schedule(count: torch.Tensor) -> torch.Tensor:
        value = torch.full_like(_number(count), init_value)
        for boundary, factor in (boundaries_and_scales or {}).items():
            value = torch.where(_number(count) >= boundary, value * factor, value)
        return value

    return schedule


def join_schedules(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """One schedule after the other; each counts from its own start.

    Args:
        schedules: one more than boundaries.
        boundaries: the step at which the next one begins.

    >>> joined = join_schedules([constant_schedule(1.0), linear_schedule(0.0, 1.0, 10)], [5])
    >>> float(joined(torch.tensor(4))), float(joined(torch.tensor(10)))
    (1.0, 0.5)
    """
    if len(schedules) != len(boundaries) + 1:
        raise ValueError(f"{len(schedules)} schedules need {len(schedules) - 1} boundaries, not {len(boundaries)}")

    def schedule(count: torch.Tensor) -> torch.Tensor:
        value = torch.as_tensor(schedules[0](count))
        for boundary, following in zip(boundaries, schedules[1:], strict=True):
            value = torch.where(torch.as_tensor(count) < boundary, value, torch.as_tensor(following(count - boundary)))
        return value

    return schedule
