"""When a node may write its result into a buffer that already exists: shared by donation and by buffer reuse."""

from collections.abc import Set

import torch.fx as fx

from functrain.compile.graph import Storages, outputs


class Writable:
    """Answers, while a pass walks a graph in order, which buffers nobody will read again."""

    def __init__(self, graph: fx.Graph, donated: Set[int]) -> None:
        self.storages = Storages(graph)
        self.place = {node: i for i, node in enumerate(graph.nodes)}
        self.returned = {x for x in outputs(graph) if isinstance(x, fx.Node)}
        inputs = [n for n in graph.nodes if n.op == "placeholder"]
        self.given = {node for i, node in enumerate(inputs) if i in donated}

    def __call__(self, buffer: fx.Node, writer: fx.Node) -> bool:
        """Whether `writer` may overwrite the storage that `buffer` shows: it is ours, whole, not returned, and no one reads it later."""
        owner = self.storages.owner[buffer]
        if owner.op != "call_function" and owner not in self.given:
            return False
        members = self.storages.members[owner]
        if any(member in self.returned for member in members):
            return False
        last = max((self.place[user] for member in members for user in member.users), default=-1)
        return last <= self.place[writer] and self._only_reading(buffer, owner, writer) and self._covers(buffer, owner)

    def _only_reading(self, buffer: fx.Node, owner: fx.Node, writer: fx.Node) -> bool:
        """The writer sees the storage in this one layout: it would otherwise read what it has just written."""
        return all(x is buffer or self.storages.owner[x] is not owner for x in writer.all_input_nodes)

    def _covers(self, buffer: fx.Node, owner: fx.Node) -> bool:
        val = buffer.meta["val"]
        whole = owner.meta["val"]
        return not isinstance(whole, (tuple, list)) and val.numel() * val.element_size() == whole.untyped_storage().nbytes()

    def overwritten(self, owner_of: fx.Node, by: fx.Node) -> None:
        """Record that `by` now lives in the storage of `owner_of`."""
        self.storages.merge(by, self.storages.owner[owner_of])
