"""The seam of model kinds: how a batch becomes hidden states, and what loads and projects them."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from sftkit.data.collate import Batch


class Head(NamedTuple):
    """What turns hidden states into logits: softcap * tanh((hidden @ weight.T + bias) / softcap)."""

    weight: Tensor
    "[V, H]"
    bias: Tensor | None
    "[V]"
    softcap: float | None
    "None: the product itself"
    tokens: int | None = None
    "rows that are tokens': those behind them are padding (models/padding.py), without a probability; None: all. A kind leaves it out"


class ModelKind(Protocol):
    """A family of architectures that are trained alike."""

    @property
    def auto_class(self) -> Any:
        """The class of transformers that loads such a model from a folder, a hub id or a config."""

    def hidden_states(
        self, orig_model: PreTrainedModel, batch: Batch, backend: str, context_group: str | None = None
    ) -> Tensor:
        """What the head projects, for the local positions of a batch: [B, C, H].

        Args:
            backend: of attention, see ops.attention.
            context_group: name of the group of ranks whose chunks make whole rows; None: rows are whole here.
        """

    def head(self, orig_model: PreTrainedModel) -> Head:
        """The output projection, its weights gathered by whoever shards the model."""

    def plain_logits(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
        """Logits [1, L, V] of one document's inputs [1, L], by transformers' own forward pass and attention: nothing of
        ours, so the other side of what is checked."""
