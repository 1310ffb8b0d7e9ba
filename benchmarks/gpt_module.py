"""The model of the step benchmark: a plain GPT as an `nn.Module`, the same for every contestant."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Config:
    layers: int = 6
    width: int = 384
    heads: int = 6
    seq: int = 256  # tokens
    vocab: int = 8192
    batch: int = 8  # sequences


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, width = x.shape
        q, k, v = (y.view(batch, seq, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, seq, width)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Tokens `[batch, seq]` -> hidden states `[batch, seq, width]` after the last norm; `head` turns them into logits."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.seq, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def batch(config: Config, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets `[batch, seq]`, int64."""
    generator = torch.Generator().manual_seed(seed)
    shape = (config.batch, config.seq)
    return torch.randint(0, config.vocab, shape, generator=generator), torch.randint(0, config.vocab, shape, generator=generator)
