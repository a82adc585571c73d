"""The seam of model kinds: how a batch becomes hidden states, and what loads and projects them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sftkit.config.schema import DataConfig, TrainConfig
from sftkit.config.topology import Topology
from sftkit.data.collate import Batch
from sftkit.data.types import EncoderInputs, Examples


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


class Continuation(NamedTuple):
    """What reads the tokens of texts that are written, one after the other."""

    read: Callable[..., Any]
    """As transformers' causal models are called: input_ids [B, T], attention_mask, position_ids, past_key_values, use_cache and
    logits_to_keep; returns what has `logits`"""
    given: dict[str, Tensor]
    "what it is called with besides, each [B, ...]: what was encoded for the texts"


class ModelKind(Protocol):
    """A family of architectures that are trained alike."""

    @property
    def auto_class(self) -> Any:
        """The class of transformers that loads such a model from a folder, a hub id or a config."""

    def scratch(self, fields: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """The fields of a new model's config, those that follow from the tokenizer filled in."""

    def prepare(self, orig_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Set in a model that was just made or loaded what training and generation need. Parameters on which nothing depends
        are not trained."""

    def check(self, orig_model: PreTrainedModel, topology: Topology, train: TrainConfig) -> None:
        """Refuse what these models cannot do.

        Raises:
            ConfigError: with what to do instead.
        """

    def with_inputs(
        self,
        orig_model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        examples: Examples,
        max_length: int,
        data: DataConfig,
    ) -> Examples:
        """Documents with what an encoder is given for each, made once and kept in data.cache_dir; as they are without one.

        Raises:
            DataError: they name nothing that could be encoded, or what they name cannot be read.
        """

    def made_up_inputs(self, orig_model: PreTrainedModel, documents: int, length: int) -> EncoderInputs | None:
        """The same for documents that are made up, always the same; None without an encoder.

        Args:
            length: data.max_length, to which texts for an encoder are filled.
        """

    def plain_inputs(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Inputs of an encoder, as batches have them, as transformers' own forward pass and generation take them."""

    def files(self, orig_model: PreTrainedModel) -> dict[str, bytes]:
        """What a checkpoint of such a model has beside config, weights and tokenizer, by name."""

    def encoder_positions(self, orig_model: PreTrainedModel, length: int) -> int:
        """S, the positions of an encoded input; 0 without an encoder. `length`: data.max_length."""

    def decoder_inputs(
        self, orig_model: PreTrainedModel, batch: Batch, backend: str, context_group: str | None = None
    ) -> dict[str, Any]:
        """Arguments of the decoder for a batch; what it looks at is encoded for it. See hidden_states."""

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

    def continuation(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> Continuation:
        """What writes texts token by token, each for what an encoder is given: inputs as batches have them, encoded here, once."""

    def plain_logits(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
        """Logits [1, L, V] of one document's inputs, tokens [1, L] and what is encoded for it [1, ...], by transformers' own
        forward pass and attention: nothing of ours, so the other side of what is checked."""
