"""Ctrl-C as a wish: the step that runs is finished first."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """While this context is open, the first Ctrl-C (or SIGTERM) is noted; a second one interrupts as usual.

    >>> with Interrupt() as interrupt:
    ...     signal.raise_signal(signal.SIGINT)
    ...     interrupt.number == signal.SIGINT
    True
    """

    def __init__(self) -> None:
        self.number: int | None = None  # of the signal that came
        self._before: dict[int, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():  # others cannot set handlers, and get no signals
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()
