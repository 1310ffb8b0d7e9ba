"""What ends a command, each with its exit status."""


class UsageError(ValueError):
    """The command cannot start as it was given; exit status 2."""


class StoppedError(RuntimeError):
    """A run that had started had to stop; exit status 3."""
