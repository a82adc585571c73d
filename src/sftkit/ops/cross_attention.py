"""Attention that is not causal within a row: from texts to their encoded inputs, and from one new position.

Several texts in a row each see the positions of their own input only. Those boundaries travel as the mask of the
decoder's layers, the one argument that every architecture passes to its cross attention, with fixed shapes whatever the
texts are. A decoding step attends from one position to keys and values in memory of a fixed size, those of the text so
far or of its encoded input: every shape is static, and nothing is repeated.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sftkit.ops.flash import document_attention
from sftkit.ops.flex import Scores

IMPLEMENTATION = "sftkit_cached"


def attend_cached(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    at: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
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


BOUNDED = ("fa4", "varlen")
"Backends that know boundaries: torch's varlen kernel serves both here, as cross attention is a small part of a step."


def input_boundaries(
    doc_ids: Tensor, inputs: int, length: int, backend: str, visible: Tensor | None = None
) -> Tensor | None:
    """Return where each position of a row finds the encoded input of its own document. No host sync.

    It is passed as the mask that the layers of a decoder give to attention; transformers passes a mask of four
    dimensions on as it is.

    Args:
        doc_ids: int [B, T], number of the document in its row; padding, -1, sees the input of the document before it.
        inputs: K, inputs of a row; the k-th is that of its k-th document. length: S, positions of an encoded input.
        backend: of attention.
        visible: bool [B, K S], False for positions of an input that are padding; None: none are.

    Returns:
        None: rows have one input each, all of it seen. For kernels that know boundaries int32 [1, 1, 1, B K + 1], where
        the queries of each input start in the B T positions; else bool [B, 1, T, K S], True where a query sees a key.
    """
    if inputs == 1 and visible is None:
        return None
    # Padding sees some input, too, since a softmax over nothing is NaN; nobody reads its result.
    own = doc_ids.cummax(1).values.clamp(min=0)
    rows, row_length = own.shape
    numbers = torch.arange(inputs, device=own.device)
    if visible is None and backend in BOUNDED:
        # A place without a document has no queries: its start is the next one's.
        before = (own[:, None, :] < numbers[None, :, None]).sum(-1)  # [B, K]
        starts = before + row_length * torch.arange(rows, device=own.device)[:, None]
        return F.pad(starts.flatten(), (0, 1), value=rows * row_length).to(torch.int32)[None, None, None]
    mask = own[:, :, None] == numbers.repeat_interleave(length)[None, None, :]
    return (mask if visible is None else mask & visible[:, None, :]).unsqueeze(1)


def bidirectional_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """Return attention without an order, [B, T, H, D]: within an input, or from a text to its encoded input.

    Args:
        query: [B, H, T, D]; key, value: [B, KV, keys, D].
        mask: bool [B, 1, 1 or T, keys], or what input_boundaries returned; None: all is seen.
        scores: a window or soft cap is not computed.
    """
    if mask is not None and mask.dtype == torch.int32:
        # Each query sees all positions of one encoded input, all of one length; the mask is where their queries start.
        rows, _, row_length, _ = query.shape
        query, key, value = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (query, key, value))
        starts = mask.flatten()
        length = len(key) // (len(starts) - 1)
        starts_k = length * torch.arange(len(starts), dtype=torch.int32, device=key.device)
        sizes = (max(row_length, length), scores.scale, 0, "varlen")
        out, _ = document_attention(query, key, value, starts, starts_k, *sizes, causal=False)
        return out.unflatten(0, (rows, row_length))
    bias = scores.bias
    if bias is not None:
        mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
    grouped = key.shape[1] < query.shape[1]
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=scores.dropout, scale=scores.scale, enable_gqa=grouped
    )
    return out.transpose(1, 2)
