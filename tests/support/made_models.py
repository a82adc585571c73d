"""Small models of several architectures, and a recorder of a model's forward passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SIZES = {
    "vocab_size": 67,  # not divisible by two, three or four ranks
    "hidden_size": 48,
    "intermediate_size": 66,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,  # its norms have fewer elements than three ranks
    "max_position_embeddings": 128,
}


MOE = {"moe_intermediate_size": 16, "num_experts": 5, "num_experts_per_tok": 2}


MODELS = {
    "llama": partial(LlamaForCausalLM, LlamaConfig(**SIZES)),
    "qwen3": partial(Qwen3ForCausalLM, Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "qwen3_moe": partial(Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, **MOE)),
}


def tiny_gemma2() -> PreTrainedModel:
    """Soft caps of scores and logits, and windows of 5 in every other layer."""
    torch.manual_seed(0)
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            sliding_window=5,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
            initializer_range=0.5,
            attn_implementation="eager",
        )
    ).eval()


def odd_llama(dtype: torch.dtype = torch.float32, device: str = "cpu") -> PreTrainedModel:
    """A vocabulary of 67, not a multiple of what fast matrix products need; answers to different prompts differ."""
    sizes = {"hidden_size": 64, "intermediate_size": 130, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=67, num_key_value_heads=2, head_dim=16, max_position_embeddings=256, **sizes)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5.0)
    return model.to(device, dtype)  # type: ignore[arg-type, return-value]


@contextmanager
def passes(model: PreTrainedModel) -> Iterator[list[tuple[int, int]]]:
    """(rows, positions) of each forward pass within the context."""
    seen: list[tuple[int, int]] = []
    hook = model.model.embed_tokens.register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape)))  # type: ignore[union-attr, arg-type]
    yield seen
    hook.remove()  # type: ignore[union-attr]
