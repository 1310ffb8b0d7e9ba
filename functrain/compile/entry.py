"""One captured version of a step, and which arguments it is for."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from functrain.compile.capture import Output
from functrain.compile.donation import Donated, donated_class
from functrain.compile.errors import DonatedError
from functrain.compile.guards import Guards
from functrain.compile.lower import Executable
from functrain.torch_internals import tensor_guard


@dataclass(frozen=True)
class Signature:
    """What a graph depends on of its tensor leaves. Lists, so that a call compares four lists and builds no object per leaf."""

    shapes: list[Any]
    dtypes: list[Any]
    devices: list[Any]
    contiguous: list[bool]
    strides: tuple[tuple[int, tuple[int, ...]], ...]  # (place, stride) of the leaves that are not contiguous

    def difference(self, other: "Signature", paths: Sequence[str], key: Any, other_key: Any) -> str:
        """What differs from another signature, in words: the first three leaves, or the rest of the key."""
        if key[0] != other_key[0]:
            return "the arguments have another structure"
        if key[1] != other_key[1]:
            changed = [f"{a[0]}={a[-1]!r} (was {b[-1]!r})" for a, b in zip(key[1], other_key[1], strict=False) if a != b]
            return "static arguments changed: " + ", ".join(changed)
        if key[2] != other_key[2]:
            return "torch's default dtype or autocast changed"
        found = [
            f"{path} was {list(s0)} {_name(d0)} and is {list(s1)} {_name(d1)}" + ("" if c0 == c1 else ", with other strides")
            for path, s0, s1, d0, d1, c0, c1 in zip(
                paths, other.shapes, self.shapes, other.dtypes, self.dtypes, other.contiguous, self.contiguous, strict=True
            )
            if (s0, d0, c0) != (s1, d1, c1)
        ]
        return "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "") or "strides or devices changed"


def signature_of(leaves: Sequence[Any]) -> Signature:
    """Read a signature off tensors (or abstract leaves)."""
    contiguous = [x.is_contiguous() for x in leaves]
    return Signature(
        shapes=[torch.Size(x.shape) for x in leaves],
        dtypes=[x.dtype for x in leaves],
        devices=[x.device for x in leaves],
        contiguous=contiguous,
        strides=tuple((i, tuple(leaves[i].stride())) for i, c in enumerate(contiguous) if not c),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))  # leaves of other types are looked at closely


class Glance:
    """Tells at a glance that a call's leaves are like those of an earlier call, as in all steps of a run but the first two."""

    def __init__(self) -> None:
        self._check: Callable[..., bool] | None = None
        self._renewals = 4  # parameters at first, then plain tensors; whoever changes kinds for ever is looked at closely for ever

    def check(self, leaves: list[Any]) -> bool:
        """Whether the leaves surely have the signature, and are distinct. False says nothing."""
        return self._check is not None and self._check(*leaves)

    def remember(self, leaves: list[Any]) -> None:
        """These leaves were compared one by one and have the signature."""
        if self._renewals:
            self._renewals -= 1
            self._check = tensor_guard(leaves)


@dataclass(frozen=True)
class Entry:
    """An executable, its signature and what a call needs, worked out once."""

    executable: Executable
    signature: Signature
    guards: Guards
    donated: list[int]  # places of donated leaves, in order
    retired: list[type[Donated]]  # the class that each donated leaf is given
    emptied: list[int]  # among the donated leaves, those whose memory no result takes over
    all_tensors: bool  # every leaf of the result is a tensor
    glance: Glance = field(default_factory=Glance)

    @staticmethod
    def make(executable: Executable, signature: Signature, guards: Guards, name: str) -> "Entry":
        """Work out what calls will need."""
        captured = executable.lowered.captured
        donated = sorted(executable.lowered.donated)
        return Entry(
            executable,
            signature,
            guards,
            donated,
            [donated_class(f"{captured.in_paths[i]} of {name}") for i in donated],
            [k for k, i in enumerate(donated) if i not in executable.aliased],
            all(isinstance(leaf, Output) for leaf in captured.out_leaves),
        )

    def fits(self, leaves: list[Any]) -> bool:
        """Whether the leaves are tensors of this signature, compared one by one."""
        if not self._compare(leaves):
            return False
        self.glance.remember(leaves)
        return True

    def _compare(self, leaves: list[Any]) -> bool:
        """Four comprehensions and four list comparisons: nothing else per leaf."""
        want = self.signature
        if len(leaves) != len(want.shapes) or not _PLAIN.issuperset(map(type, leaves)):
            return False
        return (
            [x.shape for x in leaves] == want.shapes
            and [x.dtype for x in leaves] == want.dtypes
            and [x.is_contiguous() for x in leaves] == want.contiguous
            and [x.device for x in leaves] == want.devices
            and all(leaves[i].stride() == stride for i, stride in want.strides)
        )

    def check_distinct(self, leaves: list[Any]) -> None:
        """Raise if one tensor is donated and passed a second time."""
        if len(set(map(id, leaves))) == len(leaves):
            return
        paths = self.executable.lowered.captured.in_paths
        places: dict[int, int] = {}
        donated = set(self.donated)
        for i, leaf in enumerate(leaves):
            j = places.setdefault(id(leaf), i)
            if j != i and (i in donated or j in donated):
                raise DonatedError(
                    f"{paths[j]} and {paths[i]} are the same tensor, and one of them is donated: the step would overwrite a value that it "
                    "still reads. Pass a copy (`.clone()`) of one, or do not donate it."
                )

    def check_overlap(self, leaves: list[Any]) -> None:
        """Raise if a donated leaf shares memory with another leaf. Done once for each capture, since it sorts."""
        paths = self.executable.lowered.captured.in_paths
        donated = set(self.donated)
        spans = sorted(
            (x.data_ptr(), x.data_ptr() + x.numel() * x.element_size(), i) for i, x in enumerate(leaves) if x.numel() and x.is_contiguous()
        )
        for (_, end, i), (start, _, j) in itertools.pairwise(spans):
            if start < end and (i in donated or j in donated):
                raise DonatedError(
                    f"{paths[i]} and {paths[j]} share memory, and one of them is donated: the step would overwrite a value that it still "
                    "reads. Pass a copy (`.clone()`) of one, or do not donate it."
                )
