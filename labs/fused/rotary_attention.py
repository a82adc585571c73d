"""Attention modules that leave norms and rotary embedding of queries and keys to one operator (rotary.py).

Modules of known classes get another class in front of their own. Whatever the operator does not compute, such as an
answer with a cache or another attention backend, their own forward pass does.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from labs.fused.rotary import rotary_attention
from sftkit.models.token_rows import in_front
from sftkit.ops.attention import Documents
from sftkit.ops.flash import MAX_REPEATS

ROTARY_CLASSES = ("LlamaAttention", "Qwen2Attention", "Qwen3Attention", "Qwen3MoeAttention")
"Classes of transformers whose forward pass is computed here; the last two normalize the heads of queries and keys."
HEAD_SIZES = (32, 64, 128, 256)
"Those that the kernels take."


def use_rotary_operator(orig_model: PreTrainedModel) -> None:
    """Put `RotaryAttention` in front of the attention modules that are known."""
    for module in orig_model.modules():
        # Not by name alone: a class in front of transformers' own, such as one for adapters, would be passed by.
        own: Any = type(module)
        if own.__name__ in ROTARY_CLASSES and own.__module__.startswith("transformers."):
            module.__class__ = in_front(RotaryAttention, own)


class RotaryAttention(torch.nn.Module):
    """An attention module of transformers in packed rows, with one pass over queries and keys in each direction."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute what the module's own forward pass does."""
        documents: Documents | None = kwargs.get("documents")
        own: Any = self
        weights = (own.q_norm.weight, own.k_norm.weight) if hasattr(self, "q_norm") else (None, None)
        cos, sin = position_embeddings
        if (
            documents is None
            or documents.backend not in MAX_REPEATS
            or documents.chunks is not None
            or past_key_values is not None
            or not own.is_causal
            or (self.training and own.attention_dropout)
            or cos.shape[-1] != own.head_dim
            or own.head_dim not in HEAD_SIZES
            or any(isinstance(weight, DTensor) for weight in weights)
        ):
            given = {"attention_mask": attention_mask, "past_key_values": past_key_values, **kwargs}
            found: tuple[Tensor, Tensor | None] = super().forward(hidden_states, position_embeddings, **given)
            return found
        rows = hidden_states.shape[:-1]
        layers = (own.q_proj, own.k_proj, own.v_proj)
        query, key, value = (layer(hidden_states).view(rows.numel(), -1, own.head_dim) for layer in layers)
        angles = (x.expand(*rows, -1).flatten(0, 1) for x in (cos, sin))
        eps = own.q_norm.variance_epsilon if hasattr(self, "q_norm") else 0.0
        window = getattr(self, "sliding_window", None) or 0
        sizes = (documents.max_length, own.scaling, window, documents.backend)
        out, *_ = rotary_attention(query, key, value, *weights, *angles, eps, documents.cu_seqlens, *sizes)
        return own.o_proj(out.view(*rows, -1)), None
