"""DeepSpeed's ZeRO stages 1, 2 and 3 on 2 gloo ranks of one thread, by its CPU accelerator.

Command:  DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/peers/deepspeed_ranks.py [--stage 3] [--dtype bf16]
              [--reduce bf16]
Takes:    about half a minute; the first run compiles DeepSpeed's optimizer (g++ and ninja, minutes).
Needs:    the `bench` extra (`pip install --constraint constraints.txt -e '.[bench]'`), in one environment with functrain or in its own.
Expect:   one JSON line; its fields are those of `measure.py`.

With bf16 params are bfloat16 beside float32 copies in the optimizer; gradients are reduced in `--reduce` (`communication_data_type`, in
DeepSpeed's own choice bfloat16). DeepSpeed clips gradients at 1.0 unless told otherwise: here it is told. A run that is killed while it
compiles leaves a file `lock` under ~/.cache/torch_extensions (or TORCH_EXTENSIONS_DIR), on which every later one waits for ever: remove it.
"""

import os
import time
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from gpt import model
from measure import run, tell_and_leave, torch_gather
from task import ADAMW, RANKS, Task, batch, parser, rows


def settings(task: Task, stage: int, dtype: str, reduce: str) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    adamw = {"lr": ADAMW["lr"], "betas": [ADAMW["b1"], ADAMW["b2"]], "eps": ADAMW["eps"], "weight_decay": ADAMW["weight_decay"]}
    return {
        "train_micro_batch_size_per_gpu": task.batch // RANKS,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": adamw},
        "bf16": {"enabled": dtype == "bf16"},
        "communication_data_type": reduce if dtype == "bf16" else "fp32",
        "zero_optimization": {"stage": stage, "overlap_comm": False},
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--stage", type=int, default=3, choices=(1, 2, 3))
    arguments.add_argument("--reduce", choices=("fp32", "bf16"), default="fp32", help="what gradients are summed over ranks in, with bf16")
    arguments.add_argument("--local_rank", type=int, default=0)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    start, task, rank = time.perf_counter(), Task(), dist.get_rank()
    gpt = model(task)
    config = settings(task, options.stage, options.dtype, options.reduce)
    engine, *_ = deepspeed.initialize(model=gpt, model_parameters=gpt.parameters(), config=config)

    def step(i: int) -> float:
        loss = engine(*(torch.from_numpy(rows(x, rank)) for x in batch(task, i)))
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    reduce = "fp32" if options.dtype == "fp32" else options.reduce
    tell_and_leave(run(step, options, torch_gather, start=start, name=f"deepspeed-{options.stage}", reduce=reduce), rank)


if __name__ == "__main__":
    main()
