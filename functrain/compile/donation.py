"""What becomes of a tensor that was donated to a step: its values live on in the result, and using it again is an error by name."""

from typing import Any

import torch

from functrain.compile.errors import DonatedError


class Donated(torch.Tensor):
    """The class of a tensor after donation: every operation on it raises and says which leaf of which call it was."""

    donated_as: str  # such as "state/params/w of train_step"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Refuse every torch operation."""
        for value in (*args, *(kwargs or {}).values()):
            for one in value if isinstance(value, (list, tuple)) else (value,):
                if type(one) is Donated:
                    raise DonatedError(message(one))
        raise DonatedError("a donated tensor is used again")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Says what it was, so that a debugger can show it."""
        return f"<donated: {self.__dict__.get('donated_as')}>"


def message(tensor: torch.Tensor) -> str:
    """What to tell the user of a donated tensor."""
    name = tensor.__dict__.get("donated_as", "a leaf")
    return (
        f"{name} was donated: the step took its memory, and the tensor has no values any more. Use the step's result instead; to keep the "
        "old value, clone it before the call or leave the argument out of `donate`."
    )


def retire(leaves: list[torch.Tensor], labels: list[str], emptied: list[int]) -> None:
    """Mark leaves as donated.

    Args:
        leaves: the tensors that the caller passed.
        labels: what to call each in an error.
        emptied: places of those whose memory no result took over; theirs is let go of, so that it is free after its last use.
    """
    for i in emptied:
        leaves[i].data = torch.empty(0, dtype=leaves[i].dtype, device=leaves[i].device)
    for leaf, label in zip(leaves, labels, strict=True):
        leaf.__class__ = Donated
        leaf.donated_as = label  # type: ignore[attr-defined]
