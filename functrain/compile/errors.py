"""Errors of capture and of calls to a captured step: each names the user's line and says what to change."""


class CaptureError(RuntimeError):
    """A function cannot be captured as one graph; the message names the line and the remedy."""


class DataDependentError(CaptureError):
    """A branch, a shape or a Python number depends on the value of a traced tensor."""


class RandomnessError(CaptureError):
    """An operation draws from torch's global generator, which a pure function has no access to."""


class MutationError(CaptureError):
    """A function changes one of its arguments, or something outside itself, in place."""


class ImpureError(CaptureError):
    """A function reads or writes Python state outside itself in a way that a captured graph cannot repeat."""


class DonatedError(RuntimeError):
    """A tensor is used after it was donated to a step."""


class LeafError(TypeError):
    """An argument's leaf is of a type that no graph can take."""


class PartitionError(CaptureError):
    """A captured step cannot be cut for its mesh."""
