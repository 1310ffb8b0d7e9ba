"""Python values outside a function that its captured graph depends on: read at capture, so they must not change afterwards.

A captured graph holds the value that a global or a closed-over variable had. JAX would go on with it silently; here each call compares.
"""

import dataclasses
import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from functrain.compile.errors import ImpureError
from functrain.compile.source import SourceLine, is_user_code

_MAX_ITEMS = 64  # of a container that are compared; a larger one is compared by length
_MAX_FUNCTIONS = 500


class _Same:
    """Equal to itself around the same object only. Holds the object: an id alone may be given to another after it dies."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


_GONE = object()  # stands for a variable that was deleted


@dataclass(frozen=True)
class Variable:
    """A global or closed-over variable that a captured function reads."""

    name: str
    holder: Any  # the globals dict, or the cell
    source: SourceLine  # a line that reads it
    kind: str  # "global" or "closed-over variable"

    def value(self) -> Any:
        """What it holds now; the sentinel `_GONE` where it was deleted."""
        try:
            return self.holder.cell_contents if self.kind != "global" else self.holder.get(self.name, _GONE)
        except ValueError:
            return _GONE


@dataclass(frozen=True)
class Guards:
    """Variables and what they held when the function was captured."""

    variables: tuple[Variable, ...]
    held: tuple[Any, ...]  # fingerprints

    def check(self, during_capture: bool = False) -> None:
        """Raise if any holds something else now.

        Args:
            during_capture: whether the function is the only code that ran since: then it has changed the variable itself.

        Raises:
            ImpureError: names the variable, a line that uses it, both values and the remedy.
        """
        for variable, before in zip(self.variables, self.held, strict=True):
            now = fingerprint(variable.value())
            if now != before:
                raise ImpureError(_changed(variable, before, now, during_capture))


def watch(function: Callable[..., Any]) -> Guards:
    """Find the variables that a function, and the user's functions it calls, read from outside; note what they hold."""
    variables = tuple(_variables(function))
    return Guards(variables, tuple(fingerprint(v.value()) for v in variables))


def fingerprint(value: Any, depth: int = 0) -> Any:
    """Something that compares equal as long as a value means the same to a captured graph."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        return (type(value).__name__, value)
    if isinstance(value, torch.Tensor):
        return ("tensor", _Same(value), value._version)
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        if depth > 2 or len(value) > _MAX_ITEMS:
            return (type(value).__name__, len(value))
        if isinstance(value, dict):
            return (type(value).__name__, tuple((fingerprint(k, depth + 1), fingerprint(x, depth + 1)) for k, x in value.items()))
        return (type(value).__name__, tuple(fingerprint(x, depth + 1) for x in value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and depth < 2:
        return (
            type(value).__name__,
            _Same(value),
            fingerprint({f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, depth + 1),
        )
    return (type(value).__name__, _Same(value))


def _changed(variable: Variable, before: Any, now: Any, during_capture: bool) -> str:
    what = f"{variable.source}: the {variable.kind} `{variable.name}`"
    if not during_capture:
        return (
            f"{what} held {_show(before)} when the step was captured and holds {_show(now)} now; the graph has the old value in it. "
            "Pass it to the step as an argument (named in `static_argnames` if it is no tensor)."
        )
    return f"{what} is changed by the function itself. A captured function runs once: return the new value instead, and keep it outside."


def _show(held: Any) -> str:
    kind, *rest = held
    return repr(rest[0]) if len(rest) == 1 and not isinstance(rest[0], (tuple, _Same)) else f"another {kind}"


# ---- which variables a function reads


def _variables(function: Callable[..., Any]) -> Iterator[Variable]:
    seen: set[tuple[int, str]] = set()
    for one in _user_functions(function):
        for variable in _read_by(one):
            key = (id(variable.holder), variable.name)
            if key not in seen and not isinstance(variable.value(), ModuleType):
                seen.add(key)
                yield variable


def _user_functions(function: Callable[..., Any]) -> Iterator[FunctionType]:
    """The function and the user's functions that it reaches through globals and closures."""
    queue: list[Any] = [function]
    seen: set[FunctionType] = set()
    while queue and len(seen) < _MAX_FUNCTIONS:
        one = _plain_function(queue.pop())
        if one is None or one in seen or not is_user_code(one.__code__):
            continue
        seen.add(one)
        yield one
        queue += [v.value() for v in _read_by(one)]


def _plain_function(candidate: Any) -> FunctionType | None:
    """The Python function inside partial objects, wrappers and methods."""
    while isinstance(candidate, functools.partial):
        candidate = candidate.func
    candidate = inspect.unwrap(candidate) if callable(candidate) else candidate
    candidate = getattr(candidate, "__func__", candidate)
    return candidate if isinstance(candidate, FunctionType) else None


def _read_by(function: FunctionType) -> list[Variable]:
    found = [
        Variable(name, cell, _line(function.__code__, name), "closed-over variable")
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    ]
    for code in _nested(function.__code__):
        for instruction, line in _instructions(code):
            if instruction.opname in ("LOAD_GLOBAL", "STORE_GLOBAL") and instruction.argval in function.__globals__:
                source = SourceLine(code.co_filename, line, code.co_name)
                found.append(Variable(instruction.argval, function.__globals__, source, "global"))
    return found


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _instructions(code: CodeType) -> Iterator[tuple[dis.Instruction, int]]:
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        positions = instruction.positions
        line = positions.lineno if positions is not None and positions.lineno is not None else line
        yield instruction, line


def _line(code: CodeType, name: str) -> SourceLine:
    for instruction, line in _instructions(code):
        if instruction.argval == name:
            return SourceLine(code.co_filename, line, code.co_name)
    return SourceLine(code.co_filename, code.co_firstlineno, code.co_name)
