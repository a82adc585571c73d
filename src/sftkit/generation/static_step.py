"""One step of decoding whose shapes and addresses stay the same, so that a GPU replays it without the host.

An eager step launches some hundreds of kernels, which takes longer than computing them. A CUDA graph of the same kernels is
recorded in the time of a step and needs no compiler (https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs/).
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache

from sftkit.generation.kv_cache import FixedLayer
from sftkit.models.structure import EXPERT_COUNTS
from sftkit.ops.attention import implementation, mixes_tokens
from sftkit.ops.cached_attention import NAME, Filled, attend_cached

GROWING_ROPES = ("dynamic", "longrope")
"Rotary embeddings that look at the highest position on the host."


def refusal(orig_model: PreTrainedModel) -> str | None:
    """Return why this model's step cannot be replayed, None if it can."""
    config = orig_model.config.get_text_config()
    if mixed := mixes_tokens(orig_model):
        return f"{mixed} keeps a state of its own"
    if any(getattr(config, name, None) for name in EXPERT_COUNTS):
        return "experts are visited as the host finds out"
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = {of.get("rope_type") for of in (ropes, *(ropes.values())) if isinstance(of, dict)}
    if growing := kinds & set(GROWING_ROPES):
        return f"rotary embeddings of type {', '.join(sorted(map(str, growing)))} are recomputed on the host"
    return None


class StaticStep:
    """The next token of every sequence, with memory of a fixed size for keys and values."""

    def __init__(
        self,
        orig_model: PreTrainedModel,
        cache: Cache,
        tokens: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        seen: int,
    ) -> None:
        """
        Args:
            cache: keys and values of the first `seen` positions in layers of `FixedLayer`, with room for all.
            tokens: int64 [B, 1], those at position `seen`.
            mask: int64 [B, N], 0 at padding; positions: int64 [B, N].
        """
        AttentionInterface.register(NAME, attend_cached)
        self._orig_model = orig_model
        self._tokens = tokens.clone()
        self._mask, self._positions = mask.bool(), positions
        self._at = torch.full((1,), seen, device=tokens.device)
        self._order = torch.arange(mask.shape[1], device=tokens.device)
        self._cache = cache
        for layer in cache.layers:
            assert isinstance(layer, FixedLayer)
            layer.written_at(self._at, seen)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._warm = False

    def __call__(self) -> torch.Tensor:
        """Return the tokens after those at hand, int64 [B, 1]; the next call goes on from them."""
        if self._graph is not None:
            self._graph.replay()
            return self._tokens
        with implementation(self._orig_model, NAME):
            if self._tokens.device.type != "cuda":
                self._compute()
            elif not self._warm:  # what a first call sets up may not be recorded, and not on the default stream
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    self._compute()
                torch.cuda.current_stream().wait_stream(side)
                self._warm = True
            else:
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph):
                    self._compute()
                self._graph.replay()
        return self._tokens

    def _compute(self) -> None:
        filled = Filled(self._mask & (self._order <= self._at), self._at)
        logits = self._orig_model(
            input_ids=self._tokens,
            position_ids=self._positions.index_select(1, self._at),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
            filled=filled,
        ).logits
        self._tokens.copy_(logits[:, -1].float().argmax(-1, keepdim=True))
        self._at.add_(1)
