"""Attention that keeps the documents of a row apart: one function registered with transformers, several kernels.

The boundaries travel as `documents`, a keyword argument of every layer, with fixed shapes whatever the documents are.
transformers builds no mask for an attention name that it does not know, so nothing quadratic exists outside the
reference kernel. Attention that is not causal, inside an encoder and from texts to its output, gets its boundaries as
the attention_mask of its layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from sftkit.data.batches.collate import Batch
from sftkit.errors import ConfigError
from sftkit.ops import flex
from sftkit.ops.cross_attention import bidirectional_attention
from sftkit.ops.flash import document_attention
from sftkit.ops.flex import Scores
from sftkit.ops.tensors import gather_rows
from sftkit.runtime.start import replaced

_NAME = "sftkit"
DENSE_KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class Documents(NamedTuple):
    """Where the documents of a batch lie, in the form that its backend needs; fields of other backends are None."""

    backend: str
    max_length: int
    "upper bound of a document's length, the same for every batch of a run"
    cu_seqlens: Tensor | None = None
    "fa4, varlen: int32 [D + 1], where documents start in the flattened B * T positions"
    doc_ids: Tensor | None = None
    "flex: int32 [B, T], T padded to a multiple of 128"
    blocks: flex.BlockTensors | None = None
    "flex: counts [B, 1, T/128] and indices [B, 1, T/128, T/128] of key blocks by query block, and the reverse"
    mask: Tensor | None = None
    "reference: bool [B, 1, C, T], True where a query sees a key; C = T except for chunks of rows"
    group: str | None = None
    "context parallel: name of the group of ranks whose chunks make whole rows"
    chunks: tuple[Tensor, Tensor] | None = None
    "context parallel, fa4, varlen: cu_seqlens_q and cu_seqlens_k of Batch"


def document_boundaries(batch: Batch, backend: str, context_group: str | None = None) -> Documents:
    """Return the boundaries of a batch's documents, the attention mask of a backend, which every layer passes to
    `attend`. No host sync; only the reference backend takes quadratic memory.

    Args:
        backend: one of attention.backend, never auto.
        context_group: with context parallelism, name of the group of ranks whose chunks make whole rows.
    """
    documents = Documents(backend, batch.max_doc_length)
    if batch.columns is not None:
        assert context_group is not None, "batches of chunks need the group of their ranks"
        documents = documents._replace(group=context_group)
    if backend == "reference":
        mask = document_mask(batch.doc_ids)
        return documents._replace(mask=mask if batch.columns is None else mask.index_select(2, batch.columns))
    if backend == "flex":
        doc_ids = flex.pad_to_blocks(batch.doc_ids)
        return documents._replace(doc_ids=doc_ids, blocks=flex.blocks_of(doc_ids))
    if backend == "sdpa":
        return documents
    if batch.cu_seqlens_q is not None and batch.cu_seqlens_k is not None:  # of chunks
        documents = documents._replace(chunks=(batch.cu_seqlens_q, batch.cu_seqlens_k))
    return documents._replace(cu_seqlens=batch.cu_seqlens)


def use_document_attention(orig_model: PreTrainedModel) -> None:
    """Route the model's attention through `attend`.

    Raises:
        ConfigError: the model's code does not take its attention from transformers' registry.
    """
    # The registry is the process's: registered again it is the same function, whatever the model.
    AttentionInterface.register(_NAME, attend)
    _set_implementation(orig_model, _NAME)


@contextmanager
def implementation(orig_model: PreTrainedModel, name: str) -> Iterator[None]:
    """Let the model take its attention by this name from transformers' registry, within the context."""
    # Private: transformers has a public setter (huggingface/transformers#38974), but no public getter.
    before = _attending(orig_model)[0].config._attn_implementation
    _set_implementation(orig_model, name)
    try:
        yield
    finally:
        _set_implementation(orig_model, str(before))


def plain_attention(orig_model: PreTrainedModel) -> AbstractContextManager[None]:
    """Let the model attend as transformers does it, with masks and a cache, within the context:
    for generation and checks."""
    return implementation(orig_model, plain_implementation(orig_model.config))


def plain_implementation(config: PreTrainedConfig) -> str:
    """Return the name of transformers' own attention for this model: sdpa, or eager where sdpa is wrong.

    sdpa leaves a soft cap of the scores out, before transformers 5.23 without a word; and relative positions are
    part of the scores, too.
    """
    text = config.get_text_config()
    return "eager" if getattr(text, "attn_logit_softcapping", None) or relative_positions(config) else "sdpa"


def relative_positions(config: PreTrainedConfig) -> bool:
    """Return whether positions are numbers added to the scores (T5), which kernels that know
    boundaries do not support."""
    return bool(getattr(config.get_text_config(), "relative_attention_num_buckets", None))


def mixes_tokens(orig_model: PreTrainedModel) -> str | None:
    """Return what in the model lets tokens see each other besides attention, which no document
    boundary stops; None: nothing."""
    kinds = set(getattr(orig_model.config.get_text_config(), "layer_types", None) or ())
    odd = kinds - {"full_attention", "sliding_attention"}
    if odd:
        return f"a layer of type {', '.join(sorted(map(str, odd)))}"
    convolutions = [name for name, module in orig_model.named_modules() if isinstance(module, torch.nn.Conv1d)]
    return f"the convolution {convolutions[0]}" if convolutions else None


def _attending(orig_model: PreTrainedModel) -> list[PreTrainedModel]:
    """Return the models with a config of their own that a model consists of: itself, or encoder and decoder
    without what holds them."""
    found: dict[int, PreTrainedModel] = {}
    # Parts are told apart by their configs: a model and the decoder inside it share one, encoder and decoder do not.
    for module in orig_model.modules():
        if isinstance(module, PreTrainedModel):
            found.setdefault(id(module.config), module)
    first, *inner = found.values()
    return inner if orig_model.config.is_encoder_decoder and inner else [first]


def _set_implementation(orig_model: PreTrainedModel, name: str) -> None:
    """Switch all parts of the model to this attention and check that they took it."""
    # Private, as in `implementation` (transformers 5.17).
    for part in _attending(orig_model):
        if part.config._attn_implementation == name:
            continue
        part.set_attn_implementation(name)
        if part.config._attn_implementation != name:
            raise ConfigError(
                f"{type(part).__name__} is not supported: it does not take its attention from transformers' registry"
            )


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    documents: Documents | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers: causal and within documents; for modules that are not causal, as
    their mask says.

    Args:
        query: [B, H, T, D]; key: [B, KV, T, D]; value: [B, KV, T, Dv].
        attention_mask: used only by modules that are not causal: bool [B, 1, 1 or T, keys], or what
            cross_attention.input_boundaries returned.
        scaling: factor of the scores; None: D ** -0.5.
        sliding_window: most keys a query sees, itself included. softcap: c in c * tanh(score / c).
        documents: from document_boundaries; used by causal modules.
        position_bias: [1, H, T, keys], added to the scores: relative positions.

    Returns:
        ([B, T, H, Dv], None)

    Raises:
        RuntimeError: called without documents, as generation does outside `plain_attention`; or with something that the
            backend does not compute.
    """
    # Where boundaries come from decides the kernel: a mask of the layer's own, or the documents of the row.
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    scores = Scores(scale, sliding_window, softcap, dropout, position_bias)
    if not getattr(module, "is_causal", True):
        return bidirectional_attention(query, key, value, attention_mask, scores), None
    if documents is None:
        raise RuntimeError("sftkit's attention needs `documents`; generate inside sftkit.ops.attention.plain_attention")
    # Whatever the backend cannot compute is an error, never silently ignored.
    if kwargs.get("s_aux") is not None:
        raise RuntimeError("attention sinks (s_aux) are not supported")
    if position_bias is not None and documents.mask is None:
        raise RuntimeError(f"attention backend {documents.backend} does not support relative positions")
    if documents.group is not None:
        key, value = gather_rows(key, value, documents.group)
    width = value.shape[-1]
    if width < query.shape[-1]:  # multi-head latent attention: kernels want one head size
        value = F.pad(value, (0, query.shape[-1] - width))
    # Which form of the documents is there says which backend it is; with none of them a row is one document.
    if documents.cu_seqlens is not None:
        if softcap is not None or dropout:
            raise RuntimeError(f"attention backend {documents.backend} does not support soft cap or dropout")
        out = _flash(query, key, value, documents, scores)
    elif documents.blocks is not None:
        assert documents.doc_ids is not None
        out = flex.attend_flex(query, key, value, (documents.doc_ids, documents.blocks), scores)
    elif documents.mask is not None:
        out = _reference(query, key, value, documents.mask, scores)
    else:
        out = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=key.shape[1] < query.shape[1]
        ).transpose(1, 2)
    return out[..., :width], None


def _flash(query: Tensor, key: Tensor, value: Tensor, documents: Documents, scores: Scores) -> Tensor:
    """Return attention by FlashAttention, [B, T, H, D]; the two chunks of a context-parallel
    rank one after the other."""
    cu_seqlens = documents.cu_seqlens
    assert cu_seqlens is not None
    key, value = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (key, value))

    def attended(query: Tensor, starts: Tensor, starts_k: Tensor) -> Tensor:
        rows, _, row_length, _ = query.shape
        query = query.transpose(1, 2).flatten(0, 1).contiguous()
        out, _ = document_attention(
            *(query, key, value, starts, starts_k),
            *(documents.max_length, scores.scale, scores.window or 0, documents.backend),
        )
        return out.unflatten(0, (rows, row_length))

    if documents.chunks is None:
        return attended(query, cu_seqlens, cu_seqlens)
    # The two chunks of a rank lie far apart in the row, so each is a call with boundaries of its own over
    # the whole keys.
    pairs = zip(query.chunk(2, dim=2), *documents.chunks, strict=True)
    return torch.cat([attended(*pair) for pair in pairs], dim=1)


def _reference(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scores: Scores) -> Tensor:
    """Return attention by a dense mask, [B, T, H, D]."""
    scale, window, softcap, dropout, bias = scores
    if window is not None:
        # A query always sees itself, one of padding too, so no row of the mask gets empty.
        positions = torch.arange(mask.shape[-1], device=mask.device)
        mask = mask & (positions[:, None] - positions < window)
    grouped = key.shape[1] < query.shape[1]
    # torch's function has no soft cap, so with one the scores are computed here.
    if softcap is None:
        added = mask if bias is None else bias.masked_fill(~mask, float("-inf"))
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=added, dropout_p=dropout, scale=scale, enable_gqa=grouped
        )
        return out.transpose(1, 2)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    capped = softcap * torch.tanh((query @ key.transpose(2, 3)).float() * scale / softcap)
    weights = capped.masked_fill(~mask, float("-inf")).softmax(-1).to(query.dtype)
    return (F.dropout(weights, dropout) @ value).transpose(1, 2)


def document_mask(doc_ids: Tensor) -> Tensor:
    """Return bool [B, 1, T, T], True where query i may see key j: same document and j <= i.

    Args:
        doc_ids: int [B, T]; padding counts as a document of its own, so no row of the mask is empty.
    """
    row_length = doc_ids.shape[1]
    causal = torch.ones(row_length, row_length, dtype=torch.bool, device=doc_ids.device).tril()
    return (causal & (doc_ids[:, :, None] == doc_ids[:, None, :])).unsqueeze(1)


def kernel_order(backend: str) -> AbstractContextManager[None]:
    """Set the order in which backend sdpa looks for a kernel, within the context: cuDNN's is the fastest on Hopper.
    Other backends have one."""
    return sdpa_kernel(DENSE_KERNELS, set_priority=True) if backend == "sdpa" else nullcontext()


@contextmanager
def short_windows(orig_model: PreTrainedModel) -> Iterator[None]:
    """Make every sliding window of the model three positions long within the context, in its config and
    in its layers."""
    with ExitStack() as stack:
        for owner in (orig_model.config.get_text_config(), *orig_model.modules()):
            size = getattr(owner, "sliding_window", None)
            if type(size) is int and size > 0:
                stack.enter_context(replaced(owner, "sliding_window", 3))
        yield


def windows(config: PreTrainedConfig) -> bool:
    """Return whether any layer of the model has a sliding window."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if kinds is not None:
        return "sliding_attention" in kinds
    return bool(getattr(text, "sliding_window", None))  # some configs say 0 for none
