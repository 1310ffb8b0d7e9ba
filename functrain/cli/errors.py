"""What ends a command, each with its exit status."""

import contextlib
from collections.abc import Iterator


class UsageError(ValueError):
    """The command cannot start as it was given; exit status 2."""


class StoppedError(RuntimeError):
    """A run that had started had to stop; exit status 3."""


@contextlib.contextmanager
def as_usage() -> Iterator[None]:
    """What a function rejects as an argument (a ValueError) is the user's to change.

    >>> with as_usage():
    ...     int("x")
    Traceback (most recent call last):
    functrain.cli.errors.UsageError: invalid literal for int() with base 10: 'x'
    """
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from None
