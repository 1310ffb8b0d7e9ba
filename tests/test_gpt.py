"""The GPT equals Llama, is causal, captures as one graph; generation with a cache equals reading everything again."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import functrain as ft
from functrain import tree
from functrain.models import gpt
from functrain.models.generate import draw, generate
from tests.helpers import assert_trees_close, assert_trees_equal

SMALL = gpt.Config(vocab_size=61, context=16, layers=2, d_model=32, heads=4, kv_heads=2, d_ff=48)
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])
CONFIGS = [
    SMALL,
    dataclasses.replace(SMALL, tied=False),
    dataclasses.replace(SMALL, kv_heads=1, rope_base=500.0),
    dataclasses.replace(SMALL, kv_heads=4, norm_eps=1e-2),
]


def make_params(config: gpt.Config, seed: int = 0) -> tree.PyTree:
    """Random params whose norms are not ones, and whose logits are not small."""
    params = tree.map(
        lambda x: x + 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(x.numel())), gpt.init(config, ft.random.key(seed))
    )
    return params


def by_kind(qkv: torch.Tensor, config: gpt.Config) -> list[torch.Tensor]:
    """The weights of queries, keys and values, each [out, D], as torch stores them."""
    group = config.heads // config.kv_heads
    columns = qkv.T.unflatten(0, (config.kv_heads, group + 2, config.head_width))
    return [part.flatten(0, 2) for part in columns.split((group, 1, 1), dim=1)]


def as_llama(params: tree.PyTree, config: gpt.Config) -> LlamaForCausalLM:
    """The same model in Hugging Face's Llama."""
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=config.d_ff,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.context,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_base},
            tie_word_embeddings=config.tied,
        )
    ).eval()
    weights = {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["norm"], "lm_head.weight": gpt.head(params)}
    names = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj", "out": "self_attn.o_proj"}
    for i, block in enumerate(params["blocks"]):
        q, k, v = by_kind(block["qkv"], config)
        own = {name: block[ours].T for ours, name in names.items()}
        own |= {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v}
        own |= {"input_layernorm": block["attention_norm"], "post_attention_layernorm": block["mlp_norm"]}
        weights |= {f"model.layers.{i}.{name}.weight": weight for name, weight in own.items()}
    llama.load_state_dict(weights)
    return llama


@pytest.mark.parametrize("config", CONFIGS, ids=["tied", "untied", "multi-query", "multi-head"])
def test_logits_and_gradients_equal_llamas(config: gpt.Config) -> None:
    params = make_params(config)
    llama = as_llama(params, config)
    logits = llama(TOKENS).logits
    assert logits.std() > 0.5  # or the comparison would say little
    assert_trees_close(gpt.apply(params, TOKENS, config), logits, rtol=1e-5, atol=1e-5)
    targets = TOKENS.roll(-1, 1)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    grads = ft.grad(lambda p: gpt.loss(p, {"tokens": TOKENS, "targets": targets}, config))(params)
    for i, block in enumerate(grads["blocks"]):
        layer = llama.model.layers[i]
        for found, projection in zip(by_kind(block["qkv"], config), "qkv", strict=True):
            assert_trees_close(found, getattr(layer.self_attn, f"{projection}_proj").weight.grad, rtol=1e-5, atol=1e-5)
        assert_trees_close(block["down"], layer.mlp.down_proj.weight.grad.T, rtol=1e-5, atol=1e-5)
        assert_trees_close(block["mlp_norm"], layer.post_attention_layernorm.weight.grad, rtol=1e-5, atol=1e-5)
    assert_trees_close(grads["embed"], llama.model.embed_tokens.weight.grad, rtol=1e-5, atol=1e-5)


def test_a_position_sees_itself_and_those_before_it() -> None:
    params = make_params(SMALL)
    changed = TOKENS.clone()
    changed[:, 5] = 60
    before, after = gpt.apply(params, TOKENS, SMALL), gpt.apply(params, changed, SMALL)
    assert_trees_close(after[:, :5], before[:, :5], atol=1e-6)
    assert (after[:, 5:] - before[:, 5:]).abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("config", CONFIGS)
def test_the_count_of_params_is_the_number_of_their_elements(config: gpt.Config) -> None:
    assert gpt.count(config) == tree.size(gpt.init(config, ft.random.key(0)))


@pytest.mark.parametrize("name", gpt.SIZES)
def test_a_named_size_has_about_as_many_params_as_it_says(name: str) -> None:
    abstract = ft.eval_shape(lambda key: gpt.init(gpt.config(name), key), ft.random.key(0))
    total = sum(
        leaf.shape.numel() if isinstance(leaf.shape, torch.Size) else torch.Size(leaf.shape).numel() for leaf in tree.leaves(abstract)
    )
    assert total == gpt.count(gpt.config(name))
    stated = {"125m": 125e6, "350m": 350e6, "760m": 760e6, "1.3b": 1.3e9}.get(name, total)
    assert 0.8 * stated < total < 1.2 * stated


def test_init_depends_on_the_key_alone_and_has_the_stated_scale() -> None:
    config = gpt.Config(layers=2)
    params = gpt.init(config, ft.random.key(1))
    assert_trees_equal(params, gpt.init(config, ft.random.key(1)))
    assert not torch.equal(params["embed"], gpt.init(config, ft.random.key(2))["embed"])
    block = params["blocks"][0]
    assert block["gate"].std() == pytest.approx(192**-0.5, rel=0.02)
    assert block["down"].std() == pytest.approx((4 * 512) ** -0.5, rel=0.02)
    assert not torch.equal(block["gate"], params["blocks"][1]["gate"])


def test_an_unknown_size_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'tinny'; did you mean 'tiny'\?"):
        gpt.config("tinny")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "positive, not layers=0"),
        ({"heads": 3}, "d_model=32 must be heads=3 times an even number"),
        ({"kv_heads": 3}, "heads=4 must be a multiple of kv_heads=3"),
        ({"dropout": 1.0}, r"dropout=1.0 must be in \[0, 1\)"),
    ],
)
def test_sizes_that_do_not_fit_are_an_error(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


def test_dropout_is_drawn_from_the_key() -> None:
    config = dataclasses.replace(SMALL, dropout=0.2)
    params = make_params(config)
    first, again, other = (gpt.apply(params, TOKENS, config, key=ft.random.key(seed)) for seed in (0, 0, 1))
    assert_trees_equal(first, again)
    assert (first - other).abs().max() > 1e-2
    assert_trees_equal(gpt.apply(params, TOKENS, config), gpt.apply(params, TOKENS, SMALL))


def test_the_loss_is_the_mean_over_targets_that_count() -> None:
    params, targets = make_params(SMALL), TOKENS.roll(-1, 1)
    targets[1, 2:] = -100
    mean = gpt.loss(params, {"tokens": TOKENS, "targets": targets}, SMALL)
    expected = F.cross_entropy(gpt.apply(params, TOKENS, SMALL).flatten(0, 1), targets.flatten())
    assert float(mean.weight) == 10
    assert_trees_close(mean.value(), expected, rtol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_rematerialized_gradients_are_the_same(dropout: float) -> None:
    config = dataclasses.replace(SMALL, dropout=dropout)
    params, batch = make_params(config), {"tokens": TOKENS, "targets": TOKENS.roll(-1, 1)}
    plain, again = (ft.grad(gpt.loss)(params, batch, config, key=ft.random.key(3), remat=remat) for remat in (False, True))
    assert_trees_equal(again, plain)


def test_captured_gradients_equal_eager_ones() -> None:
    params, batch = make_params(SMALL), {"tokens": TOKENS, "targets": TOKENS.roll(-1, 1)}
    step = ft.value_and_grad(lambda p, b: gpt.loss(p, b, SMALL))
    captured = ft.jit(step)
    assert_trees_close(captured(params, batch), step(params, batch), rtol=1e-6, atol=1e-7)
    assert captured.status.state == "captured"


def test_half_precision_params_give_logits_close_to_full_ones() -> None:
    params = gpt.init(SMALL, ft.random.key(0))
    half = gpt.apply(tree.cast(params, torch.bfloat16), TOKENS, SMALL)
    assert half.dtype == torch.bfloat16
    assert_trees_close(half, gpt.apply(params, TOKENS, SMALL), rtol=0.05, atol=0.02)


# ---- generation


def greedy_from_scratch(params: tree.PyTree, prompt: torch.Tensor, config: gpt.Config, tokens: int) -> torch.Tensor:
    text = prompt
    for _ in range(tokens):
        text = torch.cat((text, gpt.apply(params, text, config)[:, -1:].argmax(-1)), dim=1)
    return text[:, prompt.shape[1] :]


@pytest.mark.parametrize("config", CONFIGS, ids=["tied", "untied", "multi-query", "multi-head"])
def test_generation_with_a_cache_equals_reading_everything_again(config: gpt.Config) -> None:
    params = make_params(config)
    found = generate(params, TOKENS[:, :3], config, key=ft.random.key(0), tokens=13, temperature=0.0)
    assert_trees_equal(found, greedy_from_scratch(params, TOKENS[:, :3], config, 13))
    assert len(set(found.flatten().tolist())) > 3


def test_generation_goes_on_when_the_context_is_full() -> None:
    params = make_params(SMALL)
    found = generate(params, TOKENS, SMALL, key=ft.random.key(0), tokens=12, temperature=0.0)
    text = torch.cat((TOKENS, greedy_from_scratch(params, TOKENS, SMALL, 9)), dim=1)  # 17 tokens: one more than were read
    rest = greedy_from_scratch(params, text[:, -8:], SMALL, 3)
    assert_trees_equal(found, torch.cat((text[:, 8:], rest), dim=1))


def test_the_same_key_gives_the_same_continuation() -> None:
    params = make_params(SMALL)
    first, again, other = (generate(params, TOKENS, SMALL, key=ft.random.key(seed), tokens=20) for seed in (0, 0, 1))
    assert_trees_equal(first, again)
    assert not torch.equal(first, other)


def test_draws_follow_temperature_and_top_k() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).expand(4000, 4)
    for temperature, top_k in ((1.0, None), (0.5, None), (2.0, 3), (1.0, 1)):
        drawn = draw(ft.random.key(5), logits, temperature, top_k)
        kept = logits[0] / temperature
        kept[top_k or 4 :] = -torch.inf
        assert_trees_close(torch.bincount(drawn, minlength=4) / 4000, kept.softmax(0), rtol=0, atol=0.03)
    assert draw(ft.random.key(5), logits, 0.0, None).eq(0).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": torch.zeros(1, 0, dtype=torch.int64)}, "at least one token"),
        ({"prompt": torch.tensor([[61]])}, "holds the id 61"),
        ({"temperature": -1.0}, "0 or more, not -1"),
        ({"temperature": float("nan")}, "0 or more, not nan"),
        ({"top_k": 0}, "at least 1, not 0"),
        ({"tokens": -1}, "cannot generate -1"),
    ],
)
def test_wrong_requests_are_errors(changes: dict[str, object], message: str) -> None:
    request = {"prompt": TOKENS, "tokens": 1, "temperature": 1.0, "top_k": None, **changes}
    with pytest.raises(ValueError, match=message):
        generate(make_params(SMALL), request.pop("prompt"), SMALL, key=ft.random.key(0), **request)
