"""Implicit randomness from a key: inside `scope(key)`, what torch would draw from its global generator is drawn from the key.

Draw number i uses ``fold_in(key, i)``, so a result depends on the key and on the order of the draws alone: the same eagerly, captured and
compiled, on any device. `nn.Dropout` in a user's module, `torch.randn`, `nn.init` and the like work unchanged.

What runs again in a backward pass (rematerialization) must draw what it drew the first time: `scope_state` says where a scope stands,
`resume` enters it there again, and `checkpoint_contexts` is both for `torch.utils.checkpoint`.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from functrain.random.implicit import HANDLERS, Slices, Source, arguments
from functrain.random.implicit import is_random as is_random
from functrain.random.keys import check_key
from functrain.torch_internals import TorchDispatchMode, active_modes, backward_is_running, enclosing_vmaps, innermost_checkpoint, unwrap


@dataclasses.dataclass(frozen=True)
class ScopeState:
    """Where a scope stands: with it, `resume` draws again what the scope draws next."""

    key: torch.Tensor  # [*vmaps, 2], without the wrappers of torch.func
    slices: tuple[Slices, ...]  # the vmaps that the scope was entered in
    counter: int  # draws so far


class RandomScope(TorchDispatchMode):
    """The mode behind `scope`; `state` is where it stands."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would otherwise import its compiler (seconds) to keep it out of this mode's method."""
        return False

    def __init__(self, state: ScopeState) -> None:
        super().__init__()
        self.state = state
        self.entered_in_backward = backward_is_running()
        self.entered_in_checkpoint = innermost_checkpoint()

    @property
    def counter(self) -> int:
        """How many draws were made so far."""
        return self.state.counter

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not is_random(operation, args, kwargs):
            return operation(*args, **kwargs)
        handler = HANDLERS.get(operation)
        if handler is None:
            raise NotImplementedError(f"{operation} draws random numbers that `random.scope` cannot take from a key. {_remedy(operation)}")
        given = arguments(operation, args, kwargs)
        if given.get("generator") is not None:
            raise ValueError(f"{operation} inside `random.scope` has a torch.Generator of its own: leave it out to draw from the key")
        self._check_place(operation)
        return handler(self._next(), given)

    def _next(self) -> Source:
        state = self.state
        self.state = dataclasses.replace(state, counter=state.counter + 1)
        number = torch.full((), state.counter, dtype=torch.int64, device=state.key.device)
        return Source(torch.ops.functrain.threefry_fold_in(state.key, number), state.slices)

    def _check_place(self, operation: Any) -> None:
        """Refuse draws that a recomputation would make otherwise, or did."""
        if backward_is_running() and not self.entered_in_backward:
            raise RuntimeError(
                f"{operation} in a backward pass inside `random.scope`: what runs again there would draw other numbers. {_RECOMPUTE}"
            )
        checkpoint = innermost_checkpoint()
        if checkpoint is not None and checkpoint is not self.entered_in_checkpoint:
            raise RuntimeError(
                f"{operation} inside torch.utils.checkpoint inside `random.scope`: the recomputation would draw other numbers. {_RECOMPUTE}"
            )


_RECOMPUTE = "Use functrain.remat, or give torch.utils.checkpoint `context_fn=functrain.random.checkpoint_contexts`."


def _remedy(operation: Any) -> str:
    if "attention" in operation._schema.name:
        return "Use `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`, or dropout_p=0."
    return "Call functrain.random with a key instead."


@contextlib.contextmanager
def scope(key: torch.Tensor) -> Iterator[RandomScope]:
    """Draw torch's implicit random numbers from a key while the context is active.

    It works eagerly, under autograd, inside the transforms of torch.func, on fake tensors and while a step is captured. Scopes nest: the
    innermost counts. Inside `torch.vmap` (with ``randomness="different"``) a key that differs between slices gives each slice what it would
    get alone, and a key that does not gives all slices the same.

    Args:
        key: `[2]`.

    Raises:
        NotImplementedError: at a random operation that it does not know, with the operation's name.
        ValueError: at one that has a `torch.Generator` of its own.
        RuntimeError: at one in a backward pass, or in a `torch.utils.checkpoint`, whose recomputation would draw other numbers. (With
            ``use_reentrant=True`` and a backward pass outside the scope this cannot be seen: it draws from torch's generator then.)

    >>> from functrain.random import key
    >>> layer = torch.nn.Dropout(0.5)
    >>> with scope(key(0)):
    ...     first = layer(torch.ones(8))
    >>> with scope(key(0)):
    ...     second = layer(torch.ones(8))
    >>> torch.equal(first, second)
    True
    """
    check_key("scope", key)
    raw, levels = unwrap(key)
    with _entered(ScopeState(raw, _slices(levels), 0)) as active:
        yield active


def _slices(levels_of_key: frozenset[int]) -> tuple[Slices, ...]:
    slices = []
    for vmap in enclosing_vmaps():
        if vmap.randomness == "different":
            slices.append(Slices(vmap.size, vmap.level in levels_of_key))
        elif vmap.level in levels_of_key and vmap.randomness == "same":
            raise ValueError('`random.scope` has a key for each slice of a vmap with randomness="same": use randomness="different"')
    return tuple(slices)


def current_scope() -> RandomScope | None:
    """The innermost active scope, or None.

    >>> current_scope() is None
    True
    """
    return next((mode for mode in reversed(active_modes()) if isinstance(mode, RandomScope)), None)


def scope_state() -> ScopeState | None:
    """Where the innermost scope stands now, or None where there is none; a plain value, to be kept for `resume`."""
    active = current_scope()
    return None if active is None else active.state


def resume(state: ScopeState | None) -> contextlib.AbstractContextManager[RandomScope | None]:
    """Enter a scope again as it stood, anywhere and any number of times: what was drawn then is drawn again. None enters nothing.

    >>> from functrain.random import key
    >>> with scope(key(0)):
    ...     state = scope_state()
    ...     first = torch.randn(3)
    >>> with resume(state):
    ...     second = torch.randn(3)
    >>> torch.equal(first, second)
    True
    """
    return contextlib.nullcontext() if state is None else _entered(state)


@contextlib.contextmanager
def _entered(state: ScopeState) -> Iterator[RandomScope]:
    with RandomScope(state) as active:
        yield active


@contextlib.contextmanager
def _continued(outer: RandomScope) -> Iterator[RandomScope]:
    """A scope from where it stands to where its body leaves it, entered here so that draws are known to be made here again."""
    with _entered(outer.state) as inner:
        yield inner
    outer.state = inner.state


def checkpoint_contexts() -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
    """The `context_fn` of `torch.utils.checkpoint` inside a scope: the recomputation draws what the first run drew.

    >>> from functrain.random import key
    >>> from torch.utils.checkpoint import checkpoint
    >>> x = torch.ones(8, requires_grad=True)
    >>> with scope(key(0)):
    ...     y = checkpoint(torch.nn.Dropout(0.5), x, use_reentrant=False, context_fn=checkpoint_contexts)
    >>> y.sum().backward()
    >>> torch.equal(x.grad, y)
    True
    """
    active = current_scope()
    if active is None:
        return contextlib.nullcontext(), contextlib.nullcontext()
    return _continued(active), _entered(active.state)
