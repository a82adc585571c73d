"""A fixed-size cache of keys and values, and a decoding step that a GPU replays.

`SharedPrefix` holds the cache of a text that many rows begin with. `StaticStep` is one decoding step with constant
shapes and addresses, so that a GPU replays it without the host: an eager step launches some hundreds of kernels,
which takes longer than computing them. A CUDA graph of the same kernels is recorded in the time of one step and needs
no compiler (https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/).
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache

from sftkit.models.hybrids import state_besides_keys
from sftkit.models.kind import Continuation
from sftkit.models.structure import decoder, inference, num_experts
from sftkit.ops.attention import head_sizes, implementation, plain_attention, relative_positions
from sftkit.ops.flex import IMPLEMENTATION, attend_cached
from sftkit.parallel.tensor import without_sequence_parallel

MAX_CACHE_BYTES = 8 * 2**30
"Maximum bytes of keys and values of a batch. The same on every device, so batches and results are the same."


def max_cached_positions(orig_model: PreTrainedModel) -> int | None:
    """Return the number of positions, over all rows of a batch, whose keys and values fit in MAX_CACHE_BYTES; None if
    the model keeps none.

    Computed from the whole model's sizes, even if ranks share its heads.
    """
    config = orig_model.config.get_text_config()
    if getattr(config, "num_attention_heads", None) is None:
        return None
    head_dim, queries_per_key = head_sizes(orig_model)
    key_heads = config.num_attention_heads // queries_per_key
    # Bytes of the keys and values of all layers, for each position.
    each = 2 * config.num_hidden_layers * key_heads * head_dim * orig_model.dtype.itemsize
    return max(MAX_CACHE_BYTES // int(each), 1)


class FixedLayer(DynamicLayer):
    """One layer's keys and values in memory that is allocated once; attention reads the filled part without a copy.

    Layers with a sliding window keep all positions too: transformers' masks apply the window.
    """

    def __init__(self, max_length: int) -> None:
        super().__init__()
        self.max_length = max_length
        self.length = 0
        self.at: torch.Tensor | None = None  # written_at

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values of new positions, [B, KV, T, D]. Returns all positions so far, [B, KV, T', D]; after
        `written_at` the whole memory.
        """
        # Allocated at the first update, when the number of rows and heads is known.
        if not self.is_initialized:
            self.dtype, self.device = key_states.dtype, key_states.device
            self.keys, self.values = (
                x.new_empty((*x.shape[:2], self.max_length, x.shape[3])) for x in (key_states, value_states)
            )
            self.is_initialized = True
        assert self.keys is not None
        assert self.values is not None
        if self.at is not None:
            return self.keys.index_copy_(2, self.at, key_states), self.values.index_copy_(2, self.at, value_states)
        start = self.length
        self.length += key_states.shape[2]
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def written_at(self, at: torch.Tensor, seen: int) -> None:
        """Switch to steps of a fixed shape: each pass writes one position, at index `at` (int64 [1]), and reads the
        whole memory. The memory after the `seen` positions is set to zero: uninitialized memory may hold NaN, which a
        mask does not remove.
        """
        for memory in (self.keys, self.values):
            assert memory is not None
            memory[:, :, seen:] = 0
        self.at = at

    def get_seq_length(self) -> int:
        """Return the number of filled positions."""
        return self.length


def new_cache(orig_model: PreTrainedModel, max_length: int) -> Cache:
    """Return an empty cache for `max_length` positions. Models with other kinds of layers get
    transformers' own cache.

    Keys and values of an encoder's output are stored next to it, computed once with the first tokens.
    """
    if state_besides_keys(orig_model):
        return DynamicCache(config=orig_model.config)
    # Cache calls this to create each layer at its first update; transformers expects a class
    own = Cache(layer_class_to_replicate=partial(FixedLayer, max_length))  # type: ignore[arg-type]
    return EncoderDecoderCache(own, DynamicCache()) if orig_model.config.is_encoder_decoder else own


def fixed_layers(cache: Cache) -> list[FixedLayer]:
    """Return the layers for the decoder's own positions, without those of cross-attention."""
    own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    layers: list[Any] = own.layers
    assert all(isinstance(layer, FixedLayer) for layer in layers)
    return layers


class SharedPrefix:
    """The keys and values of the text that the current batches begin with."""

    def __init__(self, orig_model: PreTrainedModel) -> None:
        self._orig_model = orig_model
        self.ids: tuple[int, ...] = ()
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def move_to(self, ids: tuple[int, ...], *, in_step: bool) -> None:
        """Compute the keys and values of the prefix, unless they are already held.

        Args:
            in_step: whether other ranks may compute a prefix now and gather weights for it: a pass runs even if it is
                not needed.
        """
        if ids and ids != self.ids:
            cache = new_cache(self._orig_model, len(ids))
            rows = torch.tensor([ids], device=self._orig_model.device)
            self._orig_model(input_ids=rows, past_key_values=cache, use_cache=True, logits_to_keep=1)
            self._layers = [(layer.keys, layer.values) for layer in cache.layers]  # type: ignore[union-attr, misc]
        elif in_step:
            empty_pass(self._orig_model)
        self.ids = ids

    def cache(self, rows: int, max_length: int) -> Cache:
        """Return a cache of `rows` rows that holds the prefix, with room for `max_length` more positions."""
        cache = new_cache(self._orig_model, len(self.ids) + max_length)
        for i, (keys, values) in enumerate(self._layers if self.ids else ()):
            # Expanded, not copied: the layer copies them into its own memory.
            cache.update(keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1), i)
        return cache


def empty_pass(orig_model: PreTrainedModel) -> None:
    """Run a forward pass and ignore its result: either all ranks gather sharded weights or none."""
    token = torch.zeros((1, 1), dtype=torch.long, device=orig_model.device)
    orig_model(input_ids=token, use_cache=False, logits_to_keep=1)


@contextmanager
def plain_forward(orig_model: PreTrainedModel) -> Iterator[None]:
    """Make the model compute as transformers does inside the block: eagerly, with masks and caches, without dropout
    and gradients.
    """
    with inference(orig_model), plain_attention(orig_model), without_sequence_parallel(orig_model):
        yield


PAYS_FROM = 7
"""Number of steps of a batch from which replaying them on a GPU, recording included, is faster than eager
steps (benchmarks/h200_decode).
"""
GROWING_ROPES = ("dynamic", "longrope")
"Types of rotary embeddings that read the highest position on the host."


def replay_pays(device: torch.device, steps: int) -> bool:
    """Return whether this many steps of a batch are faster when replayed."""
    return device.type == "cuda" and steps >= PAYS_FROM


def replay_unsupported_reason(orig_model: PreTrainedModel) -> str | None:
    """Return the reason why this model's step cannot be replayed; None if it can."""
    # A decision of the host in a step would be recorded once and then repeated.
    config = orig_model.config.get_text_config()
    if mixed := state_besides_keys(orig_model):
        return f"{mixed} keeps a state of its own"
    if num_experts(orig_model):
        return "the host decides which experts are visited"
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = {of.get("rope_type") for of in (ropes, *(ropes.values())) if isinstance(of, dict)}
    if growing := kinds & set(GROWING_ROPES):
        return f"rotary embeddings of type {', '.join(sorted(map(str, growing)))} are recomputed on the host"
    if relative_positions(config) or "position_ids" not in inspect.signature(decoder(orig_model).forward).parameters:
        return "positions are counted on the host"
    return None


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that steps are recorded on. There is one per device, because cuBLAS's setup for a stream,
    tens of MiB, is kept for the life of the process.
    """
    return torch.cuda.Stream(device)


def next_tokens(continuation: Continuation, **inputs: Any) -> torch.Tensor:
    """Run the model over unread tokens, and return the next token of each row, int64 [B, 1]."""
    read, model_kwargs = continuation
    logits = read(**model_kwargs, **inputs, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1].float().argmax(-1, keepdim=True)


class StaticStep:
    """Compute the next token of every sequence with fixed-size memory for keys and values."""

    def __init__(
        self,
        orig_model: PreTrainedModel,
        continuation: Continuation,
        *,
        cache: Cache,
        tokens: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        seen: int,
    ) -> None:
        """Copy the tokens, and write later keys and values into the cache from now on.

        Args:
            cache: keys and values of the first `seen` positions in layers of `FixedLayer`, with room for all.
            tokens: int64 [B, 1], tokens at position `seen`.
            mask: int64 [B, N], 0 at padding.
            positions: int64 [B, N].
        """
        # attention that reads the whole memory up to `at`; used only inside `implementation`
        AttentionInterface.register(IMPLEMENTATION, attend_cached)
        self._orig_model = orig_model
        self._continuation = continuation
        self._tokens = tokens.clone()
        self._mask = mask.bool()
        self._positions = positions
        self._at = torch.full((1,), seen, device=tokens.device)
        self._order = torch.arange(mask.shape[1], device=tokens.device)
        self._cache = cache
        for layer in fixed_layers(cache):
            layer.written_at(self._at, seen)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._warm = False

    def __call__(self) -> torch.Tensor:
        """Return the tokens after the current ones, int64 [B, 1]; the next call continues from them."""
        if self._graph is None:
            with implementation(self._orig_model, IMPLEMENTATION):
                self._first() if self._tokens.device.type == "cuda" else self._compute()
        if self._graph is not None:
            self._graph.replay()
        return self._tokens

    def _first(self) -> None:
        """Compute the first step on a GPU and record the second, both on a side stream, because the default stream
        cannot be recorded.

        The setup of a first call, such as a workspace of the stream, must not be part of the recording, which would
        own it.
        """
        stream = _side_stream(self._tokens.device)
        if not self._warm:
            # Both ways: the side stream reads earlier results, and later work reads its tokens.
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._compute()
            torch.cuda.current_stream().wait_stream(stream)
            self._warm = True
            return
        graph = torch.cuda.CUDAGraph()
        # the recording excludes the work of other threads, such as memory pinned by a loader
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._compute()
        self._graph = graph

    def _compute(self) -> None:
        """Compute the next tokens [B, 1] in place, and move to the next position."""
        # Mask and positions are computed from `at` on the device: a replay runs no Python that could count.
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
