"""A captured function: called as one graph, captured once for each set of argument shapes."""

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from functrain import tree
from functrain.compile.abstract import ShapeDtypeStruct
from functrain.compile.capture import as_tensor_leaf, capture, is_capturing
from functrain.compile.codegen import FILENAME
from functrain.compile.donation import Donated, retire
from functrain.compile.entry import Entry, Signature, signature_of
from functrain.compile.errors import CaptureError, DonatedError
from functrain.compile.guards import Guards, watch
from functrain.compile.lower import Executable, Lowered, Options, build, lower, rebuild_result
from functrain.compile.partition import PartitionReport
from functrain.compile.report import Compilation, Report, Status
from functrain.compile.source import source_of_function
from functrain.differentiate import is_nested
from functrain.torch_internals import transform_is_active

logger = logging.getLogger("functrain.compile")
_disabled: ContextVar[bool] = ContextVar("functrain_jit_disabled", default=False)


@contextlib.contextmanager
def disable_jit() -> Iterator[None]:
    """Inside, jitted functions run as plain Python, operation by operation, with the same numbers: for debugging with print and pdb.

    >>> import functrain as ft
    >>> with disable_jit():
    ...     float(ft.jit(lambda x: x * 2)(torch.tensor(3.0)))
    6.0
    """
    token = _disabled.set(True)
    try:
        yield
    finally:
        _disabled.reset(token)


class Jitted:
    """A captured function. Call it as the function; see `jit`."""

    def __init__(self, function: Callable[..., Any], donate: frozenset[str], static: frozenset[str], options: Options) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)
        self.options = options
        self.donate, self.static = donate, static
        self._parameters = _parameter_names(function, donate | static)
        self._entries: dict[Any, list[Entry]] = {}
        self._compilations: list[Compilation] = []
        self._uncaptured: dict[str, int] = {}
        self._latest: tuple[Any, Entry] | None = None  # key and entry of the latest call
        self._last: tuple[Signature, Any] | None = None  # signature and key of the latest compilation

    # ---- calling

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the captured graph; the first call with new shapes captures it.

        Raises:
            CaptureError: the function cannot be captured; names the user's line and the remedy.
            DonatedError: an argument was donated to an earlier call.
        """
        reason = self._runs_uncaptured()
        if reason is not None:
            self._uncaptured[reason] = self._uncaptured.get(reason, 0) + 1
            return self.function(*args, **kwargs)
        args, kwargs, statics = self._split_static(args, kwargs) if self.static else (args, kwargs, {})
        entry, leaves = self._recall(args, kwargs, statics)
        if entry is not None and entry.glance.check(leaves):
            return self._run(entry, leaves, distinct=True)
        if entry is None or not entry.fits(leaves):
            leaves, key = self._flatten(args, kwargs, statics)
            entry = self._find(leaves, key)
            if entry is None:
                leaves = self._as_tensors(leaves, key)
                entry = self._find(leaves, key) or self._compile(leaves, key, statics)
            self._latest = key, entry
        return self._run(entry, leaves)

    def _recall(self, args: tuple[Any, ...], kwargs: dict[str, Any], statics: dict[str, Any]) -> tuple[Entry | None, list[Any]]:
        """The latest entry if this call has its structure: a known one is taken apart ten times faster than a new one."""
        if self._latest is None:
            return None, []
        (structure, static, around), entry = self._latest
        try:
            leaves = structure.flatten_up_to((args, kwargs))
        except ValueError:
            return None, []
        same = around == ambient() and static == static_key(statics)
        return (entry, leaves) if same else (None, [])

    def _runs_uncaptured(self) -> str | None:
        """Why this call must run as plain Python; None where it need not."""
        if _disabled.get():
            return "jit is disabled"
        if is_capturing():
            return "called inside another captured function, whose graph it becomes part of"
        if is_nested() or transform_is_active():
            return "called inside a transform (grad, vmap, ...), which needs its operations"
        return None

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any], statics: dict[str, Any]) -> tuple[list[Any], Any]:
        """Leaves of the dynamic arguments, and the cache key of everything else."""
        leaves, structure = tree.flatten((args, kwargs))
        return leaves, (structure, static_key(statics), ambient())

    def _split_static(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
        statics = {}
        dynamic = list(args)
        for i in range(len(args)):
            if self._parameter(i) in self.static:
                statics[self._parameter(i)], dynamic[i] = args[i], None
        statics.update({name: value for name, value in kwargs.items() if name in self.static})
        for name, value in statics.items():
            _check_static(name, value)
        rest = {name: value for name, value in kwargs.items() if name not in self.static}
        return tuple(dynamic), rest, statics

    def _parameter(self, i: int) -> str:
        """The name of the i-th positional argument."""
        return self._parameters[i] if i < len(self._parameters) else f"args/{i}"

    def _find(self, leaves: list[Any], key: Any) -> Entry | None:
        return next((entry for entry in self._entries.get(key, ()) if entry.fits(leaves)), None)

    def _as_tensors(self, leaves: list[Any], key: Any) -> list[Any]:
        """Numbers and arrays as tensors; a donated tensor raises."""
        paths = self._paths(key[0])
        for leaf in leaves:
            if isinstance(leaf, Donated):
                raise DonatedError(type(leaf).message())
        return [as_tensor_leaf(leaf, path) for leaf, path in zip(leaves, paths, strict=True)]

    def _paths(self, structure: tree.Structure) -> list[str]:
        """Paths of the leaves as a user writes them: the argument's name first."""
        args, kwargs = tree.unflatten(structure, range(structure.num_leaves))
        named = {self._parameter(i): value for i, value in enumerate(args)}
        pairs = tree.leaves_with_path({**named, **kwargs})
        return [path for path, _ in sorted(pairs, key=lambda pair: pair[1])]

    def _run(self, entry: Entry, leaves: list[Any], distinct: bool = False) -> Any:
        entry.guards.check()
        inputs = list(leaves)
        if entry.donated:
            self._hand_over(entry, leaves, inputs, distinct)
        del leaves
        try:
            with torch.no_grad():
                results = entry.executable.call(inputs)
        except Exception as error:
            add_line(error, entry.executable)
            raise
        captured = entry.executable.lowered.captured
        return tree.unflatten(captured.out_structure, results if entry.all_tensors else rebuild_result(captured, results))

    def _hand_over(self, entry: Entry, leaves: list[Any], inputs: list[Any], distinct: bool) -> None:
        """Give the graph new tensors on the donated leaves' memory, and retire the caller's."""
        if not distinct:
            entry.check_distinct(leaves)
        for i in entry.donated:
            inputs[i] = leaves[i].data
        retire([leaves[i] for i in entry.donated], entry.retired, entry.emptied)

    # ---- capturing

    def _compile(self, leaves: list[Any], key: Any, statics: dict[str, Any]) -> Entry:
        lowered, guards = self._lower(leaves, key, statics)
        entry = self._add(lowered, guards, leaves, key)
        entry.check_overlap(leaves)
        return entry

    def _add(self, lowered: Lowered, guards: Guards, leaves: list[Any], key: Any) -> Entry:
        """Build a lowered step and remember it for these leaves' signature."""
        executable = build(lowered)
        signature = signature_of(leaves)
        self._note(executable, key, signature)
        entry = Entry.make(executable, signature, guards, self.name)
        self._entries.setdefault(key, []).insert(0, entry)
        return entry

    def _lower(self, leaves: list[Any], key: Any, statics: dict[str, Any]) -> tuple[Lowered, Guards]:
        structure = key[0]
        paths = self._paths(structure)
        guards = watch(self.function)

        captured = capture(self.function, leaves, paths, self._rebuild(structure, statics))
        guards.check(during_capture=True)
        donated = frozenset(i for i, path in enumerate(paths) if path.split("/")[0] in self.donate)
        return lower(captured, donated, self.options), guards

    def _rebuild(self, structure: tree.Structure, statics: dict[str, Any]) -> Callable[[list[Any]], Any]:
        """From the dynamic leaves to the function's (args, kwargs)."""

        def rebuild(fakes: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            args, kwargs = tree.unflatten(structure, fakes)
            names = [self._parameter(i) for i in range(len(args))]
            positional = tuple(statics.get(name, value) for name, value in zip(names, args, strict=True))
            return positional, {**kwargs, **{name: value for name, value in statics.items() if name not in names}}

        return rebuild

    def _note(self, executable: Executable, key: Any, signature: Signature, partition: PartitionReport | None = None) -> None:
        paths = executable.lowered.captured.in_paths
        why = "first call" if self._last is None else signature.difference(self._last[0], paths, key, self._last[1])
        self._last = signature, key
        program = executable.program
        done = Compilation(
            number=len(self._compilations),
            why=why,
            nodes=sum(n.op == "call_function" for n in executable.lowered.graph.graph.nodes),
            capture_seconds=executable.lowered.captured.seconds,
            lower_seconds=executable.seconds,
            status=executable.status,
            passes=executable.lowered.passes,
            released=program.released if program else (),
            kept=program.kept if program else (),
            partition=partition,
        )
        self._compilations.append(done)
        if done.number:
            logger.warning("%s is captured again (%d): %s", self.name, done.number, why)

    # ---- looking

    def lower(self, *args: Any, **kwargs: Any) -> "LoweredCall":
        """Capture for these arguments, real or abstract (`ShapeDtypeStruct`), without running anything."""
        args, kwargs, statics = self._split_static(args, kwargs)
        leaves, key = self._flatten(args, kwargs, statics)
        paths = self._paths(key[0])
        leaves = [x if isinstance(x, ShapeDtypeStruct) else as_tensor_leaf(x, path) for x, path in zip(leaves, paths, strict=True)]
        lowered, guards = self._lower(leaves, key, statics)
        return LoweredCall(self, lowered, key, guards, leaves)

    @property
    def status(self) -> Status:
        """What runs when the step is called: the truth, not the wish."""
        if _disabled.get():
            return Status("disabled", "none", "inside disable_jit()")
        return self._compilations[-1].status if self._compilations else Status("not captured", "none", "it was not called yet")

    def report(self) -> Report:
        """Everything the step has done so far: each compilation and why, its passes, what is released where, uncaptured calls."""
        return Report(self.name, source_of_function(self.function), tuple(self._compilations), dict(self._uncaptured))


class LoweredCall:
    """What `step.lower(...)` returns: text, analyses and `compile()`; nothing has run."""

    def __init__(self, step: Jitted, lowered: Lowered, key: Any, guards: Guards, leaves: list[Any]) -> None:
        self._step, self._key, self._guards, self._leaves = step, key, guards, leaves
        self.lowered = lowered
        self.as_text = lowered.as_text
        self.memory_analysis = lowered.memory_analysis
        self.cost_analysis = lowered.cost_analysis

    @property
    def graph(self) -> torch.fx.GraphModule:
        """The graph after the passes."""
        return self.lowered.graph

    @property
    def captured(self) -> torch.fx.GraphModule:
        """The graph as captured, before the passes: without mutation."""
        return self.lowered.captured.graph

    def compile(self) -> Jitted:
        """The step, with this call's graph built: the next call with these shapes runs at once."""
        if self._step._find(self._leaves, self._key) is None:
            self._step._add(self.lowered, self._guards, self._leaves, self._key)
        return self._step


def _parameter_names(function: Callable[..., Any], needed: frozenset[str]) -> list[str]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    known = {p.name for p in parameters}
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for name in sorted(needed - known):
        if not accepts_any:
            raise ValueError(f"{name!r} is no argument of {getattr(function, '__name__', function)}; it has {', '.join(known) or 'none'}")
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _check_static(name: str, value: Any) -> None:
    try:
        hash(value)
    except TypeError:
        raise CaptureError(
            f"the static argument {name!r} is {type(value).__name__}, which is not hashable: static values tell graphs apart. Use a tuple, "
            "a frozen dataclass or a string."
        ) from None
    if isinstance(value, torch.Tensor):
        raise CaptureError(f"the static argument {name!r} is a tensor; leave it out of `static_argnames` to pass its values to the graph")


def add_line(error: Exception, executable: Executable) -> None:
    """Tell an error of a running graph which line of the user's code it comes from."""
    entry, line = error.__traceback__, None
    while entry is not None:
        if entry.tb_frame.f_code.co_filename == FILENAME and executable.program is not None:
            line = executable.program.lines.get(entry.tb_lineno)
        entry = entry.tb_next
    if line is not None:
        error.add_note(f"in the operation of {line}")


def static_key(statics: dict[str, Any]) -> tuple[Any, ...]:
    """Names, types and values: 1 and True are equal, but make different graphs."""
    return tuple((name, type(value), value) for name, value in statics.items())


def ambient() -> tuple[Any, ...]:
    """Settings of torch that change what a function's operations are."""
    autocast = [(device, torch.get_autocast_dtype(device)) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    return (torch.get_default_dtype(), *autocast)
