"""A state for a training step. Any pytree can be one; this one is a convenience."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from functrain import tree
from functrain.precision import all_finite, select
from functrain.tree import PyTree, struct


class Transformation(Protocol):
    """An optimizer as a pair of pure functions, as in `functrain.optim` or Optax."""

    @property
    def init(self) -> Callable[..., PyTree]:
        """From params to state."""

    @property
    def update(self) -> Callable[..., tuple[PyTree, PyTree]]:
        """From (grads, state, params) to (updates, state)."""


@struct
class TrainState:
    """Everything a training step carries from one call to the next.

    Example:
        >>> class Descent:
        ...     init = staticmethod(lambda params: None)
        ...     update = staticmethod(lambda grads, state, params: (tree.map(lambda g: -0.1 * g, grads), state))
        >>> state = TrainState.create(params={"w": torch.ones(2)}, tx=Descent, seen=torch.zeros(()))
        >>> state = state.apply_gradients({"w": torch.ones(2)}, Descent, seen=state.seen + 8)
        >>> state.params["w"], state.step, state.seen
        (tensor([0.9000, 0.9000]), tensor(1, dtype=torch.int32), tensor(8.))
    """

    params: PyTree  # what is trained
    opt_state: PyTree  # the optimizer's own values
    step: torch.Tensor  # how many steps counted so far, int32 scalar
    loss_scale: Any = None  # a `StaticScale` or `DynamicScale`; None: gradients are taken as they come
    buffers: PyTree = None  # values of a module that a forward pass replaces
    key: torch.Tensor | None = None  # random key, int64 [2]
    extra: Any = None  # dict of further leaves by name, readable as attributes; None when there are none

    @classmethod
    def create(cls, *, params: PyTree, tx: Transformation, **extra: Any) -> "TrainState":
        """The state before the first step.

        Args:
            params: tree of tensors.
            tx: the optimizer; its `init(params)` gives `opt_state`.
            extra: `loss_scale`, `buffers`, `key`, and any further leaves by name.

        Raises:
            TypeError: an extra has the name of a field that `create` fills itself.
        """
        taken = sorted({"opt_state", "step", "extra"} & extra.keys())
        if taken:
            raise TypeError(f"TrainState.create makes {', '.join(taken)} itself; choose another name, or use .replace afterwards")
        device = next((x.device for x in tree.tensors(params)), None)
        known = {name: extra.pop(name) for name in ("loss_scale", "buffers", "key") if name in extra}
        if known.get("loss_scale") is not None:
            known["loss_scale"] = tree.map(lambda x: x.to(device), known["loss_scale"])
        step = torch.zeros((), dtype=torch.int32, device=device)
        return cls(params=params, opt_state=tx.init(params), step=step, extra=extra or None, **known)

    def __getattr__(self, name: str) -> Any:
        extra = self.__dict__.get("extra") or {}
        if name in extra:
            return extra[name]
        raise AttributeError(f"TrainState has no {name!r}; its extras are: {', '.join(sorted(extra)) or 'none'}")

    def replace(self, **changes: Any) -> "TrainState":
        """A copy with some fields or extras changed.

        Raises:
            TypeError: there is no such field or extra.
        """
        fields = {name: getattr(self, name) for name in type(self).__dataclass_fields__}  # type: ignore[attr-defined]
        extra = dict(self.extra or {})
        for name, value in changes.items():
            if name in fields:
                fields[name] = value
            elif name in extra:
                extra[name] = value
            else:
                known = ", ".join([*fields, *extra])
                raise TypeError(f"TrainState has no {name!r} to replace; it has {known}. New extras are given to TrainState.create")
        if "extra" not in changes:
            fields["extra"] = extra or None
        return type(self)(**fields)

    def apply_gradients(self, grads: PyTree, tx: Transformation, **replacements: Any) -> "TrainState":
        """The state after one step of the optimizer.

        With a `loss_scale`, a step whose gradients are not all finite is undone: every leaf of the old state comes back bit for bit,
        `step` and the replacements included, and only the scale changes; `state.loss_scale.finite` tells. So give what else a step
        replaces (buffers, a key, averages) here and not to `.replace`, which knows nothing of the gradients.

        Args:
            grads: gradients, unscaled, in the structure of `params`.
            tx: the optimizer that `create` was given.
            replacements: new values for other fields or extras, such as `buffers=`.

        Raises:
            StructureError: the gradients have another structure than the params.
            TypeError: a replacement names no field or extra, or one that this call sets itself.
        """
        difference = tree.mismatch(self.params, grads)
        if difference:
            raise tree.StructureError(f"gradients do not fit the params: {difference}")
        own = sorted({"params", "opt_state", "step", "loss_scale"} & replacements.keys())
        if own:
            raise TypeError(f"apply_gradients sets {', '.join(own)} itself; use .replace on its result")
        updates, opt_state = tx.update(grads, self.opt_state, self.params)
        params = tree.map(_add, self.params, updates)
        new = self.replace(params=params, opt_state=opt_state, step=self.step + 1, **replacements)
        if self.loss_scale is None:
            return new
        finite = all_finite(grads)
        chosen: TrainState = select(finite, new, self)
        return chosen.replace(loss_scale=self.loss_scale.update(finite))


def _add(param: Any, update: Any) -> Any:
    """The param plus its update, in the param's own dtype."""
    moved = param + update
    return moved.to(param.dtype) if isinstance(param, torch.Tensor) else moved
