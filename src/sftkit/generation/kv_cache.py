"""Keys and values of past positions: memory of a fixed size, and those of a text that many rows begin with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache

from sftkit.models.structure import inference
from sftkit.ops.attention import mixes_tokens, plain_attention
from sftkit.ops.attention_choice import head_sizes
from sftkit.parallel.tensor import without_sequence_parallel

MAX_CACHE_BYTES = 8 * 2**30
"The most bytes of keys and values of a batch. The same on every device, so batches and results are the same."


def max_cached_positions(orig_model: PreTrainedModel) -> int | None:
    """Return for how many positions, over all rows of a batch, keys and values fit in MAX_CACHE_BYTES; None
    if the model keeps none.

    Computed from the whole model's sizes, also where ranks share its heads.
    """
    config = orig_model.config.get_text_config()
    if getattr(config, "num_attention_heads", None) is None:
        return None
    head_dim, queries_per_key = head_sizes(orig_model)
    key_heads = config.num_attention_heads // queries_per_key
    # Keys and values, of all layers, in bytes a position.
    each = 2 * config.num_hidden_layers * key_heads * head_dim * orig_model.dtype.itemsize
    return max(MAX_CACHE_BYTES // int(each), 1)


class FixedLayer(DynamicLayer):
    """One layer's keys and values in memory that is taken once; attention reads the part that is filled,
    without a copy.

    Layers with a sliding window keep everything too: transformers' masks apply the window.
    """

    def __init__(self, max_length: int) -> None:
        super().__init__()
        self.max_length, self.length = max_length, 0
        self.at: torch.Tensor | None = None  # written_at

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values of new positions, [B, KV, T, D]. Returns all up to them, [B, KV, T', D]; after
        `written_at` the whole memory."""
        # Taken at the first update, which tells how many rows and heads there are.
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
        start, self.length = self.length, self.length + key_states.shape[2]
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def written_at(self, at: torch.Tensor, seen: int) -> None:
        """Switch to steps of a fixed shape: each pass writes one position, at index `at` (int64 [1]), and reads
        the whole memory. What lies behind the `seen` positions is set to zero: uninitialized memory may hold NaN,
        which a mask does not remove."""
        for memory in (self.keys, self.values):
            assert memory is not None
            memory[:, :, seen:] = 0
        self.at = at

    def get_seq_length(self) -> int:
        """Return how many positions are filled."""
        return self.length


def new_cache(orig_model: PreTrainedModel, max_length: int) -> Cache:
    """Return an empty cache for `max_length` positions. Models with layers of other kinds get transformers' own cache.

    Keys and values of what an encoder has read stand beside it, made once, when the first tokens are read.
    """
    if mixes_tokens(orig_model):
        return DynamicCache(config=orig_model.config)
    # Cache makes a layer at the first update of each, by calling this; transformers expects a class
    own = Cache(layer_class_to_replicate=partial(FixedLayer, max_length))  # type: ignore[arg-type]
    return EncoderDecoderCache(own, DynamicCache()) if orig_model.config.is_encoder_decoder else own


def fixed_layers(cache: Cache) -> list[FixedLayer]:
    """Return the layers of the decoder's own positions, without those of cross-attention."""
    own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    layers: list[Any] = own.layers
    assert all(isinstance(layer, FixedLayer) for layer in layers)
    return layers


class SharedPrefix:
    """The keys and values of the text that the present batches begin with."""

    def __init__(self, orig_model: PreTrainedModel) -> None:
        self._orig_model = orig_model
        self.ids: tuple[int, ...] = ()
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def move_to(self, ids: tuple[int, ...], *, in_step: bool) -> None:
        """Compute the keys and values of the prefix, unless they are those at hand.

        Args:
            in_step: other ranks may compute a prefix now, and gather weights for it: run a pass even if it is not
                needed.
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
    """Run a forward pass whose result is not used: sharded weights are gathered by all ranks or none."""
    token = torch.zeros((1, 1), dtype=torch.long, device=orig_model.device)
    orig_model(input_ids=token, use_cache=False, logits_to_keep=1)


@contextmanager
def plain_forward(orig_model: PreTrainedModel) -> Iterator[None]:
    """Let the model compute as transformers does inside the block: eagerly, with masks and caches,
    no dropout, no gradients."""
    with inference(orig_model), plain_attention(orig_model), without_sequence_parallel(orig_model):
        yield
