"""A mixture-of-experts GPT as pure functions over nested dicts of params: the blocks of `gpt`, whose MLP is one of many for each token.

Experts are SwiGLU, stacked [experts, ...], and chosen by a router in float32. Each has a fixed number of slots for every ROW of the
batch, so that shapes do not depend on values, no row influences another, and a batch that is split over ranks computes the same thing.
Tokens reach their slots by products with one-hot tensors (GShard: Lepikhin et al. 2020, arXiv 2006.16668): where `experts` is split over
ranks that hold different rows, [batch, experts, slots, d] -> [experts, batch, slots, d] is an all-to-all.

Balance loss and the gate of a single choice are the Switch Transformer's (Fedus et al. 2021, arXiv 2101.03961), the z-loss is ST-MoE's
(Zoph et al. 2022, arXiv 2202.08906).

Shape suffixes: those of `gpt`, and N experts, R choices of a token, C slots (the capacity of an expert), L blocks.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

import functrain.random as random
from functrain.compile.constraint import with_sharding_constraint
from functrain.losses import linear_cross_entropy
from functrain.models import gpt
from functrain.remat import remat as rematerialized
from functrain.sharding import P, Rules
from functrain.tree import Mean, PyTree


@dataclass(frozen=True)
class Config(gpt.Config):
    """The architecture: that of `gpt`, where `d_ff` is the width of one expert, and the mixture's own fields."""

    experts: int = 8  # N
    top_k: int = 2  # R, experts that a token is sent to
    capacity_factor: float = 1.25  # slots by choices: 1 is just enough where every expert is chosen equally often
    balance_weight: float = 0.01  # of the balance loss, summed over blocks (Switch, section 2.2)
    z_weight: float = 0.001  # of the router's z-loss, summed over blocks (ST-MoE, section 3.3)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k={self.top_k} must be between 1 and experts={self.experts}")
        if not 0 < self.capacity_factor < math.inf:
            raise ValueError(f"capacity_factor={self.capacity_factor} must be positive and finite")
        if self.balance_weight < 0 or self.z_weight < 0:
            raise ValueError(f"weights of losses are not negative, but balance_weight={self.balance_weight}, z_weight={self.z_weight}")

    def capacity(self, length: int) -> int:
        """C, the slots that an expert has for one row: ceil(capacity_factor * length * top_k / experts), at most one a token.

        >>> Config(experts=4, top_k=2, capacity_factor=1.5).capacity(8), Config(experts=4, capacity_factor=100.0).capacity(8)
        (6, 8)
        """
        slots = self.capacity_factor * length * self.top_k / self.experts
        return min(length, math.ceil(slots * (1 - 1e-12)))  # 1.1 * 10 is a little more than 11


# Experts over an axis `expert` that divides their number. Rows of the batch are split over it too, and the plan says how
# [experts, batch, ...] is split with the rows and where experts work, so that it is exchanged twice a block, forward and backward. With an
# axis `data` beside it: `Plan(mesh, EXPERT_PARALLEL, batch=P(("data", "expert")), activations={"slots": P(None, ("data", "expert")),
# "experts": P("expert", "data")})`.
EXPERT_PARALLEL = Rules({"params/blocks/*/experts/*": P("expert")})


# ---- params


def init(config: Config, key: torch.Tensor) -> PyTree:
    """Random params in float32, on the scales of `gpt.init`; the router's is `d_model ** -0.5`.

    A block holds `router` [D, N] and `experts`: `gate` and `up` [N, D, F], `down` [N, F, D], as `layers.moe` takes them.

    >>> params = init(Config(vocab_size=32, layers=1, d_model=16, heads=2, d_ff=8, experts=4), random.key(0))
    >>> params["blocks"][0]["experts"]["up"].shape
    torch.Size([4, 16, 8])
    """
    dense_key, experts_key = random.split(key)
    params = gpt.init(config, dense_key)
    keys = random.split(experts_key, config.layers)
    blocks = [_with_experts(config, block, k) for block, k in zip(params["blocks"], keys, strict=True)]
    return {**params, "blocks": blocks}


def _with_experts(config: Config, block: PyTree, key: torch.Tensor) -> PyTree:
    """A block of `gpt` with experts instead of its MLP."""
    count, width, hidden = config.experts, config.d_model, config.d_ff
    router_key, gate_key, up_key, down_key = random.split(key, 4)
    experts = {
        "gate": width**-0.5 * random.normal(gate_key, (count, width, hidden)),
        "up": width**-0.5 * random.normal(up_key, (count, width, hidden)),
        "down": (2 * config.layers * hidden) ** -0.5 * random.normal(down_key, (count, hidden, width)),
    }
    kept = {name: leaf for name, leaf in block.items() if name not in experts}
    return {**kept, "router": width**-0.5 * random.normal(router_key, (width, count)), "experts": experts}


def count(config: Config) -> int:
    """How many params a model has, worked out from its shape alone.

    >>> count(Config(experts=1, top_k=1)) - gpt.count(gpt.Config())  # the routers
    768
    """
    expert = 3 * config.d_model * config.d_ff
    return gpt.count(config) + config.layers * ((config.experts - 1) * expert + config.d_model * config.experts)


# ---- the forward pass


class Routing(NamedTuple):
    """What the routers did, row by row; of one block [batch], of several [batch, blocks]."""

    balance: torch.Tensor  # experts * sum(share of choices * mean probability): 1 where the load is even
    z: torch.Tensor  # mean over tokens of logsumexp(router's logits) ** 2
    dropped: torch.Tensor  # share of the choices that found no slot
    load: torch.Tensor  # [batch, experts] or [batch, blocks, experts]: share of the choices, those that found no slot included


def apply(params: PyTree, tokens: torch.Tensor, config: Config, *, key: torch.Tensor | None = None, remat: bool = False) -> torch.Tensor:
    """Logits of the next token at every position.

    Args:
        params: as `init` makes them, in the dtype to compute in.
        tokens: int64 [batch, seq].
        config: the architecture; static.
        key: for dropout; without one there is none.
        remat: keep only each block's input for the backward pass and compute the rest again.

    Returns:
        [batch, seq, vocab], in the params' dtype.

    >>> small = Config(vocab_size=32, layers=1, d_model=16, heads=2, d_ff=8, experts=4)
    >>> apply(init(small, random.key(0)), torch.zeros(2, 5, dtype=torch.int64), small).shape
    torch.Size([2, 5, 32])
    """
    return hidden(params, tokens, config, key=key, remat=remat)[0] @ gpt.head(params).T


def loss(
    params: PyTree, batch: dict[str, torch.Tensor], config: Config, *, key: torch.Tensor | None = None, remat: bool = False
) -> tuple[Mean, dict[str, Mean]]:
    """Cross-entropy of the next token, and the routers' losses.

    The routers' losses are computed for each row, and rows are averaged by how many of their targets count. So all is one mean over
    targets: rows may be cut into microbatches or split over ranks in any way, and the sum of the parts is exact. A row without targets
    has no weight. Every position is routed and takes up slots, whether its target counts or not.

    Args:
        params: as `init` makes them, in the dtype to compute in.
        batch: `tokens` and `targets`, int64 [batch, seq]; targets of -100 do not count.
        config: the architecture; static.
        key: for dropout; without one there is none.
        remat: as for `apply`.

    Returns:
        (loss, metrics), for `value_and_grad(..., has_aux=True)`. The loss is entropy + balance_weight * sum(balance) + z_weight * sum(z),
        a `Mean` over the targets that count, in nats. Metrics are `Mean`s by the same weight: `entropy` a scalar; `balance`, `z` and
        `dropped` [layers]; `load` [layers, experts]; see `Routing`.

    >>> small = Config(vocab_size=32, layers=1, d_model=16, heads=2, d_ff=8, experts=4)
    >>> zeros = torch.zeros(2, 5, dtype=torch.int64)
    >>> total, metrics = loss(init(small, random.key(0)), {"tokens": zeros, "targets": zeros}, small)
    >>> int(total.weight), metrics["load"].value().shape
    (10, torch.Size([1, 4]))
    """
    x_BxSxD, routing = hidden(params, batch["tokens"], config, key=key, remat=remat)
    entropy = linear_cross_entropy(x_BxSxD, gpt.head(params), batch["targets"])
    targets_B = (batch["targets"] != -100).sum(1)
    metrics = {name: Mean(_weighted_sum(targets_B, rows), entropy.weight) for name, rows in routing._asdict().items()}
    auxiliary = config.balance_weight * metrics["balance"].total.sum() + config.z_weight * metrics["z"].total.sum()
    return Mean(entropy.total + auxiliary, entropy.weight), {"entropy": entropy, **metrics}


def _weighted_sum(weights_B: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[batch], [batch, ...] -> [...]."""
    return (weights_B.to(rows.dtype).reshape(-1, *[1] * (rows.dim() - 1)) * rows).sum(0)


def hidden(
    params: PyTree, tokens: torch.Tensor, config: Config, *, key: torch.Tensor | None = None, remat: bool = False
) -> tuple[torch.Tensor, Routing]:
    """The last hidden state [batch, seq, D], normed, and what the routers of all blocks did; `apply` without the head."""
    turns = gpt.rotations(torch.arange(tokens.shape[1], device=tokens.device), config)
    keys = [None] * (config.layers + 1) if key is None or not config.dropout else list(random.split(key, config.layers + 1))
    x_BxSxD = _drop(F.embedding(tokens, params["embed"]), config, keys[0])

    def run(block: PyTree, x_BxSxD: torch.Tensor, block_key: torch.Tensor | None) -> tuple[torch.Tensor, Routing]:
        return apply_block(block, x_BxSxD, config, turns, gpt.causal_attention, block_key)

    routings = []
    for block, block_key in zip(params["blocks"], keys[1:], strict=True):
        x_BxSxD, routing = (rematerialized(run) if remat else run)(block, x_BxSxD, block_key)
        routings.append(routing)
    return gpt.rms_norm(x_BxSxD, params["norm"], config.norm_eps), Routing(*(torch.stack(rows, 1) for rows in zip(*routings, strict=True)))


def apply_block(
    block: PyTree, x_BxSxD: torch.Tensor, config: Config, turns: gpt.Turns, attend: gpt.Attend, key: torch.Tensor | None = None
) -> tuple[torch.Tensor, Routing]:
    """One block: attention, then the mixture, each added to the residual stream; arguments as for `gpt.apply_block`."""
    keys = (None, None) if key is None else random.split(key, 2)
    y_BxSxD = gpt.rms_norm(x_BxSxD, block["attention_norm"], config.norm_eps)
    x_BxSxD = x_BxSxD + _drop(gpt.attention(block, y_BxSxD, config, turns, attend), config, keys[0])
    y_BxSxD, routing = mixture(block, gpt.rms_norm(x_BxSxD, block["mlp_norm"], config.norm_eps), config)
    return x_BxSxD + _drop(y_BxSxD, config, keys[1]), routing


def _drop(x: torch.Tensor, config: Config, key: torch.Tensor | None) -> torch.Tensor:
    return x if key is None else random.dropout(key, x, config.dropout)


# ---- the mixture


def mixture(params: PyTree, x: torch.Tensor, config: Config) -> tuple[torch.Tensor, Routing]:
    """Each token through the experts that its router chose, as far as they have slots, and their results weighted by the gates.

    A choice that finds no slot adds nothing (the other gates stay as they are), so that a token without any slot gets zeros, and passes
    by the residual. Where slots run out, a later token's first choice may take one from an earlier token's second choice: strictly causal
    are a single choice, and a mixture that drops nothing. With all slots that could be needed, `capacity_factor >= experts / top_k`, it
    computes what `layers.moe` does, which runs every token through every expert (but for the gate of a single choice, see `_gates`).

    Args:
        params: `router` [d, experts] and `experts` with `gate`, `up` [experts, d, hidden], `down` [experts, hidden, d].
        x: [batch, seq, d].
        config: the architecture.

    Returns:
        (result [batch, seq, d], what the router did, row by row).

    >>> config = Config(d_model=6, d_ff=8, experts=4, top_k=2)
    >>> experts = {"gate": torch.ones(4, 6, 8), "up": torch.ones(4, 6, 8), "down": torch.ones(4, 8, 6)}
    >>> y, routing = mixture({"router": torch.ones(6, 4), "experts": experts}, torch.ones(3, 5, 6), config)  # all choose the same two
    >>> y.shape, routing.dropped
    (torch.Size([3, 5, 6]), tensor([0.2000, 0.2000, 0.2000]))
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    logits_BxSxN = x.to(wide) @ params["router"].to(wide)
    probabilities_BxSxN = torch.softmax(logits_BxSxN, -1)
    chosen_BxSxRxN = _choices(probabilities_BxSxN, config.top_k)
    gates_BxSxR = _gates(probabilities_BxSxN, chosen_BxSxRxN)
    places_BxSxR = _places(chosen_BxSxRxN)
    slots_C = torch.arange(config.capacity(x.shape[1]), device=x.device)
    dropped_B = (places_BxSxR >= slots_C.shape[0]).to(wide).mean((1, 2))
    load_BxN = chosen_BxSxRxN.to(wide).mean((1, 2))
    balance_B = config.experts * (load_BxN * probabilities_BxSxN.mean(1)).sum(-1)
    z_B = torch.logsumexp(logits_BxSxN, -1).square().mean(1)

    chosen, slot = chosen_BxSxRxN.to(x.dtype), (places_BxSxR[..., None] == slots_C).to(x.dtype)  # no slot at all where they ran out
    dispatch_BxSxNxC = torch.einsum("bsrn,bsrc->bsnc", chosen, slot)
    combine_BxSxNxC = torch.einsum("bsrn,bsrc->bsnc", gates_BxSxR.to(x.dtype)[..., None] * chosen, slot)
    given_NxBxCxD = with_sharding_constraint(torch.einsum("bsnc,bsd->nbcd", dispatch_BxSxNxC, x), "slots")
    made_NxBxCxD = _run_experts(params["experts"], with_sharding_constraint(given_NxBxCxD, "experts"))
    made_NxBxCxD = with_sharding_constraint(with_sharding_constraint(made_NxBxCxD, "experts"), "slots")
    result_BxSxD = torch.einsum("bsnc,nbcd->bsd", combine_BxSxNxC, made_NxBxCxD)
    return result_BxSxD, Routing(balance_B, z_B, dropped_B, load_BxN)


def _choices(probabilities_BxSxN: torch.Tensor, top_k: int) -> torch.Tensor:
    """Bool [B, S, R, N]: the expert of each choice, best first."""
    places_BxSxR = torch.topk(probabilities_BxSxN.detach(), top_k, dim=-1).indices
    return places_BxSxR[..., None] == torch.arange(probabilities_BxSxN.shape[-1], device=places_BxSxR.device)


def _gates(probabilities_BxSxN: torch.Tensor, chosen_BxSxRxN: torch.Tensor) -> torch.Tensor:
    """[B, S, R]: the choices' probabilities, scaled to the sum 1; a single choice keeps its own, or the router would get no gradient."""
    gates_BxSxR = (probabilities_BxSxN[:, :, None] * chosen_BxSxRxN).sum(-1)
    return gates_BxSxR if gates_BxSxR.shape[-1] == 1 else gates_BxSxR / gates_BxSxR.sum(-1, keepdim=True)


def _places(chosen_BxSxRxN: torch.Tensor) -> torch.Tensor:
    """Int64 [B, S, R]: how many choices of the row stand before this one at its expert; all first choices come before all second ones."""
    queue_BxRSxN = chosen_BxSxRxN.transpose(1, 2).flatten(1, 2).long()
    ahead_BxRS = ((queue_BxRSxN.cumsum(1) - queue_BxRSxN) * queue_BxRSxN).sum(-1)
    return ahead_BxRS.unflatten(1, (chosen_BxSxRxN.shape[2], chosen_BxSxRxN.shape[1])).transpose(1, 2)


def _run_experts(experts: PyTree, x_NxBxCxD: torch.Tensor) -> torch.Tensor:
    """SwiGLU, each expert on its own slots; an empty slot holds zeros and gives zeros."""
    gate = F.silu(torch.einsum("nbcd,ndf->nbcf", x_NxBxCxD, experts["gate"]))
    return torch.einsum("nbcf,nfd->nbcd", gate * torch.einsum("nbcd,ndf->nbcf", x_NxBxCxD, experts["up"]), experts["down"])
