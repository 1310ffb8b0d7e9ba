"""The head and its loss, forward and backward: `linear_cross_entropy` beside F.linear and F.cross_entropy, eagerly and captured.

Command:  python benchmarks/head.py [--runs 5] [--threads 2] [--chunks 256,512,1024]
Takes:    about 3 minutes on 2 cores.
Expect:   about 0.85 of the plain head's processor time in float32, 0.6 to 0.7 in bfloat16, and half its memory (one thread, chunks of 512).
          On a machine that others use take --threads 1: two threads that wait for each other count as busy.

Batch 8, sequence 256, width 384, vocabulary 8192. Each measurement is a process of its own; contestants take turns. `cpu ms` is processor
time (what other programs do to the clock stays out of it), `ms` the clock's; both are the least of the repetitions, then the median of
the runs. `peak` is what the process grew by, above its inputs.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

BATCH, SEQ, WIDTH, VOCAB = 8, 256, 384, 8192


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chunks", default="256,512,1024")
    parser.add_argument("--child", nargs=2, metavar=("CONTESTANT", "DTYPE"))
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(*options.child, options.repeat, options.threads)))
        return
    chunks = [f"{kind}{size}" for kind in ("chunk", "jit") for size in options.chunks.split(",")]
    names = ["plain", "jit-plain", *chunks]
    for dtype in ("float32", "bfloat16"):
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for run in range(options.runs):
            for name in names if run % 2 == 0 else reversed(names):
                rows[name].append(run_child(name, dtype, options))
        print(f"\n{dtype}, {options.threads} threads, {options.runs} runs")
        print(f"{'':12} {'cpu ms':>8} {'ms':>8} {'peak MiB':>9} {'cpu ratio':>10}")
        for name in names:
            median = {key: statistics.median(r[key] for r in rows[name]) for key in rows[name][0]}
            ratio = statistics.median(r["cpu"] / plain["cpu"] for r, plain in zip(rows[name], rows["plain"], strict=True))
            print(f"{name:12} {median['cpu']:8.1f} {median['clock']:8.1f} {median['peak']:9.0f} {ratio:10.2f}", flush=True)


def run_child(name: str, dtype: str, options: argparse.Namespace) -> dict[str, float]:
    arguments = ["--child", name, dtype, "--repeat", str(options.repeat), "--threads", str(options.threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(name: str, dtype: str, repeat: int, threads: int) -> dict[str, float]:
    import torch

    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(BATCH, SEQ, WIDTH, generator=generator).to(getattr(torch, dtype))
    weight = (0.05 * torch.randn(VOCAB, WIDTH, generator=generator)).to(getattr(torch, dtype))
    targets = torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator)
    (weight[:8] @ weight.T).sum().item()  # loads the matrix library
    step = contestant(name)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    clock, cpu = [], []
    for _ in range(repeat):
        begin, begin_cpu = time.perf_counter(), time.process_time()
        step(hidden, weight, targets)
        clock.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - begin_cpu)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {"cpu": 1e3 * min(cpu[1:]), "clock": 1e3 * min(clock[1:]), "peak": peak}


def contestant(name: str) -> Callable[..., Any]:
    import torch
    import torch.nn.functional as F

    import functrain as ft
    from functrain.losses import linear_cross_entropy

    if name == "plain":

        def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Any:
            hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
            logits = F.linear(hidden, weight).float().flatten(0, 1)
            return torch.autograd.grad(F.cross_entropy(logits, targets.flatten()), (hidden, weight))

        return plain
    if name == "jit-plain":

        def loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Any:
            return F.cross_entropy(F.linear(hidden, weight).float().flatten(0, 1), targets.flatten())

        return ft.jit(ft.value_and_grad(loss, argnums=(0, 1)))
    kind, size = name[:3], int("".join(c for c in name if c.isdigit()))

    def chunked(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> Any:
        return linear_cross_entropy(hidden, weight, targets, chunk_size=size)

    step = ft.value_and_grad(chunked, argnums=(0, 1))
    return ft.jit(step) if kind == "jit" else step


if __name__ == "__main__":
    main()
