"""FSDP2 (`fully_shard`) on 2 gloo ranks of one thread: stage 3, or 2, which keeps params after the forward pass; eager or compiled.

Command:  OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/peers/fsdp2_ranks.py [--stage 2] [--dtype bf16] [--compile]
Takes:    about half a minute; with --compile (each block, as torchtitan does) one more.
Expect:   one JSON line; its fields are those of `measure.py`.

With bf16 params are gathered in bfloat16 and gradients reduced in float32 (`MixedPrecisionPolicy`).
"""

import time

import torch
import torch.distributed as dist
from gpt import adamw, model
from measure import run, tell_and_leave, torch_gather
from task import Task, batch, parser, rows
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--stage", type=int, default=3, choices=(2, 3))
    arguments.add_argument("--compile", action="store_true")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    start, task, rank = time.perf_counter(), Task(), dist.get_rank()
    mesh, gpt = init_device_mesh("cpu", (dist.get_world_size(),)), model(task)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = half if options.dtype == "bf16" else MixedPrecisionPolicy()
    for block in gpt.blocks:
        if options.compile:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=options.stage == 3)
    fully_shard(gpt, mesh=mesh, mp_policy=policy, reshard_after_forward=options.stage == 3)
    optimizer = adamw(gpt.parameters())

    def step(i: int) -> float:
        tokens, targets = (torch.from_numpy(rows(x, rank)) for x in batch(task, i))
        loss = gpt(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    name = f"fsdp2-{options.stage}" + ("-compiled" if options.compile else "")
    tell_and_leave(run(step, options, torch_gather, start=start, name=name, reduce="fp32"), rank)


if __name__ == "__main__":
    main()
