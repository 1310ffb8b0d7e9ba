"""The model equals a plain nn.Module in answers, losses and gradients; its tower stays as it is, and uneven counts are weighed right."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import functrain as ft
from functrain import tree
from functrain.models import gpt, vla
from tests.helpers import assert_same_structure, assert_trees_close, assert_trees_equal
from tests.test_gpt import by_kind

SMALL = vla.Config(
    image=8,
    patch=4,
    vision_layers=2,
    vision_width=12,
    vision_heads=2,
    vocab_size=23,
    state_dim=3,
    layers=2,
    d_model=16,
    heads=2,
    d_ff=20,
    horizon=5,
    action_dim=2,
    bins=7,
    action_weight=0.7,
    token_weight=0.4,
)
Batch = dict[str, torch.Tensor]


def make_params(config: vla.Config = SMALL) -> tree.PyTree:
    """Random params whose norms are not ones."""
    generator = torch.Generator().manual_seed(0)
    params = tree.map(lambda x: x + 0.2 * torch.randn(x.shape, generator=generator), vla.init(config, ft.random.key(0)))
    return tree.map_with_path(lambda path, x: by_head(x, config.trunk if "trunk" in path else config.tower) if "qkv" in path else x, params)


def by_head(qkv: torch.Tensor, config: gpt.Config) -> torch.Tensor:
    """Columns of all queries, all keys, all values in the order of `gpt`: for each key-value head its queries, its key, its value."""
    heads, kv_heads, group = config.heads, config.kv_heads, config.heads // config.kv_heads
    order = [h for k in range(kv_heads) for h in (*range(k * group, (k + 1) * group), heads + k, heads + kv_heads + k)]
    return qkv.unflatten(1, (heads + 2 * kv_heads, config.head_width))[:, order].flatten(1)


def make_batch(config: vla.Config = SMALL) -> Batch:
    """Four rows: with 5, 2, 0 and 1 valid steps, with other counts of classes, with padded instructions."""
    batch = vla.example_batch(config, ft.random.key(1), rows=4, length=6)
    batch["text"] = batch["text"].clamp(min=1)
    batch["text"][0, 4:] = batch["text"][2, 1:] = vla.PADDING
    batch["valid"] = torch.arange(config.horizon) < torch.tensor([[5], [2], [0], [1]])
    batch["action_tokens"] = torch.where(batch["valid"][..., None], vla.discretize(batch["actions"], config.bins), -100)
    batch["action_tokens"][0, :3, 0] = -100
    return batch


def value_and_grad(params: tree.PyTree, batch: Batch, config: vla.Config = SMALL, **options: Any) -> Any:
    """Of the trained params, as the module's docstring has it."""
    frozen, trained = tree.partition(params, "vision/**")
    return ft.value_and_grad(lambda p: vla.loss(tree.combine(p, frozen), batch, config, **options), has_aux=True)(trained)


# ---- the same in plain PyTorch


class PlainBlock(nn.Module):
    """Pre-norm attention and SwiGLU, with rotary positions as complex numbers."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, width // heads * kv_heads, bias=False) for _ in range(2))
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, readable: torch.Tensor | None = None) -> torch.Tensor:
        y = self.attention_norm(x)
        q, k, v = self.q(y).unflatten(2, (self.heads, -1)), *(f(y).unflatten(2, (self.kv_heads, -1)) for f in (self.k, self.v))
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, 2) for part in (self._turn(k), v))
        scores = torch.einsum("bshe,bthe->bhst", self._turn(q), k) / q.shape[-1] ** 0.5
        if readable is not None:
            scores = scores.masked_fill(~readable[:, None, None], -torch.inf)
        x = x + self.out(torch.einsum("bhst,bthe->bshe", scores.softmax(-1), v).flatten(2))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def _turn(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[1])[:, None, None] * 10000.0 ** (-torch.arange(half) / half)
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), -1)


class PlainVla(nn.Module):
    """The same model, written as modules."""

    def __init__(self, c: vla.Config) -> None:
        super().__init__()
        self.config = c
        self.patch = nn.Conv2d(3, c.vision_width, c.patch, c.patch, bias=False)
        self.position = nn.Parameter(torch.empty(c.patches, c.vision_width))
        self.vision = nn.ModuleList(
            PlainBlock(c.vision_width, c.vision_heads, c.vision_heads, 4 * c.vision_width) for _ in range(c.vision_layers)
        )
        self.vision_norm = nn.RMSNorm(c.vision_width, eps=1e-5)
        self.connector = nn.Sequential(
            nn.RMSNorm(c.vision_width, eps=1e-5),
            nn.Linear(c.vision_width, c.d_ff, bias=False),
            nn.GELU(),
            nn.Linear(c.d_ff, c.d_model, bias=False),
        )
        self.camera, self.query = nn.Parameter(torch.empty(2, c.d_model)), nn.Parameter(torch.empty(c.horizon, c.d_model))
        self.embed, self.state = nn.Embedding(c.vocab_size, c.d_model), nn.Linear(c.state_dim, c.d_model, bias=False)
        self.trunk = nn.ModuleList(PlainBlock(c.d_model, c.heads, c.kv_heads, c.d_ff) for _ in range(c.layers))
        self.norm = nn.RMSNorm(c.d_model, eps=1e-5)
        self.action = nn.Linear(c.d_model, c.action_dim, bias=False)
        self.action_bins = nn.Linear(c.d_model, c.action_dim * c.bins, bias=False)

    def see(self, image: torch.Tensor) -> torch.Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2) + self.position
        for block in self.vision:
            x = block(x)
        return self.connector(self.vision_norm(x))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        rows, c = len(batch["text"]), self.config
        images = [self.see(batch[name]) + self.camera[i] for i, name in enumerate(("scene", "wrist"))]
        parts = [*images, self.embed(batch["text"]), self.state(batch["state"]).unsqueeze(1), torch.stack([self.query] * rows)]
        sizes = (2 * c.patches, 1 + c.horizon)
        before, after = (torch.ones(rows, size, dtype=torch.bool) for size in sizes)
        readable = torch.cat([before, batch["text"] != 0, after], 1)
        x = torch.cat(parts, 1)
        for block in self.trunk:
            x = block(x, readable)
        y = self.norm(x)[:, -c.horizon :]
        return self.action(y), self.action_bins(y).reshape(rows, c.horizon, c.action_dim, c.bins)

    def loss(self, batch: Batch) -> torch.Tensor:
        values, logits = self(batch)
        valid = batch["valid"]
        error = (values[valid] - batch["actions"][valid]).square().mean()
        entropy = F.cross_entropy(logits.flatten(0, 2), batch["action_tokens"].flatten())
        return self.config.action_weight * error + self.config.token_weight * entropy


def plain_names(params: tree.PyTree, c: vla.Config = SMALL) -> dict[str, torch.Tensor]:
    """Params (or gradients) under the module's names and in its layouts; a tower that is left out is left out."""
    found = {"camera": params["camera"], "query": params["query"], "norm.weight": params["trunk"]["norm"]}
    found |= {f"{name}.weight": params[name].T for name in ("state", "action", "action_bins")} | {"embed.weight": params["trunk"]["embed"]}
    connector = params["connector"]
    found |= {"connector.0.weight": connector["norm"], "connector.1.weight": connector["up"].T, "connector.3.weight": connector["down"].T}
    towers = [("trunk", params["trunk"]["blocks"], c.trunk)]
    vision = params["vision"]
    if vision["patch"] is not None:
        towers.append(("vision", vision["blocks"], c.tower))
        found |= {"patch.weight": vision["patch"].T.unflatten(1, (3, c.patch, c.patch)), "position": vision["position"]}
        found |= {"vision_norm.weight": vision["norm"]}
    for name, blocks, config in towers:
        for i, block in enumerate(blocks):
            q, k, v = by_kind(block["qkv"], config)
            own = {"q": q, "k": k, "v": v} | {part: block[part].T for part in ("out", "gate", "up", "down")}
            own |= {part: block[part] for part in ("attention_norm", "mlp_norm")}
            found |= {f"{name}.{i}.{part}.weight": leaf for part, leaf in own.items()}
    return found


def as_plain(params: tree.PyTree, config: vla.Config = SMALL) -> PlainVla:
    module = PlainVla(config)
    module.load_state_dict(plain_names(params, config))
    return module


@pytest.mark.parametrize("changes", [{}, {"heads": 4, "kv_heads": 2, "image": 12}], ids=["multi-query", "grouped"])
def test_answers_losses_and_gradients_equal_a_plain_modules(changes: dict[str, Any]) -> None:
    config = dataclasses.replace(SMALL, **changes)
    params, batch = make_params(config), make_batch(config)
    module = as_plain(params, config)
    answer, (values, logits) = vla.apply(params, batch, config), module(batch)
    assert values.std() > 0.3  # or the comparison would say little
    assert_trees_close(answer, vla.Actions(values, logits), rtol=1e-5, atol=1e-5)
    module.loss(batch).backward()
    (loss, _), grads = value_and_grad(params, batch, config)
    assert_trees_close(loss, module.loss(batch), rtol=1e-5)
    trained = {name: x.grad for name, x in module.named_parameters() if not name.startswith(("vision", "patch", "position"))}
    assert_trees_close(plain_names(grads, config), trained, rtol=1e-5, atol=2e-6)
    whole = ft.grad(lambda p: vla.loss(p, batch, config)[0])(params)  # the tower too, where it is not frozen
    assert_trees_close(plain_names(whole, config), {name: x.grad for name, x in module.named_parameters()}, rtol=1e-5, atol=2e-6)


# ---- the frozen tower, and the shared connector


def test_the_frozen_tower_has_no_gradient_no_optimizer_state_and_stays_bit_for_bit() -> None:
    params, batch, tx = make_params(), make_batch(), ft.optim.adamw(1e-2, weight_decay=0.1)
    frozen, trained = tree.partition(params, "vision/**")
    _, grads = value_and_grad(params, batch)
    assert not tree.leaves(grads["vision"])
    assert all(g.abs().max() > 0 for g in tree.leaves(grads))
    whole = ft.grad(lambda p: vla.loss(p, batch, SMALL)[0])(params)
    assert all(g.abs().max() > 0 for g in tree.leaves(whole["vision"]))  # there is something to freeze
    assert_trees_close(grads, tree.partition(whole, "vision/**")[1], rtol=1e-5, atol=1e-7)
    assert not any("vision" in path for path in tree.paths(tx.init(trained)))

    @ft.jit
    def step(state: ft.TrainState, batch: Batch) -> ft.TrainState:
        loss = lambda p: vla.loss(tree.combine(p, state.buffers), batch, SMALL)[0]  # noqa: E731
        return state.apply_gradients(ft.grad(loss)(state.params), tx)

    state = step(ft.TrainState.create(params=trained, tx=tx, buffers=frozen), batch)
    after = tree.combine(state.params, state.buffers)
    assert_same_structure(after, params)
    assert_trees_equal(after["vision"], params["vision"])
    assert all(not torch.equal(x, y) for x, y in zip(tree.leaves(state.params), tree.leaves(trained), strict=True))


def test_the_shared_connector_gets_the_sum_of_both_cameras_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    params, batch, connect = make_params(), make_batch(), vla.connect
    shared = value_and_grad(params, batch)[1]["connector"]

    def apart(scene: tree.PyTree, wrist: tree.PyTree) -> ft.Mean:
        given = iter((scene, wrist))
        monkeypatch.setattr(vla, "connect", lambda _, *others: connect(next(given), *others))
        return vla.loss(params, batch, SMALL)[0]

    scene, wrist = ft.grad(apart, argnums=(0, 1))(params["connector"], params["connector"])
    assert_trees_close(shared, tree.map(torch.add, scene, wrist), rtol=1e-5, atol=1e-7)
    assert min(float(tree.global_norm(g)) for g in (scene, wrist, tree.map(torch.sub, scene, wrist))) > 1e-3


def test_cameras_are_told_apart() -> None:
    params, batch = make_params(), make_batch()
    swapped = {**batch, "scene": batch["wrist"], "wrist": batch["scene"]}
    assert (vla.apply(params, batch, SMALL).values - vla.apply(params, swapped, SMALL).values).abs().max() > 1e-3


def test_half_precision_reaches_the_trained_params_while_the_tower_stays_in_float32() -> None:
    params, batch = make_params(), make_batch()
    frozen, trained = tree.partition(params, "vision/**")
    loss = lambda p: vla.loss(tree.combine(p, frozen), batch, SMALL)[0]  # noqa: E731
    half, full = (ft.value_and_grad(loss, precision=precision)(trained)[0] for precision in (ft.Precision(), None))
    assert half != full
    assert_trees_close(half, full, rtol=0.05)


# ---- what counts


def test_a_row_without_valid_steps_or_classes_has_no_influence() -> None:
    params, batch = make_params(), make_batch()
    assert not batch["valid"][2].any()
    by_input = ft.grad(lambda state: vla.loss(params, {**batch, "state": state}, SMALL)[0])(batch["state"])
    assert [bool(row.any()) for row in by_input] == [True, True, False, True]
    loss, parts = vla.loss(params, batch, SMALL)
    kept, kept_parts = vla.loss(params, {name: x[[0, 1, 3]] for name, x in batch.items()}, SMALL)
    assert_trees_close((kept.value(), kept_parts), (loss.value(), parts), rtol=1e-5)
    assert (int(parts["actions"].weight), int(parts["tokens"].weight)) == (16, 13)


def test_what_stands_in_steps_that_are_not_valid_has_no_influence() -> None:
    params, batch = make_params(), make_batch()
    rubbish = {**batch, "actions": torch.where(batch["valid"][..., None], batch["actions"], torch.nan)}
    assert_trees_equal(value_and_grad(params, rubbish), value_and_grad(params, batch))
    padded = {**batch, "text": torch.cat((batch["text"], torch.zeros(4, 3, dtype=torch.int64)), 1)}
    longer, mask = vla.fuse(params, padded, SMALL)
    assert mask.shape == (4, 1, 1, longer.shape[1])
    assert mask.sum(-1).flatten().tolist() == [2 * 4 + read + 1 + 5 for read in (4, 6, 1, 6)]


@pytest.mark.parametrize("missing", ["actions", "tokens"])
def test_a_loss_without_terms_counts_nothing(missing: str) -> None:
    params, batch = make_params(), make_batch()
    if missing == "actions":
        batch["valid"] = torch.zeros_like(batch["valid"])
    else:
        batch["action_tokens"] = torch.full_like(batch["action_tokens"], -100)
    (loss, parts), grads = value_and_grad(params, batch)
    other, weight = ("tokens", SMALL.token_weight) if missing == "actions" else ("actions", SMALL.action_weight)
    assert_trees_close(loss, weight * parts[other].value(), rtol=1e-5)
    assert not grads["action" if missing == "actions" else "action_bins"].any()
    assert all(torch.isfinite(g).all() for g in tree.leaves(grads))


@pytest.mark.parametrize("microbatches", [2, 4])
def test_microbatches_of_uneven_counts_give_the_gradients_of_the_whole(microbatches: int) -> None:
    params, batch = make_params(), make_batch()
    frozen, trained = tree.partition(params, "vision/**")
    counts = vla.count_targets(batch)
    loss = lambda p, b: vla.loss(tree.combine(p, frozen), b, SMALL, counts=counts)  # noqa: E731
    (value, parts), grads = ft.accumulate(loss, microbatches, has_aux=True)(trained, batch)
    (whole, whole_parts), whole_grads = value_and_grad(params, batch)
    assert_trees_close((value, parts, grads), (whole, whole_parts, whole_grads), rtol=1e-5, atol=1e-6)
    apart = ft.accumulate(lambda p, b: vla.loss(tree.combine(p, frozen), b, SMALL)[0], microbatches)(trained, batch)[0]
    assert abs(float(apart - whole)) > 1e-3  # which is what the counts of the whole are for


# ---- the function as a whole


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_rematerialized_gradients_are_the_same_and_dropout_is_drawn_from_the_key(dropout: float) -> None:
    config = dataclasses.replace(SMALL, dropout=dropout)
    params, batch = make_params(config), make_batch(config)
    plain, again = (value_and_grad(params, batch, config, key=ft.random.key(3), remat=remat) for remat in (False, True))
    assert_trees_equal(again, plain)
    assert torch.equal(plain[0][0], value_and_grad(params, batch, config)[0][0]) == (not dropout)


def test_captured_gradients_equal_eager_ones() -> None:
    params, batch = make_params(), make_batch()
    frozen, trained = tree.partition(params, "vision/**")

    def step(trained: tree.PyTree, batch: Batch, frozen: tree.PyTree, key: torch.Tensor) -> Any:
        counts, config = vla.count_targets(batch), dataclasses.replace(SMALL, dropout=0.1)
        loss = lambda p, b, k: vla.loss(tree.combine(p, frozen), b, config, key=k, counts=counts)  # noqa: E731
        whole = ft.value_and_grad(loss, has_aux=True)(trained, batch, key)
        return whole, ft.accumulate(loss, 2, has_aux=True, key_argnums=2)(trained, batch, key)

    captured = ft.jit(step)
    arguments = (trained, batch, frozen, ft.random.key(2))
    assert_trees_close(captured(*arguments), step(*arguments), rtol=1e-5, atol=1e-6)
    assert captured.status.state == "captured"


def test_training_lowers_both_losses() -> None:
    tx = ft.optim.adamw(1e-2)
    frozen, trained = tree.partition(vla.init(SMALL, ft.random.key(0)), "vision/**")
    batch = vla.example_batch(SMALL, ft.random.key(1), rows=8)
    actions = torch.tanh(batch["state"][:, None, :2] + torch.linspace(-1, 1, SMALL.horizon)[:, None])  # what the state says
    batch |= {"actions": actions, "action_tokens": vla.discretize(actions, SMALL.bins), "valid": torch.ones_like(batch["valid"])}

    def step(state: ft.TrainState, batch: Batch, frozen: tree.PyTree) -> tuple[ft.TrainState, Any]:
        loss = lambda p: vla.loss(tree.combine(p, frozen), batch, SMALL)  # noqa: E731
        (_, parts), grads = ft.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads, tx), {name: part.value() for name, part in parts.items()}

    state, captured, history = ft.TrainState.create(params=trained, tx=tx), ft.jit(step, donate="state"), []
    for _ in range(100):
        state, parts = captured(state, batch, frozen)
        history.append(parts)
    assert history[-1]["actions"] < 0.1 * history[0]["actions"]
    assert history[-1]["tokens"] < 0.3 * history[0]["tokens"]


def test_init_depends_on_the_key_alone() -> None:
    params = vla.init(SMALL, ft.random.key(1))
    assert_trees_equal(params, vla.init(SMALL, ft.random.key(1)))
    assert not torch.equal(params["state"], vla.init(SMALL, ft.random.key(2))["state"])


def test_classes_are_intervals_of_one_width() -> None:
    middles = (torch.arange(7) + 0.5) / 7 * 2 - 1
    assert_trees_equal(vla.discretize(middles, 7), torch.arange(7))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": 10}, "image=10 must be a positive multiple of patch=4"),
        ({"horizon": 0, "bins": 0}, "positive, not horizon=0, bins=0"),
        ({"token_weight": -1.0}, "not negative, but action_weight=0.7, token_weight=-1.0"),
        ({"vision_heads": 5}, "d_model=12 must be heads=5 times an even number"),
        ({"dropout": 1.0}, r"dropout=1.0 must be in \[0, 1\)"),
    ],
)
def test_sizes_that_do_not_fit_are_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)
