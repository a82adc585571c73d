"""Small examples and models for the tests of the core."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from sftkit.data.types import Examples
from sftkit.runtime import Runtime

VOCAB_SIZE = 64
SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"


def make_examples(lengths: Sequence[int], seed: int = 0, target_share: float = 0.5) -> Examples:
    """Documents that take `lengths` row positions, of random tokens, with at least one target each."""
    rng = np.random.default_rng(seed)
    sizes = np.asarray(lengths) + 1
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    ids = rng.integers(3, VOCAB_SIZE, int(offsets[-1])).astype(np.int32)
    is_target = rng.random(len(ids)) < target_share
    is_target[offsets[:-1]] = False
    is_target[offsets[1:] - 1] = True
    zeros = np.zeros(len(sizes), dtype=np.int64)
    return Examples(ids, is_target, offsets, zeros + 1, zeros.astype(np.int16), ("test",), {})


def tiny_llama(seed: int = 0, layers: int = 2, dropout: float = 0.0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            attention_dropout=dropout,
        )
    )


def tiny_qwen3_with_windows(seed: int = 0) -> PreTrainedModel:
    """Alternating full and sliding-window layers (window 5)."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            use_sliding_window=True,
            sliding_window=5,
            max_window_layers=2,
        )
    )


def cpu_runtime() -> Runtime:
    return Runtime(Accelerator(cpu=True), "fp32")
