"""Pytrees: nested containers of leaves, named by paths such as ``opt_state/mu/blocks/0/qkv``.

Built on optree with a namespace of its own, so that registering a class here changes nothing for other users of optree.
Dict keys are visited in sorted order and ``None`` is a node without leaves, both as in JAX.
"""

import dataclasses
import difflib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar, dataclass_transform

import optree
import torch

NAMESPACE = "functrain"

PyTree = Any
Structure = optree.PyTreeSpec
IsLeaf = Callable[[Any], bool] | None
T = TypeVar("T")


class StructureError(ValueError):
    """Two trees that must have one structure do not. The message names the path and both sides."""


# ---- flatten and map


def flatten(tree: PyTree, is_leaf: IsLeaf = None) -> tuple[list[Any], Structure]:
    """Split a tree into its leaves and its structure.

    >>> flatten({"b": 2, "a": (1, None)})[0]
    [1, 2]
    """
    return optree.tree_flatten(tree, is_leaf=is_leaf, namespace=NAMESPACE)


def unflatten(structure: Structure, leaves: Iterable[Any]) -> PyTree:
    """Put leaves back into a structure: the inverse of `flatten`.

    Raises:
        ValueError: the number of leaves is not the structure's.
    """
    return optree.tree_unflatten(structure, leaves)


def leaves(tree: PyTree, is_leaf: IsLeaf = None) -> list[Any]:
    """The leaves of a tree, in order."""
    return optree.tree_leaves(tree, is_leaf=is_leaf, namespace=NAMESPACE)


def structure(tree: PyTree, is_leaf: IsLeaf = None) -> Structure:
    """The structure of a tree: everything but its leaves. Hashable and comparable."""
    return optree.tree_structure(tree, is_leaf=is_leaf, namespace=NAMESPACE)


def map(function: Callable[..., Any], tree: PyTree, *rest: PyTree, is_leaf: IsLeaf = None) -> PyTree:
    """Apply a function to every leaf of one tree, or to the leaves that stand at the same path in several.

    Args:
        function: takes one leaf of each tree.
        tree: gives the structure of the result.
        rest: more trees of the same structure; where `tree` has a leaf, these may have a sub-tree.
        is_leaf: says which nodes of `tree` to treat as leaves.

    Raises:
        StructureError: the structures differ; the message names the first path where they do, and both sides.

    >>> map(lambda x, y: x + y, {"w": 1}, {"w": 10})
    {'w': 11}
    """
    first, spec = flatten(tree, is_leaf)
    return unflatten(spec, [function(*xs) for xs in zip(first, *_aligned(tree, spec, rest, is_leaf), strict=True)])


def map_with_path(function: Callable[..., Any], tree: PyTree, *rest: PyTree, is_leaf: IsLeaf = None) -> PyTree:
    """As `map`, with the leaf's path as the function's first argument.

    >>> map_with_path(lambda path, x: f"{path}={x}", {"a": [1, 2]})
    {'a': ['a/0=1', 'a/1=2']}
    """
    first, spec = flatten(tree, is_leaf)
    columns = _aligned(tree, spec, rest, is_leaf)
    return unflatten(spec, [function(*xs) for xs in zip(_paths_of(spec), first, *columns, strict=True)])


def transpose(outer: Structure, rows: Iterable[Iterable[T]], width: int) -> tuple[PyTree, ...]:
    """A list with one tuple a leaf -> one tree for each place in the tuple.

    >>> transpose(structure({"a": 0, "b": 0}), [(1, 2), (3, 4)], 2)
    ({'a': 1, 'b': 3}, {'a': 2, 'b': 4})
    """
    columns: list[list[Any]] = [[] for _ in range(width)]
    for row in rows:
        for column, value in zip(columns, row, strict=True):
            column.append(value)
    return tuple(unflatten(outer, column) for column in columns)


def _aligned(tree: PyTree, spec: Structure, rest: tuple[PyTree, ...], is_leaf: IsLeaf) -> list[list[Any]]:
    columns = []
    for other in rest:
        try:
            columns.append(spec.flatten_up_to(other))
        except ValueError:
            raise StructureError(mismatch(tree, other, is_leaf=is_leaf) or "the trees differ in structure") from None
    return columns


# ---- paths and patterns


def paths(tree: PyTree, is_leaf: IsLeaf = None) -> list[str]:
    """The path of every leaf, in order.

    >>> paths({"blocks": [{"w": 0}, {"w": 1}], "head": 2})
    ['blocks/0/w', 'blocks/1/w', 'head']
    """
    return _paths_of(structure(tree, is_leaf))


def leaves_with_path(tree: PyTree, is_leaf: IsLeaf = None) -> list[tuple[str, Any]]:
    """Pairs (path, leaf), in order."""
    found, spec = flatten(tree, is_leaf)
    return list(zip(_paths_of(spec), found, strict=True))


def _paths_of(spec: Structure) -> list[str]:
    try:
        return list(_known_paths(spec))
    except TypeError:  # a static field that cannot be hashed
        return list(_known_paths.__wrapped__(spec))


@functools.lru_cache(maxsize=256)
def _known_paths(spec: Structure) -> tuple[str, ...]:
    """Kept by structure: eager transforms ask for the same ones at every call."""
    return tuple("/".join(_name(entry) for entry in accessor) for accessor in spec.accessors())


def _name(entry: optree.PyTreeEntry) -> str:
    """The entry as a user writes it: a field's name for named tuples and structs, else the key or index."""
    field = getattr(entry, "field", None)
    return str(field if isinstance(field, str) else entry.entry)


def matches(pattern: str, path: str) -> bool:
    """Whether a glob pattern matches a whole path: ``*`` within one name, ``**`` across names, ``?`` one character.

    >>> matches("blocks/*/w", "blocks/0/w"), matches("**/w", "blocks/0/w"), matches("*", "blocks/0")
    (True, True, False)
    """
    return _compiled(pattern).fullmatch(path) is not None


@functools.lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    """`**/` stands for any number of leading names, none included; `/**` at the end for all that lies below (or the path itself)."""
    out, i = [], 0
    while i < len(pattern):
        if pattern.startswith("**/", i):
            out.append("(?:.*/)?")
            i += 3
        elif pattern[i:] == "/**":
            out.append("(?:/.*)?")
            i += 3
        elif pattern.startswith("**", i):
            out.append(".*")
            i += 2
        else:
            character = pattern[i]
            out.append({"*": "[^/]*", "?": "[^/]"}.get(character, re.escape(character)))
            i += 1
    return re.compile("".join(out), re.DOTALL)


def select(tree: PyTree, *patterns: str) -> dict[str, Any]:
    """The leaves whose path matches one of the patterns, as ``{path: leaf}``.

    Raises:
        ValueError: a pattern matches no leaf; the message shows the nearest paths.

    >>> select({"a": {"w": 1, "b": 2}, "c": 3}, "**/w", "c")
    {'a/w': 1, 'c': 3}
    """
    pairs = leaves_with_path(tree)
    check_patterns(patterns, [path for path, _ in pairs])
    return {path: leaf for path, leaf in pairs if any(matches(p, path) for p in patterns)}


def partition(tree: PyTree, *patterns: str) -> tuple[PyTree, PyTree]:
    """Split a tree by path into (leaves that match, the others); each has ``None`` where the other has the leaf.

    Raises:
        ValueError: a pattern matches no leaf.

    >>> partition({"w": 1, "b": 2}, "w")
    ({'w': 1, 'b': None}, {'w': None, 'b': 2})
    """
    chosen = select(tree, *patterns)
    inside = map_with_path(lambda path, leaf: leaf if path in chosen else None, tree)
    outside = map_with_path(lambda path, leaf: None if path in chosen else leaf, tree)
    return inside, outside


def combine(*trees: PyTree) -> PyTree:
    """Merge trees that `partition` split: at each path the first value that is not ``None``.

    >>> combine({"w": 1, "b": None}, {"w": None, "b": 2})
    {'w': 1, 'b': 2}
    """

    def first(*values: Any) -> Any:
        return next((value for value in values if value is not None), None)

    return optree.tree_map(first, *trees, none_is_leaf=True, namespace=NAMESPACE)


def check_patterns(patterns: Iterable[str], known: list[str]) -> None:
    """Raise ValueError, with the nearest paths, for a pattern that matches none of the known paths."""
    for pattern in patterns:
        if not any(matches(pattern, path) for path in known):
            near = difflib.get_close_matches(pattern, dict.fromkeys(known), n=3, cutoff=0.0)
            raise ValueError(f"pattern {pattern!r} matches no leaf; nearest paths: {', '.join(near) or '(the tree is empty)'}")


# ---- where two trees differ


def mismatch(left: PyTree, right: PyTree, *, is_leaf: IsLeaf = None, at: str = "") -> str | None:
    """Describe the first place where `right` lacks the structure of `left`; ``None`` where it has it.

    >>> mismatch({"a": [1, 2]}, {"a": [1]})
    'structures differ at a: list of 2 against list of 1'
    """
    if _is_leaf(left, is_leaf):
        return None
    here = at or "the root"
    if _is_leaf(right, None):
        return f"structures differ at {here}: {_describe(left)} against {_describe(right)}"
    one, other = (optree.tree_flatten_one_level(t, namespace=NAMESPACE) for t in (left, right))
    same_kind = type(left) is type(right) or (isinstance(left, dict) and isinstance(right, dict))
    if not same_kind or len(one.children) != len(other.children) or one.entries != other.entries:
        return f"structures differ at {here}: {_describe(left)} against {_describe(right)}{_key_difference(left, right)}"
    if one.metadata != other.metadata:
        return f"structures differ at {here}: static fields {one.metadata!r} against {other.metadata!r}"
    for entry, x, y in zip(one.entries, one.children, other.children, strict=True):
        name = _name(one.path_entry_type(entry, one.type, one.kind))
        found = mismatch(x, y, is_leaf=is_leaf, at=f"{at}/{name}" if at else name)
        if found:
            return found
    return None


def _is_leaf(tree: PyTree, is_leaf: IsLeaf) -> bool:
    return optree.tree_is_leaf(tree, is_leaf=is_leaf, namespace=NAMESPACE)


def _describe(tree: PyTree) -> str:
    if tree is None:
        return "None"
    if isinstance(tree, torch.Tensor):
        return f"tensor {list(tree.shape)} {str(tree.dtype).removeprefix('torch.')}"
    if _is_leaf(tree, None):
        return f"leaf {type(tree).__name__}"
    return f"{type(tree).__name__} of {len(optree.tree_flatten_one_level(tree, namespace=NAMESPACE).children)}"


def _key_difference(left: PyTree, right: PyTree) -> str:
    if not (isinstance(left, Mapping) and isinstance(right, Mapping)):
        return ""
    only_left, only_right = (sorted({str(k) for k in a} - {str(k) for k in b}) for a, b in ((left, right), (right, left)))
    sides = [f"only on the {side}: {', '.join(keys[:5])}" for side, keys in (("left", only_left), ("right", only_right)) if keys]
    return f" ({'; '.join(sides)})" if sides else ""


# ---- frozen dataclasses as nodes


def field(*, static: bool = False, **options: Any) -> Any:
    """A dataclass field of a `struct`; a static one is part of the structure (hashable, compared by ``==``), not a leaf.

    Args:
        static: whether the field is structure instead of a child.
        options: as `dataclasses.field` takes them (`default`, `default_factory`, ...).

    >>> @struct
    ... class Scaled:
    ...     x: Any
    ...     by: float = field(static=True, default=2.0)
    >>> leaves(Scaled(1))
    [1]
    """
    return dataclasses.field(metadata={"static": static}, **options)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def struct(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass whose fields are children of a pytree node, with a ``.replace(**changes)``.

    >>> @struct
    ... class Layer:
    ...     weight: Any
    ...     name: str = field(static=True, default="layer")
    >>> paths(Layer(weight=1)), Layer(weight=1).replace(weight=2).weight
    (['weight'], 2)
    """
    made: Any = dataclasses.dataclass(frozen=True)(cls)
    children = tuple(f.name for f in dataclasses.fields(made) if not f.metadata.get("static"))
    statics = tuple(f.name for f in dataclasses.fields(made) if f.metadata.get("static"))

    def to_children(node: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[str, ...]]:
        return tuple(getattr(node, name) for name in children), tuple(getattr(node, name) for name in statics), children

    def from_children(static_values: Any, values: Iterable[Any]) -> Any:
        node = object.__new__(made)
        for name, value in zip(children + statics, (*values, *static_values), strict=True):
            object.__setattr__(node, name, value)
        return node

    def replace(self: T, **changes: Any) -> T:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    if "replace" not in cls.__dict__:
        made.replace = replace
    optree.register_pytree_node(made, to_children, from_children, path_entry_type=optree.GetAttrEntry, namespace=NAMESPACE)
    return made


@struct
class Mean:
    """A weighted mean that is not divided yet, so that parts of a batch can be merged exactly.

    >>> float((Mean(torch.tensor(6.0), torch.tensor(2.0)) + Mean(torch.tensor(0.0), torch.tensor(1.0))).value())
    2.0
    """

    total: torch.Tensor  # sum of the terms, scalar
    weight: torch.Tensor  # how many terms (or their weights' sum), scalar

    def value(self) -> torch.Tensor:
        """``total / weight``, and 0 (with zero gradient) where the weight is 0."""
        weight = torch.as_tensor(self.weight)
        empty = weight == 0
        return torch.where(empty, torch.zeros_like(self.total), self.total / torch.where(empty, torch.ones_like(weight), weight))

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.weight + other.weight)


# ---- numbers about a tree of tensors


def tensors(tree: PyTree) -> Iterator[torch.Tensor]:
    """The leaves that are tensors."""
    return (leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor))


def global_norm(tree: PyTree) -> torch.Tensor:
    """The Euclidean norm of all floating-point leaves together, a scalar; half precision is summed in float32.

    >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    tensor(5.)
    """
    norms = [torch.linalg.vector_norm(x, dtype=_summing_dtype(x)) for x in tensors(tree) if x.is_floating_point()]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def _summing_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def cast(tree: PyTree, dtype: torch.dtype | None) -> PyTree:
    """Convert the floating-point tensors of a tree to a dtype; other leaves pass through, and ``None`` changes nothing."""

    def convert(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return tree if dtype is None else map(convert, tree)


def size(tree: PyTree) -> int:
    """How many elements all tensors of a tree have together."""
    return sum(x.numel() for x in tensors(tree))


def nbytes(tree: PyTree) -> int:
    """How many bytes all tensors of a tree take together."""
    return sum(x.numel() * x.element_size() for x in tensors(tree))


class LeafInfo(NamedTuple):
    """What is known of a tensor leaf without its values."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int  # bytes


def summary(tree: PyTree) -> list[LeafInfo]:
    """One row per tensor leaf: path, shape, dtype, bytes."""
    rows = [(path, x) for path, x in leaves_with_path(tree) if isinstance(x, torch.Tensor)]
    return [LeafInfo(path, tuple(x.shape), x.dtype, x.numel() * x.element_size()) for path, x in rows]
