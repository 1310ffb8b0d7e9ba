"""Small questions about FX graphs that several passes ask: which storage a value lives in, which nodes are views, what is dead."""

import functools
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx

from functrain.torch_internals import OpOverload

TAGS = ("source", "phase", "block", "param")  # what a node says about where it comes from; what replaces it says the same


def schema_of(node: fx.Node) -> Any:
    """The operator's schema, or None for what is no operator (getitem)."""
    return node.target._schema if isinstance(node.target, OpOverload) else None


def is_mutable(node: fx.Node) -> bool:
    """Whether the node writes one of its arguments."""
    schema = schema_of(node)
    return schema is not None and schema.is_mutable


@functools.cache
def _alias_positions(operator_: Any) -> tuple[str, ...]:
    """Names of the arguments that the results may share storage with.

    A written argument is one where a result carries its mark. An argument that is marked and not written is a view's source, whatever
    the result carries: the marks of lists (`split`, `unbind`) stand in another place.
    """
    schema = operator_._schema
    shared = {name for r in schema.returns if r.alias_info is not None for name in r.alias_info.before_set}
    marked = [a for a in schema.arguments if a.alias_info is not None]
    return tuple(a.name for a in marked if schema.returns and (not a.alias_info.is_write or shared & set(a.alias_info.before_set)))


def aliased_argument(node: fx.Node) -> fx.Node | None:
    """The node whose storage this one's result shares, by the operator's schema; None where the result has its own."""
    if node.target is operator.getitem:
        return node.args[0] if isinstance(node.args[0], fx.Node) else None
    schema = schema_of(node)
    names = _alias_positions(node.target) if schema is not None else ()
    for i, argument in enumerate(schema.arguments if names else ()):
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        if argument.name in names and isinstance(value, fx.Node):
            return value
    return None


def is_view(node: fx.Node) -> bool:
    """Whether the node allocates nothing: its result shows an argument's storage (or is an item of a tuple)."""
    return aliased_argument(node) is not None


def values(node: fx.Node) -> list[torch.Tensor]:
    """The (fake) tensors that a node makes: one, several, or none."""
    val = node.meta.get("val")
    items = val if isinstance(val, (tuple, list)) else (val,)
    return [x for x in items if isinstance(x, torch.Tensor)]


def value_bytes(x: torch.Tensor) -> int:
    """Bytes of a tensor's storage."""
    return x.untyped_storage().nbytes()


def operations(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes that compute something."""
    return (node for node in graph.nodes if node.op == "call_function")


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """The inputs, in order."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def outputs(graph: fx.Graph) -> list[Any]:
    """What the graph returns: nodes, or plain values."""
    return list(graph.output_node().args[0])


def drop_dead_code(graph: fx.Graph) -> None:
    """Remove operations whose result nobody uses, except those that write."""
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and not is_mutable(node):
            graph.erase_node(node)


class Storages:
    """Which storage each node's result lives in, by following views.

    Decided by the operators' schemas, not by fake tensors: passes make nodes whose values are copies of others' and share no storage
    with what they view.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.owner: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            self.owner[node] = self._root(node)
        self.members: dict[fx.Node, list[fx.Node]] = {}
        for node, owner in self.owner.items():
            self.members.setdefault(owner, []).append(node)

    def _root(self, node: fx.Node) -> fx.Node:
        """The node that allocated what this one shows. An item of a tuple has its own storage, unless the tuple is of views."""
        source = aliased_argument(node)
        if source is None or (node.target is operator.getitem and aliased_argument(source) is None):
            return node
        return self.owner[source]

    def merge(self, node: fx.Node, into: fx.Node) -> None:
        """Record that a node now writes into another's storage."""
        for member in self.members.pop(node, []):
            self.owner[member] = into
            self.members[into].append(member)

    def users(self, owner: fx.Node) -> set[fx.Node]:
        """Every node that reads the storage, directly or through a view (the views themselves included)."""
        return {user for member in self.members[owner] for user in member.users}
