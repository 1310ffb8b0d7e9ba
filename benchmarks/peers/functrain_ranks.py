"""functrain's own contestant: the captured step on 2 ranks of one thread, at any ZeRO stage.

Command:  OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/peers/functrain_ranks.py [--stage 3] [--dtype bf16] [--reduce bf16]
              [--backend eager] [--head plain] [--report]
Takes:    about half a minute.
Expect:   one JSON line; its fields are those of `measure.py`. With --report those of `Sizes` too: the bytes that the step's graph says a
          rank sends, which the loopback device must confirm within 5 %.

The head is `ft.losses.linear_cross_entropy`, which never holds all logits; `--head plain` takes the module's own `F.cross_entropy` on all
of them, as the peers do. With bf16 params are cast, then gathered; gradients are summed over ranks in `--reduce`.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from gpt import model
from measure import run, tell, torch_gather
from task import ADAMW, RANKS, Task, batch, parser

import functrain as ft
from functrain.compile.collectives import SENT
from functrain.compile.emitter import bytes_sent
from functrain.compile.graph import operations

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Sizes:
    """What `--report` adds."""

    graph_bytes: int  # bytes that a rank sends in a step: the collectives of its graph, params that are gathered twice counted twice
    zero_bytes: int  # bytes by the paper on ZeRO: each gradient reduced once, each param gathered once, at stage 3 twice
    collectives: dict[str, int]  # how many of each the graph holds
    partition_s: float  # seconds to cut the captured graph
    capture_s: float  # seconds to capture it
    nodes: int  # of the graph that runs
    state_bytes: int  # bytes of the state that rest on a rank: params, both moments, counters
    whole_state_bytes: int  # bytes of the state on one device


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--stage", type=int, default=3, choices=(0, 1, 2, 3))
    arguments.add_argument("--reduce", choices=DTYPES, default="fp32", help="what gradients are summed over ranks in, with bf16")
    arguments.add_argument("--backend", default="eager")
    arguments.add_argument("--head", choices=("chunked", "plain"), default="chunked")
    arguments.add_argument("--report", action="store_true")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    start, task = time.perf_counter(), Task()
    plan = ft.Plan(ft.make_mesh({"data": RANKS}), ft.zero(options.stage), batch=ft.P("data"))
    make, function, params = train_step(task, options.dtype, options.reduce, options.head)
    state = ft.init(make, params, plan=plan)
    del params
    jitted = ft.jit(function, plan=plan, donate="state", backend=options.backend)

    def step(i: int) -> float:
        nonlocal state
        state, loss = jitted(state, *(torch.from_numpy(x) for x in batch(task, i)))
        return float(loss)

    reduce = "fp32" if options.dtype == "fp32" else options.reduce
    about = {"name": f"functrain-{options.stage}", "reduce": reduce, "head": options.head}
    found = run(step, options, torch_gather, start=start, **about)
    if options.report:
        found |= asdict(sizes(jitted, state, task, options.stage, options.dtype, reduce))
    tell(found, plan.mesh.rank)


def train_step(task: Task, dtype: str, reduce: str, head: str) -> tuple[Callable[[Any], Any], Callable[..., Any], Any]:
    """(params -> first state, step, first params) of the GPT."""
    module = ft.from_module(model(task))
    tx = ft.optim.adamw(ADAMW["lr"], b1=ADAMW["b1"], b2=ADAMW["b2"], eps=ADAMW["eps"], weight_decay=ADAMW["weight_decay"])
    precision = ft.Precision(compute=torch.bfloat16, reduce=DTYPES[reduce]) if dtype == "bf16" else None

    def first(params: Any) -> Any:
        return ft.TrainState.create(params=params, tx=tx)

    def loss_fn(params: Any, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        if head == "plain":
            return module.apply(params, {}, tokens, targets)[0]
        hidden, _ = module.apply(params, {}, tokens)
        return ft.losses.linear_cross_entropy(hidden, params["head"]["weight"], targets)

    def step(state: Any, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        loss, grads = ft.value_and_grad(loss_fn, precision=precision)(state.params, tokens, targets)
        return state.apply_gradients(grads, tx), loss

    return first, step, module.params


def sizes(step: Any, state: Any, task: Task, stage: int, dtype: str, reduce: str) -> Sizes:
    """What the step says of itself."""
    done = step.report().compilations[-1]
    lowered = step.lower(state, *(torch.from_numpy(x) for x in batch(task, 0)))
    leaves = ft.tree.leaves(state)
    graph = lowered.graph.graph
    return Sizes(
        graph_bytes=graph_bytes(graph),
        zero_bytes=zero_bytes(sum(x.numel() for x in ft.tree.leaves(state.params)), stage, dtype, reduce),
        collectives=done.partition.counts(),
        partition_s=done.partition.seconds,
        capture_s=done.capture_seconds,
        nodes=done.nodes,
        state_bytes=sum(x.shards[0].nbytes for x in leaves),
        whole_state_bytes=sum(x.numel() * x.dtype.itemsize for x in leaves),
    )


def graph_bytes(graph: torch.fx.Graph) -> int:
    """Bytes that a rank sends in one run of its graph."""
    total = 0
    for node in operations(graph):
        if node.target in SENT:
            name, given = node.target.name().rpartition("::")[2].partition(".")[0], node.args[0].meta["val"]
            total += bytes_sent(name, given.nbytes * (RANKS if name == "all_gather" else 1), RANKS)
    return total


def zero_bytes(params: int, stage: int, dtype: str, reduce: str) -> int:
    """Rajbhandari et al. 2020, section 7: bytes that a rank sends for this many params, none of them too small to be split."""
    width, part = {"fp32": 4, "bf16": 2}, (RANKS - 1) / RANKS
    gradients = part * params * width[reduce] * (2 if stage == 0 else 1)
    gathers = {0: 0, 1: 4, 2: 4, 3: 2 * width[dtype]}[stage]  # stages 1 and 2 gather what the optimizer wrote: float32
    return int(gradients + part * params * gathers)


if __name__ == "__main__":
    main()
