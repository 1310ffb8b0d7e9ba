"""Distributed data parallel, alone and with ZeRO-1 (`ZeroRedundancyOptimizer`), on 2 gloo ranks of one thread.

Command:  OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/peers/ddp_ranks.py [--zero1] [--dtype bf16] [--compile]
Takes:    about half a minute; with --compile one more.
Expect:   one JSON line; its fields are those of `measure.py`.

Gradients are reduced in float32 in views of DDP's buckets, also with bf16, which is autocast: params and gradients stay float32.
"""

import time
from typing import Any

import torch
import torch.distributed as dist
from gpt import adamw, model, torch_adamw
from measure import run, tell_and_leave, torch_gather
from task import Task, batch, parser, rows
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--zero1", action="store_true", help="ZeroRedundancyOptimizer around AdamW")
    arguments.add_argument("--compile", action="store_true")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    start, task, rank = time.perf_counter(), Task(), dist.get_rank()
    ddp = DistributedDataParallel(model(task), gradient_as_bucket_view=True)
    optimizer: Any = adamw(ddp.parameters())
    if options.zero1:
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, **torch_adamw(), fused=True)
    forward = torch.compile(ddp) if options.compile else ddp

    def step(i: int) -> float:
        tokens, targets = (torch.from_numpy(rows(x, rank)) for x in batch(task, i))
        with torch.autocast("cpu", torch.bfloat16, enabled=options.dtype == "bf16"):
            loss = forward(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    name = ("ddp-zero1" if options.zero1 else "ddp") + ("-compiled" if options.compile else "")
    tell_and_leave(run(step, options, torch_gather, start=start, name=name, reduce="fp32"), rank)


if __name__ == "__main__":
    main()
