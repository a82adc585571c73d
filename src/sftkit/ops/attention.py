"""Attention that keeps the documents of a row apart: one function registered with transformers, one table of backends.

The boundaries travel as `documents`, a keyword argument of every layer, with fixed shapes whatever the documents are.
transformers builds no mask for an attention name that it does not know, so nothing quadratic exists outside the
reference backend. Attention that is not causal, inside an encoder and from texts to its output, gets its boundaries as
the attention_mask of its layers (ops.cross_attention).

A backend is an entry of BACKENDS: what it needs to know of documents, how it computes, and what it cannot serve. A run
takes the backend that the recipe names, or with auto the fastest that can serve it.
"""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from sftkit.data.batches.collate import Batch
from sftkit.data.batches.pack import Layout
from sftkit.errors import ConfigError, config_error
from sftkit.ops import flash, flex, tensors
from sftkit.ops.flex import Scores, bidirectional_attention
from sftkit.rundir.files import read_object, replace_shared
from sftkit.runtime.hardware import user_cache
from sftkit.runtime.start import Runtime, replaced

log = logging.getLogger(__name__)

_NAME = "sftkit"
DENSE_KERNELS = [
    getattr(SDPBackend, name) for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
]
CHUNKED = "chunked_attention"
"Type of a layer whose queries see their own chunk of the document (Llama 4)."
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
"Fields of configs with the dropout of attention weights."
SINKS = "sinks"
"Name that architectures give the parameter with the sinks of a layer's heads (ops.flex.Scores)."


class Documents(NamedTuple):
    """Where the documents of a batch lie, in the form that its backend needs; fields of other backends are None."""

    backend: str
    max_length: int
    "upper bound of a document's length, the same for every batch of a run"
    positions: Tensor | None = None
    "int64 [B, T], distance of each position from the first of its document"
    cu_seqlens: Tensor | None = None
    "fa4, varlen, recurrent layers: int32 [D + 1], where documents start in the flattened B * T positions"
    ends: Tensor | None = None
    "flex: int32 [B, T], T padded to a multiple of 128: a key is seen up to the column before its end"
    blocks: tuple[flex.BlockLists, flex.BlockLists] | None = None
    "flex: by query block and by key block"
    mask: Tensor | None = None
    "reference: bool [B, 1, C, T], True where a query sees a key; C = T except for chunks of rows"
    columns: Tensor | None = None
    "reference, of chunks of rows: int64 [C], where the queries lie in their rows"
    group: str | None = None
    "context parallel: name of the group of ranks whose chunks make whole rows"
    chunks: tuple[Tensor, Tensor] | None = None
    "context parallel, fa4, varlen: cu_seqlens_q and cu_seqlens_k of Batch"
    pieces: Any = None
    "Documents: what layers of chunked attention see, where every chunk of a document is one of its own; None: the same"


def document_boundaries(
    batch: Batch, backend: str, context_group: str | None = None, chunk: int | None = None
) -> Documents:
    """Return the boundaries of a batch's documents, the attention mask of a backend, which every layer passes to
    `attend`. No host sync; only the reference backend takes quadratic memory.

    Args:
        backend: one of attention.backend, never auto.
        context_group: with context parallelism, name of the group of ranks whose chunks make whole rows.
        chunk: positions of a document that layers of chunked attention see together (attention_chunk).
    """
    assert batch.columns is None or context_group is not None, "batches of chunks need the group of their ranks"
    group = None if batch.columns is None else context_group
    pieces = None
    trees = batch.tree_ends is not None
    assert not trees or BACKENDS[backend].trees, f"attention backend {backend} has no rows of trees"
    if chunk is not None and chunk < batch.max_doc_length:
        assert group is None, "structure.check_rope rejects chunks of documents in chunks of rows"
        assert not trees, "hybrids.check_trees rejects chunks of documents in rows of trees"
        pieces = document_boundaries(_cut(batch, chunk), backend)
    found = {"positions": batch.inputs["position_ids"], "cu_seqlens": batch.cu_seqlens, "pieces": pieces}
    return Documents(backend, batch.max_doc_length, group=group, **found | BACKENDS[backend].boundaries(batch))


def _cut(batch: Batch, chunk: int) -> Batch:
    """Return a batch in which each chunk of a document, counted from its first position, is a document. No host sync:
    a chunk that begins inside a document follows a full one, so there are at most B T / chunk of these.
    """
    rows, row_length = batch.doc_ids.shape
    first = torch.ones_like(batch.doc_ids, dtype=torch.bool)
    first[:, 1:] = batch.doc_ids[:, 1:] != batch.doc_ids[:, :-1]
    columns = torch.arange(row_length, device=first.device)
    starts = (columns - torch.where(first, columns, 0).cummax(1).values) % chunk == 0
    number = starts.flatten().cumsum(0) - 1
    size = rows * row_length
    slots = len(batch.cu_seqlens) + size // chunk
    cu_seqlens = torch.full((slots,), size, dtype=torch.int32, device=first.device)
    places = torch.arange(size, dtype=torch.int32, device=first.device)
    cu_seqlens = cu_seqlens.scatter_reduce(0, number, places, "amin")
    doc_ids = number.view(rows, row_length).to(torch.int32)
    return replace(batch, doc_ids=doc_ids, cu_seqlens=cu_seqlens, max_doc_length=chunk)


def attention_chunk(config: PreTrainedConfig | None) -> int | None:
    """Return the positions of a document that a layer of chunked attention sees together; None: no layer is so."""
    text: Any = None if config is None else config.get_text_config()
    return text.attention_chunk_size if CHUNKED in (getattr(text, "layer_types", None) or ()) else None


def use_document_attention(orig_model: PreTrainedModel) -> None:
    """Route the model's attention through `attend`.

    Raises:
        ConfigError: the model's code does not take its attention from transformers' registry, or gives it no window.
    """
    if type(orig_model).__name__ == "PhimoeForCausalLM" and orig_model.config.sliding_window:
        raise config_error("window in the mask alone", window=orig_model.config.sliding_window)
    # The registry is the process's: registered again it is the same function, whatever the model.
    AttentionInterface.register(_NAME, attend)
    _set_implementation(orig_model, _NAME)
    for module in orig_model.modules():
        kinds = getattr(getattr(module, "config", None), "layer_types", None) or ()
        at = getattr(module, "layer_idx", None)
        # A mark, not the index, which compiled code would read as another constant for each layer.
        if CHUNKED in kinds and at is not None and kinds[at] == CHUNKED:
            module.sftkit_chunked = True  # type: ignore[assignment]


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
    """Return the name of transformers' own attention for this model: sdpa, or eager where sdpa is wrong or missing.

    sdpa leaves a soft cap of the scores out, before transformers 5.23 without a word; relative positions are part of
    the scores, too; and it has no sinks.
    """
    text = config.get_text_config()
    if getattr(text, "attn_logit_softcapping", None) or relative_positions(config):
        return "eager"
    known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
    # Private: transformers has no public name for what an architecture supports (huggingface/transformers#38974).
    return "sdpa" if getattr(known, "_supports_sdpa", True) else "eager"


def has_sinks(orig_model: PreTrainedModel) -> bool:
    """Return whether any layer has sinks: scores that join the sum of the weights and have no value."""
    return any(name.rpartition(".")[2] == SINKS for name, _ in orig_model.named_parameters())


def relative_positions(config: PreTrainedConfig) -> bool:
    """Return whether positions are numbers added to the scores (T5), which kernels that know
    boundaries do not support."""
    return bool(getattr(config.get_text_config(), "relative_attention_num_buckets", None))


def _attending(orig_model: PreTrainedModel) -> list[PreTrainedModel]:
    """Return the models with a config of their own that a model consists of: itself, or encoder and decoder
    without what holds them."""
    found: dict[int, PreTrainedModel] = {}
    # Configs identify the parts: a model and the decoder inside it share one, encoder and decoder do not.
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
            raise config_error("attention outside the registry", name=type(part).__name__)


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
    s_aux: Tensor | None = None,
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
        position_bias: [1, H, T, keys], added to the scores: relative positions. s_aux: [H], sinks (has_sinks).

    Returns:
        ([B, T, H, Dv], None)

    Raises:
        RuntimeError: called without documents, as generation does outside `plain_attention`; or with something that the
            backend does not compute.
    """
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    scores = Scores(scale, sliding_window, softcap, dropout, position_bias, s_aux)
    if not getattr(module, "is_causal", True):
        if s_aux is not None:
            raise RuntimeError("attention that is not causal does not support sinks (s_aux)")
        return bidirectional_attention(query, key, value, attention_mask, scores), None
    if documents is None:
        raise RuntimeError("sftkit's attention needs `documents`; generate inside sftkit.ops.attention.plain_attention")
    if documents.pieces is not None and getattr(module, "sftkit_chunked", False):
        documents = documents.pieces
    # Whatever the backend cannot compute is an error, never silently ignored.
    if attention_mask is not None:
        raise RuntimeError("its layers add numbers of their own to the scores, through the attention mask")
    if s_aux is not None and not BACKENDS[documents.backend].sinks:
        raise RuntimeError(f"attention backend {documents.backend} does not support sinks (s_aux)")
    if position_bias is not None and not BACKENDS[documents.backend].relative_positions:
        raise RuntimeError(f"attention backend {documents.backend} does not support relative positions")
    if documents.group is not None:
        key, value = tensors.gather_rows(key, value, documents.group)
    width = value.shape[-1]
    if width < query.shape[-1]:  # multi-head latent attention: kernels want one head size
        value = F.pad(value, (0, query.shape[-1] - width))
    out = BACKENDS[documents.backend].attend(query, key, value, documents, scores)
    return out[..., :width], None


class Backend(NamedTuple):
    """An attention backend."""

    boundaries: Callable[[Batch], dict[str, Any]]
    "fields of Documents that it needs, of a batch"
    attend: Callable[[Tensor, Tensor, Tensor, Documents, Scores], Tensor]
    "query [B, H, T, D], key and value [B, KV, T, D] -> [B, T, H, D]"
    unsupported_reason: Callable[..., str | None]
    "(model, layout, device, compiled=, captured=) -> why it cannot serve a run, besides what the fields below say"
    timed: bool = False
    "whether it is among the fast ones, which auto compares by measuring them"
    eager: bool = True
    "whether it is differentiable without a compiler"
    in_chunks: bool = True
    "whether it attends from chunks of rows (context parallelism)"
    trees: bool = False
    "whether it attends in rows of prefix trees"
    dropout: bool = False
    relative_positions: bool = False
    sinks: bool = True


def _flash_boundaries(batch: Batch) -> dict[str, Any]:
    chunked = batch.cu_seqlens_q is not None and batch.cu_seqlens_k is not None
    chunks = (batch.cu_seqlens_q, batch.cu_seqlens_k) if chunked else None
    return {"chunks": chunks}


def _flash(query: Tensor, key: Tensor, value: Tensor, documents: Documents, scores: Scores) -> Tensor:
    """Return attention by FlashAttention, [B, T, H, D]; the two chunks of a context-parallel
    rank one after the other."""
    cu_seqlens = documents.cu_seqlens
    assert cu_seqlens is not None
    if scores.softcap is not None or scores.dropout:
        raise RuntimeError(f"attention backend {documents.backend} does not support soft cap or dropout")
    key, value = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (key, value))

    def attended(query: Tensor, starts: Tensor, starts_k: Tensor) -> Tensor:
        rows, _, row_length, _ = query.shape
        query = query.transpose(1, 2).flatten(0, 1).contiguous()
        out, _ = flash.document_attention(
            *(query, key, value, starts, starts_k),
            *(documents.max_length, scores.scale, scores.window or 0, documents.backend),
            sinks=scores.sinks,
        )
        return out.unflatten(0, (rows, row_length))

    if documents.chunks is None:
        return attended(query, cu_seqlens, cu_seqlens)
    # The two chunks of a rank lie far apart in the row, so each is a call with boundaries of its own over
    # the whole keys.
    pairs = zip(query.chunk(2, dim=2), *documents.chunks, strict=True)
    return torch.cat([attended(*pair) for pair in pairs], dim=1)


def _flash_unsupported(
    kernel: str, orig_model: PreTrainedModel, layout: Layout, device: torch.device, **_: bool
) -> str | None:
    if getattr(orig_model.config.get_text_config(), "attn_logit_softcapping", None):
        return "has no soft cap of the scores, which this model needs"
    if problem := flash.kernel_unsupported_reason(kernel, device, orig_model.dtype):
        return problem
    head_dim = head_sizes(orig_model)[0]
    fits = head_dim in (64, 96, 128) if kernel == "fa4" else head_dim % 8 == 0 and head_dim <= 256
    return None if fits else f"has no kernel for heads of {head_dim}"


def _ends(batch: Batch) -> Tensor:
    """Return the column up to which each key is seen, int32 [B, T]."""
    if batch.tree_ends is not None:
        return batch.tree_ends
    return flex.document_ends(batch.cu_seqlens, *batch.doc_ids.shape)


def _flex_boundaries(batch: Batch) -> dict[str, Any]:
    ends = flex.pad_to_blocks(_ends(batch))
    return {"ends": ends, "blocks": flex.blocks_of(ends)}


def _flex(query: Tensor, key: Tensor, value: Tensor, documents: Documents, scores: Scores) -> Tensor:
    assert documents.ends is not None
    assert documents.blocks is not None
    assert documents.positions is not None
    return flex.attend_flex(query, key, value, documents.ends, documents.blocks, documents.positions, scores)


def _flex_unsupported(
    orig_model: PreTrainedModel, layout: Layout, device: torch.device, *, compiled: bool, captured: bool
) -> str | None:
    if device.type != "cuda" and not captured:
        return f"has no backward pass on {device.type}"
    if device.type == "cuda" and head_sizes(orig_model)[0] < 16:
        return "has no kernel for heads of less than 16"
    if layout.dynamic and layout.pad_multiple % flex.FLEX_BLOCK:
        return f"wants rows of whole blocks: set data.pad_multiple to a multiple of {flex.FLEX_BLOCK}"
    return None if compiled else "needs compile.enabled: without it, it is quadratic in memory"


def _sdpa(query: Tensor, key: Tensor, value: Tensor, documents: Documents, scores: Scores) -> Tensor:
    """Return attention where a row is one document, [B, T, H, D]."""
    grouped = key.shape[1] < query.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, dropout_p=scores.dropout, is_causal=True, scale=scores.scale, enable_gqa=grouped
    ).transpose(1, 2)


def _sdpa_unsupported(orig_model: PreTrainedModel, layout: Layout, *_: Any, **__: bool) -> str | None:
    if layout.kind == "packed":
        return "sees one document per row, and rows are packed"
    softcap = getattr(orig_model.config.get_text_config(), "attn_logit_softcapping", None)
    return "has no sliding window or soft cap" if windows(orig_model.config) or softcap else None


def _reference_boundaries(batch: Batch) -> dict[str, Any]:
    mask = dense_mask(_ends(batch))
    if batch.columns is None:
        return {"mask": mask}
    return {"mask": mask.index_select(2, batch.columns), "columns": batch.columns}


def _reference(query: Tensor, key: Tensor, value: Tensor, documents: Documents, scores: Scores) -> Tensor:
    """Return attention by a dense mask, [B, T, H, D]."""
    scale, window, softcap, dropout, bias, sinks = scores
    mask = documents.mask
    assert mask is not None
    if window is not None:
        # Within a document positions differ as columns do, and chunks of rows have the positions of their own columns
        # only. A query always sees itself, one of padding too, so no row of the mask gets empty.
        positions = queries = documents.positions
        if documents.columns is not None:
            positions = torch.arange(mask.shape[-1], device=mask.device)[None]
            queries = documents.columns[None]
        assert positions is not None
        assert queries is not None
        mask = mask & (queries[:, None, :, None] - positions[:, None, None] < window)
    grouped = key.shape[1] < query.shape[1]
    # torch's function has no soft cap and no sinks, so with one of them the scores are computed here.
    if softcap is None and sinks is None:
        added = mask if bias is None else bias.masked_fill(~mask, float("-inf"))
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=added, dropout_p=dropout, scale=scale, enable_gqa=grouped
        )
        return out.transpose(1, 2)
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, 1)
    value = value.repeat_interleave(groups, 1)
    weights = flex.weights_of(query, key, mask, scores).to(query.dtype)
    return (F.dropout(weights, dropout) @ value).transpose(1, 2)


def dense_mask(ends: Tensor) -> Tensor:
    """Return bool [B, 1, T, T], True where query i sees key j: j <= i < ends[j]. Every query sees itself.

    Args:
        ends: int [B, T], the column behind each key's document, in a tree behind its subtree.
    """
    columns = torch.arange(ends.shape[1], device=ends.device)
    return ((columns <= columns[:, None]) & (columns[:, None] < ends[:, None, :])).unsqueeze(1)


BACKENDS = {
    "fa4": Backend(_flash_boundaries, _flash, partial(_flash_unsupported, "fa4"), timed=True),
    "varlen": Backend(_flash_boundaries, _flash, partial(_flash_unsupported, "varlen"), timed=True),
    "sdpa": Backend(lambda _: {}, _sdpa, _sdpa_unsupported, timed=True, in_chunks=False, dropout=True, sinks=False),
    "flex": Backend(_flex_boundaries, _flex, _flex_unsupported, eager=False, in_chunks=False, trees=True),
    "reference": Backend(
        _reference_boundaries, _reference, lambda *_, **__: None, trees=True, dropout=True, relative_positions=True
    ),
}
"By attention.backend. auto tries those that are timed first; one that does not support what a model has is rejected."


def kernel_order(backend: str) -> AbstractContextManager[None]:
    """Set the order in which backend sdpa looks for a kernel, within the context: cuDNN's is the fastest on Hopper.
    Other backends have one."""
    return sdpa_kernel(DENSE_KERNELS, set_priority=True) if backend == "sdpa" else nullcontext()


@contextmanager
def short_windows(orig_model: PreTrainedModel) -> Iterator[None]:
    """Make every sliding window and attention chunk of the model three positions long within the context, in its config
    and in its layers, and likewise the positions between two temperatures (models.structure)."""
    with ExitStack() as stack:
        for owner in (orig_model.config.get_text_config(), *orig_model.modules()):
            for name in ("sliding_window", "attention_chunk_size", "floor_scale"):
                size = getattr(owner, name, None)
                if type(size) is int and size > 0:
                    stack.enter_context(replaced(owner, name, 3))
        yield


def windows(config: PreTrainedConfig) -> bool:
    """Return whether any layer of the model has a sliding window or sees chunks."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if kinds is not None:
        return "sliding_attention" in kinds or CHUNKED in kinds
    return bool(getattr(text, "sliding_window", None))  # some configs say 0 for none


class AttentionChoice(NamedTuple):
    """An attention backend and the reason for it."""

    backend: str
    reason: str


def choose_backend(
    named: str, orig_model: PreTrainedModel, layout: Layout, rt: Runtime, *, compiled: bool, captured: bool = False
) -> AttentionChoice:
    """Choose the attention backend of training and validation, on the main rank for all, and print which and why.

    Args:
        named: attention.backend of the recipe.
        compiled: whether the blocks are compiled; flex only exists as generated code.
        captured: flex is an operator of a captured graph, which a CPU can compute too, with all scores in memory;
            counts where a backend is named.

    Raises:
        ConfigError: the backend that the recipe names does not run here or cannot compute this model or layout.
    """
    given = {"compiled": compiled, "in_chunks": rt.topology.context > 1}
    if named == "auto":
        choice = AttentionChoice(*rt.from_main(lambda: fastest(orig_model, layout, rt.device, **given)))
    else:
        if problem := unsupported_reason(named, orig_model, layout, rt.device, captured=captured, **given):
            raise ConfigError(f"attention.backend: {named} {problem}; take another one, or auto")
        choice = AttentionChoice(named, "named by the recipe")
    rt.print(f"attention {choice.backend}: {choice.reason}")
    return choice


def fastest(
    orig_model: PreTrainedModel, layout: Layout, device: torch.device, *, compiled: bool, in_chunks: bool
) -> tuple[str, str]:
    """Return (backend, why) of the fastest that can serve the run; where there are several, they are timed."""

    def problem(backend: str) -> str | None:
        return unsupported_reason(backend, orig_model, layout, device, compiled=compiled, in_chunks=in_chunks)

    # flex is not timed against these: it would have to be compiled for that. It is taken where none of them serves.
    able = [name for name, backend in BACKENDS.items() if backend.timed and problem(name) is None]
    if not able:
        if problem("flex") is None:
            return "flex", "no FlashAttention for this model"
        if device.type != "cuda":
            return "reference", "runs everywhere"
        reasons = "; ".join(f"{b} {problem(b)}" for b in ("varlen", "flex"))
        return "reference", f"a dense mask, quadratic in the row length: {reasons}"
    if len(able) == 1:
        return able[0], "the fastest that runs here"
    times = _measured(able, orig_model, layout, device)
    if not times:
        return "reference", "nothing faster works"
    best = min(times, key=times.__getitem__)
    return best, ", ".join(f"{name} {ms:.2f} ms" for name, ms in sorted(times.items(), key=lambda item: item[1]))


def unsupported_reason(
    backend: str,
    orig_model: PreTrainedModel,
    layout: Layout,
    device: torch.device,
    *,
    compiled: bool,
    in_chunks: bool = False,
    captured: bool = False,
) -> str | None:
    """Return why a backend cannot serve a run, None if it can.

    Args:
        in_chunks: queries are chunks of rows (context parallelism). compiled, captured: see choose_backend.
    """
    spec = BACKENDS[backend]
    config = orig_model.config.get_text_config()
    dropout = max(float(getattr(config, name, 0.0) or 0.0) for name in DROPOUTS)
    if relative_positions(orig_model.config) and not spec.relative_positions:
        return "has no relative positions, which this model adds to the scores"
    if not spec.sinks and has_sinks(orig_model):
        return "has no attention sinks, which this model has"
    if layout.kind == "tree" and not spec.trees:
        return "has no rows of trees"
    if in_chunks and not spec.in_chunks:
        return "attends within whole rows, and context parallelism cuts them"
    if dropout and not spec.dropout:
        return f"has no dropout, and the model's is {dropout}"
    return spec.unsupported_reason(orig_model, layout, device, compiled=compiled, captured=captured)


def eager_backend(backend: str, orig_model: PreTrainedModel, *, trees: bool = False) -> str:
    """Return the backend that replaces this one where nothing is compiled.

    Args:
        trees: rows are of trees.
    """
    if BACKENDS[backend].eager:
        return backend
    if trees:
        return "reference"
    softcap = getattr(orig_model.config.get_text_config(), "attn_logit_softcapping", None)
    unusable = softcap or flash.kernel_unsupported_reason("varlen", orig_model.device, orig_model.dtype)
    return "reference" if unusable else "varlen"


def head_sizes(orig_model: PreTrainedModel) -> tuple[int, int]:
    """Return (size of a query head, query heads per key head)."""
    config = orig_model.config.get_text_config()
    heads = config.num_attention_heads
    latent = getattr(config, "qk_head_dim", None)
    head_dim = latent or getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(head_dim), heads // int(getattr(config, "num_key_value_heads", None) or heads)


def _measured(
    backends: list[str], orig_model: PreTrainedModel, layout: Layout, device: torch.device
) -> dict[str, float]:
    """Return milliseconds of forward and backward of one layer by backend: from the cache, or
    measured now and kept there."""
    head_dim, groups = head_sizes(orig_model)
    heads = int(orig_model.config.get_text_config().num_attention_heads)
    rows, row_length = layout.shapes[-1]
    # A packed row has slots for about twice the mean number of documents (data.pack), so this is their mean length.
    length = max(2 * row_length // layout.docs_per_row, 1) if layout.kind == "packed" else row_length
    shape = (heads, heads // groups, head_dim, rows, row_length, length)
    key = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {'/'.join(backends)}, {shape}"
    path = user_cache() / "attention.json"  # safe to delete
    cached: dict[str, dict[str, float]] = read_object(path)
    if key not in cached:
        times = {}
        for name in backends:
            try:
                times[name] = _milliseconds(name, shape, device)
            except Exception as error:  # such as an installation that does not fit this GPU or torch
                log.warning("attention backend %s does not work here: %s", name, " ".join(str(error).split())[:200])
        # Not kept where one failed: the next start may find it fixed.
        if len(times) < len(backends):
            return times
        cached[key] = times
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_shared(path, json.dumps(cached, indent=1))
        except OSError as error:
            lost = "%s cannot be written (%s): attention is measured again at the next start"
            log.warning(lost, path, error.strerror)
    return cached[key]


def _milliseconds(backend: str, shape: tuple[int, ...], device: torch.device) -> float:
    """Return the GPU's milliseconds of forward and backward of attention, bf16, without the host's part.

    Calls are queued behind 60 ms of other work, as they are in a training step, where launching is hidden. When each
    was timed alone, FlashAttention-4's slow launches once cost it the choice.

    Args:
        shape: heads, those of keys, their size, rows, their length, that of a document.
    """
    heads, kv_heads, head_dim, rows, row_length, length = shape
    generator = torch.Generator(device).manual_seed(0)
    options: Any = {"device": device, "dtype": torch.bfloat16, "generator": generator, "requires_grad": True}
    inputs = [torch.randn(rows, row_length, count, head_dim, **options) for count in (heads, kv_heads, kv_heads)]
    starts = torch.arange(0, rows * row_length, length, dtype=torch.int32, device=device)
    cu_seqlens = torch.cat([starts, starts.new_full((1,), rows * row_length)])
    documents = Documents(backend, length, cu_seqlens=cu_seqlens)
    query, key, value = (x.transpose(1, 2) for x in inputs)

    def work() -> Tensor:
        with kernel_order(backend):
            return BACKENDS[backend].attend(query, key, value, documents, Scores(head_dim**-0.5))

    grad = torch.ones_like(work())
    for _ in range(3):
        torch.autograd.grad(work(), inputs, grad)
    torch.cuda.synchronize(device)
    delay = torch.empty(2**28, dtype=torch.uint8, device=device)  # 0.06 ms to fill on an H200
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(1000):
        delay.fill_(1)
    start.record()
    for _ in range(10):
        torch.autograd.grad(work(), inputs, grad)
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 10
