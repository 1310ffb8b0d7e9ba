"""What a captured step costs in Python: a call with a state of 1,000 leaves, and capture by number of layers.

Command:  python benchmarks/overhead.py
Takes:    about a minute.
Expect:   under 1 ms a call beyond the graph itself, donated or not; capture of the 6-layer GPT under 2 s, linear in layers.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import functrain as ft

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpt_module import GPT, Config, batch


def milliseconds(run: Callable[[], Any]) -> float:
    """Duration of a call, milliseconds."""
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def call_overhead(donate: bool, times: int = 300) -> tuple[float, float, float]:
    """(whole call, the graph's own function, their difference), milliseconds, for a step that adds one to 1,000 small leaves.

    The two are measured in turn, and the difference is the median of neighbours': what slows the machine slows both.
    """
    state = {f"block{i}": {f"w{j}": torch.zeros(4, 4) for j in range(10)} for i in range(100)}
    step = ft.jit(lambda state: ft.tree.map(lambda x: x + 1, state), donate="state" if donate else ())

    def call() -> None:
        nonlocal state
        state = step(state)

    call()
    (entry,) = next(iter(step._entries.values()))
    rows = []
    for _ in range(times):
        leaves = ft.tree.leaves(state)
        with torch.no_grad():
            graph = milliseconds(lambda leaves=leaves: entry.executable.call(leaves))
        whole = milliseconds(call)
        rows.append((whole, graph, whole - graph))
    whole, graph, overhead = (statistics.median(column) for column in zip(*rows, strict=True))
    return whole, graph, overhead


def capture_seconds(layers: int) -> tuple[int, float]:
    """(nodes, seconds to capture) of a GPT's whole step."""
    config = Config(layers=layers)
    module = ft.from_module(GPT(config))
    tx = ft.optim.adamw(1e-3)

    def train_step(state: Any, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        def loss_fn(params: Any) -> Any:
            hidden, _ = module.apply(params, state.buffers, tokens)
            return ft.losses.linear_cross_entropy(hidden, params["head"]["weight"], targets)

        loss, grads = ft.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads, tx), loss

    state = ft.TrainState.create(params=module.params, tx=tx, buffers=module.buffers)
    start = time.perf_counter()
    captured = ft.jit(train_step).lower(state, *batch(config, 0)).captured
    return len(captured.graph.nodes), time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(2)
    print("call with 1,000 leaves      whole ms   graph ms   overhead ms")
    for donate in (False, True):
        whole, graph, overhead = call_overhead(donate)
        print(f"{'donated' if donate else 'not donated':24} {whole:11.3f} {graph:10.3f} {overhead:13.3f}")
    capture_seconds(1)  # imports and caches
    print("\nlayers   nodes   capture s")
    for layers in (3, 6, 12, 24):
        nodes, seconds = capture_seconds(layers)
        print(f"{layers:6} {nodes:7} {seconds:11.2f}")


if __name__ == "__main__":
    main()
