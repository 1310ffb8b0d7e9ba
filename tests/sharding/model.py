"""The small GPT of the contract tests: sizes that 2, 3 and 4 ranks do not divide, very uneven token counts, tied weights by choice."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import functrain as ft

WIDTH, HEADS, SEQ, VOCAB, ROWS, HIDDEN = 12, 3, 6, 23, 48, 29


def init(key: torch.Tensor, layers: int = 1, hidden: int = HIDDEN) -> dict[str, Any]:
    """Params as in a GPT with LayerNorm, learned positions and an untied head."""
    keys = iter(ft.random.split(key, 3 + 6 * layers))

    def normal(*shape: int) -> torch.Tensor:
        return 0.1 * ft.random.normal(next(keys), shape)

    def norm() -> dict[str, torch.Tensor]:
        return {"w": torch.ones(WIDTH), "b": torch.zeros(WIDTH)}

    def block() -> dict[str, Any]:
        attention = {name: normal(WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
        return {"ln1": norm(), "attn": attention, "ln2": norm(), "mlp": {"up": normal(hidden, WIDTH), "down": normal(WIDTH, hidden)}}

    return {
        "wte": normal(VOCAB, WIDTH),
        "wpe": normal(SEQ, WIDTH),
        "blocks": [block() for _ in range(layers)],
        "ln_f": norm(),
        "head": normal(VOCAB, WIDTH),
    }


def logits(params: dict[str, Any], tokens: torch.Tensor, constrain: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> torch.Tensor:
    """`[batch, seq, vocab]`; `constrain` is applied where tensor parallelism wants its activations whole."""

    def norm(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (WIDTH,), p["w"], p["b"])

    x = F.embedding(tokens, params["wte"]) + params["wpe"][: tokens.shape[1]]
    for p in params["blocks"]:
        h = constrain(norm(p["ln1"], x))
        q, k, v = (F.linear(h, p["attn"][n]).view(*h.shape[:2], HEADS, -1).transpose(1, 2) for n in "qkv")
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(h.shape)
        x = x + constrain(F.linear(y, p["attn"]["out"]))
        h = constrain(norm(p["ln2"], x))
        x = x + constrain(F.linear(F.gelu(F.linear(h, p["mlp"]["up"]), approximate="tanh"), p["mlp"]["down"]))
    return F.linear(norm(params["ln_f"], x), params.get("head", params["wte"]))


def loss_fn(params: dict[str, Any], batch: dict[str, torch.Tensor]) -> ft.Mean:
    """The mean over all valid tokens of the batch."""
    return ft.losses.cross_entropy(logits(params, batch["tokens"]), batch["targets"])


def batch(i: int, rows: int = ROWS) -> dict[str, torch.Tensor]:
    """Rows of tokens; the second half of the rows has 2 valid targets of 6."""
    generator = torch.Generator().manual_seed(100 + i)
    tokens, targets = (torch.randint(0, VOCAB, (rows, SEQ), generator=generator) for _ in range(2))
    targets[rows // 2 :, 2:] = -100
    return {"tokens": tokens, "targets": targets}


def train_step(tx: Any, accumulate: int = 1, loss: Callable[..., Any] = loss_fn, **options: Any) -> Callable[..., Any]:
    """A step `(state, batch) -> (state, metrics)`."""

    def step(state: Any, rows: Any) -> Any:
        derive = ft.value_and_grad(loss, **options) if accumulate == 1 else ft.accumulate(loss, accumulate, **options)
        value, grads = derive(state.params, rows)
        return state.apply_gradients(grads, tx), {"loss": value, "norm": ft.tree.global_norm(grads)}

    return step


OPTIMIZERS = {"sgd": lambda: ft.optim.sgd(0.1, momentum=0.9), "adam": lambda: ft.optim.adam(3e-3, eps=1e-3)}
