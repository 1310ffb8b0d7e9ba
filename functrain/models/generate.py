"""Sampling from a GPT, one token at a time, with the keys and values of earlier tokens kept.

Shape suffixes as in `functrain.models.gpt`.
"""

import torch
import torch.nn.functional as F

import functrain.random as random
from functrain.models import gpt
from functrain.models.gpt import Config
from functrain.tree import PyTree

Past = list[tuple[torch.Tensor, torch.Tensor]]


@torch.no_grad()
def generate(
    params: PyTree,
    prompt: torch.Tensor,
    config: Config,
    *,
    key: torch.Tensor,
    tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> torch.Tensor:
    """Continue a prompt.

    When the context is full, its older half is dropped and the rest is read again.

    Args:
        params: as `gpt.init` makes them.
        prompt: int64 [batch, length], at least one token each; only its last `config.context` tokens count.
        config: the architecture.
        key: the same key and prompt give the same continuation.
        tokens: how many to add.
        temperature: logits are divided by it; 0 takes the likeliest token each time.
        top_k: draw among the k likeliest only; None for all.

    Returns:
        The new tokens, int64 [batch, tokens].

    Raises:
        ValueError: an empty prompt, a negative number of tokens or temperature, a top_k below one, or a prompt id outside the vocabulary.

    >>> small = Config(vocab_size=32, layers=1, d_model=16, heads=2, kv_heads=1, d_ff=32)
    >>> params = gpt.init(small, random.key(0))
    >>> generate(params, torch.tensor([[1, 2]]), small, key=random.key(1), tokens=3).shape
    torch.Size([1, 3])
    """
    _check(prompt, config, tokens, temperature, top_k)
    text, past = prompt, _no_past(params)
    unread = prompt[:, -config.context :]
    for number in range(tokens):
        if past[0][0].shape[2] == config.context:
            past, unread = _no_past(params), text[:, -max(1, config.context // 2) :]
        logits, past = advance(params, unread, past, config)
        unread = draw(random.fold_in(key, number), logits, temperature, top_k)[:, None]
        text = torch.cat((text, unread), dim=1)
    return text[:, prompt.shape[1] :]


def _check(prompt: torch.Tensor, config: Config, tokens: int, temperature: float, top_k: int | None) -> None:
    if prompt.ndim != 2 or prompt.shape[1] < 1:
        raise ValueError(f"a prompt has shape [batch, length] with at least one token, not {list(prompt.shape)}")
    if int(prompt.min()) < 0 or int(prompt.max()) >= config.vocab_size:
        raise ValueError(f"the prompt holds the id {int(prompt.max())}, and the model's ids are below {config.vocab_size}")
    if tokens < 0:
        raise ValueError(f"cannot generate {tokens} tokens")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"a temperature is 0 or more, not {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is at least 1, not {top_k}")


def _no_past(params: PyTree) -> Past:
    """An empty cache: keys and values [1, 0, 0, 0] of each block."""
    empty = params["embed"].new_zeros(1, 0, 0, 0)
    return [(empty, empty)] * len(params["blocks"])


def advance(params: PyTree, tokens: torch.Tensor, past: Past, config: Config) -> tuple[torch.Tensor, Past]:
    """Read tokens that follow those in the cache.

    Args:
        params: as `gpt.init` makes them.
        tokens: int64 [batch, length]; with a cache that is not empty, the length is 1.
        past: keys and values of each block so far.
        config: the architecture.

    Returns:
        Logits after the last token, [batch, vocab], and the longer cache.
    """
    start = past[0][0].shape[2]
    turns = gpt.rotations(torch.arange(start, start + tokens.shape[1], device=tokens.device), config)
    x_BxSxD, longer = F.embedding(tokens, params["embed"]), []
    for block, before in zip(params["blocks"], past, strict=True):
        kept: Past = []
        x_BxSxD = gpt.apply_block(block, x_BxSxD, config, turns, _cached_attention(before, kept))
        longer += kept
    return gpt.rms_norm(x_BxSxD[:, -1], params["norm"], config.norm_eps) @ gpt.head(params).T, longer


def _cached_attention(before: tuple[torch.Tensor, torch.Tensor], kept: Past) -> gpt.Attend:
    """Attention to the cache and the new tokens; appends both together to `kept`."""

    def attend(q_BxHxSxE: torch.Tensor, k_BxKxSxE: torch.Tensor, v_BxKxSxE: torch.Tensor) -> torch.Tensor:
        if not before[0].numel():
            kept.append((k_BxKxSxE, v_BxKxSxE))
            return gpt.causal_attention(q_BxHxSxE, k_BxKxSxE, v_BxKxSxE)
        k_BxKxTxE, v_BxKxTxE = (torch.cat(pair, dim=2) for pair in zip(before, (k_BxKxSxE, v_BxKxSxE), strict=True))
        kept.append((k_BxKxTxE, v_BxKxTxE))
        group = q_BxHxSxE.shape[1] // k_BxKxTxE.shape[1]
        return F.scaled_dot_product_attention(q_BxHxSxE, gpt.share_heads(k_BxKxTxE, group), gpt.share_heads(v_BxKxTxE, group))

    return attend


def draw(key: torch.Tensor, logits: torch.Tensor, temperature: float, top_k: int | None) -> torch.Tensor:
    """One token for each row of logits [batch, vocab]; int64 [batch]."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = torch.where(logits < least, -torch.inf, logits)
    return random.categorical(key, logits)
