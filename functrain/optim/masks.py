"""Which leaves a transformation is for: a tree of bools, a function of the params, or path patterns."""

from collections.abc import Callable, Sequence
from typing import Any

from functrain import tree
from functrain.tree import PyTree

Mask = PyTree | Callable[[PyTree], PyTree] | str | Sequence[str] | None


def as_mask(mask: Mask, params: PyTree) -> PyTree:
    """A tree of bools over the params.

    Args:
        mask: None for all leaves; a pattern or a list of patterns; a function of the params; a tree of bools, which may stop above the
            leaves (a bool there holds for all below).
        params: gives the structure.

    >>> as_mask("**/w", {"layer": {"w": 1, "b": 2}})
    {'layer': {'w': True, 'b': False}}
    """
    if mask is None:
        return tree.map(lambda _: True, params)
    if isinstance(mask, str) or (isinstance(mask, (list, tuple)) and all(isinstance(m, str) for m in mask)):
        patterns = (mask,) if isinstance(mask, str) else tuple(mask)
        tree.check_patterns(patterns, tree.paths(params))
        return tree.map_with_path(lambda path, _: any(tree.matches(p, path) for p in patterns), params)
    return spread(mask(params) if callable(mask) else mask, params)


def as_labels(labels: Any, params: PyTree) -> PyTree:
    """A tree of labels over the params, from such a tree, a function of the params, or ``{pattern: label}``, first match wins.

    Raises:
        ValueError: a leaf that no pattern matches, or a pattern that matches no leaf.

    >>> as_labels({"**/b": "plain", "**": "decayed"}, {"layer": {"w": 1, "b": 2}})
    {'layer': {'w': 'decayed', 'b': 'plain'}}
    """
    if callable(labels):
        return spread(labels(params), params)
    paths = tree.paths(params)
    if isinstance(labels, dict) and any("*" in str(key) or "/" in str(key) for key in labels):
        tree.check_patterns(labels, paths)
        return tree.map_with_path(lambda path, _: _first(labels, path), params)
    return spread(labels, params)


def _first(labels: dict[str, Any], path: str) -> Any:
    for pattern, label in labels.items():
        if tree.matches(pattern, path):
            return label
    raise ValueError(f"{path} has no label: no pattern of {', '.join(labels)} matches it; end with '**' for all that is left")


def spread(prefix: PyTree, params: PyTree) -> PyTree:
    """Repeat each leaf of a tree over the sub-tree of the params that stands in its place."""
    return tree.map(lambda value, below: tree.map(lambda _: value, below), prefix, params)
