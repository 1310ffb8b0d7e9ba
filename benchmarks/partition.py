"""How long cutting a step for a mesh takes, by number of layers, on 2 ranks and on 1,024: nothing is computed, no leaf has memory.

Command:  python benchmarks/partition.py
Takes:    about a minute.
Expect:   under 2 s for 6 layers and linear in layers; a step of 8,000 nodes on 1,024 ranks under 10 s.
"""

from typing import Any

import torch

import functrain as ft
from functrain import P
from functrain.models import gpt


def seconds(layers: int, ranks: int) -> tuple[int, int, float]:
    """(nodes captured, nodes of a rank's graph, seconds to cut) of the whole step of a GPT with ZeRO-3, on 2,048 tokens."""
    config = gpt.config("small", layers=layers)
    tx = ft.optim.adamw(1e-3)

    def train_step(state: ft.TrainState, rows: Any) -> Any:
        loss, grads = ft.value_and_grad(lambda params, rows: gpt.loss(params, rows, config))(state.params, rows)
        return state.apply_gradients(grads, tx), {"loss": loss, "norm": ft.tree.global_norm(grads)}

    state = ft.eval_shape(lambda key: ft.TrainState.create(params=gpt.init(config, key), tx=tx), ft.random.key(0))
    rows = {name: ft.ShapeDtypeStruct((max(8, ranks), 2048 // max(8, ranks)), torch.int64) for name in ("tokens", "targets")}
    plan = ft.Plan(ft.make_mesh({"data": ranks}, abstract=True), ft.zero(3), batch=P("data"))
    captured = len(ft.jit(train_step).lower(state, rows).captured.graph.nodes)
    lowered: Any = ft.jit(train_step, plan=plan).lower(state, rows)
    return captured, len(lowered.graph.graph.nodes), lowered.partition.seconds


def main() -> None:
    print("ranks   layers   nodes captured   nodes of a rank   seconds to cut")
    seconds(1, 2)  # imports and caches
    for ranks in (2, 1024):
        for layers in (3, 6, 12, 24, 48):
            captured, own, taken = seconds(layers, ranks)
            print(f"{ranks:5} {layers:8} {captured:16,} {own:17,} {taken:16.2f}", flush=True)


if __name__ == "__main__":
    main()
