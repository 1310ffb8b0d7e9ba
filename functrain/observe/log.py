"""The log: one line a fact, with the rank in front where there are several."""

import logging
import os
import sys

FORMAT = "%(levelname)s %(name)s: %(message)s"


class _OneLine(logging.Formatter):
    """A record is one line; a traceback, which comes with DEBUG or an error, keeps its own."""

    def format(self, record: logging.LogRecord) -> str:
        world, rank = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK", "0")
        message = super().format(record) if record.exc_info else " ".join(super().format(record).split("\n"))
        return f"[rank {rank}] {message}" if world != "1" else message


def set_log_level(level: int | str) -> logging.Logger:
    """Show functrain's messages of a level and above on stderr; sets the logger AND its handlers.

    Called again, it changes the level and adds nothing. Handlers that others put on the logger follow it too.

    Args:
        level: as for `logging`: "debug", "info", "warning", "error", or a number.

    Returns:
        The logger `functrain`, the parent of all of ours.

    Raises:
        ValueError: no such level.

    >>> set_log_level("warning").level == logging.WARNING
    True
    """
    number = logging.getLevelNamesMapping().get(level.upper()) if isinstance(level, str) else level
    if not isinstance(number, int):
        raise ValueError(f"unknown log level {level!r}; there are debug, info, warning, error, critical")
    logger = logging.getLogger("functrain")
    if not any(isinstance(handler, _Stderr) for handler in logger.handlers):
        own = _Stderr()
        own.setFormatter(_OneLine(FORMAT))
        logger.addHandler(own)
        logger.propagate = False  # or the root logger's handlers would print each line again
    logger.setLevel(number)
    for handler in logger.handlers:
        handler.setLevel(number)
    return logger


class _Stderr(logging.Handler):
    """Writes to what `sys.stderr` is at the time, so that redirection works."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
        except Exception:
            self.handleError(record)
