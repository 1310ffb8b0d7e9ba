"""The pure functions of a training run: init, step, evaluation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import functrain as ft
from functrain import tree
from functrain.cli.settings import TrainSettings
from functrain.models import gpt
from functrain.precision import select
from functrain.tree import Mean, PyTree

Batch = dict[str, torch.Tensor]
PEAK_LR = {"muon": 0.02, "adamw": 3e-3, "lion": 3e-4, "sgd": 0.1}
FINAL_LR = 0.05  # of the peak


@dataclass(frozen=True)
class Program:
    """What a run calls."""

    init: Callable[[torch.Tensor], ft.TrainState]  # key -> state
    step: Callable[[ft.TrainState, Batch], tuple[ft.TrainState, dict[str, torch.Tensor]]]  # the state is donated
    evaluate: Callable[[PyTree, Batch], Mean]  # params, batch -> loss


def make_program(settings: TrainSettings, config: gpt.Config, plan: ft.Plan | None = None) -> Program:
    """Put together what the settings ask for."""
    schedule = make_schedule(settings)
    tx = make_optimizer(settings, schedule)
    precision = ft.Precision() if settings.precision == "bf16" else None

    def init(key: torch.Tensor) -> ft.TrainState:
        params_key, dropout_key = ft.random.split(key)
        return ft.TrainState.create(params=gpt.init(config, params_key), tx=tx, key=dropout_key)

    def loss_fn(params: PyTree, batch: Batch, key: torch.Tensor) -> Mean:
        return gpt.loss(params, batch, config, key=key, remat=settings.remat)

    gradient = ft.accumulate(loss_fn, settings.microbatches, key_argnums=2, precision=precision)

    def train_step(state: ft.TrainState, batch: Batch) -> tuple[ft.TrainState, dict[str, torch.Tensor]]:
        assert state.key is not None  # `init` gives it one
        loss, grads = gradient(state.params, batch, ft.random.fold_in(state.key, state.step))
        norm = tree.global_norm(grads)
        new = state.apply_gradients(grads, tx)
        kept = select(torch.isfinite(loss + norm), new, state)  # a step that is not finite does not count
        return kept, {"loss": loss, "grad_norm": norm, "lr": schedule(state.step)}

    def evaluate(params: PyTree, batch: Batch) -> Mean:
        return gpt.loss(ft.unshard(params if precision is None else precision.to_compute(params)), batch, config)

    step = ft.jit(train_step, plan=plan, donate="state", backend=settings.backend)
    return Program(lambda key: ft.init(init, key, plan=plan), step, ft.jit(evaluate, plan=plan, backend=settings.backend))


def make_schedule(settings: TrainSettings) -> Any:
    """Linear warm-up, then half a cosine down to a twentieth."""
    peak = settings.lr if settings.lr is not None else PEAK_LR[settings.optimizer]
    warmup = min(settings.warmup, settings.steps - 1)
    return ft.optim.warmup_cosine_decay_schedule(
        init_value=peak / (warmup + 1), peak_value=peak, warmup_steps=warmup, decay_steps=settings.steps, end_value=FINAL_LR * peak
    )


def make_optimizer(settings: TrainSettings, schedule: Any) -> ft.optim.GradientTransformation:
    """Gradients are clipped by their norm. Weight decay is for the blocks' matrices; Muon too, with AdamW at half its rate for the rest."""
    optim = ft.optim
    choices = {
        "muon": lambda: optim.multi_transform(
            {
                True: optim.muon(schedule, weight_decay=settings.weight_decay),
                False: optim.adamw(_half(schedule), b2=0.95, weight_decay=0.0),
            },
            is_matrix,
        ),
        "adamw": lambda: optim.adamw(schedule, b2=0.95, weight_decay=settings.weight_decay, mask=is_matrix),
        "lion": lambda: optim.lion(schedule, weight_decay=settings.weight_decay, mask=is_matrix),
        "sgd": lambda: optim.sgd(schedule, momentum=0.9),
    }
    return optim.chain(optim.clip_by_global_norm(settings.clip), choices[settings.optimizer]())


def is_matrix(params: PyTree) -> PyTree:
    """Which leaves are matrices of a block: neither embedding, head nor norm."""
    return tree.map_with_path(lambda path, leaf: path.startswith("blocks/") and leaf.ndim == 2, params)


def _half(schedule: Any) -> Any:
    return lambda count: 0.5 * schedule(count)
