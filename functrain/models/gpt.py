"""A GPT as pure functions over nested dicts of params: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

The block is Llama's (Touvron et al. 2023, arXiv 2302.13971): pre-norm RMSNorm (arXiv 1910.07467), RoPE (2104.09864) in the layout that
rotates halves, grouped-query attention (2305.13245), SwiGLU (2002.05202), no biases. Weights are stored [in, out] and applied as `x @ w`;
embedding and head are [vocab, D]. The columns of `qkv` go by key-value head: its query heads, its key, its value; so they can be split over
ranks by head, as `TENSOR_PARALLEL` does.

Shape suffixes: B batch, S sequence, D model width, H query heads, K key-value heads, E width of a head, F width of the MLP, V vocabulary.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import functrain.random as random
from functrain.compile.constraint import with_sharding_constraint
from functrain.losses import linear_cross_entropy
from functrain.remat import remat as rematerialized
from functrain.sharding import P, Rules
from functrain.tree import Mean, PyTree

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Turns = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Config:
    """The architecture. Names of sizes are in `SIZES`; see `config`."""

    vocab_size: int = 1024  # V, token ids are below it
    context: int = 128  # S at most, tokens
    layers: int = 4  # blocks
    d_model: int = 192  # D
    heads: int = 3  # H; D / H is the width of a head
    kv_heads: int = 1  # K, divides H; K = H is multi-head, K = 1 multi-query attention
    d_ff: int = 512  # F
    tied: bool = True  # whether the head is the embedding
    dropout: float = 0.0  # rate, on the embedding and on what each block adds; needs a key
    rope_base: float = 10000.0  # longest wavelength is about 2 pi times this, in tokens
    norm_eps: float = 1e-5  # added to the mean square

    def __post_init__(self) -> None:
        counts = ("vocab_size", "context", "layers", "d_model", "heads", "kv_heads", "d_ff")
        wrong = [f"{name}={getattr(self, name)}" for name in counts if getattr(self, name) < 1]
        if wrong:
            raise ValueError(f"a model's sizes are positive, not {', '.join(wrong)}")
        if self.d_model % self.heads or self.head_width % 2:
            raise ValueError(f"d_model={self.d_model} must be heads={self.heads} times an even number (rotary positions turn pairs)")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be in [0, 1)")

    @property
    def head_width(self) -> int:
        """E, the width of one head."""
        return self.d_model // self.heads


SIZES: dict[str, dict[str, Any]] = {
    "nano": {"layers": 2, "d_model": 64, "heads": 2, "kv_heads": 1, "d_ff": 176, "context": 64, "vocab_size": 512},
    "tiny": {"layers": 4, "d_model": 192, "heads": 3, "kv_heads": 1, "d_ff": 512, "context": 128, "vocab_size": 1024},
    "small": {"layers": 6, "d_model": 384, "heads": 6, "kv_heads": 6, "d_ff": 1024, "context": 256, "vocab_size": 8192},
    "125m": {"layers": 12, "d_model": 768, "heads": 12, "kv_heads": 12, "d_ff": 2048, "context": 1024, "vocab_size": 32768},
    "350m": {"layers": 24, "d_model": 1024, "heads": 16, "kv_heads": 16, "d_ff": 2816, "context": 1024, "vocab_size": 32768},
    "760m": {"layers": 24, "d_model": 1536, "heads": 16, "kv_heads": 8, "d_ff": 4096, "context": 2048, "vocab_size": 32768},
    "1.3b": {"layers": 24, "d_model": 2048, "heads": 16, "kv_heads": 16, "d_ff": 5632, "context": 2048, "vocab_size": 32768, "tied": False},
}


def config(name: str, **changes: Any) -> Config:
    """The architecture of a named size, with some fields changed.

    Raises:
        ValueError: no such size, or fields that do not fit each other.

    >>> config("tiny", kv_heads=3).layers
    4
    """
    if name not in SIZES:
        near = difflib.get_close_matches(name, SIZES, n=1)
        raise ValueError(f"unknown model {name!r}{f'; did you mean {near[0]!r}?' if near else ''} (there are {', '.join(SIZES)})")
    return dataclasses.replace(Config(**SIZES[name]), **changes)


# Megatron's split of a block over an axis `model` that divides `kv_heads` and `d_ff` (Shoeybi et al. 2019, arXiv 1909.08053). The plan says
# how rows are split where blocks begin and end: `Plan(mesh, TENSOR_PARALLEL, batch=P("data"), activations={"hidden": P("data")})`.
TENSOR_PARALLEL = Rules(
    {
        "params/blocks/*/qkv": P(None, "model"),
        "params/blocks/*/out": P("model"),
        "params/blocks/*/gate": P(None, "model"),
        "params/blocks/*/up": P(None, "model"),
        "params/blocks/*/down": P("model"),
    }
)


# ---- params


def init(config: Config, key: torch.Tensor) -> PyTree:
    """Random params in float32.

    Matrices have standard deviation `in ** -0.5`, those that write to the residual stream `(2 * layers * in) ** -0.5` (as GPT-2 scales
    them), embedding and head 0.02; norms are ones.

    >>> sorted(init(config("tiny"), random.key(0)))
    ['blocks', 'embed', 'norm']
    """
    embed_key, head_key, blocks_key = random.split(key, 3)
    params = {
        "embed": 0.02 * random.normal(embed_key, (config.vocab_size, config.d_model)),
        "blocks": [_init_block(config, block_key) for block_key in random.split(blocks_key, config.layers)],
        "norm": torch.ones(config.d_model, device=key.device),
    }
    if not config.tied:
        params["head"] = 0.02 * random.normal(head_key, (config.vocab_size, config.d_model))
    return params


def _init_block(config: Config, key: torch.Tensor) -> PyTree:
    width, into = config.d_model, (2 * config.layers) ** -0.5
    shapes = {
        "qkv": (width, (config.heads + 2 * config.kv_heads) * config.head_width, 1.0),
        "out": (width, width, into),
        "gate": (width, config.d_ff, 1.0),
        "up": (width, config.d_ff, 1.0),
        "down": (config.d_ff, width, into),
    }
    keys = random.split(key, len(shapes))
    matrices = {
        name: scale * rows**-0.5 * random.normal(k, (rows, columns))
        for (name, (rows, columns, scale)), k in zip(shapes.items(), keys, strict=True)
    }
    norms = {name: torch.ones(width, device=key.device) for name in ("attention_norm", "mlp_norm")}
    return {**matrices, **norms}


def count(config: Config) -> int:
    """How many params a model has, worked out from its shape alone.

    >>> count(config("tiny"))
    1771200
    """
    width, heads = config.d_model, (config.heads + 2 * config.kv_heads) * config.head_width
    block = width * heads + width * width + 3 * width * config.d_ff + 2 * width
    return config.layers * block + width + config.vocab_size * width * (1 if config.tied else 2)


# ---- the forward pass


def apply(params: PyTree, tokens: torch.Tensor, config: Config, *, key: torch.Tensor | None = None, remat: bool = False) -> torch.Tensor:
    """Logits of the next token at every position.

    Args:
        params: as `init` makes them, in the dtype to compute in.
        tokens: int64 [batch, sequence].
        config: the architecture; static.
        key: for dropout; without one there is none.
        remat: keep only each block's input for the backward pass and compute the rest again.

    Returns:
        [batch, sequence, vocab], in the params' dtype.

    >>> small = Config(vocab_size=32, layers=1, d_model=16, heads=2, kv_heads=1, d_ff=32)
    >>> apply(init(small, random.key(0)), torch.zeros(2, 5, dtype=torch.int64), small).shape
    torch.Size([2, 5, 32])
    """
    return hidden(params, tokens, config, key=key, remat=remat) @ head(params).T


def loss(params: PyTree, batch: dict[str, torch.Tensor], config: Config, *, key: torch.Tensor | None = None, remat: bool = False) -> Mean:
    """Cross-entropy of the next token; the logits are made and used up a piece at a time.

    Args:
        params: as `init` makes them, in the dtype to compute in.
        batch: `tokens` and `targets`, int64 [batch, sequence]; targets of -100 do not count.
        config: the architecture; static.
        key: for dropout; without one there is none.
        remat: as for `apply`.

    Returns:
        `Mean(total, weight)` over the targets that count, in nats.

    >>> small = Config(vocab_size=32, layers=1, d_model=16, heads=2, kv_heads=1, d_ff=32)
    >>> zeros = torch.zeros(2, 5, dtype=torch.int64)
    >>> int(loss(init(small, random.key(0)), {"tokens": zeros, "targets": zeros}, small).weight)
    10
    """
    x_BxSxD = hidden(params, batch["tokens"], config, key=key, remat=remat)
    return linear_cross_entropy(x_BxSxD, head(params), batch["targets"])


def head(params: PyTree) -> torch.Tensor:
    """One row a token, [V, D], whose products with the last hidden state are the logits: the params' own, or the embedding."""
    return params["head"] if "head" in params else params["embed"]


def hidden(params: PyTree, tokens: torch.Tensor, config: Config, *, key: torch.Tensor | None = None, remat: bool = False) -> torch.Tensor:
    """The last hidden state, normed: `apply` without the head; [batch, sequence, D]."""
    turns = rotations(torch.arange(tokens.shape[1], device=tokens.device), config)
    keys = [None] * (config.layers + 1) if key is None or not config.dropout else list(random.split(key, config.layers + 1))
    x_BxSxD = _drop(F.embedding(tokens, params["embed"]), config, keys[0])

    def run(block: PyTree, x_BxSxD: torch.Tensor, block_key: torch.Tensor | None) -> torch.Tensor:
        return apply_block(block, x_BxSxD, config, turns, causal_attention, block_key)

    for block, block_key in zip(params["blocks"], keys[1:], strict=True):
        x_BxSxD = (rematerialized(run) if remat else run)(block, x_BxSxD, block_key)
    return rms_norm(x_BxSxD, params["norm"], config.norm_eps)


def apply_block(
    block: PyTree,
    x_BxSxD: torch.Tensor,
    config: Config,
    turns: Turns,
    attend: Attend,
    key: torch.Tensor | None = None,
) -> torch.Tensor:
    """One block: attention, then the MLP, each added to the residual stream.

    Args:
        block: its params.
        x_BxSxD: the residual stream.
        config: the architecture.
        turns: from `rotations`, at the positions of `x`.
        attend: takes queries [B, H, S, E], keys and values [B, K, S, E], returns [B, H, S, E]; generation gives one with a cache.
        key: for dropout.
    """
    keys = (None, None) if key is None else random.split(key, 2)
    y_BxSxD = rms_norm(x_BxSxD, block["attention_norm"], config.norm_eps)
    x_BxSxD = x_BxSxD + _drop(attention(block, y_BxSxD, config, turns, attend), config, keys[0])
    y_BxSxD = with_sharding_constraint(rms_norm(x_BxSxD, block["mlp_norm"], config.norm_eps), "hidden")
    mlp_BxSxD = (F.silu(y_BxSxD @ block["gate"]) * (y_BxSxD @ block["up"])) @ block["down"]
    return x_BxSxD + _drop(with_sharding_constraint(mlp_BxSxD, "hidden"), config, keys[1])


def attention(block: PyTree, x_BxSxD: torch.Tensor, config: Config, turns: Turns, attend: Attend) -> torch.Tensor:
    """What attention adds to the residual stream, from the normed stream; arguments as for `apply_block`."""
    x_BxSxD = with_sharding_constraint(x_BxSxD, "hidden")
    batch, length, _ = x_BxSxD.shape
    heads, kv_heads, width = config.heads, config.kv_heads, config.head_width
    group = heads // kv_heads
    qkv = (x_BxSxD @ block["qkv"]).reshape(batch, length, kv_heads, group + 2, width).permute(0, 2, 3, 1, 4)  # [B, K, group + 2, S, E]
    q_BxHxSxE, k_BxKxSxE, v_BxKxSxE = (part.flatten(1, 2) for part in qkv.split((group, 1, 1), dim=2))
    y_BxHxSxE = attend(rotate(q_BxHxSxE, turns), rotate(k_BxKxSxE, turns), v_BxKxSxE)
    return with_sharding_constraint(y_BxHxSxE.transpose(1, 2).reshape(batch, length, heads * width) @ block["out"], "hidden")


def causal_attention(q_BxHxSxE: torch.Tensor, k_BxKxSxE: torch.Tensor, v_BxKxSxE: torch.Tensor) -> torch.Tensor:
    """Each position attends to itself and those before it; each key-value head serves H / K neighbouring query heads."""
    group = q_BxHxSxE.shape[1] // k_BxKxSxE.shape[1]
    return F.scaled_dot_product_attention(q_BxHxSxE, share_heads(k_BxKxSxE, group), share_heads(v_BxKxSxE, group), is_causal=True)


def share_heads(x_BxKxSxE: torch.Tensor, group: int) -> torch.Tensor:
    """Each key-value head `group` times over: [B, K * group, S, E]."""
    if group == 1:
        return x_BxKxSxE
    batch, heads, length, width = x_BxKxSxE.shape
    return x_BxKxSxE[:, :, None].expand(batch, heads, group, length, width).reshape(batch, heads * group, length, width)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute x / rms(x) * weight over the last dimension, the mean square in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rotations(positions: torch.Tensor, config: Config) -> Turns:
    """Cosine and sine of position * frequency, float32 [S, E / 2] each."""
    half = config.head_width // 2
    steps = torch.arange(half, device=positions.device, dtype=torch.float32)
    angles = positions.float()[:, None] * torch.exp(steps * (-math.log(config.rope_base) / half))
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, turns: Turns) -> torch.Tensor:
    """Turn the pairs (i, i + E / 2) of each head by its position's angles."""
    cosine, sine = (turn.to(x.dtype) for turn in turns)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def _drop(x: torch.Tensor, config: Config, key: torch.Tensor | None) -> torch.Tensor:
    return x if key is None else random.dropout(key, x, config.dropout)
