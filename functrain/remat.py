"""Rematerialization: what a function computes is not kept for the backward pass but computed again there."""

import contextvars
import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from functrain.differentiate import split_tensors
from functrain.random.scoping import ScopeState, checkpoint_contexts, resume, scope_state
from functrain.torch_internals import (
    TorchDispatchMode,
    active_modes,
    alias_that_sees_writes,
    annotate,
    makes_one_new_tensor,
    transform_is_active,
)

Policy = Callable[..., bool]


class remat_policies:
    """Which results `remat` keeps, by JAX's names: functions `(operation, *args, **kwargs) -> bool`, True for what is kept.

    Write your own likewise; operations are torch's, such as `torch.ops.aten.mm.default`.
    """

    @staticmethod
    def nothing_saveable(operation: Any, *args: Any, **kwargs: Any) -> bool:
        """Keep inputs only: least memory."""
        return False

    @staticmethod
    def everything_saveable(operation: Any, *args: Any, **kwargs: Any) -> bool:
        """Keep all, as without `remat`."""
        return True

    @staticmethod
    def dots_saveable(operation: Any, *args: Any, **kwargs: Any) -> bool:
        """Keep results of matrix products, compute the rest again: most of the memory for little of the time."""
        return operation in _DOTS or operation in _BATCHED_DOTS

    @staticmethod
    def dots_with_no_batch_dims_saveable(operation: Any, *args: Any, **kwargs: Any) -> bool:
        """Keep results of plain matrix products: not of batched ones, such as attention scores."""
        return operation in _DOTS


_aten = torch.ops.aten
_DOTS = {_aten.mm.default, _aten.addmm.default, _aten.mv.default, _aten.addmv.default, _aten.dot.default, _aten._scaled_mm.default}
_BATCHED_DOTS = {_aten.bmm.default, _aten.baddbmm.default}


def remat(function: Callable[..., Any], policy: Policy | None = None) -> Callable[..., Any]:
    """The same function with the same derivatives, that keeps its inputs instead of its intermediates, as `jax.checkpoint`.

    Gradients reach tensors that the function closes over. It must be pure, since it runs again in the backward pass; what it draws from
    keys, or from an enclosing `random.scope`, is the same again.

    Inside `vmap` and `jvp` results are right but intermediates are kept: torch cannot drop them there.

    Args:
        function: takes and returns trees.
        policy: which results to keep all the same, one of `remat_policies` or a function like them; None keeps nothing.

    Example:
        >>> from functrain.transforms import grad
        >>> grad(remat(lambda x: torch.sin(torch.sin(x))))(torch.tensor(0.5))
        tensor(0.7786)
    """
    if policy is remat_policies.everything_saveable:
        return function

    @functools.wraps(function)
    def rematerialized(*args: Any, **kwargs: Any) -> Any:
        if transform_is_active() or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        tensors, rebuild = split_tensors((args, kwargs))
        call = _Repeatable(function, rebuild, policy)
        # torch's generator is restored for the second run, except where a mode is active: capture refuses it, a scope replaces it.
        return checkpoint(call, *tensors, use_reentrant=False, preserve_rng_state=not active_modes())

    return rematerialized


class _Repeatable:
    """One call, which runs once forward and again for every backward pass, in the context of the first time."""

    def __init__(self, function: Callable[..., Any], rebuild: Callable[..., Any], policy: Policy | None) -> None:
        self.function = function
        self.rebuild = rebuild
        self.kept = None if policy is None or policy is remat_policies.nothing_saveable else _Kept(policy)
        self.context: contextvars.Context | None = None  # of the first run; None before it
        self.scope: ScopeState | None = None  # where implicit random numbers stood then

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self.context is not None:
            return self.context.copy().run(self._again, tensors)
        self.context, self.scope = contextvars.copy_context(), scope_state()
        with checkpoint_contexts()[0], nullcontext() if self.kept is None else _Keep(self.kept):
            return self._run(tensors)

    def _again(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        with annotate({"again": True}), resume(self.scope), nullcontext() if self.kept is None else _Replay(self.kept):
            return self._run(tensors)

    def _run(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        args, kwargs = self.rebuild(tensors)
        return self.function(*args, **kwargs)


class _Kept:
    """Results that a policy keeps, in the order they were computed, with their version to see whether they were changed since."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.results: list[tuple[Any, torch.Tensor, int]] = []

    def wants(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether to keep this result; views cost nothing and are always made again, and so is what is written in place."""
        return makes_one_new_tensor(operation) and self.policy(operation, *args, **kwargs)


class _Keep(TorchDispatchMode):
    """Writes down what the policy keeps."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        if self.kept.wants(operation, args, kwargs):
            alias = alias_that_sees_writes(result)
            self.kept.results.append((operation, alias, alias._version))
        return result


class _Replay(TorchDispatchMode):
    """Gives back what was kept, computes the rest; each pass starts from the beginning."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self.kept = kept
        self.given = iter(kept.results)

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self.kept.wants(operation, args, kwargs):
            first, result, version = next(self.given)
            if first is not operation:
                raise RuntimeError(f"remat: the function computed {first} the first time and {operation} now. It must be pure")
            if result._version == version:
                return result.detach()
        return operation(*args, **kwargs)
