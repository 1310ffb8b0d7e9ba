"""A small vision-language-action model as pure functions over nested dicts of params: two cameras, an instruction and the robot's state in,
a chunk of actions out.

The shape is that of OpenVLA (Kim et al. 2024, arXiv 2406.09246) and its successor OFT (Kim, Finn, Liang 2025, arXiv 2502.19645): a frozen
vision tower (ViT: Dosovitskiy et al. 2020, arXiv 2010.11929), a connector that brings its features into the width of a language model,
learned queries for a chunk of actions that are decoded in parallel (ACT: Zhao et al. 2023, arXiv 2304.13705), and two heads on them: the
actions as numbers, and as one of `bins` classes each (RT-2: Brohan et al. 2023, arXiv 2307.15818). Tower and trunk are made of the blocks
of `gpt`, without a causal mask.

The tower is frozen by keeping its sub-tree out of what is differentiated, so that it has no gradient and no optimizer state:

>>> import functrain as ft
>>> config = Config(vision_layers=1, layers=1)
>>> frozen, trained = ft.tree.partition(init(config, ft.random.key(0)), "vision/**")
>>> def loss_fn(trained, batch, frozen):
...     return loss(ft.tree.combine(trained, frozen), batch, config)
>>> batch = example_batch(config, ft.random.key(1))
>>> (value, metrics), grads = ft.value_and_grad(loss_fn, has_aux=True)(trained, batch, frozen)
>>> ft.tree.leaves(grads["vision"]), ft.tree.mismatch(trained, grads)
([], None)

Shape suffixes: those of `gpt`, and P patches, T steps of the action chunk, A numbers of an action, N bins, X width of the vision tower.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

import functrain.random as random
from functrain.layers import mlp
from functrain.losses import cross_entropy, mean_squared_error
from functrain.models import gpt
from functrain.remat import remat as rematerialized
from functrain.tree import Mean, PyTree

CAMERAS = ("scene", "wrist")
PADDING = 0  # the token id that is not read


@dataclass(frozen=True)
class Config:
    """The architecture, and the weights of its two losses."""

    image: int = 32  # height and width of each camera's image, pixels
    patch: int = 8  # height and width of a patch, pixels; divides `image`
    vision_layers: int = 2  # blocks of the vision tower
    vision_width: int = 48  # X
    vision_heads: int = 2
    vocab_size: int = 512  # V, token ids of the instruction are below it
    state_dim: int = 8  # numbers of the robot's state
    layers: int = 2  # blocks of the trunk
    d_model: int = 64  # D
    heads: int = 2  # H
    kv_heads: int = 1  # K
    d_ff: int = 176  # F, of the trunk's blocks and of the connector
    horizon: int = 8  # T, steps of an action chunk
    action_dim: int = 7  # A, numbers of an action
    bins: int = 256  # N, classes of a number of an action
    dropout: float = 0.0  # rate, in the trunk; needs a key
    action_weight: float = 1.0  # of the squared error of an action's number
    token_weight: float = 0.1  # of the cross-entropy of an action's class, in nats
    norm_eps: float = 1e-5  # added to the mean square

    def __post_init__(self) -> None:
        wrong = [f"{name}={getattr(self, name)}" for name in ("state_dim", "horizon", "action_dim", "bins") if getattr(self, name) < 1]
        if wrong:
            raise ValueError(f"a model's sizes are positive, not {', '.join(wrong)}")
        if self.patch < 1 or self.image < 1 or self.image % self.patch:
            raise ValueError(f"image={self.image} must be a positive multiple of patch={self.patch}")
        if self.action_weight < 0 or self.token_weight < 0:
            raise ValueError(
                f"weights of losses are not negative, but action_weight={self.action_weight}, token_weight={self.token_weight}"
            )
        _ = self.tower, self.trunk  # raise for sizes that do not fit

    @property
    def patches(self) -> int:
        """P, patches of one image."""
        return (self.image // self.patch) ** 2

    @property
    def tower(self) -> gpt.Config:
        """The vision tower's blocks; its vocabulary is the places of patches."""
        return gpt.Config(
            vocab_size=self.patches,
            layers=self.vision_layers,
            d_model=self.vision_width,
            heads=self.vision_heads,
            kv_heads=self.vision_heads,
            d_ff=4 * self.vision_width,
            norm_eps=self.norm_eps,
        )

    @property
    def trunk(self) -> gpt.Config:
        """The trunk's blocks, with the instruction's vocabulary."""
        return gpt.Config(
            vocab_size=self.vocab_size,
            layers=self.layers,
            d_model=self.d_model,
            heads=self.heads,
            kv_heads=self.kv_heads,
            d_ff=self.d_ff,
            dropout=self.dropout,
            norm_eps=self.norm_eps,
        )


# ---- params


def init(config: Config, key: torch.Tensor) -> PyTree:
    """Random params in float32, on the scales of `gpt.init`.

    `vision` is the tower; `connector` is applied to each camera's features; `camera` [2, D] says which one it was; `query` [T, D] stands
    for the steps of the chunk.

    >>> params = init(Config(), random.key(0))
    >>> sorted(params)
    ['action', 'action_bins', 'camera', 'connector', 'query', 'state', 'trunk', 'vision']
    """
    tower_key, trunk_key, patch_key, connector_key, camera_key, query_key, *head_keys = random.split(key, 9)
    tower, width = gpt.init(config.tower, tower_key), config.d_model
    up_key, down_key = random.split(connector_key)
    return {
        "vision": {
            "patch": _matrix(patch_key, 3 * config.patch**2, config.vision_width),
            "position": tower["embed"],
            "blocks": tower["blocks"],
            "norm": tower["norm"],
        },
        "connector": {
            "norm": torch.ones(config.vision_width, device=key.device),
            "up": _matrix(up_key, config.vision_width, config.d_ff),
            "down": _matrix(down_key, config.d_ff, width),
        },
        "camera": 0.02 * random.normal(camera_key, (len(CAMERAS), width)),
        "trunk": gpt.init(config.trunk, trunk_key),
        "query": 0.02 * random.normal(query_key, (config.horizon, width)),
        "state": _matrix(head_keys[0], config.state_dim, width),
        "action": _matrix(head_keys[1], width, config.action_dim),
        "action_bins": _matrix(head_keys[2], width, config.action_dim * config.bins),
    }


def _matrix(key: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return rows**-0.5 * random.normal(key, (rows, columns))


def example_batch(config: Config, key: torch.Tensor, rows: int = 2, length: int = 5) -> dict[str, torch.Tensor]:
    """A random batch of the shapes that `apply` and `loss` take; each row's chunk ends at a step of its own.

    >>> {name: list(x.shape) for name, x in example_batch(Config(), random.key(0)).items()}
    {'scene': [2, 3, 32, 32], 'wrist': [2, 3, 32, 32], 'text': [2, 5], 'state': [2, 8], 'actions': [2, 8, 7], 'valid': [2, 8],
     'action_tokens': [2, 8, 7]}
    """
    keys = random.split(key, 6)
    actions = random.uniform(keys[4], (rows, config.horizon, config.action_dim), minval=-1.0, maxval=1.0)
    ends = random.randint(keys[5], (rows, 1), 0, config.horizon + 1)
    valid = torch.arange(config.horizon, device=key.device) < ends
    return {
        "scene": random.normal(keys[0], (rows, 3, config.image, config.image)),
        "wrist": random.normal(keys[1], (rows, 3, config.image, config.image)),
        "text": random.randint(keys[2], (rows, length), 0, config.vocab_size),
        "state": random.normal(keys[3], (rows, config.state_dim)),
        "actions": actions,
        "valid": valid,
        "action_tokens": torch.where(valid[..., None], discretize(actions, config.bins), -100),
    }


def discretize(actions: torch.Tensor, bins: int) -> torch.Tensor:
    """The class of each number: `bins` intervals of one width from -1 to 1; what lies outside goes to the first or last.

    >>> discretize(torch.tensor([-1.5, -1.0, 0.0, 0.99, 1.0]), 4)
    tensor([0, 0, 2, 3, 3])
    """
    return ((actions.float() + 1) / 2 * bins).floor().clamp(0, bins - 1).long()


# ---- the forward pass


class Actions(NamedTuple):
    """What the model answers."""

    values: torch.Tensor  # [batch, horizon, action_dim]
    logits: torch.Tensor  # [batch, horizon, action_dim, bins]


def apply(
    params: PyTree, batch: dict[str, torch.Tensor], config: Config, *, key: torch.Tensor | None = None, remat: bool = False
) -> Actions:
    """The chunk of actions, as numbers and as classes.

    Args:
        params: as `init` makes them; what is trained in the dtype to compute in, the tower in any.
        batch: `scene` and `wrist`, images [batch, 3, image, image]; `text`, int64 [batch, length], where 0 is not read;
            `state` [batch, state_dim].
        config: the architecture; static.
        key: for dropout; without one there is none.
        remat: keep only each of the trunk's blocks' input for the backward pass and compute the rest again.

    >>> config = Config(vision_layers=1, layers=1)
    >>> actions = apply(init(config, random.key(0)), example_batch(config, random.key(1)), config)
    >>> actions.values.shape, actions.logits.shape
    (torch.Size([2, 8, 7]), torch.Size([2, 8, 7, 256]))
    """
    x_BxSxD, mask_Bx1x1xS = fuse(params, batch, config)
    y_BxSxD = _run_trunk(params["trunk"], x_BxSxD, mask_Bx1x1xS, config.trunk, key, remat)
    y_BxTxD = gpt.rms_norm(y_BxSxD[:, -config.horizon :], params["trunk"]["norm"], config.norm_eps)
    logits_BxTxAxN = (y_BxTxD @ params["action_bins"]).unflatten(-1, (config.action_dim, config.bins))
    return Actions(y_BxTxD @ params["action"], logits_BxTxAxN)


def see(vision: PyTree, image: torch.Tensor, config: Config) -> torch.Tensor:
    """The vision tower: [batch, 3, image, image] -> [batch, patches, X], patches row by row."""
    size, side = config.patch, config.image // config.patch
    cut = image.to(vision["patch"].dtype).unflatten(3, (side, size)).unflatten(2, (side, size))  # [B, 3, side, size, side, size]
    x_BxPxX = cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2) @ vision["patch"] + vision["position"]
    turns = gpt.rotations(torch.arange(config.patches, device=image.device), config.tower)
    for block in vision["blocks"]:
        x_BxPxX = gpt.apply_block(block, x_BxPxX, config.tower, turns, attend_all)
    return gpt.rms_norm(x_BxPxX, vision["norm"], config.norm_eps)


def connect(connector: PyTree, x_BxPxX: torch.Tensor, config: Config) -> torch.Tensor:
    """Features of one camera in the width of the trunk, [batch, patches, D]: a norm and an MLP that all cameras share."""
    x_BxPxX = x_BxPxX.to(connector["up"].dtype)
    return mlp(connector, gpt.rms_norm(x_BxPxX, connector["norm"], config.norm_eps), activation=F.gelu)


def fuse(params: PyTree, batch: dict[str, torch.Tensor], config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """What the trunk reads: each camera's patches, the instruction, the state, the queries of the chunk.

    Returns:
        ([batch, seq, D], bool [batch, 1, 1, seq]: what may be attended to, that is all but the instruction's padding)
    """
    text, state, embed = batch["text"], batch["state"], params["trunk"]["embed"]
    seen = [connect(params["connector"], see(params["vision"], batch[name], config), config) for name in CAMERAS]
    told_BxLxD = F.embedding(text, embed)
    felt_Bx1xD = (state.to(embed.dtype) @ params["state"])[:, None]
    query_BxTxD = params["query"].expand(text.shape[0], -1, -1)
    x_BxSxD = torch.cat([*(x + mark for x, mark in zip(seen, params["camera"], strict=True)), told_BxLxD, felt_Bx1xD, query_BxTxD], 1)
    before, after = len(CAMERAS) * config.patches, 1 + config.horizon
    return x_BxSxD, F.pad(text != PADDING, (before, after), value=True)[:, None, None]


def _run_trunk(
    trunk: PyTree, x_BxSxD: torch.Tensor, mask_Bx1x1xS: torch.Tensor, config: gpt.Config, key: torch.Tensor | None, remat: bool
) -> torch.Tensor:
    turns = gpt.rotations(torch.arange(x_BxSxD.shape[1], device=x_BxSxD.device), config)
    keys = [None] * config.layers if key is None or not config.dropout else list(random.split(key, config.layers))

    def attend(q_BxHxSxE: torch.Tensor, k_BxKxSxE: torch.Tensor, v_BxKxSxE: torch.Tensor) -> torch.Tensor:
        return attend_all(q_BxHxSxE, k_BxKxSxE, v_BxKxSxE, mask_Bx1x1xS)

    def run(block: PyTree, x_BxSxD: torch.Tensor, block_key: torch.Tensor | None) -> torch.Tensor:
        return gpt.apply_block(block, x_BxSxD, config, turns, attend, block_key)

    for block, block_key in zip(trunk["blocks"], keys, strict=True):
        x_BxSxD = (rematerialized(run) if remat else run)(block, x_BxSxD, block_key)
    return x_BxSxD


def attend_all(q_BxHxSxE: torch.Tensor, k_BxKxSxE: torch.Tensor, v_BxKxSxE: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Each position attends to all where the mask is True; each key-value head serves H / K neighbouring query heads."""
    group = q_BxHxSxE.shape[1] // k_BxKxSxE.shape[1]
    return F.scaled_dot_product_attention(q_BxHxSxE, gpt.share_heads(k_BxKxSxE, group), gpt.share_heads(v_BxKxSxE, group), attn_mask=mask)


# ---- the loss


class Counts(NamedTuple):
    """How many terms the two losses of a batch have, and its rows; see `loss`."""

    rows: torch.Tensor
    actions: torch.Tensor  # numbers of valid steps
    tokens: torch.Tensor  # classes that are not -100


def count_targets(batch: dict[str, torch.Tensor]) -> Counts:
    """The counts of a batch; of a whole one, where `loss` gets parts of it."""
    rows, _, numbers = batch["actions"].shape
    valid = batch["valid"]
    return Counts(torch.full((), rows, device=valid.device), numbers * valid.sum(), (batch["action_tokens"] != -100).sum())


def loss(
    params: PyTree,
    batch: dict[str, torch.Tensor],
    config: Config,
    *,
    key: torch.Tensor | None = None,
    counts: Counts | None = None,
    remat: bool = False,
) -> tuple[Mean, dict[str, Mean]]:
    """`action_weight` times the mean squared error of the valid actions, plus `token_weight` times the cross-entropy of their classes.

    Each is a mean over terms of its own, that rows have unevenly many of, and one that has no terms counts 0. The sum of two such means is
    no mean over the terms of either. For parts of a batch to add up exactly (`accumulate`), give each the counts of the whole:

    >>> config = Config(vision_layers=1, layers=1)
    >>> params, batch = init(config, random.key(0)), example_batch(config, random.key(1), rows=4)
    >>> whole, _ = loss(params, batch, config)
    >>> halves = [{name: x[i::2] for name, x in batch.items()} for i in range(2)]
    >>> one, other = (loss(params, half, config, counts=count_targets(batch))[0] for half in halves)
    >>> torch.allclose((one + other).value(), whole.value())
    True

    Args:
        params: as for `apply`.
        batch: as for `apply`, and `actions` [batch, horizon, action_dim]; `valid`, bool [batch, horizon]: steps whose actions count (what
            stands in others, NaN included, has no influence); `action_tokens`, int64 [batch, horizon, action_dim], as from `discretize`:
            -100 does not count.
        config: the architecture; static.
        key: for dropout; without one there is none.
        counts: of the whole batch; None: this is it.
        remat: as for `apply`.

    Returns:
        (loss, {"actions": squared error, "tokens": cross-entropy}), for `value_and_grad(..., has_aux=True)`. The weight of the loss is the
        number of rows; the two parts are `Mean`s over their terms.
    """
    rows, numbers, classes = count_targets(batch) if counts is None else counts
    answer, valid_BxTx1 = apply(params, batch, config, key=key, remat=remat), batch["valid"][..., None]
    wanted_BxTxA = torch.where(valid_BxTx1, batch["actions"], 0)
    actions = mean_squared_error(answer.values, wanted_BxTxA, mask=valid_BxTx1)
    tokens = cross_entropy(answer.logits, batch["action_tokens"])
    value = config.action_weight * Mean(actions.total, numbers).value() + config.token_weight * Mean(tokens.total, classes).value()
    return Mean(rows * value, count_targets(batch).rows), {"actions": actions, "tokens": tokens}
