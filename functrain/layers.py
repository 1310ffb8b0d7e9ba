"""Layers for long sequences: the memory of one chunk of tokens, forward and backward, and the derivatives of the whole.

Pure functions over params; each is `tiled` on a function of tokens, so use `tiled` itself for layers of other kinds.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from functrain import tree
from functrain.random.keys import OPERATORS, fill, split
from functrain.tiled import tiled
from functrain.tree import Mean, PyTree

Activation = Callable[[torch.Tensor], torch.Tensor]

# ---- MLP


def mlp(
    params: PyTree,
    x: torch.Tensor,
    *,
    activation: Activation = F.silu,
    dropout_rate: float = 0.0,
    key: torch.Tensor | None = None,
) -> torch.Tensor:
    """Two linear layers with an activation between them, gated where there is a gate (Shazeer 2020, arXiv 2002.05202).

    Args:
        params: `up` [d, hidden] and `down` [hidden, d]; with `gate` [d, hidden] the hidden values are activation(x @ gate) * (x @ up),
            without it activation(x @ up).
        x: [..., d].
        activation: element by element.
        dropout_rate: in [0, 1), of the hidden values.
        key: `[2]`, for dropout; a token's mask depends on the key and on the token's place in `x` alone.

    Returns:
        [..., d].

    Raises:
        ValueError: there is dropout, and no key, or the rate is out of range.

    >>> mlp({"up": torch.ones(2, 3), "down": torch.ones(3, 2)}, torch.ones(5, 2), activation=torch.relu)[0]
    tensor([6., 6.])
    """
    return _mlp(params, x, activation, dropout_rate, _token_keys(x, dropout_rate, key))


def tiled_mlp(
    params: PyTree,
    x: torch.Tensor,
    *,
    chunks: int,
    activation: Activation = F.silu,
    dropout_rate: float = 0.0,
    key: torch.Tensor | None = None,
) -> torch.Tensor:
    """`mlp` in chunks of tokens: the hidden values of one chunk are in memory at a time (Bekman et al. 2025, arXiv 2506.13996).

    Args:
        params: as for `mlp`.
        x: [..., tokens, d], cut along the tokens: [batch, seq, d], or [tokens, d] as experts get it.
        chunks: how many; the tokens need not divide by it.
        activation: as for `mlp`.
        dropout_rate: as for `mlp`.
        key: as for `mlp`, with the same masks whatever `chunks` is.

    Returns:
        [..., tokens, d].

    Raises:
        ValueError: as `mlp`, or `x` has no token dimension.

    >>> params = {"gate": torch.ones(2, 3), "up": torch.ones(2, 3), "down": torch.ones(3, 2)}
    >>> torch.allclose(tiled_mlp(params, torch.ones(5, 2), chunks=2), mlp(params, torch.ones(5, 2)))
    True
    """
    _check_tokens("tiled_mlp", x)

    def chunk(part: tuple[torch.Tensor, torch.Tensor | None], params: PyTree) -> torch.Tensor:
        return _mlp(params, part[0], activation, dropout_rate, part[1])

    result: torch.Tensor = tiled(chunk, chunks, dim=-2)((x, _token_keys(x, dropout_rate, key)), params)
    return result


def _mlp(params: PyTree, x: torch.Tensor, activation: Activation, dropout_rate: float, keys: torch.Tensor | None) -> torch.Tensor:
    """`mlp` with a key for each token, [..., 2], or None where there is no dropout."""
    hidden = activation(x @ params["gate"]) * (x @ params["up"]) if "gate" in params else activation(x @ params["up"])
    if keys is not None:
        keep = fill(OPERATORS.threefry_bernoulli, keys, hidden.shape[-1:], 1 - dropout_rate)
        hidden = torch.where(keep, hidden * (1 / (1 - dropout_rate)), 0)
    return hidden @ params["down"]


def _token_keys(x: torch.Tensor, dropout_rate: float, key: torch.Tensor | None) -> torch.Tensor | None:
    """[..., 2] for x [..., d]: a key for each token, so that a chunk of tokens draws what it would draw in the whole."""
    if not 0 <= dropout_rate < 1:
        raise ValueError(f"dropout_rate must be in [0, 1), not {dropout_rate}")
    if not dropout_rate:
        return None
    if key is None:
        raise ValueError(f"dropout_rate={dropout_rate} needs random numbers: pass `key=` (see ft.random)")
    return split(key, x.shape[:-1])


# ---- mixture of experts


class Routing(NamedTuple):
    """What a router decided, summed over tokens so that parts of a batch can be added; see `Routing.balance_loss`."""

    load: torch.Tensor  # [experts], how many tokens chose each expert, in the router's dtype
    probability: torch.Tensor  # [experts], sum of the router's probabilities
    tokens: torch.Tensor  # scalar, how many

    def balance_loss(self) -> torch.Tensor:
        """Experts * sum(share of choices * mean probability): 1 where the load is even (Fedus et al. 2021, arXiv 2101.03961, eq. 4)."""
        share = self.load / self.load.sum()
        return self.load.shape[0] * (share * self.probability / self.tokens).sum()


def moe(
    params: PyTree,
    x: torch.Tensor,
    *,
    top_k: int,
    activation: Activation = F.silu,
    dropout_rate: float = 0.0,
    key: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Routing]:
    """A mixture of experts: each token goes through the `top_k` experts that the router gives the most, weighted by its probabilities.

    Every token passes every expert, and those not chosen count nothing: shapes do not depend on values, no token is dropped, and the
    result is exact. It costs experts / top_k times the work of the chosen ones alone, which is little for few experts.

    Args:
        params: `router` [d, experts], and `experts`: params as for `mlp`, each stacked: `up` [experts, d, hidden], `down` [experts,
            hidden, d], and `gate` like `up` if there is one.
        x: [..., d].
        top_k: experts a token; their probabilities are scaled to the sum 1, as Mixtral does (Jiang et al. 2024, arXiv 2401.04088).
        activation: as for `mlp`.
        dropout_rate: as for `mlp`.
        key: `[2]`, for dropout; a mask depends on the key, the expert and the token's place in `x` alone.

    Returns:
        (result [..., d], what the router decided).

    Raises:
        ValueError: `top_k` is not between 1 and the number of experts, or as `mlp`.

    >>> params = {"router": torch.ones(2, 4), "experts": {"up": torch.ones(4, 2, 3), "down": torch.ones(4, 3, 2)}}
    >>> y, routing = moe(params, torch.ones(5, 2), top_k=2, activation=torch.relu)
    >>> y[0], int(routing.tokens)
    (tensor([6., 6.]), 5)
    """
    return _moe(params, x, top_k, activation, dropout_rate, _token_keys(x, dropout_rate, key))


def tiled_moe(
    params: PyTree,
    x: torch.Tensor,
    *,
    chunks: int,
    top_k: int,
    activation: Activation = F.silu,
    dropout_rate: float = 0.0,
    key: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Routing]:
    """`moe` in chunks of tokens: what router and experts compute on one chunk is in memory at a time.

    Args:
        params: as for `moe`.
        x: [..., tokens, d], cut along the tokens: [batch, seq, d] or [tokens, d].
        chunks: how many; the tokens need not divide by it.
        top_k: as for `moe`.
        activation: as for `moe`.
        dropout_rate: as for `moe`.
        key: as for `moe`, with the same masks whatever `chunks` is.

    Returns:
        (result [..., tokens, d], what the router decided on all tokens).

    Raises:
        ValueError: as `moe`, or `x` has no token dimension.

    >>> params = {"router": torch.ones(2, 4), "experts": {"up": torch.ones(4, 2, 3), "down": torch.ones(4, 3, 2)}}
    >>> tiled_moe(params, torch.ones(5, 2), chunks=3, top_k=1)[1].tokens
    tensor(5.)
    """
    _check_tokens("tiled_moe", x)

    def chunk(part: tuple[torch.Tensor, torch.Tensor | None], params: PyTree) -> Any:
        result, routing = _moe(params, part[0], top_k, activation, dropout_rate, part[1])
        return result, [Mean(column, routing.tokens) for column in routing]  # a Mean's total is summed over the chunks

    result, sums = tiled(chunk, chunks, dim=-2)((x, _token_keys(x, dropout_rate, key)), params)
    return result, Routing(*(column.total for column in sums))


def _moe(
    params: PyTree, x: torch.Tensor, top_k: int, activation: Activation, dropout_rate: float, keys: torch.Tensor | None
) -> tuple[torch.Tensor, Routing]:
    """`moe` with a key for each token, [..., 2], or None where there is no dropout."""
    tokens = x.reshape(-1, x.shape[-1])
    shares, routing = _route(params["router"], tokens, top_k)
    total = torch.zeros_like(tokens)
    for i in range(shares.shape[-1]):
        expert = tree.map(lambda leaf, i=i: leaf[i], params["experts"])
        own = None if keys is None else OPERATORS.threefry_fold_in(keys.reshape(-1, 2), torch.full((), i, device=keys.device))
        result = _mlp(expert, tokens, activation, dropout_rate, own)
        total = total + shares[:, i : i + 1].to(result.dtype) * result
    return total.reshape(x.shape), routing


def _route(router: torch.Tensor, tokens: torch.Tensor, top_k: int) -> tuple[torch.Tensor, Routing]:
    """Shares [tokens, experts], 0 for experts that are not chosen; softmax in float32 at least."""
    experts = router.shape[-1]
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k={top_k} of {experts} experts: choose between 1 and {experts}")
    logits = tokens @ router
    probabilities = torch.softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
    values, places = torch.topk(probabilities, top_k, dim=-1)
    shares = torch.zeros_like(probabilities).scatter(-1, places, values / values.sum(-1, keepdim=True))
    chosen = torch.zeros_like(probabilities).scatter(-1, places, 1.0)
    count = torch.full((), tokens.shape[0], dtype=probabilities.dtype, device=tokens.device)
    return shares, Routing(chosen.sum(0), probabilities.sum(0), count)


# ---- loss


def tiled_loss(loss: Callable[..., Mean], chunks: int, dim: int = 0) -> Callable[..., Mean]:
    """A loss over tokens in chunks: what it computes on one chunk (logits, say) is in memory at a time.

    Args:
        loss: `loss(tokens, *others) -> Mean`: `tokens` is a tree of tensors of one size along `dim` (hidden states and targets, say), and
            others, such as params, are given whole to every chunk. For random numbers that do not depend on `chunks`, let `tokens` hold a
            key for each: `ft.random.split(key, targets.shape)`.
        chunks: how many; sizes need not divide by it.
        dim: the dimension to cut along; [batch, seq, ...] leaves are cut along the sequence by 1.

    Returns:
        A function of the same arguments, whose `Mean` is that of the whole.

    Raises:
        TypeError: the loss returns no `Mean`: a mean of chunks' means is not the mean of the whole.

    >>> from functrain.losses import cross_entropy
    >>> loss = tiled_loss(lambda tokens, head: cross_entropy(tokens["hidden"] @ head, tokens["targets"]), chunks=2)
    >>> tokens = {"hidden": torch.zeros(3, 2), "targets": torch.tensor([0, 1, -100])}
    >>> round(float(loss(tokens, torch.ones(2, 4)).value()), 4)
    1.3863
    """

    def chunk(tokens: PyTree, *others: Any, **named: Any) -> Mean:
        result = loss(tokens, *others, **named)
        if not isinstance(result, Mean):
            raise TypeError(
                f"tiled_loss: the loss must return ft.Mean(total, weight), not {type(result).__name__}; chunks add up as totals"
            )
        return result

    result: Callable[..., Mean] = tiled(chunk, chunks, dim)
    return result


def _check_tokens(name: str, x: torch.Tensor) -> None:
    if x.dim() < 2:
        raise ValueError(f"{name}: x is [..., tokens, d], but it has shape {list(x.shape)}")
