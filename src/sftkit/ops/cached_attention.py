"""Attention of one new position over keys and values in memory of a fixed size: every shape is static, nothing is repeated."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

NAME = "sftkit_cached"


class Filled(NamedTuple):
    """Which keys the new position of each sequence sees."""

    keys: torch.Tensor
    "bool [B, N], False at padding and at what is not written yet"
    at: torch.Tensor
    "int64 [1], where the new position stands in the memory"


def attend_cached(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    *,
    filled: Filled,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it. The query heads of a key head are taken as so many positions that see the same keys.

    Args:
        query: [B, H, 1, D]; key: [B, KV, N, D]; value: [B, KV, N, Dv]; what is not filled must be finite.
        sliding_window: most keys a query sees, itself included. softcap: c in c * tanh(score / c).

    Returns:
        ([B, 1, H, Dv], None)
    """
    batch, heads, _, width = query.shape
    scale = scaling if scaling is not None else width**-0.5
    visible = filled.keys
    if sliding_window is not None:
        visible = visible & (torch.arange(visible.shape[1], device=visible.device) > filled.at - sliding_window)
    mask = visible[:, None, None]
    grouped = query.view(batch, key.shape[1], heads // key.shape[1], width)
    if softcap is None:
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
    else:
        scores = softcap * torch.tanh(grouped.float() @ key.float().transpose(2, 3) * scale / softcap)
        out = scores.masked_fill(~mask, -torch.inf).softmax(-1).to(value.dtype) @ value
    return out.reshape(batch, 1, heads, value.shape[-1]), None
