"""The GPT of every contestant that runs on torch, functrain included: `benchmarks/gpt_module.py` with the first params of `task.py`."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from task import ADAMW, Task, init

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import gpt_module


class GPT(gpt_module.GPT):
    """Tokens `[batch, seq]` -> hidden states `[batch, seq, width]`; with targets the mean cross entropy, its softmax in float32."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        hidden = super().forward(tokens)
        if targets is None:
            return hidden
        return F.cross_entropy(self.head(hidden).float().flatten(0, 1), targets.flatten())


def model(task: Task) -> GPT:
    """The module with its first params."""
    made = empty(task)
    made.load_state_dict({name: torch.from_numpy(value) for name, value in init(task).items()}, assign=True)
    return made.requires_grad_()


def empty(task: Task) -> GPT:
    """The module without values."""
    with torch.device("meta"):
        return GPT(gpt_module.Config(task.layers, task.width, task.heads, task.seq, task.vocab, task.batch))


def adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    """Torch's fused AdamW."""
    return torch.optim.AdamW(params, **torch_adamw(), fused=True, **options)


def torch_adamw() -> dict[str, Any]:
    """The optimizer's settings under torch's names."""
    return {"lr": ADAMW["lr"], "betas": (ADAMW["b1"], ADAMW["b2"]), "eps": ADAMW["eps"], "weight_decay": ADAMW["weight_decay"]}
