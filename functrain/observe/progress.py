"""Progress of a run: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from types import TracebackType
from typing import Any, Protocol, TextIO

LINE_EVERY = 10.0  # seconds between plain lines


class Progress(Protocol):
    """What a run reports to. A context: leaving it ends the display."""

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Show that a step is done."""
        ...

    def say(self, message: str) -> None:
        """Print a line without breaking the display."""
        ...

    def __enter__(self) -> "Progress": ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


def make_progress(steps: int, stream: TextIO | None = None) -> Progress:
    """A bar where the stream is a terminal, else a plain line every ten seconds.

    Args:
        steps: of the whole run.
        stream: where to write; None for `sys.stderr`.
    """
    stream = stream or sys.stderr
    return Bar(steps, stream) if stream.isatty() else Lines(steps, stream)


class Lines:
    """Plain lines: the first step, one every ten seconds, and the last.

    >>> with Lines(2, sys.stdout) as progress:
    ...     progress.update(1, 3.25, 1000.0)
    step 1/2  loss 3.250  1,000 tokens/s  ...left
    """

    def __init__(self, steps: int, stream: TextIO, every: float = LINE_EVERY) -> None:
        self._steps, self._stream, self._every = steps, stream, every
        self._start = self._shown = time.monotonic()
        self._first: int | None = None

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Print a line when one is due."""
        now = time.monotonic()
        first = self._first is None
        if self._first is None:
            self._first, self._start = step, now
        if first or step == self._steps or now - self._shown >= self._every:
            self._shown = now
            left = remaining(now - self._start, step - self._first, self._steps - step)
            self.say(f"step {step}/{self._steps}  loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s  {left} left")

    def say(self, message: str) -> None:
        """Print a line."""
        print(message, file=self._stream, flush=True)

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Nothing is open."""


class Bar:
    """A bar by the `rich` library: loss, tokens per second, time left."""

    def __init__(self, steps: int, stream: TextIO) -> None:
        from rich.console import Console  # noqa: PLC0415  (only on a terminal)
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn  # noqa: PLC0415
        from rich.progress import Progress as RichProgress  # noqa: PLC0415

        columns: list[Any] = [
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        ]
        self._bar = RichProgress(*columns, console=Console(file=stream, force_terminal=True), speed_estimate_period=30)
        self._task = self._bar.add_task("capturing the step", total=steps)

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=step, description=f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s")

    def say(self, message: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(message, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> "Bar":
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()


def remaining(seconds: float, done: int, left: int) -> str:
    """The time that is left at the speed so far, as minutes and seconds.

    >>> remaining(30.0, 10, 25), remaining(30.0, 0, 25)
    ('1:15', '?:??')
    """
    if done < 1:
        return "0:00" if left == 0 else "?:??"
    whole = round(seconds / done * left)
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
