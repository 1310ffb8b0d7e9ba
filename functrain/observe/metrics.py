"""Metrics as JSON lines: one object a line, written at once."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any


class MetricsError(RuntimeError):
    """A metric could not be written; the message says where and why."""


class MetricsWriter:
    """A file of JSON lines that a reader may follow while it grows.

    Each record is one `write` to a file opened for appending: never half a line after a crash of the process, and nothing kept back. Should
    a disk be full in the middle of a line, that half is cut off again.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with MetricsWriter(Path(folder, "metrics.jsonl")) as metrics:
    ...         metrics.write({"step": 1, "loss": 2.5})
    ...     read_metrics(Path(folder, "metrics.jsonl"))
    [{'step': 1, 'loss': 2.5}]
    """

    def __init__(self, path: Path, append: bool = False) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if append else os.O_TRUNC), 0o666)
        except OSError as error:
            raise MetricsError(f"the metrics {path} cannot be opened: {error.strerror}") from None

    def write(self, record: Mapping[str, Any]) -> None:
        """Add one line; a number that JSON has no word for (NaN, infinity) becomes null.

        Raises:
            MetricsError: the disk is full, or the file cannot be written.
        """
        line = (json.dumps({name: _finite(value) for name, value in record.items()}) + "\n").encode()
        size = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, line)
            if written < len(line):  # a disk that fills up takes part of a line first
                os.write(self._file, line[written:])
        except OSError as error:
            _cut(self._file, size)
            raise MetricsError(f"the metrics {self.path} cannot be written: {error.strerror}") from None

    def close(self) -> None:
        """Close the file; the lines are there already."""
        os.close(self._file)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cut(file: int, size: int) -> None:
    """Back to a length, where the file has one (a device has none)."""
    try:
        os.ftruncate(file, size)
    except OSError:
        return


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records of a file of JSON lines, the unfinished last line of a run that still writes left out."""
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
