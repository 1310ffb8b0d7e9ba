"""The one error of this room."""


class DataError(ValueError):
    """The data cannot be used; the message says what, where and what to do, in one sentence for whoever started the run."""
