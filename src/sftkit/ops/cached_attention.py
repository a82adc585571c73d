"""Attention of one new position over keys and values in memory of a fixed size: every shape is
static, nothing is repeated.

They are those of the text so far, or of what was encoded for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

IMPLEMENTATION = "sftkit_cached"


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
    at: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from one position, as transformers calls it.

    The query heads that share a key head are treated as that number of positions that see the same keys.

    Args:
        query: [B, H, 1, D]; key: [B, KV, N, D]; value: [B, KV, N, Dv]; places not written yet must be finite.
        attention_mask: bool [B, 1, 1, N], False at padding and at places not written yet; None: all is seen.
        sliding_window: most keys a query sees, itself included. softcap: c in c * tanh(score / c).
        at: int64 [1], index of the new position in the memory; read by layers with a sliding window.

    Returns:
        ([B, 1, H, Dv], None)
    """
    batch, heads, _, width = query.shape
    scale = scaling if scaling is not None else width**-0.5
    mask = attention_mask
    if sliding_window:
        assert mask is not None
        assert at is not None
        mask = mask & (torch.arange(key.shape[2], device=key.device) > at - sliding_window)
    # No keys are repeated: a step of decoding is bound by reading them.
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], width)
    if softcap is None:
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
    else:
        scores = softcap * torch.tanh(grouped.float() @ key.float().transpose(2, 3) * scale / softcap)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        out = scores.softmax(-1).to(value.dtype) @ value
    return out.reshape(batch, 1, heads, value.shape[-1]), None
