"""Records every operation of a function as a node of one FX graph, with its line, its phase and the shape of its result.

A dispatch mode above a fake-tensor mode: it sees what autograd and functorch have already broken down to plain operations, forward and
backward alike. A backward operation takes the line of the forward operation it came from: both carry autograd's sequence number.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from functrain.compile.collectives import SHARD_OPERATIONS
from functrain.compile.errors import CaptureError, DataDependentError, MutationError, RandomnessError
from functrain.compile.source import SourceLine, current_source
from functrain.random.scoping import is_random
from functrain.torch_internals import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    current_annotation,
    current_autograd_sequence_number,
    disable_current_modes,
    next_autograd_sequence_number,
    partition_decompositions,
    storage_identity,
    written_arguments,
)

# Operations that answer a question about a tensor and leave no node.
_QUERIES = {torch.ops.prim.device.default, torch.ops.aten.is_pinned.default}
_WRITES_UNSAID = {torch.ops.aten.cudnn_batch_norm.default, torch.ops.aten.miopen_batch_norm.default}
_READS_A_VALUE = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default, torch.ops.aten.equal.default}


class Recorder(TorchDispatchMode):
    """A dispatch mode that writes down what it sees into `graph`; one recorder records one function once."""

    # Control-flow operators come here too, and are refused with a message of ours.
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would otherwise import its compiler (a second) to keep it out of this mode's method, where it never comes."""
        return False

    def __init__(self, fake_mode: FakeTensorMode, decompose: bool = False) -> None:
        super().__init__()
        self.decompositions = partition_decompositions() if decompose else {}  # operation -> the same in simpler ones
        self.fake_mode = fake_mode
        self.graph = fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}  # get_attr target -> value
        self.mutates = False  # whether the graph holds an in-place operation
        self.origin: dict[str, Any] | None = None  # tags that override what is seen on the stack
        self._nodes: dict[int, fx.Node] = {}  # id of a tensor -> its node
        self._alive: list[Any] = []  # keeps those ids from being used again
        self._inputs: dict[int, str] = {}  # storage of an input -> its path
        self._folded: dict[int, torch.Tensor] = {}  # storages computed from constants alone, kept alive
        self._lines: dict[int, SourceLine | None] = {}  # autograd's sequence number -> line of the forward operation

    # ---- the ends of the graph

    def input(self, path: str, value: torch.Tensor) -> torch.Tensor:
        """Add a placeholder for a leaf and return the fake tensor that stands for it."""
        with self.fake_mode:
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        node = self.graph.placeholder(f"arg{len(self._inputs)}")
        node.meta.update(val=fake, path=path, phase="input")
        self._bind(fake, node)
        self._inputs[storage_identity(fake)] = path
        return fake

    def output(self, leaves: Sequence[Any]) -> fx.Node:
        """End the graph with these leaves; a tensor that no node made becomes a constant."""
        return self.graph.output(tuple(self.node_of(x) if isinstance(x, torch.Tensor) else x for x in leaves))

    def node_of(self, x: torch.Tensor) -> fx.Node:
        """The node whose result a tensor is."""
        node = self._nodes.get(id(x))
        return node if node is not None else self._constant(x)

    # ---- what is recorded

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            raise CaptureError(
                f"{self._where()}: the operator {func} holds functions of its own, which one flat graph cannot. Use plain operations."
            )
        func = self._declared(func, args)
        tensors = [x for x in _flat(args, kwargs) if isinstance(x, torch.Tensor)]
        if tensors and not any(isinstance(x, FakeTensor) for x in tensors) and func not in SHARD_OPERATIONS:
            return self._fold(func, args, kwargs)
        if is_random(func, args, kwargs):
            raise RandomnessError(
                f"{self._where()}: {func} draws from torch's global generator. Pass a key: call functrain.random, or wrap the call in "
                "`with ft.random.scope(key):` (a module's `apply` takes `key=`)."
            )
        if func in self.decompositions:
            with self:
                return self.decompositions[func](*args, **kwargs)
        self._check_writes(func, args, kwargs)
        result = self._compute(func, args, kwargs)
        if func in _QUERIES or func in _READS_A_VALUE:
            return result
        self._record(func, args, kwargs, result)
        return result

    def _declared(self, func: Any, args: tuple[Any, ...]) -> Any:
        """The form of an operation whose schema says what it writes: training batch norms update their statistics behind theirs."""
        if func is torch.ops.aten.native_batch_norm.default and args[3] is not None and args[5]:
            return torch.ops.aten._native_batch_norm_legit.default
        if func in _WRITES_UNSAID and args[3] is not None and args[5]:
            raise CaptureError(
                f"{self._where()}: {func} changes its running statistics without saying so. Call it under "
                "`torch.backends.cudnn.flags(enabled=False)`: torch's own kernel can be captured."
            )
        return func

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            with self.fake_mode:
                return func(*args, **kwargs)
        except DataDependentOutputException:
            raise DataDependentError(
                f"{self._where()}: Python needs the value of a traced tensor ({func}): an `if`, a loop, `.item()`, `float()`, `.tolist()`. "
                "While a step is captured a tensor has a shape but no value. Use torch.where for a choice, keep numbers as 0-dim "
                "tensors, or pass the value as a Python number named in `static_argnames`."
            ) from None
        except DynamicOutputShapeException:
            raise DataDependentError(
                f"{self._where()}: the shape of {func}'s result depends on values. Use a mask of fixed shape (torch.where) instead."
            ) from None

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        node = self.graph.call_function(func, fx.node.map_aggregate(args, self._argument), fx.node.map_aggregate(kwargs, self._argument))
        node.meta.update(self._tags(), val=result)
        if isinstance(result, torch.Tensor):
            self._bind(result, node)
        elif isinstance(result, (tuple, list)):
            for i, item in enumerate(result):
                if isinstance(item, torch.Tensor):
                    part = self.graph.call_function(operator.getitem, (node, i))
                    part.meta.update({key: node.meta[key] for key in ("source", "phase", "sequence") if key in node.meta}, val=item)
                    self._bind(item, part)

    def _argument(self, x: Any) -> Any:
        return self.node_of(x) if isinstance(x, torch.Tensor) else x

    def _bind(self, x: torch.Tensor, node: fx.Node) -> None:
        self._nodes[id(x)] = node
        self._alive.append(x)

    # ---- constants

    def _fold(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation on real tensors alone (of the enclosing scope, or computed from those here) has its value now."""
        self._check_outer_writes(func, args, kwargs)
        if is_random(func, args, kwargs):
            raise RandomnessError(f"{self._where()}: {func} draws from torch's global generator. Pass a key and call functrain.random.")
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor(...) written inside the function: new on every call
            result = self._compute(func, args, kwargs)
            with disable_current_modes():
                self._bind(args[0], self._constant(args[0].detach().clone()))
            self._record(func, args, kwargs, result)
            return result
        with disable_current_modes(), torch.no_grad():
            result = func(*args, **kwargs)
        for x in _flat((result,), {}):
            if isinstance(x, torch.Tensor):
                self._folded[storage_identity(x)] = x
        return result

    def _check_outer_writes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tensors that were folded here may be written for real; those from outside may not."""
        written = written_arguments(func, args, kwargs) if func._schema.is_mutable else []
        if any(storage_identity(x) not in self._folded for x in written):
            raise MutationError(
                f"{self._where()}: {func} changes a tensor from outside the function. Pass it as an argument and return the new value."
            )

    def constant(self, value: torch.Tensor, tags: dict[str, Any]) -> torch.Tensor:
        """Add a constant and return the fake tensor that stands for it."""
        self.origin = tags
        node = self._constant(value)
        self.origin = None
        self._bind(node.meta["val"], node)
        return node.meta["val"]

    def _constant(self, x: torch.Tensor) -> fx.Node:
        if isinstance(x, FakeTensor):
            raise CaptureError(
                f"{self._where()}: a tensor of another capture is used here. Do not keep tensors of a traced function outside it."
            )
        name = f"constant{len(self.constants)}"
        with disable_current_modes():  # the fake mode would make the value fake
            self.constants[name] = x.detach()
            node = self.graph.get_attr(name)
            node.meta.update(self._tags(), val=self.fake_mode.from_tensor(x.detach()))
        self._bind(x, node)
        return node

    # ---- tags and checks

    def _tags(self) -> dict[str, Any]:
        """Phase and line of the operation being recorded, and the number that a backward operation shares with its forward one."""
        if self.origin is not None:
            return dict(self.origin)
        annotation = current_annotation()
        phase = annotation.get("phase", "update")
        backward = None if annotation.get("again") else current_autograd_sequence_number()  # remat runs its function inside a backward
        if backward is not None and backward in self._lines:
            return {"phase": phase, "source": self._lines[backward], "sequence": backward}
        source, sequence = current_source(skip=2), next_autograd_sequence_number() - 1
        self._lines.setdefault(sequence, source)
        return {"phase": phase, "source": source, "sequence": sequence}

    def _where(self) -> str:
        return str(self._tags().get("source") or "in the captured function")

    def _check_writes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An in-place operation may write what the function made itself, and nothing else."""
        if not func._schema.is_mutable:
            return
        self.mutates = True
        for x in written_arguments(func, args, kwargs):
            if not isinstance(x, FakeTensor) and storage_identity(x) in self._folded:
                raise MutationError(
                    f"{self._where()}: {func} writes traced values into a tensor that was computed from constants alone. Use the form that "
                    "returns a new tensor, or clone the tensor together with a traced one."
                )
            path = self._inputs.get(storage_identity(x)) if isinstance(x, FakeTensor) else "a tensor from outside the function"
            if path is not None:
                raise MutationError(
                    f"{self._where()}: {func} changes {path} in place, but a captured function is pure. Return the new value instead "
                    f"(for instance `x = x + 1` for `x += 1`), or clone the tensor first."
                )


def _flat(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            found.extend(value)
        else:
            found.append(value)
    return found
