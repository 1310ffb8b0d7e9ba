"""Which line of the user's code an operation comes from."""

import functools
import os
import sys
from dataclasses import dataclass
from types import CodeType, FrameType

import einops
import optree
import torch

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Frames of these are skipped: an operation belongs to whoever called them. The models are user code that happens to be shipped.
_FRAMEWORK = tuple(os.path.join(folder, "") for folder in (_PACKAGE, *torch.__path__, *optree.__path__, *einops.__path__))
_SHIPPED_USER_CODE = os.path.join(_PACKAGE, "models") + os.sep


@dataclass(frozen=True)
class SourceLine:
    """A line of user code."""

    file: str
    line: int  # from 1
    function: str

    def __str__(self) -> str:
        return f"{_short(self.file)}:{self.line} in {self.function}"


def _short(file: str) -> str:
    """The file's last two components: enough to find it, without anybody's home directory."""
    return os.sep.join(file.split(os.sep)[-2:])


@functools.cache
def is_user_code(code: CodeType) -> bool:
    """Whether a code object belongs to neither torch nor this package's machinery."""
    file = code.co_filename
    if file.startswith("<") and not file.startswith(("<ipython", "<stdin>", "<string>", "<doctest")):
        return False
    file = file if file.startswith("<") else os.path.abspath(file)
    return not file.startswith(_FRAMEWORK) or file.startswith(_SHIPPED_USER_CODE)


def current_source(skip: int = 1) -> SourceLine | None:
    """The innermost line of user code on the stack, or None where there is none."""
    frame: FrameType | None = sys._getframe(skip)
    while frame is not None:
        if is_user_code(frame.f_code):
            return SourceLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None


def source_of_function(function: object) -> SourceLine | None:
    """Where a Python function is defined; None for what has no code of its own."""
    code = getattr(function, "__code__", None)
    return SourceLine(code.co_filename, code.co_firstlineno, code.co_name) if isinstance(code, CodeType) else None


def source_of_traceback(error: BaseException) -> SourceLine | None:
    """The innermost line of user code in an exception's traceback."""
    found, entry = None, error.__traceback__
    while entry is not None:
        if is_user_code(entry.tb_frame.f_code):
            found = SourceLine(entry.tb_frame.f_code.co_filename, entry.tb_lineno, entry.tb_frame.f_code.co_name)
        entry = entry.tb_next
    return found
