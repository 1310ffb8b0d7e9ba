"""What becomes of a tensor that was donated to a step: its values live on in the result, and using it again is an error by name."""

from typing import Any

import torch

from functrain.compile.errors import DonatedError


class Donated(torch.Tensor):
    """The class of a tensor after donation: every operation on it raises and says which leaf of which call it was."""

    donated_as = "a leaf"  # in a subclass such as "state/params/w of train_step"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Refuse every torch operation."""
        raise DonatedError(cls.message())

    @classmethod
    def message(cls) -> str:
        """What to tell the user."""
        return (
            f"{cls.donated_as} was donated: the step took its memory, and the tensor has no values any more. Use the step's result "
            "instead; to keep the old value, clone it before the call or leave the argument out of `donate`."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Says what it was, so that a debugger can show it."""
        return f"<donated: {type(self).donated_as}>"


def donated_class(label: str) -> type[Donated]:
    """The class for one leaf of one step: to change a tensor's class is the cheapest mark there is, so the class says it all."""
    return type("Donated", (Donated,), {"donated_as": label})


def retire(leaves: list[torch.Tensor], classes: list[type[Donated]], emptied: list[int]) -> None:
    """Mark leaves as donated.

    Args:
        leaves: the tensors that the caller passed.
        classes: what each becomes.
        emptied: places of those whose memory no result took over; theirs is let go of, so that it is free after its last use.
    """
    for i in emptied:
        leaves[i].data = torch.empty(0, dtype=leaves[i].dtype, device=leaves[i].device)
    for leaf, becomes in zip(leaves, classes, strict=True):
        leaf.__class__ = becomes
