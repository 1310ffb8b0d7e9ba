"""What every derivative here is made of: a function of a list of tensors, run forward once and pulled back.

Outside torch.func this is `torch.autograd.grad` on detached leaves, which any PyTorch model survives. Inside torch.func (our `vmap` and
`jvp` are built on it) tensors are wrapped, and torch.func.vjp does the same. A derivative inside a function that is being differentiated
takes aliases of its inputs instead of detached copies and keeps its own graph, so that derivatives nest.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from functrain import tree
from functrain.precision import Precision
from functrain.torch_internals import annotate, derivative_transform_is_active, saved_tensors_kept, transform_is_active
from functrain.tree import PyTree

_depth: ContextVar[int] = ContextVar("functrain_differentiation_depth", default=0)  # how many derivatives we are inside of

Pull = Callable[..., list[torch.Tensor]]
ListFunction = Callable[[list[torch.Tensor]], tuple[list[torch.Tensor], PyTree]]


@contextmanager
def _one_deeper() -> Iterator[None]:
    token = _depth.set(_depth.get() + 1)
    try:
        yield
    finally:
        _depth.reset(token)


def phase(name: str) -> AbstractContextManager[None]:
    """Tag what is computed inside as `forward` or `backward`, for whoever captures it; the outermost derivative decides."""
    return annotate({"phase": name}) if _depth.get() == 0 else nullcontext()


def is_nested() -> bool:
    """Whether results may still be differentiated: we are inside another derivative of ours or of torch.func."""
    return _depth.get() > 0 or derivative_transform_is_active()


# ---- forward once, then back


def pullback(function: ListFunction, leaves: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], PyTree, Pull]:
    """Run a function and keep what its derivative needs.

    Args:
        function: takes a list of tensors like `leaves`; returns a list of floating-point tensors, and a tree that is only passed on.
        leaves: floating-point or complex tensors.

    Returns:
        The function's two results, and `pull(cotangents, keep=False)`: one cotangent an output -> one an input, zeros where an input had
        no influence. With `keep` it can be called again.
    """
    run = _transformed_pullback if transform_is_active() and leaves else _autograd_pullback
    outputs, rest, pull = run(function, leaves)

    def conjugated(cotangents: Sequence[torch.Tensor], keep: bool = False) -> list[torch.Tensor]:
        """JAX transposes where torch takes the adjoint; they differ for complex numbers only."""
        with phase("backward"):
            return [_conjugate(g) for g in pull([_conjugate(c) for c in cotangents], keep)]

    return outputs, rest, conjugated


def _conjugate(x: torch.Tensor) -> torch.Tensor:
    return x.conj().resolve_conj() if x.is_complex() else x


def _autograd_pullback(function: ListFunction, leaves: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], PyTree, Pull]:
    nested = _depth.get() > 0
    with _recording(), phase("forward"):
        inputs = [_alias(x) if nested else x.detach().requires_grad_() for x in leaves]
        with _one_deeper():
            outputs, rest = function(inputs)

    def pull(cotangents: Sequence[torch.Tensor], keep: bool) -> list[torch.Tensor]:
        used = [(output, c) for output, c in zip(outputs, cotangents, strict=True) if output.requires_grad]
        if not used or not inputs:
            return [torch.zeros_like(x) for x in leaves]
        create = nested or is_nested()
        heads, seeds = zip(*used, strict=True)
        options: dict[str, Any] = {"create_graph": create, "retain_graph": keep or create, "allow_unused": True, "materialize_grads": True}
        with _recording():
            return list(torch.autograd.grad(heads, inputs, seeds, **options))

    if nested:
        return outputs, rest, pull
    return [cut(x) for x in outputs], tree.map(cut, rest), pull


def _recording() -> AbstractContextManager[Any]:
    """Autograd on, whatever the caller has: torch.inference_mode would leave it off silently."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else torch.enable_grad()


def _alias(x: torch.Tensor) -> torch.Tensor:
    """The same values as a new input: gradients with respect to it leave out other uses of `x`, and reach `x` when differentiated again."""
    return x.view_as(x) if x.requires_grad else x.detach().requires_grad_()


def cut(x: Any) -> Any:
    """A leaf without its history, as it leaves the outermost derivative."""
    return x.detach() if isinstance(x, torch.Tensor) and x.requires_grad else x


def _transformed_pullback(function: ListFunction, leaves: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], PyTree, Pull]:
    rebuild: list[Callable[[list[torch.Tensor]], PyTree]] = []

    def flat(*inputs: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        with _one_deeper():
            outputs, rest = function(list(inputs))
        tensors, put_back = split_tensors(rest)
        rebuild[:] = [put_back]
        return outputs, tensors

    def pull_kept(cotangents: Sequence[torch.Tensor], keep: bool) -> list[torch.Tensor]:
        with saved_tensors_kept():
            return list(pull(list(cotangents)))

    with phase("forward"), saved_tensors_kept():
        outputs, pull, tensors = torch.func.vjp(flat, *leaves, has_aux=True)  # type: ignore[misc]
    return list(outputs), rebuild[0](tensors), pull_kept


def split_tensors(value: PyTree) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], PyTree]]:
    """The tensors of a tree, and a function that puts as many back among its other leaves: torch's transforms take tensors only."""
    leaves, structure = tree.flatten(value)
    plain = [None if isinstance(x, torch.Tensor) else (x,) for x in leaves]

    def rebuild(tensors: Sequence[torch.Tensor]) -> PyTree:
        given = iter(tensors)
        return tree.unflatten(structure, [next(given) if x is None else x[0] for x in plain])

    return [x for x in leaves if isinstance(x, torch.Tensor)], rebuild


# ---- which leaves of which arguments


@dataclass(frozen=True)
class Selection:
    """The arguments that a call is differentiated by, as leaves."""

    args: tuple[Any, ...]  # all positional arguments of the call
    argnums: tuple[int, ...]  # which of them are differentiated
    single: bool  # whether the caller named one argument, and gets one tree instead of a tuple
    structure: tree.Structure  # of the tuple of those arguments
    paths: tuple[str, ...]  # of its leaves, such as `blocks/0/w`
    leaves: tuple[Any, ...]  # its leaves; numbers and arrays have become tensors
    active: tuple[int, ...]  # which leaves are floating-point or complex

    def tensors(self, precision: Precision | None) -> list[torch.Tensor]:
        """The differentiated leaves as the function gets them."""
        return [to_compute(self.leaves[i], precision) for i in self.active]

    def arguments(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """The arguments of a call with these tensors in the differentiated places."""
        leaves = list(self.leaves)
        for i, tensor in zip(self.active, tensors, strict=True):
            leaves[i] = tensor
        args = list(self.args)
        for argnum, argument in zip(self.argnums, tree.unflatten(self.structure, leaves), strict=True):
            args[argnum] = argument
        return args

    def gradients(self, tensors: Sequence[torch.Tensor], precision: Precision | None, factor: torch.Tensor | None) -> PyTree:
        """Gradients as they leave: multiplied by a factor, in their param's dtype and place; zeros for what cannot be differentiated."""
        given = iter(tensors)
        leaves = [to_storage(next(given), x, precision, factor) if is_active(x) else _zero(x) for x in self.leaves]
        found = tree.unflatten(self.structure, leaves)
        return found[0] if self.single else found


def select_arguments(name: str, args: tuple[Any, ...], argnums: int | Sequence[int]) -> Selection:
    """Find the leaves that `argnums` names.

    Raises:
        TypeError: an argument has a leaf that is no tensor or number, or no floating-point leaf at all.
        ValueError: `argnums` names an argument that was not given.
    """
    numbers = tuple(argnums) if isinstance(argnums, (tuple, list)) else (argnums,)
    places = tuple(_place(name, number, len(args)) for number in numbers)
    chosen = tuple(args[place] for place in places)
    found, structure = tree.flatten(chosen)
    paths = tuple(path.partition("/")[2] for path in tree.paths(chosen))
    leaves = tuple(as_tensor(leaf, path) for leaf, path in zip(found, paths, strict=True))
    active = tuple(i for i, leaf in enumerate(leaves) if is_active(leaf))
    if leaves and not active:
        raise TypeError(
            f"{name} is differentiated by argument {places[0]}, which holds no floating-point tensor ({_kinds(leaves)}). "
            "Choose another with argnums, or convert it with .float()"
        )
    return Selection(args, places, not isinstance(argnums, (tuple, list)), structure, paths, leaves, active)


def _place(name: str, number: Any, given: int) -> int:
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"argnums takes an int or a tuple of ints, not {number!r}")
    if not -given <= number < given:
        raise ValueError(f"argnums={number}, but {name} was called with {given} positional argument{'s' if given != 1 else ''}")
    return number % given


def as_tensor(leaf: Any, path: str) -> Any:
    """Floats and numpy arrays become tensors, as JAX makes them arrays; ints and bools stay."""
    if isinstance(leaf, (torch.Tensor, int)):
        return leaf
    if isinstance(leaf, (float, complex)):
        return torch.full((), leaf, dtype=torch.get_default_dtype() if isinstance(leaf, float) else None)
    if type(leaf).__module__ == "numpy":
        return torch.as_tensor(leaf)
    raise TypeError(f"leaf {path or '(the whole argument)'} is {type(leaf).__name__}, which cannot be differentiated by")


def is_active(leaf: Any) -> bool:
    """Whether a leaf has derivatives: a floating-point or complex tensor."""
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _zero(leaf: Any) -> Any:
    return torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else type(leaf)()


def _kinds(leaves: Sequence[Any]) -> str:
    return ", ".join(sorted({str(x.dtype) if isinstance(x, torch.Tensor) else type(x).__name__ for x in leaves}))


# ---- where params leave storage, and where gradients arrive in it


@dataclass(frozen=True)
class Markers:
    """Operations that say nothing but where they stand; a function captured for a mesh is recorded with them."""

    unshard: Callable[[torch.Tensor], torch.Tensor]
    store_grad: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    part_grad: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    constrain: Callable[[torch.Tensor, str], torch.Tensor]
    spread: Callable[[torch.Tensor], torch.Tensor]
    spread_like: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


_markers: ContextVar[Markers | None] = ContextVar("functrain_markers", default=None)


@contextmanager
def marked(markers: Markers | None) -> Iterator[None]:
    """Inside, the outermost derivatives leave these markers."""
    token = _markers.set(markers)
    try:
        yield
    finally:
        _markers.reset(token)


def recorded_markers() -> Markers | None:
    """The markers of the capture around this, whatever derivatives it is inside of."""
    return None if transform_is_active() else _markers.get()


def active_markers() -> Markers | None:
    """The markers to leave at this point: none inside another derivative or transform, where params have left their storage already."""
    return None if is_nested() or transform_is_active() else _markers.get()


def to_compute(leaf: torch.Tensor, precision: Precision | None) -> torch.Tensor:
    """A param as the loss function gets it: this is the one place where params leave their storage, in the dtype to compute in."""
    leaf = leaf if precision is None or not leaf.is_floating_point() else leaf.to(precision.compute)
    markers = active_markers()
    return leaf if markers is None else markers.unshard(leaf)


def of_microbatch(gradient: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """The gradient of one microbatch, before it is summed with the others'."""
    markers = active_markers()
    return gradient if markers is None else markers.part_grad(gradient, leaf)


def to_storage(gradient: torch.Tensor, leaf: torch.Tensor, precision: Precision | None, factor: torch.Tensor | None) -> torch.Tensor:
    """A gradient as it leaves: this is the one place where gradients arrive in their param's storage, reduced in `precision.reduce`."""
    if precision is not None and gradient.is_floating_point():
        gradient = gradient.to(precision.reduce)
    markers = active_markers()
    if markers is not None:
        gradient = markers.store_grad(gradient, leaf)
    dtype = leaf.dtype
    if factor is not None:
        wide = torch.promote_types(gradient.dtype, torch.float32)
        gradient = gradient.to(wide) * factor
    return gradient.to(dtype)
