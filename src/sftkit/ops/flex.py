"""Document-isolated causal attention by FlexAttention: which blocks of the mask are not empty, and the call.

`Scores` are the settings by which the products of queries and keys become weights, the same for every backend.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

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


FLEX_BLOCK = 128
BEHIND_ROW = -2
"Document id of positions behind the end of a row, where rows are padded for flex."

BlockTensors = tuple[Tensor, Tensor, Tensor, Tensor]


class Call(NamedTuple):
    """The arguments of a call of FlexAttention, its mask and scores as functions that hold no tensor."""

    query: Tensor
    key: Tensor
    value: Tensor
    block_mask: BlockMask
    visible: Callable[..., Tensor]
    "(batch, head, query index, key index, doc_ids) -> whether the query sees the key"
    capped: Callable[..., Tensor] | None
    "(score and the four indices) -> score; None: scores stay as they are"
    doc_ids: Tensor
    "int32 [B, T]"
    scale: float


_operator: Callable[[Call], Tensor] | None = None
"Called in place of torch's function; None: torch's own."


def attention_as_operator(operator: Callable[[Call], Tensor]) -> AbstractContextManager[None]:
    """Call this function for attention within the context, for tracers other than torch.compile;
    it returns [B, H, T, Dv]."""
    return replaced(sys.modules[__name__], "_operator", operator)


def pad_to_blocks(doc_ids: Tensor) -> Tensor:
    """Pad int [B, T] to whole blocks with positions behind the row."""
    return F.pad(doc_ids, (0, -doc_ids.shape[1] % FLEX_BLOCK), value=BEHIND_ROW)


def blocks_of(doc_ids: Tensor) -> BlockTensors:
    """Return which 128 x 128 blocks of a document mask are not empty, by query block and by key block.

    A query block sees a range of key blocks that ends at its own, from the block where its first document starts.

    Args:
        doc_ids: int [B, T].

    Returns:
        (counts int32 [B, 1, M], indices int32 [B, 1, M, M]) by query block and by key block, M = ceil(T / 128)
    """
    positions = torch.arange(doc_ids.shape[1], device=doc_ids.device)
    new = torch.ones_like(doc_ids, dtype=torch.bool)
    new[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
    starts = torch.where(new, positions, 0).cummax(1).values
    first = starts[:, ::FLEX_BLOCK] // FLEX_BLOCK  # [B, M]
    blocks = torch.arange(first.shape[1], device=doc_ids.device)
    touched = (blocks[None, None, :] >= first[:, :, None]) & (blocks[None, None, :] <= blocks[None, :, None])
    return (*_listed(touched), *_listed(touched.transpose(1, 2)))


def _listed(touched: Tensor) -> tuple[Tensor, Tensor]:
    """Return (counts [B, 1, M], indices [B, 1, M, M] with those of touched blocks first), int32, of bool [B, M, M]."""
    counts = touched.sum(-1, dtype=torch.int32).unsqueeze(1)
    indices = touched.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32).unsqueeze(1)
    return counts, indices.contiguous()


def attend_flex(
    query: Tensor, key: Tensor, value: Tensor, documents: tuple[Tensor, BlockTensors], scores: Scores
) -> Tensor:
    """Attend causally within documents.

    The block mask is built here, from tensors, so that no batch's documents become constants.

    Args:
        query: [B, H, T, D]; key: [B, KV, T, D]; value: [B, KV, T, Dv].
        documents: their ids and blocks, from pad_to_blocks and blocks_of.
        scores: without dropout and bias.

    Returns:
        [B, T, H, Dv]
    """
    doc_ids, blocks = documents
    scale, window, softcap, *_ = scores
    row_length = query.shape[2]
    whole = doc_ids.shape[1]
    if whole > row_length:  # flex's backward pass reads past the end of rows that are not multiples of its blocks
        query, key, value = (F.pad(x, (0, 0, 0, whole - row_length)) for x in (query, key, value))

    # The ids come as an argument: a captured graph has to see them as an input, not as something that a function holds.
    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor, ids: Tensor) -> Tensor:
        same = (i >= j) & (ids[b, i] == ids[b, j])
        return same if window is None else same & (i - j < window)

    def capped(score: Tensor, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    # By hand, not by create_block_mask: that would evaluate the whole mask, and its blocks are known from the starts.
    counts, indices, reverse_counts, reverse_indices = blocks
    block_mask = BlockMask(
        seq_lengths=(whole, whole),
        kv_num_blocks=counts,
        kv_indices=indices,
        full_kv_num_blocks=None,
        full_kv_indices=None,
        q_num_blocks=reverse_counts,
        q_indices=reverse_indices,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(FLEX_BLOCK, FLEX_BLOCK),
        mask_mod=lambda b, h, i, j: visible(b, h, i, j, doc_ids),
    )
    score_mod = None if softcap is None else capped
    if _operator is not None:
        out = _operator(Call(query, key, value, block_mask, visible, score_mod, doc_ids, scale))
    else:
        named: Any = {"scale": scale, "enable_gqa": key.shape[1] < query.shape[1]}
        out = flex_attention(query, key, value, score_mod=score_mod, block_mask=block_mask, **named)
    return out[:, :, :row_length].transpose(1, 2)
