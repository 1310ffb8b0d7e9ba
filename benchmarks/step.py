"""The captured step beside plain PyTorch: time of a step, time until the first step is done, peak memory.

Command:  python benchmarks/step.py [--runs 5] [--only eager|inductor] [--dtype fp32|bf16]
Takes:    about 6 minutes for the eager rows, about 30 with Inductor, on 2 cores.
Expect:   ratios below 1 in the columns "step" and "peak" against eager PyTorch, below 1 in "step" against torch.compile.

GPT, 6 layers, width 384, 6 heads, sequence 256, vocabulary 8192, batch 8. Each measurement is a process of its own; the contestants take
turns, and the table gives the median over the runs of the ratios between neighbours in time. `fused` is torch's fused AdamW.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTESTANTS = ("torch", "functrain", "torch.compile", "functrain inductor")
RIVAL = {"functrain": "torch", "functrain inductor": "torch.compile"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=("eager", "inductor"))
    parser.add_argument("--dtype", choices=("fp32", "bf16"))
    parser.add_argument("--child", choices=CONTESTANTS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options)))
        return
    for dtype in (options.dtype,) if options.dtype else ("fp32", "bf16"):
        for pair in (("torch", "functrain"), ("torch.compile", "functrain inductor")):
            if options.only is None or (options.only == "inductor") == (pair[0] == "torch.compile"):
                compare(pair, dtype, options)


# ---- the parent: takes turns and prints ratios


def compare(pair: tuple[str, str], dtype: str, options: argparse.Namespace) -> None:
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in pair}
    for run in range(options.runs):
        for name in pair if run % 2 == 0 else reversed(pair):
            rows[name].append(run_child(name, dtype, options))
    print(f"\n{dtype}, {options.runs} runs, {options.threads} threads")
    print(f"{'':20} {'step ms':>9} {'first step s':>13} {'peak MiB':>9} {'loss':>9}")
    for name in pair:
        median = {key: statistics.median(r[key] for r in rows[name]) for key in rows[name][0]}
        print(f"{name:20} {median['step_ms']:9.1f} {median['first_s']:13.2f} {median['peak_mib']:9.0f} {median['loss']:9.5f}")
    ratios = {
        key: [b[key] / a[key] for a, b in zip(rows[pair[0]], rows[pair[1]], strict=True)] for key in ("step_ms", "first_s", "peak_mib")
    }
    medians = [statistics.median(ratios[key]) for key in ("step_ms", "first_s", "peak_mib")]
    print(f"{'ratio (median)':20} {medians[0]:9.3f} {medians[1]:13.3f} {medians[2]:9.3f}", flush=True)


def run_child(name: str, dtype: str, options: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:  # a compiler's cache of an earlier run would hide its first step
        environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "TORCHINDUCTOR_CACHE_DIR": cache}
        arguments = ["--child", name, "--dtype", dtype, "--steps", str(options.steps), "--threads", str(options.threads)]
        done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# ---- the child: one contestant, one process


def measure(options: argparse.Namespace) -> dict[str, float]:
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from gpt_module import Config, batch

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = Config()
    make = torch_step if options.child.startswith("torch") else functrain_step
    start = time.perf_counter()
    step = make(config, options.dtype == "bf16", compiled=options.child in ("torch.compile", "functrain inductor"))
    loss = step(*batch(config, 0))
    first = time.perf_counter() - start
    times = []
    for i in range(options.steps):
        tokens, targets = batch(config, i + 1)
        begin = time.perf_counter()
        loss = step(tokens, targets)
        times.append(time.perf_counter() - begin)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"step_ms": 1e3 * statistics.median(times), "first_s": first, "peak_mib": peak, "loss": float(loss)}


def torch_step(config: Any, half: bool, compiled: bool) -> Callable[..., Any]:
    """Idiomatic PyTorch: a module, autocast for bf16, the fused optimizer."""
    import torch
    import torch.nn.functional as F
    from gpt_module import GPT

    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def loss_of(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            logits = model.head(model(tokens))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    run = torch.compile(loss_of) if compiled else loss_of

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = run(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def functrain_step(config: Any, half: bool, compiled: bool) -> Callable[..., Any]:
    """The same module as (apply, params), its step captured as one graph."""
    import torch
    from gpt_module import GPT

    import functrain as ft

    module = ft.from_module(GPT(config))
    tx = ft.optim.adamw(1e-3, b1=0.9, b2=0.95, weight_decay=0.1)
    precision = ft.Precision(compute=torch.bfloat16) if half else None

    def loss_fn(params: Any, buffers: Any, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        hidden, _ = module.apply(params, buffers, tokens)
        return ft.losses.linear_cross_entropy(hidden, params["head"]["weight"], targets)

    def train_step(state: Any, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        loss, grads = ft.value_and_grad(loss_fn, precision=precision)(state.params, state.buffers, tokens, targets)
        return state.apply_gradients(grads, tx), loss

    jitted = ft.jit(train_step, donate="state", backend="inductor" if compiled else "eager")
    state = ft.TrainState.create(params=module.params, tx=tx, buffers=module.buffers)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal state
        state, loss = jitted(state, tokens, targets)
        return loss

    return step


if __name__ == "__main__":
    main()
