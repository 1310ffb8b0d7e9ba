"""Which leaves a transformation is for, in the four ways a user may say it: a tree, a function of the params, path patterns, a table.

Patterns are those of `functrain.tree.matches`: ``*`` within one name, ``**`` across names. In a table the first match wins.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from functrain import tree
from functrain.tree import IsLeaf, PyTree

Mask = PyTree | Callable[[PyTree], PyTree] | Mapping[str, bool] | str | Sequence[str] | None


def as_mask(mask: Mask, params: PyTree) -> PyTree:
    """A tree of bools over the params.

    Args:
        mask: None for all leaves; a pattern or a list of patterns; ``{pattern: bool}``, first match wins; a function of the params; a tree
            of bools, which may stop above the leaves (a bool there holds for all below).
        params: gives the structure.

    Raises:
        ValueError: a pattern matches no leaf, or a table leaves one out; names it.
        StructureError: a tree of bools has another structure.

    >>> as_mask("**/w", {"layer": {"w": 1, "b": 2}})
    {'layer': {'w': True, 'b': False}}
    >>> as_mask({"**/b": False, "**": True}, {"layer": {"w": 1, "b": 2}})
    {'layer': {'w': True, 'b': False}}
    """
    if mask is None:
        return tree.map(lambda _: True, params)
    if isinstance(mask, str) or (isinstance(mask, (list, tuple)) and mask and all(isinstance(m, str) for m in mask)):
        patterns = (mask,) if isinstance(mask, str) else tuple(mask)
        tree.check_patterns(patterns, _known_paths(params))
        return tree.map_with_path(lambda path, _: any(tree.matches(p, path) for p in patterns), params)
    return per_leaf(mask, params)


def per_leaf(values: Any, params: PyTree, is_leaf: IsLeaf = None, check: bool = True) -> PyTree:
    """One value for each leaf of the params, such as the name of its group.

    Args:
        values: a tree, which may stop above the leaves; a function of the params that returns one; or ``{path pattern: value}``, first
            match wins.
        params: gives the structure.
        is_leaf: which nodes of `values` are one value.
        check: whether a pattern that matches no leaf is an error.

    Raises:
        ValueError: a leaf that no pattern matches, or a pattern that matches no leaf.
        StructureError: the tree of values has another structure.

    >>> per_leaf({"**/b": "plain", "**": "decayed"}, {"layer": {"w": 1, "b": 2}})
    {'layer': {'w': 'decayed', 'b': 'plain'}}
    """
    if callable(values):
        values = values(params)
    if not _is_table(values, params, is_leaf):
        return tree.map(lambda value, below: tree.map(lambda _: value, below), values, params, is_leaf=is_leaf)
    if check:
        tree.check_patterns(values, _known_paths(params))
    return tree.map_with_path(lambda path, _: _first(values, path), params)


def _known_paths(params: PyTree) -> list[str]:
    """Paths a pattern may name: those of leaves that are None too, because a group sees the leaves of other groups so."""
    return tree.paths(params, is_leaf=lambda node: node is None)


def _is_table(values: Any, params: PyTree, is_leaf: IsLeaf) -> bool:
    """A dict from strings to single values is a table of patterns, unless its keys are those of the params: then it is a tree."""
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        return False
    if isinstance(params, dict) and params.keys() == values.keys():
        return False
    return all(value is None or tree.leaves(value, is_leaf) == [value] for value in values.values())


def _first(table: Mapping[str, Any], path: str) -> Any:
    for pattern, value in table.items():
        if tree.matches(pattern, path):
            return value
    raise ValueError(f"no pattern of {', '.join(table)} matches leaf {path}; end with '**' for all that is left")
