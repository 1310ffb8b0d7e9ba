"""Ranks that were started with different plans or different code are found at the first step, before any collective could hang."""

import hashlib

import torch
import torch.distributed as dist
import torch.fx as fx

from functrain.compile.errors import PartitionError
from functrain.sharding import Mesh


def fingerprint(graph: fx.GraphModule) -> bytes:
    """32 bytes that equal graphs share: operations, arguments, local shapes and dtypes."""
    digest = hashlib.sha256()
    for node in graph.graph.nodes:
        val = node.meta.get("val")
        seen = (tuple(val.shape), str(val.dtype)) if isinstance(val, torch.Tensor) else ""
        target = getattr(node.target, "__name__", str(node.target))
        digest.update(f"{node.name} {target} {node.args} {node.kwargs} {seen}\n".encode())
    return digest.digest()


def check_equal_on_all_ranks(name: str, graph: fx.GraphModule, mesh: Mesh) -> None:
    """Compare the graphs of all ranks.

    Raises:
        PartitionError: some rank's graph differs; names the ranks.
    """
    if mesh.groups is None:
        return
    own = torch.frombuffer(bytearray(fingerprint(graph)), dtype=torch.uint8).to(mesh.groups.device)
    found = [torch.empty_like(own) for _ in range(mesh.world_size)]
    try:
        dist.all_gather(found, own, group=mesh.groups.everyone)
    except RuntimeError as error:
        raise PartitionError(f"{name}: not every rank came to its first call (or one has ended): {error}") from error
    values = [bytes(x.tolist()) for x in found]
    common = max(values, key=values.count)
    odd = [rank for rank, value in enumerate(values) if value != common]
    if odd:
        raise PartitionError(
            f"{name}: the graph of rank {', '.join(map(str, odd))} differs from that of the other ranks: start all ranks with the same "
            "code, the same plan and batches of the same shape"
        )
