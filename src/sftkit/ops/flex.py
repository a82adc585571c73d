"""Attention by FlexAttention that keeps documents apart: causal within a row, and from texts to their encoded inputs.

One rule covers packed documents and prefix trees: query q sees key k iff k <= q < ends[k]. The end of a key is the
column behind its document, and in a tree the column behind its subtree, whose positions are its descendants.

`Scores` are the settings by which the products of queries and keys become weights, the same for every backend.

In attention to encoded inputs several texts in a row each see the positions of their own input only. Those boundaries
travel as the mask of the decoder's layers, the one argument that every architecture passes to its cross attention, with
fixed shapes whatever the texts are. A decoding step attends from one position to keys and values in memory of a fixed
size, those of the text so far or of its encoded input: every shape is static, and nothing is repeated.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from sftkit.ops.flash import document_attention
from sftkit.runtime.start import replaced


class Scores(NamedTuple):
    """Settings of the scores. A tuple, so that a compiled block unpacks it."""

    scale: float
    "factor of the products"
    window: int | None = None
    "most keys that a query sees, itself included; None: all"
    softcap: float | None = None
    "c in c * tanh(score / c); None: scores stay as they are"
    dropout: float = 0.0
    "of the weights"
    bias: Tensor | None = None
    "[1, H, T, keys], added: relative positions"
    sinks: Tensor | None = None
    "[H], a score for each head that joins the sum of the weights and has no value; None: weights add up to 1"


FLEX_BLOCK = 128


class BlockLists(NamedTuple):
    """The key blocks that each query block visits, or the query blocks of each key block; M = ceil(T / 128) of each.
    Counts are int32 [B, 1, M], lists int32 [B, 1, M, M]."""

    touched: Tensor
    "number of blocks with a pair that the mask allows"
    partial: Tensor
    "number of these in which the mask hides some pair"
    whole: Tensor
    "number of these in which it hides none"
    listed: Tensor
    "the partial blocks, then the whole ones, then the others"
    whole_listed: Tensor
    "the same list from the first whole block on"


class Call(NamedTuple):
    """The arguments of a call of FlexAttention, its mask and scores as functions that hold no tensor."""

    query: Tensor
    key: Tensor
    value: Tensor
    block_mask: BlockMask
    visible: Callable[..., Tensor]
    "(batch, head, query index, key index, ends, positions) -> whether the query sees the key"
    capped: Callable[..., Tensor] | None
    "(score and the four indices) -> score; None: scores stay as they are"
    boundaries: tuple[Tensor, Tensor]
    "ends and positions, int [B, T]"
    scale: float


_operator: Callable[[Call], tuple[Tensor, Tensor]] | None = None
"Called in place of torch's function; None: torch's own."


def attention_as_operator(operator: Callable[[Call], tuple[Tensor, Tensor]]) -> AbstractContextManager[None]:
    """Call this function for attention within the context, for tracers other than torch.compile;
    it returns [B, H, T, Dv] and the log-sum-exp of the scores, fp32 [B, H, T]."""
    return replaced(sys.modules[__name__], "_operator", operator)


def document_ends(cu_seqlens: Tensor, rows: int, row_length: int) -> Tensor:
    """Return the column behind the document of each position, int32 [B, T]. No host sync.

    Args:
        cu_seqlens: int32 [D + 1], of Batch.
    """
    places = torch.arange(rows * row_length, dtype=torch.int32, device=cu_seqlens.device)
    ends = cu_seqlens[torch.searchsorted(cu_seqlens, places, right=True)].view(rows, row_length)
    return ends - row_length * torch.arange(rows, dtype=torch.int32, device=ends.device)[:, None]


def pad_to_blocks(ends: Tensor) -> Tensor:
    """Pad int [B, T] to whole blocks with positions behind the row, which see one another."""
    missing = -ends.shape[1] % FLEX_BLOCK
    return F.pad(ends, (0, missing), value=ends.shape[1] + missing)


def blocks_of(ends: Tensor) -> tuple[BlockLists, BlockLists]:
    """Return the blocks of a mask from the ends of its keys: (by query block, by key block). No T x T mask is made, and
    no host sync.

    A block below the diagonal is touched if any of its keys ends behind its first query, and whole if all its keys end
    behind its last one.

    Args:
        ends: int [B, T], T a multiple of 128.
    """
    of_blocks = ends.unflatten(1, (-1, FLEX_BLOCK))
    block = torch.arange(of_blocks.shape[1], device=ends.device)
    below = block[:, None] > block
    first = FLEX_BLOCK * block[:, None]
    touched = (below & (of_blocks.amax(2)[:, None] > first)) | (block[:, None] == block)
    whole = below & (of_blocks.amin(2)[:, None] >= first + FLEX_BLOCK)
    return _listed(touched, whole), _listed(touched.transpose(1, 2), whole.transpose(1, 2))


def _listed(touched: Tensor, whole: Tensor) -> BlockLists:
    """Return the blocks of bool [B, M, M]."""
    counts = touched.sum(-1, dtype=torch.int32)
    whole_count = whole.sum(-1, dtype=torch.int32)
    partial = counts - whole_count
    order = (2 - 2 * touched.to(torch.int8) + whole).argsort(dim=-1, stable=True)
    # Past its end the list begins again: nobody reads that far.
    at = torch.arange(order.shape[-1], device=order.device) + partial[..., None]
    lists = (order, order.gather(-1, at % order.shape[-1]))
    return BlockLists(
        *(one.unsqueeze(1) for one in (counts, partial, whole_count)),
        *(one.to(torch.int32).unsqueeze(1).contiguous() for one in lists),
    )


def attend_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    blocks: tuple[BlockLists, BlockLists],
    positions: Tensor,
    scores: Scores,
) -> Tensor:
    """Attend causally within documents, or to ancestors in trees.

    The block mask is built here, from tensors, so that no batch's documents become constants.

    Args:
        query: [B, H, T, D]; key: [B, KV, T, D]; value: [B, KV, T, Dv].
        ends, blocks: from pad_to_blocks and blocks_of.
        positions: int [B, T], in documents: a window counts by them.
        scores: without dropout and bias.

    Returns:
        [B, T, H, Dv]
    """
    scale, window, softcap, *_, sinks = scores
    row_length = query.shape[2]
    whole = ends.shape[1]
    if whole > row_length:  # flex's backward pass reads past the end of rows that are not multiples of its blocks
        query, key, value = (F.pad(x, (0, 0, 0, whole - row_length)) for x in (query, key, value))
        positions = F.pad(positions, (0, whole - row_length))

    # The tensors come as arguments: a captured graph has to see them as inputs, not as something that a function holds.
    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor, ends: Tensor, positions: Tensor) -> Tensor:
        seen = (i >= j) & (i < ends[b, j])
        return seen if window is None else seen & (positions[b, i] - positions[b, j] < window)

    def capped(score: Tensor, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    # By hand, not by create_block_mask: that would evaluate the whole mask, and its blocks are known from the ends.
    # With a window no block is known to be whole, so all touched ones count as partial.
    fields: dict[str, Any] = {}
    for side, found in zip(("kv", "q"), blocks, strict=True):
        split = window is None
        fields[f"{side}_num_blocks"] = found.partial if split else found.touched
        fields[f"{side}_indices"] = found.listed
        fields[f"full_{side}_num_blocks"] = found.whole if split else None
        fields[f"full_{side}_indices"] = found.whole_listed if split else None
    block_mask = BlockMask(
        seq_lengths=(whole, whole),
        BLOCK_SIZE=(FLEX_BLOCK, FLEX_BLOCK),
        mask_mod=lambda b, h, i, j: visible(b, h, i, j, ends, positions),
        **fields,
    )
    score_mod = None if softcap is None else capped
    if _operator is not None:
        out, lse = _operator(Call(query, key, value, block_mask, visible, score_mod, (ends, positions), scale))
    else:
        named: Any = {"scale": scale, "enable_gqa": key.shape[1] < query.shape[1], "block_mask": block_mask}
        # Asked for only where it is read: a CPU cannot return it from compiled code.
        wanted = AuxRequest(lse=sinks is not None)
        out, (lse, _) = flex_attention(query, key, value, score_mod=score_mod, return_aux=wanted, **named)
    if sinks is not None:
        out = (out * (lse - sinks[:, None]).sigmoid()[..., None]).to(out.dtype)
    return out[:, :, :row_length].transpose(1, 2)


def weights_of(query: Tensor, key: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """Return the weights of keys, [B, H, T, keys] in fp32 or fp64, from all scores in memory, without window and
    dropout.

    Args:
        query: [B, H, T, D]. key: [B, H, keys, D]. mask: bool, False at keys that are not seen; None: all are.
        scores: sinks of [1, H, T], or [H].
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    found = query.to(dtype) @ key.to(dtype).transpose(2, 3) * scores.scale
    if scores.softcap is not None:
        found = scores.softcap * torch.tanh(found / scores.softcap)
    if mask is not None:
        found = found.masked_fill(~mask, -torch.inf)
    if scores.sinks is None:
        return found.softmax(-1)
    sinks = scores.sinks if scores.sinks.ndim > 1 else scores.sinks[None, :, None]
    column = sinks.to(dtype)[..., None].expand(*found.shape[:-1], 1)
    return torch.cat([found, column], -1).softmax(-1)[..., :-1]


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
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend from one position, as transformers calls it.

    The query heads that share a key head are treated as that number of positions that see the same keys.

    Args:
        query: [B, H, 1, D]; key: [B, KV, N, D]; value: [B, KV, N, Dv]; places not written yet must be finite.
        attention_mask: bool [B, 1, 1, N], False at padding and at places not written yet; None: all is seen.
        sliding_window: most keys a query sees, itself included. softcap: c in c * tanh(score / c).
        at: int64 [1], index of the new position in the memory; read by layers with a sliding window.
        s_aux: [H], sinks (Scores).

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
    if softcap is None and s_aux is None:
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
    else:
        sinks = None if s_aux is None else s_aux.view(1, *grouped.shape[1:3])
        out = weights_of(grouped, key, mask, Scores(scale, softcap=softcap, sinks=sinks)).to(value.dtype) @ value
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
