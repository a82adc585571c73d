"""Choose the attention backend of a run: the one that the recipe names, or with auto the fastest that supports the
run."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from sftkit.data.batches.pack import Layout
from sftkit.errors import ConfigError
from sftkit.ops import flash
from sftkit.ops.attention import kernel_order, relative_positions, windows
from sftkit.ops.flex import FLEX_BLOCK
from sftkit.rundir.files import read_object, replace_shared
from sftkit.runtime.hardware import user_cache
from sftkit.runtime.start import Runtime

log = logging.getLogger(__name__)

DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
"Fields of configs with the dropout of attention weights."


class AttentionChoice(NamedTuple):
    """An attention backend and the reason for it."""

    backend: str
    reason: str


class Execution(NamedTuple):
    """Properties of a run on which the choice of a backend depends."""

    compiled: bool
    "whether the blocks are compiled; flex only exists as generated code"
    in_chunks: bool = False
    "queries are chunks of rows (context parallelism)"
    captured: bool = False
    "flex is an operator of a captured graph, which a CPU can compute too, with all scores in memory"


def choose_backend(
    named: str, execution: Execution, orig_model: PreTrainedModel, layout: Layout, rt: Runtime
) -> AttentionChoice:
    """Choose the attention backend of training and validation, on the main rank for all, and print which and why.

    Args:
        named: attention.backend of the recipe.
        execution: in_chunks is taken from the topology, and captured counts where a backend is named.

    Raises:
        ConfigError: the backend that the recipe names does not run here or cannot compute this model or layout.
    """
    execution = execution._replace(in_chunks=rt.topology.context > 1)
    if named == "auto":
        execution = execution._replace(captured=False)
        choice = AttentionChoice(*rt.from_main(lambda: fastest(orig_model, layout, rt.device, execution)))
    else:
        if problem := unsupported_reason(named, orig_model, layout, rt.device, execution):
            raise ConfigError(f"attention.backend: {named} {problem}; take another one, or auto")
        choice = AttentionChoice(named, "named by the recipe")
    rt.print(f"attention {choice.backend}: {choice.reason}")
    return choice


def fastest(orig_model: PreTrainedModel, layout: Layout, device: torch.device, execution: Execution) -> tuple[str, str]:
    """Return (backend, why) of the fastest that can serve the run; where there are several, they are timed."""
    problem = partial(unsupported_reason, orig_model=orig_model, layout=layout, device=device, execution=execution)
    # flex is not timed against these: it would have to be compiled for that. It is taken where none of them serves.
    able = [b for b in ("fa4", "varlen", "sdpa") if problem(b) is None]
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
    backend: str, orig_model: PreTrainedModel, layout: Layout, device: torch.device, execution: Execution
) -> str | None:
    """Return why a backend cannot serve a run, None if it can."""
    config = orig_model.config.get_text_config()
    dropout = max(float(getattr(config, name, 0.0) or 0.0) for name in DROPOUTS)
    softcap = getattr(config, "attn_logit_softcapping", None)
    if backend == "reference":
        return None
    if relative_positions(orig_model.config):
        return "has no relative positions, which this model adds to the scores"
    if execution.in_chunks and backend in ("sdpa", "flex"):
        return "attends within whole rows, and context parallelism cuts them"
    if backend == "sdpa":
        if layout.kind == "packed":
            return "sees one document per row, and rows are packed"
        return "has no sliding window or soft cap" if windows(orig_model.config) or softcap else None
    if dropout:
        return f"has no dropout, and the model's is {dropout}"
    if backend == "flex":
        if device.type != "cuda" and not execution.captured:
            return f"has no backward pass on {device.type}"
        if device.type == "cuda" and head_sizes(orig_model)[0] < 16:
            return "has no kernel for heads of less than 16"
        if layout.dynamic and layout.pad_multiple % FLEX_BLOCK:
            return f"wants rows of whole blocks: set data.pad_multiple to a multiple of {FLEX_BLOCK}"
        return None if execution.compiled else "needs compile.enabled: without it, it is quadratic in memory"
    if softcap:
        return "has no soft cap of the scores, which this model needs"
    if problem := flash.kernel_unsupported_reason(backend, device, orig_model.dtype):
        return problem
    head_dim = head_sizes(orig_model)[0]
    fits = head_dim in (64, 96, 128) if backend == "fa4" else head_dim % 8 == 0 and head_dim <= 256
    return None if fits else f"has no kernel for heads of {head_dim}"


def eager_backend(backend: str, orig_model: PreTrainedModel) -> str:
    """Return the backend that replaces this one where nothing is compiled."""
    if backend != "flex":
        return backend
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
    cached: dict[str, dict[str, float]] = read_object(cache_file())
    if key not in cached:
        times = {}
        for name in backends:
            try:
                times[name] = _milliseconds(name, shape, device)
            except Exception as error:  # such as an installation that does not fit this GPU or torch
                log.warning("attention backend %s does not work here: %s", name, " ".join(str(error).split())[:200])
        # Not kept where one failed: the next start may find it mended.
        if len(times) < len(backends):
            return times
        cached[key] = times
        write_cache(cached)
    return cached[key]


def write_cache(values: dict[str, dict[str, float]]) -> None:
    """Write milliseconds by backend, by machine and shape; a disk that refuses it costs a warning."""
    path = cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_shared(path, json.dumps(values, indent=1))
    except OSError as error:
        log.warning("%s cannot be written (%s): attention is measured again at the next start", path, error.strerror)


def cache_file() -> Path:
    """Return where measured times are kept; safe to delete."""
    return user_cache() / "attention.json"


def _milliseconds(backend: str, shape: tuple[int, ...], device: torch.device) -> float:
    """Return milliseconds of forward and backward of attention, bf16.

    Args:
        shape: heads, those of keys, their size, rows, their length, that of a document.
    """
    heads, kv_heads, head_dim, rows, row_length, length = shape
    positions = rows * row_length
    generator = torch.Generator(device).manual_seed(0)

    def random(num_heads: int) -> torch.Tensor:
        sizes = (positions, num_heads, head_dim)
        return torch.randn(sizes, device=device, dtype=torch.bfloat16, generator=generator).requires_grad_()

    query, key, value = random(heads), random(kv_heads), random(kv_heads)
    if backend == "sdpa":

        def attend() -> torch.Tensor:
            q, k, v = (x.unflatten(0, (rows, row_length)).transpose(1, 2) for x in (query, key, value))
            with kernel_order(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads < heads)
    else:
        starts = torch.arange(0, positions, length, dtype=torch.int32, device=device)
        cu_seqlens = torch.cat([starts, starts.new_full((1,), positions)])

        def attend() -> torch.Tensor:
            out, _ = flash.document_attention(
                query, key, value, cu_seqlens, cu_seqlens, length, head_dim**-0.5, 0, backend
            )
            return out

    grad = torch.ones_like(attend())
    return _gpu_milliseconds(lambda: torch.autograd.grad(attend(), (query, key, value), grad), device)


def _gpu_milliseconds(work: Callable[[], object], device: torch.device, warm_up: int = 3, runs: int = 10) -> float:
    """Return the GPU's milliseconds of one call, without the host's part.

    Calls are queued behind 60 ms of other work, as they are in a training step, where launching is hidden. When each
    was timed alone, FlashAttention-4's slow launches once cost it the choice.
    """
    for _ in range(warm_up):
        work()
    torch.cuda.synchronize(device)
    delay = torch.empty(2**28, dtype=torch.uint8, device=device)  # 0.06 ms to fill on an H200
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(1000):
        delay.fill_(1)
    start.record()
    for _ in range(runs):
        work()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / runs
