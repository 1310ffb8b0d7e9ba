"""The loss as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def plot_loss(records: Sequence[Mapping[str, Any]], path: Path, *, baseline: float | None = None) -> None:
    """Draw training and validation loss over steps as a PNG.

    Args:
        records: metrics, each with `step` and `loss`, `validation_loss` or neither; null values leave a gap.
        path: where to write; not atomic.
        baseline: a validation loss to compare with, drawn as a line, in nats a token.

    Raises:
        OSError: the picture cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  (half a second of start-up, needed once at the end)
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")  # not pyplot: no global state, no display
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, losses = _series(records, "loss")
    axes.plot(steps, losses, color="0.75", linewidth=0.8, label="training, each step")
    axes.plot(steps, _smoothed(losses), color="tab:blue", label="training, smoothed")
    axes.plot(*_series(records, "validation_loss"), color="tab:red", marker="o", markersize=4, label="validation")
    if baseline is not None:
        axes.axhline(baseline, color="tab:green", linestyle="--", label="bigram, validation")
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png")


def _series(records: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    found = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def _smoothed(values: Sequence[float], decay: float = 0.95) -> list[float]:
    """An exponential moving average that starts without bias."""
    smooth, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = decay * total + value, decay * weight + 1
        smooth.append(total / weight)
    return smooth
