"""ZeRO stages on two ranks beside DDP, FSDP2, DeepSpeed and JAX: time, processor time, peak memory and bytes on the wire.

Command:  python benchmarks/ranks.py [--runs 5] [--dtype fp32|bf16] [--stage 0|1|2|3] [--steps 6]
Takes:    about 50 minutes for everything on 2 cores; the first run of DeepSpeed compiles its optimizer for one more.
Needs:    the `bench` extra: `pip install --constraint constraints.txt -e '.[bench]'`.
Expect:   a table for each dtype and stage. Ratios are functrain's value over the peer's, the median over the runs
          of neighbours in time: below 1 is better. The column "loss" must not differ; "wire" of functrain is within 5 % of what its
          graph says, else the run stops.

GPT, 6 layers, width 384, 6 heads, sequence 256, vocabulary 8192, 4 sequences a rank, AdamW; 2 gloo ranks of one thread, JAX on 2 devices
of one process. Gradients are reduced in float32 by all but JAX, whose compiler chooses. Each measurement is a process group of its own;
contestants take turns, and the order is turned round every other run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PEERS = Path(__file__).resolve().parent / "peers"
COLUMNS = {"wall_s": ("step ms", 1e3), "cpu_s": ("cpu ms", 1e3), "peak_rss": ("peak MiB", 2**-20), "lo_bytes": ("wire MB", 1e-6)}


@dataclass(frozen=True)
class Contestant:
    """A script of `peers/` with its options; `torchrun` starts it but where it is one process for both ranks."""

    name: str
    script: str
    options: tuple[str, ...] = ()
    ranks: int = 2

    def command(self, dtype: str, steps: int) -> list[str]:
        """What to run."""
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)] if self.ranks > 1 else []
        return [sys.executable, *start, str(PEERS / self.script), *self.options, "--dtype", dtype, "--steps", str(steps), "--warmup", "2"]


def contestants(stage: int) -> list[Contestant]:
    """Functrain at a stage, then who does the same."""
    ours = Contestant(f"functrain {stage}", "functrain_ranks.py", ("--stage", str(stage), "--report"))
    deepspeed = Contestant(f"DeepSpeed {stage}", "deepspeed_ranks.py", ("--stage", str(stage)))
    rivals = {
        0: [
            Contestant("DDP", "ddp_ranks.py"),
            Contestant("DDP compiled", "ddp_ranks.py", ("--compile",)),
            Contestant("JAX replicated", "jax_devices.py", ("--stage", "0"), ranks=1),
        ],
        1: [Contestant("DDP + ZeroRedundancyOptimizer", "ddp_ranks.py", ("--zero1",)), deepspeed],
        2: [Contestant("FSDP2, params kept", "fsdp2_ranks.py", ("--stage", "2")), deepspeed],
        3: [
            Contestant("FSDP2", "fsdp2_ranks.py"),
            Contestant("FSDP2 compiled", "fsdp2_ranks.py", ("--compile",)),
            deepspeed,
            Contestant("JAX sharded", "jax_devices.py", ("--stage", "3"), ranks=1),
        ],
    }
    return [ours, *rivals[stage]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--dtype", choices=("fp32", "bf16"))
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3))
    options = parser.parse_args()
    for dtype in (options.dtype,) if options.dtype else ("fp32", "bf16"):
        for stage in (options.stage,) if options.stage is not None else (0, 1, 2, 3):
            compare(contestants(stage), dtype, options.runs, options.steps)


def compare(field: list[Contestant], dtype: str, runs: int, steps: int) -> None:
    """Measure in turn, and print the table."""
    found: dict[str, list[dict[str, Any]]] = {one.name: [] for one in field}
    for run in range(runs):
        for one in field if run % 2 == 0 else reversed(field):
            found[one.name].append(measured(one, dtype, steps))
    for base in (one.name for one in field if one.name.startswith("functrain")):
        show(found, base, f"{dtype}, {runs} runs, ratios of {base}")


def show(found: dict[str, list[dict[str, Any]]], base: str, title: str) -> None:
    """One table; ratios are those of the contestant `base` to each."""
    print(f"\n{title:46}" + "".join(f"{name:>12}{'ratio':>8}" for name, _ in COLUMNS.values()) + f"{'loss':>10}")
    ours = found[base]
    for name, rows in found.items():
        cells = []
        for key, (_, scale) in COLUMNS.items():
            least = 1e6 if key == "lo_bytes" else 0  # JAX sends nothing: what the device carries then is another program's
            ratios = [a[key] / b[key] for a, b in zip(ours, rows, strict=True) if b[key] > least]
            cells.append(f"{scale * statistics.median(row[key] for row in rows):12.1f}{statistics.median(ratios or [float('nan')]):8.3f}")
        print(f"{name:46}" + "".join(cells) + f"{statistics.median(row['loss'] for row in rows):10.5f}", flush=True)


def measured(one: Contestant, dtype: str, steps: int) -> dict[str, Any]:
    """One contestant's line."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(one.command(dtype, steps), capture_output=True, text=True, env=environment, check=False, timeout=900)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        sys.exit(f"{one.name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    if "graph_bytes" in found and abs(found["lo_bytes"] / found["graph_bytes"] - 1) > 0.05:
        sys.exit(f"{one.name}: {found['lo_bytes']:,.0f} bytes on the wire a step and rank, but the graph says {found['graph_bytes']:,}")
    return found


if __name__ == "__main__":
    main()
