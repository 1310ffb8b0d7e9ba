"""How every contestant is measured: the clock, processor time, peak memory and the bytes on the loopback device, as one JSON line.

- `wall_s`: seconds of a step, the median; of several ranks the slowest.
- `cpu_s`: seconds of processor time a step and rank: the process's, all its threads, waiting for messages included; the median of the
  steps, then the mean over ranks.
- `peak_rss`: bytes, the most that a rank was ever resident with (`VmHWM`, which a parent's memory is no part of), the larger of the ranks.
- `lo_bytes`: bytes that a rank sends in a step: what the loopback device (`lo` of /proc/net/dev) transmits from the end of the warm-up to
  the end of the last step, over the number of steps and ranks. The device carries what all ranks send, headers and acknowledgements
  included, and any other program's traffic too.
- `loss`: the last step's, the mean over ranks; `losses`: all of them.
"""

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from task import RANKS


def lo_bytes() -> int:
    """Bytes that the loopback device of this process's network has transmitted; 0 where Linux is not."""
    for line in _lines("/proc/self/net/dev"):
        name, _, fields = line.partition(":")
        if name.strip() == "lo":
            return int(fields.split()[8])
    return 0


def peak_rss() -> int:
    """The most bytes that this process was ever resident with; 0 where Linux is not."""
    return next((1024 * int(line.split()[1]) for line in _lines("/proc/self/status") if line.startswith("VmHWM")), 0)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def run(
    step: Callable[[int], float],
    options: Any,
    gather: Callable[[Any], list[Any]],
    *,
    ranks_here: int = 1,
    start: float,
    **about: Any,
) -> dict[str, Any] | None:
    """Take the steps and measure them.

    Args:
        step: from a step's number to its loss, on this rank's rows.
        options: what `task.parser` read.
        gather: a value of each process, on every process, after all have come there.
        ranks_here: ranks that live in this process; processor time and peak memory are divided among them.
        start: `time.perf_counter()` when the contestant began to build.
        about: what else to tell, such as `name`.

    Returns:
        The measurements, of all ranks; the caller's rank 0 prints them.
    """
    wall, cpu, losses, ready, sent = [], [], [], 0.0, 0
    for i in range(options.warmup + options.steps):
        if i == options.warmup:
            gather(None)
            sent = lo_bytes()
            gather(None)
        begin, begin_cpu = time.perf_counter(), time.process_time()
        losses.append(step(i))
        wall.append(time.perf_counter() - begin)
        cpu.append((time.process_time() - begin_cpu) / ranks_here)
        ready = ready or time.perf_counter() - start
    gather(None)
    sent = lo_bytes() - sent
    mine = {
        "wall": statistics.median(wall[options.warmup :]),
        "cpu": statistics.median(cpu[options.warmup :]),
        "rss": peak_rss() // ranks_here,
        "losses": losses,
    }
    ranks = gather(mine)
    mean = [statistics.fmean(together) for together in zip(*(rank["losses"] for rank in ranks), strict=True)]
    return {
        **about,
        "dtype": options.dtype,
        "wall_s": max(rank["wall"] for rank in ranks),
        "cpu_s": statistics.fmean(rank["cpu"] for rank in ranks),
        "peak_rss": max(rank["rss"] for rank in ranks),
        "lo_bytes": sent / options.steps / RANKS,
        "ready_s": ready,  # until the first step was done, imports not counted
        "loss": mean[-1],
        "losses": mean,
    }


def torch_gather(value: Any) -> list[Any]:
    """A value of each rank of the default process group."""
    import torch.distributed as dist

    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def tell(found: dict[str, Any], rank: int) -> None:
    """Print the line, on rank 0."""
    if rank == 0:
        print(json.dumps(found), flush=True)


def tell_and_leave(found: dict[str, Any], rank: int) -> None:
    """`tell`, then end this rank of a torch process group at once.

    While Python ends, threads of the compiler, of gloo and of DeepSpeed now and then hang (a futex) or abort (exit status -6). All is
    measured by then.
    """
    import torch.distributed as dist

    tell(found, rank)
    dist.barrier()
    os._exit(0)
