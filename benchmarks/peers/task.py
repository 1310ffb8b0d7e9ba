"""What every contestant trains: the size of the GPT, its first params, its data and its optimizer. NumPy alone, so that JAX needs no torch.

GPT of 6 layers, width 384, 6 heads, sequence 256, vocabulary 8192; 8 sequences a step, 4 on each of 2 ranks; AdamW without clipping. Params
and data come from NumPy's generator, so all contestants start from the same numbers and see the same tokens.
"""

import argparse
from dataclasses import dataclass

import numpy as np

RANKS = 2
ADAMW = {"lr": 1e-3, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


@dataclass(frozen=True)
class Task:
    layers: int = 6
    width: int = 384
    heads: int = 6
    seq: int = 256  # tokens
    vocab: int = 8192
    batch: int = 8  # sequences a step, of all ranks together

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The params of `gpt_module.GPT` by their names in its state dict."""
        d = self.width
        block = {"qkv": (3 * d, d), "out": (d, d), "up": (4 * d, d), "down": (d, 4 * d)}
        found: dict[str, tuple[int, ...]] = {"tokens.weight": (self.vocab, d), "positions.weight": (self.seq, d)}
        for i in range(self.layers):
            for norm in ("norm1", "norm2"):
                found |= {f"blocks.{i}.{norm}.weight": (d,), f"blocks.{i}.{norm}.bias": (d,)}
            found |= {f"blocks.{i}.{name}.weight": shape for name, shape in block.items()}
        return found | {"norm.weight": (d,), "norm.bias": (d,), "head.weight": (self.vocab, d)}


def init(task: Task) -> dict[str, np.ndarray]:
    """Float32: matrices normal with deviation 0.02, norms the identity."""
    random = np.random.default_rng(0)
    ends = {"weight": np.ones, "bias": np.zeros}
    return {
        name: np.float32(0.02) * random.standard_normal(shape, np.float32)
        if len(shape) > 1
        else ends[name.rpartition(".")[2]](shape, np.float32)
        for name, shape in task.shapes.items()
    }


def batch(task: Task, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets `[batch, seq]` of all ranks, int64, for the step of this number."""
    both = np.random.default_rng(1 + step).integers(0, task.vocab, (2, task.batch, task.seq))
    return both[0], both[1]


def rows(x: np.ndarray, rank: int) -> np.ndarray:
    """A rank's rows of a batch."""
    n = len(x) // RANKS
    return x[rank * n : (rank + 1) * n]


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all contestants have."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="what matrix products are done in")
    found.add_argument("--steps", type=int, default=10, help="steps that are measured")
    found.add_argument("--warmup", type=int, default=3, help="steps before those")
    return found
