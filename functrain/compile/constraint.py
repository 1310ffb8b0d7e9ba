"""`with_sharding_constraint`: say how a value inside a step is split; its gradient is then split alike."""

import json
from typing import Any

import torch

from functrain.compile.collectives import ops
from functrain.differentiate import recorded_markers
from functrain.sharding import P, Plan, Sharding


class _Constrained(torch.autograd.Function):
    """The identity, whose transpose pins the gradient to the same spec."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, spec: str) -> torch.Tensor:
        ctx.spec = spec
        return ops.constrain(x, spec)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ops.constrain(gradients[0], ctx.spec), None


def with_sharding_constraint(x: torch.Tensor, spec: P | str) -> torch.Tensor:
    """The same value, split over the mesh as said; the identity where no plan is in force.

    Args:
        x: any tensor of a step.
        spec: how it is split (dimensions without an entry are whole), or a name that the plan's `activations` gives a spec; a name that the
            plan does not know constrains nothing.

    Raises:
        TypeError: `spec` is neither.

    >>> with_sharding_constraint(torch.ones(2), P("data"))
    tensor([1., 1.])
    """
    if not isinstance(spec, (P, str)):
        raise TypeError(f"a constraint is an ft.P or the name of an activation, not {spec!r}")
    if recorded_markers() is None:
        return x
    text = json.dumps(spec if isinstance(spec, str) else spec.to_plain())
    return _Constrained.apply(x, text)  # type: ignore[no-any-return, no-untyped-call]


def constraint_spec(text: str, plan: Plan) -> P | None:
    """The spec that a marker carries, under a plan; None for a name that the plan does not constrain."""
    plain = json.loads(text)
    spec = plan.constraints.get(plain) if isinstance(plain, str) else P.of_plain(plain)
    if spec is not None:
        Sharding(plan.mesh, spec)
    return spec
