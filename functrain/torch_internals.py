"""Every use of a part of torch that is not public, in one place, each with its reason and the public way that falls short."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx.traceback as _traceback

# Tensors with a shape, dtype and device but no data: what a function is captured with. Meta tensors, the public form, lose the device
# (kernels and dtypes are chosen by it).
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

# `annotate(mapping)`: a context manager whose mapping is attached to graph nodes made inside it (documented as experimental). Transforms
# mark forward and backward with it, capture reads it. Fallback: a ContextVar of our own.
from torch.fx.traceback import annotate as annotate

# Sees every operation below autograd and functorch: what capture records and what keyed randomness replaces. `make_fx` is built on it,
# but keeps neither user lines for backward nodes nor tags of ours without a second look at each node.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# Runs a few operations for real while a mode is active: constants are folded at capture. No public counterpart.
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def current_annotation() -> dict[str, object]:
    """What `annotate` says at this point; read through the module since torch replaces the dict."""
    return _traceback.current_meta.get("custom", {})


def current_autograd_sequence_number() -> int | None:
    """The sequence number of the autograd node that is running its backward, or None outside a backward.

    Gives a backward operation the line of its forward operation. Anomaly mode, the public way to relate them, is slow and only prints.
    """
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def next_autograd_sequence_number() -> int:
    """The number that the next autograd node of this thread will get."""
    return torch.autograd._get_sequence_nr()


def single_threaded_backward() -> torch.autograd.set_multithreading_enabled:
    """Backward runs in the calling thread, so that what is recorded there sees this thread's context variables."""
    return torch.autograd.set_multithreading_enabled(False)


def tensor_guard(leaves: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """`check(*tensors)`: whether they are distinct and have the classes, shapes, strides, dtypes and devices of `leaves`.

    The check that `torch.compile` makes before each call, in C++: 1,000 tensors take a fifth of what four Python comparisons a tensor take.
    It may say no where the comparisons say yes, never the other way round. Public fallback: those comparisons.
    """
    return torch._C._dynamo.guards.TensorGuards(*leaves, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def active_modes() -> list[TorchDispatchMode]:
    """The dispatch modes that are active now, outermost first. No public way to ask."""
    return _get_current_dispatch_mode_stack()


def compile_whole_graph(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[[list[Any]], list[Any]]:
    """Inductor on a graph that is not to be differentiated or traced again.

    `torch.compile`, the public way, would run the graph's Python through Dynamo first, and lifts no limit on recompilations. Imported
    here, when it is first needed: the compiler takes seconds to load.
    """
    from torch._inductor.compile_fx import compile_fx  # noqa: PLC0415

    with torch.no_grad():
        compiled = compile_fx(graph, inputs)

    def call(values: list[Any]) -> list[Any]:
        arguments = tuple(values)
        values.clear()
        return list(compiled(*arguments))

    return call


def transform_is_active() -> bool:
    """Whether this runs inside grad, vmap, jvp or vjp of torch.func, whose tensors are wrapped. No public way to ask."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_batched(x: torch.Tensor) -> bool:
    """Whether a tensor differs between the slices of the innermost `vmap` that this runs inside. No public way to ask."""
    level = torch._C._functorch.maybe_current_level()
    return torch._C._functorch.is_batchedtensor(x) and torch._C._functorch.maybe_get_level(x) == level


def load_forward_mode_rules() -> None:
    """Load torch's decompositions for forward mode now, without the deprecation warning that torch's own use of torch.jit.script gives.

    The first `torch.func.jvp` of a process would load them and warn; the user can do nothing about it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.autograd.forward_ad._maybe_load_decompositions()


def derivative_transform_is_active() -> bool:
    """Whether one of the transforms of torch.func that this runs inside takes derivatives: grad, vjp or jvp, but not `vmap` alone."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    return any(interpreter.key() != torch._C._functorch.TransformType.Vmap for interpreter in stack)


def makes_one_new_tensor(operation: Any) -> bool:
    """Whether an operation returns one tensor that shares no memory with its arguments, and writes to none: read from its schema.

    Schemas have no public reader. A higher-order operator has none, and gives False.
    """
    schema = getattr(operation, "_schema", None)
    if schema is None or schema.is_mutable or len(schema.returns) != 1:
        return False
    return isinstance(schema.returns[0].type, torch.TensorType) and schema.returns[0].alias_info is None


# ---- what keyed randomness needs


def backward_is_running() -> bool:
    """Whether this runs inside a node of a backward pass, where what is computed again must draw the same numbers. No public way to ask."""
    return torch._C._current_autograd_node() is not None


def innermost_checkpoint() -> object | None:
    """The hook by which the innermost `torch.utils.checkpoint` around this drops what it will compute again, or None.

    Random numbers drawn there are drawn twice. No public way to ask.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks[0] if hooks and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint" else None


class EnclosingVmap(NamedTuple):
    """A `torch.vmap` that this runs inside of."""

    level: int  # of the transform, counted from outside
    size: int  # slices
    randomness: str  # "error", "same" or "different"


def enclosing_vmaps() -> list[EnclosingVmap]:
    """The `torch.vmap`s around this, outermost first. A dispatch mode sees their slices as leading dimensions. No public way to ask."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    found = [torch._C._functorch.CVmapInterpreterPtr(i) for i in stack if i.key() == torch._C._functorch.TransformType.Vmap]
    return [EnclosingVmap(i.level(), i.batchSize(), i.randomness().name.lower()) for i in found]


def unwrap(x: torch.Tensor) -> tuple[torch.Tensor, frozenset[int]]:
    """A tensor without the wrappers of torch.func, as a dispatch mode sees it, and the levels of the vmaps that it differs between.

    The slices become leading dimensions, outermost first. No public way to look inside.
    """
    functorch = torch._C._functorch
    wrappers = []
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            wrappers.append((functorch.maybe_get_level(x), functorch.maybe_get_bdim(x)))
        x = functorch.get_unwrapped(x)
    dims = list(range(x.ndim))
    slices = [dims.pop(place) for _, place in reversed(wrappers)]
    if slices:
        x = x.permute(slices + dims)
        while functorch.is_functorch_wrapped_tensor(x):  # by an active derivative transform
            x = functorch.get_unwrapped(x)
    return x, frozenset(level for level, _ in wrappers)


def alias_that_sees_writes(x: torch.Tensor) -> torch.Tensor:
    """A detached alias whose version counter is that of `x`, made inside a dispatch mode, where `x.detach()` alone starts a new one."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()


@contextlib.contextmanager
def saved_tensors_kept() -> Iterator[None]:
    """Set hooks on saved tensors aside: what autograd saves inside is kept as it is, also inside `torch.utils.checkpoint`.

    torch.func.vjp refuses to run under such hooks. Hooks have no public way to be set aside.
    """
    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def call_below_autograd(operator: torch._ops.OpOverload, keyset: Any, *arguments: Any) -> Any:
    """Go on to an operator's kernel for the device, from its own kernel for autograd, which got the key set.

    What `torch.library.register_autograd` does, whose derivatives torch.func refuses to use.
    """
    with torch._C._AutoDispatchBelowAutograd():
        return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)


# One overload of an operator, such as `torch.ops.aten.add.Tensor`: what a dispatch mode sees and a graph calls. No public name.
OpOverload = torch._ops.OpOverload


def storage_identity(x: torch.Tensor) -> int:
    """A number that tensors share exactly where they share a storage. `data_ptr`, the public way, is 0 for tensors without data."""
    return x.untyped_storage()._cdata


def written_arguments(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call writes, by the operator's schema (which has no public reader)."""
    written: list[torch.Tensor] = []
    for i, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            written += [x for x in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(x, torch.Tensor)]
    return written


# ---- meshes and DTensor's rules


def mesh_for_rules(sizes: Sequence[int], names: Sequence[str]) -> Any:
    """A `DeviceMesh` of this shape with no back end and no process group, which is all that DTensor's rules read.

    The public constructor makes process groups, one a rank of the world.
    """
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415 - half a second that one device does not pay

    world = 1
    for size in sizes:
        world *= size
    return DeviceMesh("cpu", torch.arange(world).view(*sizes), mesh_dim_names=tuple(names), _init_backend=False, _rank=0)


def register_one_thread_gloo() -> str:
    """The name of a gloo back end with one worker thread, registered at the first call.

    gloo's two worker threads corrupt the heap with several collectives in flight (torch 2.13). The number of threads has no public
    setting: `init_process_group` ignores the options of gloo.
    """
    import torch.distributed as dist  # noqa: PLC0415

    name = "gloo_one_thread"
    if name not in dist.Backend.backend_list:
        dist.Backend.register_backend(name, _one_thread_gloo, extended_api=True, devices=["cpu"])
    return name


def _one_thread_gloo(options: Any, _: Any) -> Any:
    import torch.distributed as dist  # noqa: PLC0415

    own = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    own._threads = 1
    own._timeout = options.timeout
    own._devices = [dist.ProcessGroupGloo.create_default_device()]
    own.global_ranks_in_group = options.global_ranks_in_group
    own.group_name = options.group_id
    return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, own)


class ShardingRules:
    """DTensor's rule book: which placements an operation accepts and what it returns. Without DTensors there is no public way in."""

    def __init__(self) -> None:
        from torch.distributed.tensor import DTensor  # noqa: PLC0415
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # noqa: PLC0415
        from torch.distributed.tensor._op_schema import OpSchema, RuntimeSchemaInfo  # noqa: PLC0415

        self.spec_class, self.meta_class = DTensorSpec, TensorMeta
        self._propagator = DTensor._op_dispatcher.sharding_propagator
        self._schema, self._info = OpSchema, RuntimeSchemaInfo

    def spec(self, mesh: Any, placements: Sequence[Any], shape: Sequence[int], dtype: torch.dtype) -> Any:
        """A DTensor spec of row-major strides."""
        size, strides, step = torch.Size(shape), [], 1
        for n in reversed(size):
            strides.append(step)
            step *= max(n, 1)
        return self.spec_class(mesh, tuple(placements), tensor_meta=self.meta_class(size, tuple(reversed(strides)), dtype))

    def ask(self, operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The rule's answer (an `OutputSharding`), for arguments whose tensors are specs; raises where there is no rule."""
        info = self._propagator.op_to_schema_info.get(operation, self._info(needs_pytree=True))
        return self._propagator.propagate_op_sharding(self._schema(operation, tuple(args), dict(kwargs), schema_info=info))


def partition_decompositions() -> dict[Any, Callable[..., Any]]:
    """Operations whose rule in DTensor is wrong, in simpler ones: it takes the mean of a loss over ranks as a mean of their means.

    torch's own decompositions; the public table of `torch.export` holds those that export wants.
    """
    from torch._decomp import get_decompositions  # noqa: PLC0415

    aten = torch.ops.aten
    wrong = [aten.nll_loss_forward, aten.nll_loss_backward, aten.nll_loss2d_forward, aten.nll_loss2d_backward]
    wrong += [aten.linalg_vector_norm]
    return dict(get_decompositions([*wrong, aten.mse_loss_backward, aten.smooth_l1_loss_backward, aten.huber_loss_backward]))
