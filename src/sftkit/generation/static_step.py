"""One step of decoding whose shapes and addresses stay the same, so that a GPU replays it without the host.

An eager step launches some hundreds of kernels, which takes longer than computing them. A CUDA graph of the same
kernels is recorded in the time of a step and needs no compiler
(https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/).
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache

from sftkit.generation.kv_cache import fixed_layers
from sftkit.models.kind import Continuation
from sftkit.models.structure import EXPERT_COUNTS, decoder
from sftkit.ops.attention import implementation, mixes_tokens, relative_positions
from sftkit.ops.cached_attention import IMPLEMENTATION, attend_cached

PAYS_FROM = 7
"Steps of a batch from which a GPU has replayed them sooner than computed them one by one, recording included \
(benchmarks/h200_decode)."
GROWING_ROPES = ("dynamic", "longrope")
"Rotary embeddings that look at the highest position on the host."


def replay_pays(device: torch.device, steps: int) -> bool:
    """Return whether this many steps of a batch take less time when they are replayed."""
    return device.type == "cuda" and steps >= PAYS_FROM


def replay_unsupported_reason(orig_model: PreTrainedModel) -> str | None:
    """Return why this model's step cannot be replayed; None if it can."""
    # Whatever the host decides in a step would be recorded once and then repeated.
    config = orig_model.config.get_text_config()
    if mixed := mixes_tokens(orig_model):
        return f"{mixed} keeps a state of its own"
    if any(getattr(config, name, None) for name in EXPERT_COUNTS):
        return "experts are visited as the host finds out"
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = {of.get("rope_type") for of in (ropes, *(ropes.values())) if isinstance(of, dict)}
    if growing := kinds & set(GROWING_ROPES):
        return f"rotary embeddings of type {', '.join(sorted(map(str, growing)))} are recomputed on the host"
    if relative_positions(config) or "position_ids" not in inspect.signature(decoder(orig_model).forward).parameters:
        return "positions are counted on the host"
    return None


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that steps are recorded on. There is one per device: what cuBLAS sets up for a stream, tens of
    MiB, stays as long as the process."""
    return torch.cuda.Stream(device)


def next_tokens(continuation: Continuation, **inputs: Any) -> torch.Tensor:
    """Run the model over tokens that it has not read yet, and return the next token of each row, int64 [B, 1]."""
    read, model_kwargs = continuation
    logits = read(**model_kwargs, **inputs, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1].float().argmax(-1, keepdim=True)


class DecodingState(NamedTuple):
    """The state of the sequences of a batch: what was read, and the next tokens."""

    cache: Cache
    "keys and values of the first `seen` positions in layers of `FixedLayer`, with room for all"
    tokens: torch.Tensor
    "int64 [B, 1], those at position `seen`"
    mask: torch.Tensor
    "int64 [B, N], 0 at padding"
    positions: torch.Tensor
    "int64 [B, N]"
    seen: int


class StaticStep:
    """The next token of every sequence, with memory of a fixed size for keys and values."""

    def __init__(self, orig_model: PreTrainedModel, continuation: Continuation, state: DecodingState) -> None:
        """Copy the tokens, and write the next keys and values into the cache from now on."""
        cache, tokens, mask, positions, seen = state
        # the attention that reads the whole memory up to `at`; in use only inside `implementation`
        AttentionInterface.register(IMPLEMENTATION, attend_cached)
        self._orig_model, self._continuation = orig_model, continuation
        self._tokens = tokens.clone()
        self._mask, self._positions = mask.bool(), positions
        self._at = torch.full((1,), seen, device=tokens.device)
        self._order = torch.arange(mask.shape[1], device=tokens.device)
        self._cache = cache
        for layer in fixed_layers(cache):
            layer.written_at(self._at, seen)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._warm = False

    def __call__(self) -> torch.Tensor:
        """Return the tokens after the present ones, int64 [B, 1]; the next call goes on from them."""
        if self._graph is None:
            with implementation(self._orig_model, IMPLEMENTATION):
                self._first() if self._tokens.device.type == "cuda" else self._compute()
        if self._graph is not None:
            self._graph.replay()
        return self._tokens

    def _first(self) -> None:
        """Compute the first step on a GPU, and record the second, both on a side stream, since nothing is
        recorded on the default one.

        What a first call sets up, a workspace of the stream for one, may not be part of the recording, which
        would own it.
        """
        stream = _side_stream(self._tokens.device)
        if not self._warm:
            # Both ways: the side stream reads what was computed before, and what follows reads its tokens.
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._compute()
            torch.cuda.current_stream().wait_stream(stream)
            self._warm = True
            return
        graph = torch.cuda.CUDAGraph()
        # What other threads do meanwhile, memory pinned by a loader for one, is no part of it
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._compute()
        self._graph = graph

    def _compute(self) -> None:
        """Compute the next tokens [B, 1] in place, and move to the next position."""
        # Mask and positions follow from `at`, on the device: a replay runs no Python that could count.
        tokens = next_tokens(
            self._continuation,
            input_ids=self._tokens,
            attention_mask=(self._mask & (self._order <= self._at))[:, None, None],
            position_ids=self._positions.index_select(1, self._at),
            past_key_values=self._cache,
            at=self._at,
        )
        self._tokens.copy_(tokens)
        self._at.add_(1)
