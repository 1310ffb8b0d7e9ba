"""`Rules`: path pattern -> spec. The first pattern that matches a leaf decides; one that matches nothing is an error."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from functrain import tree
from functrain.sharding.spec import P


@dataclass(frozen=True)
class Rules:
    """Specs by path pattern (``*`` within one name, ``**`` across names), for paths such as `params/blocks/0/qkv`.

    A rule for a param holds for the optimizer's leaves of the same name and shape too, unless a rule of their own comes first.

    >>> Rules({"params/**/up": P(None, "model")}).spec("params/blocks/0/up")
    P(None, 'model')
    """

    table: Mapping[str, P]

    def __post_init__(self) -> None:
        for pattern, spec in self.table.items():
            if not isinstance(spec, P):
                raise TypeError(f"the rule {pattern!r} must give a P, not {spec!r}")

    def spec(self, path: str) -> P | None:
        """The spec of the first pattern that matches, or None."""
        return next((spec for pattern, spec in self.table.items() if tree.matches(pattern, path)), None)

    def check(self, paths: Sequence[str]) -> None:
        """Raise if a pattern matches none of these paths.

        Raises:
            ValueError: names the pattern and the nearest paths.
        """
        tree.check_patterns(self.table, list(paths))

    def to_plain(self) -> dict[str, Any]:
        """As plain data."""
        return {pattern: spec.to_plain() for pattern, spec in self.table.items()}
