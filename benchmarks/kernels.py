"""The C++ kernels beside torch's own and the machine's copy bandwidth, in one run.

Command:  python benchmarks/kernels.py [--elements 50000000] [--threads 1,2] [--rounds 9]
Takes:    about 3 minutes and 4 GB of memory.
Expect:   fused AdamW in place above copy bandwidth (it reads a line before it writes it, so none is fetched only to be overwritten) and a
          tenth faster than torch's fused AdamW; with a half-precision gradient three to four times as fast as the four passes of torch,
          and without their float32 copy of the gradient; a thousand small leaves in one call faster than torch's fused and foreach forms.
          New tensors cost the system's zeroing of their pages: donate the old ones instead.

Medians over interleaved rounds, so that a busy machine slows every row alike; ratios are medians of the rounds' ratios, above 1 is faster.
GB/s counts what the operation must move: 28 bytes an element for AdamW (12 + 4 read and 12 written in float32; 12 + 2 read and 12 + 2
written with a bfloat16 gradient and copy), 8 for a copy, 4 for a fill. "extra MB" is how far one call raises the peak of resident memory.
"""

import argparse
import ctypes
import operator
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

import functrain as ft
from functrain.kernels import adamw, library

OPERATORS = torch.ops.functrain
SETTINGS = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
COEFFICIENTS = adamw.coefficients(1e-4, step=10, b1=0.9, b2=0.95, weight_decay=0.1)


class Row(NamedTuple):
    name: str
    run: Callable[[], object]
    gigabytes: float  # that one call must move


class Result(NamedTuple):
    seconds: list[float]  # one a round
    extra: float  # MB


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--elements", type=int, default=50_000_000)
    parser.add_argument("--threads", type=lambda text: [int(x) for x in text.split(",")], default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, C++ kernels: {'loaded' if library.available() else 'NOT LOADED, torch operations instead'}")
    for threads in options.threads:
        torch.set_num_threads(threads)
        for title, make in (("AdamW, float32", float32_rows), ("AdamW, bfloat16 gradient and copy", bfloat16_rows), ("fill", fill_rows)):
            rows = make(options.elements, threads)
            show(f"{title}, {options.elements:,} elements, {threads} threads", rows, measure(rows, options.rounds))
    torch.set_num_threads(1)
    rows = small_rows(1000, 64)
    show("AdamW, 1,000 leaves of 64 elements, 1 thread (ms a call are us a leaf)", rows, measure(rows, options.rounds))


def float32_rows(elements: int, threads: int) -> list[Row]:
    param, mu, nu, grad = leaf(elements)
    fused, foreach = torch_step(leaf(elements)[::3], fused=True), torch_step(leaf(elements)[::3], foreach=True)
    return [
        copy_row(param, threads),
        Row("functrain adamw_apply_", lambda: OPERATORS.adamw_apply_(param, mu, nu, grad, COEFFICIENTS), 28e-9 * elements),
        Row("torch AdamW(fused=True)", fused, 28e-9 * elements),
        Row("torch AdamW(foreach=True)", foreach, 28e-9 * elements),
        Row("functrain adamw_apply (new tensors)", lambda: OPERATORS.adamw_apply(param, mu, nu, grad, COEFFICIENTS), 28e-9 * elements),
    ]


def bfloat16_rows(elements: int, threads: int) -> list[Row]:
    """Half-precision gradient, scaled by 1024, to float32 state and a half-precision copy of the parameter."""
    param, mu, nu, grad = leaf(elements)
    half, model = (grad * 1024).bfloat16(), param.bfloat16()
    scaled = adamw.coefficients(1e-4, step=10, b1=0.9, b2=0.95, weight_decay=0.1, grad_scale=1 / 1024)
    return [
        copy_row(param, threads),
        Row("functrain adamw_apply_", lambda: OPERATORS.adamw_apply_(param, mu, nu, half, scaled, model), 28e-9 * elements),
        Row("torch cast, unscale, fused, copy", torch_half_step(param.clone(), half, model.clone()), 28e-9 * elements),
    ]


def fill_rows(elements: int, threads: int) -> list[Row]:
    key = ft.random.key(0)
    return [
        Row("functrain uniform", lambda: ft.random.uniform(key, (elements,)), 4e-9 * elements),
        Row("torch.rand", lambda: torch.rand(elements), 4e-9 * elements),
        Row("functrain normal", lambda: ft.random.normal(key, (elements,)), 4e-9 * elements),
        Row("torch.randn", lambda: torch.randn(elements), 4e-9 * elements),
    ]


def small_rows(leaves: int, elements: int) -> list[Row]:
    columns = [list(column) for column in zip(*(leaf(elements) for _ in range(leaves)), strict=True)]
    moved = 28e-9 * elements * leaves

    def one_by_one() -> None:
        for param, mu, nu, grad in zip(*columns, strict=True):
            OPERATORS.adamw_apply_(param, mu, nu, grad, COEFFICIENTS)

    pairs = [x for pair in zip(columns[0], columns[3], strict=True) for x in pair]
    return [
        Row("functrain adamw_apply_many_", lambda: OPERATORS.adamw_apply_many_(*columns, COEFFICIENTS, []), moved),
        Row("functrain adamw_apply_, one by one", one_by_one, moved),
        Row("torch AdamW(fused=True)", torch_step(pairs, fused=True), moved),
        Row("torch AdamW(foreach=True)", torch_step(pairs, foreach=True), moved),
    ]


def leaf(elements: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(param, mu, nu, grad), every page touched."""
    return torch.full((elements,), 0.5), torch.full((elements,), 1e-3), torch.full((elements,), 1e-4), torch.full((elements,), 1e-2)


def torch_step(pairs: list[torch.Tensor] | tuple[torch.Tensor, ...], **how: bool) -> Callable[[], object]:
    """The optimizer of torch on (param, grad, param, grad, ...)."""
    params = [torch.nn.Parameter(x.clone()) for x in pairs[::2]]
    for param, grad in zip(params, pairs[1::2], strict=True):
        param.grad = grad
    return torch.optim.AdamW(params, **SETTINGS, **how).step


def torch_half_step(master: torch.Tensor, half: torch.Tensor, model: torch.Tensor) -> Callable[[], object]:
    param = torch.nn.Parameter(master)
    optimizer = torch.optim.AdamW([param], **SETTINGS, fused=True)

    def step() -> None:
        param.grad = half.float().mul_(1 / 1024)
        optimizer.step()
        model.copy_(param.detach())
        param.grad = None

    return step


def copy_row(source: torch.Tensor, threads: int) -> Row:
    """The C library's copy, which writes past the caches: the best a copy can do here."""
    target, size = torch.zeros_like(source), source.numel() * source.element_size()
    pool, part = ThreadPoolExecutor(threads), -(-size // threads)

    def piece(start: int) -> None:
        ctypes.memmove(target.data_ptr() + start, source.data_ptr() + start, min(part, size - start))

    return Row("memcpy", lambda: list(pool.map(piece, range(0, size, part))), 2e-9 * size)


def measure(rows: list[Row], rounds: int) -> list[Result]:
    extra = [peak_growth(row.run) for row in rows]  # also the warm-up
    seconds: list[list[float]] = [[] for _ in rows]
    for _ in range(rounds):
        for row, times in zip(rows, seconds, strict=True):
            start = time.perf_counter()
            row.run()
            times.append(time.perf_counter() - start)
    return [Result(times, mb) for times, mb in zip(seconds, extra, strict=True)]


def peak_growth(run: Callable[[], object]) -> float:
    """MB that the peak of resident memory rises above what is resident before, in the second of two calls; nan where Linux is not."""
    run()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return float("nan")
    before = status("VmRSS")
    run()
    return (status("VmHWM") - before) / 1000


def status(field: str) -> float:
    """A field of the process's status, kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(field))


def show(title: str, rows: list[Row], results: list[Result]) -> None:
    rival = next((i for i, row in enumerate(rows) if row.name.startswith("torch")), 0)
    print(f"\n{title}\n{'':40}{'ms':>10}{'GB/s':>8}{'/ first row':>13}{'/ first of torch':>18}{'extra MB':>10}")
    for row, result in zip(rows, results, strict=True):
        rates = speeds(row, result)
        first, torchs = (statistics.median(map(operator.truediv, rates, speeds(rows[i], results[i]))) for i in (0, rival))
        print(
            f"{row.name:40}{1000 * statistics.median(result.seconds):10.2f}{statistics.median(rates):8.2f}"
            f"{first:13.2f}{torchs:18.2f}{result.extra:10.0f}"
        )


def speeds(row: Row, result: Result) -> list[float]:
    """GB/s of each round."""
    return [row.gigabytes / x for x in result.seconds]


if __name__ == "__main__":
    main()
