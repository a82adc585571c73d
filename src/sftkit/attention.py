"""Attention masks that keep the documents of a row apart, always passed explicitly so that no layout is ever guessed."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig


def document_mask(doc_ids: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """True where query i may see key j: same document, j <= i, and i - j < window if given.

    Args:
        doc_ids: int [B, T]; padding counts as a document of its own, so no row of the mask is empty.

    Returns:
        bool [B, 1, T, T]
    """
    positions = torch.arange(doc_ids.shape[1], device=doc_ids.device)
    distance = positions[:, None] - positions[None, :]
    visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return (visible & (doc_ids[:, :, None] == doc_ids[:, None, :])).unsqueeze(1)


def attention_masks(config: PreTrainedConfig, doc_ids: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
    """The mask, or the mask per layer type, as the model's forward takes it.

    transformers uses a 4-D mask as it is and would otherwise detect packing from position ids, only without a cache,
    and sometimes pass no mask at all: a second graph. https://github.com/huggingface/transformers/issues/48925
    """
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown:
        raise NotImplementedError(f"attention layers of type {sorted(unknown)} have no document mask")
    masks = {kind: document_mask(doc_ids, window if kind == "sliding_attention" else None) for kind in kinds}
    return masks if len(masks) > 1 else next(iter(masks.values()))
