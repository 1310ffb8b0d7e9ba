"""Small random Hugging Face models, each with a batch and its loss, as users train them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import nn

VOCAB = 61
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TOKENS: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DECODER: dict[str, Any] = {**SIZES, **TOKENS, "num_key_value_heads": 2, "max_position_embeddings": 32, "attention_dropout": 0.1}


class Example(NamedTuple):
    """A model and a batch that its forward takes, labels included."""

    module: nn.Module
    batch: dict[str, torch.Tensor]


def example(name: str, seed: int = 0) -> Example:
    """The model of this name, made anew; in eval mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        make, batch = MODELS[name]
        return Example(make().eval(), batch())


def _words(*shape: int, low: int = 3) -> torch.Tensor:
    return torch.randint(low, VOCAB, shape)


def _decoder_batch() -> dict[str, torch.Tensor]:
    tokens = _words(2, 12)
    return {"input_ids": tokens, "labels": tokens.where(torch.arange(12) > 2, -100)}


def _masked_batch() -> dict[str, torch.Tensor]:
    """The second row ends in padding."""
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, 8:] = 0
    tokens = _words(2, 12).where(mask == 1, 0)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.where(mask == 1, -100)}


def _translation_batch() -> dict[str, torch.Tensor]:
    return {"input_ids": _words(2, 10), "labels": _words(2, 7)}


def _image_batch() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([1, 4])}


def _gpt2() -> nn.Module:
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **TOKENS, loss_type="ForCausalLM"))


def _t5() -> nn.Module:
    sizes: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=VOCAB, pad_token_id=0, eos_token_id=2, **sizes))


def _mixtral() -> nn.Module:
    config = hf.MixtralConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    model = hf.MixtralForCausalLM(config)
    model.set_experts_implementation("batched_mm")  # shapes that do not depend on where tokens go
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, torch.Tensor]]]] = {
    "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)), _decoder_batch),
    "gpt2": (_gpt2, _masked_batch),
    "qwen2": (lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**DECODER, tie_word_embeddings=True)), _decoder_batch),
    "bert": (lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZES, **TOKENS, max_position_embeddings=32)), _masked_batch),
    "t5": (_t5, _translation_batch),
    "vit": (lambda: hf.ViTForImageClassification(hf.ViTConfig(**SIZES, image_size=16, patch_size=4, num_labels=5)), _image_batch),
    "mixtral": (_mixtral, _decoder_batch),
}
