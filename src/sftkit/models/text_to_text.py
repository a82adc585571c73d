"""Models that read one text and write another: T5 and those like it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import transformers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from sftkit.config.schema import DataConfig
from sftkit.data.types import EncoderInputs, Examples
from sftkit.models import auto_classes
from sftkit.models.encoder_decoder import EncoderDecoder, require_inputs, special_ids
from sftkit.models.kind import Continuation
from sftkit.models.structure import vocab_size
from sftkit.models.tokenizer import ids_of

IDS, MASK = "encoder_input_ids", "encoder_attention_mask"


class TextToText(EncoderDecoder):
    """Texts for the encoder are filled to data.max_length. See models.kind.ModelKind."""

    @property
    def auto_class(self) -> Any:
        """See auto_classes.TEXT_TO_TEXT."""
        return getattr(transformers, auto_classes.TEXT_TO_TEXT)

    def scratch(self, fields: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Vocabulary and special ids."""
        return {**ids_of(tokenizer), **special_ids(tokenizer), **fields}

    def with_inputs(
        self,
        orig_model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        examples: Examples,
        max_length: int,
        data: DataConfig,
    ) -> Examples:
        """Ids, int64 [I, data.max_length], of texts cut there, and where they are texts: bool of the same shape."""
        require_inputs(examples, "text")
        texts = list(dict.fromkeys(examples.given))
        number = {text: i for i, text in enumerate(texts)}
        found = tokenizer(texts, truncation=True, max_length=max_length, padding="max_length", verbose=False)
        arrays = {IDS: np.asarray(found["input_ids"]), MASK: np.asarray(found["attention_mask"], dtype=bool)}
        index = np.fromiter((number[text] for text in examples.given), np.int64)
        return replace(examples, encoder_inputs=EncoderInputs(arrays, index))

    def made_up_inputs(self, orig_model: PreTrainedModel, documents: int, length: int) -> EncoderInputs | None:
        """Random tokens, in one of two texts to its end."""
        ids = np.random.default_rng(1).integers(0, vocab_size(orig_model), (documents, length))
        mask = np.ones((documents, length), dtype=bool)
        mask[1::2, length // 2 :] = False
        return EncoderInputs({IDS: ids, MASK: mask}, np.arange(documents))

    def files(self, orig_model: PreTrainedModel) -> dict[str, bytes]:
        """None."""
        return {}

    def encoder_positions(self, orig_model: PreTrainedModel, length: int) -> int:
        """data.max_length."""
        return length

    def encode(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """All positions, of which those with a token are seen."""
        mask = _seen(inputs[MASK])
        encoded = orig_model.get_encoder()(input_ids=inputs[IDS], attention_mask=mask[:, None, None, :])
        return encoded.last_hidden_state, mask

    def continuation(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> Continuation:
        """The whole model, with what its encoder has made."""
        given = self.plain_inputs(orig_model, inputs)
        encoded = orig_model.get_encoder()(**given).last_hidden_state

        def read(
            *,
            input_ids: Tensor,
            attention_mask: Tensor,
            past_key_values: Cache,
            encoded: Tensor,
            seen: Tensor,
            **_: Any,
        ) -> Any:
            return orig_model(
                encoder_outputs=(encoded,),
                attention_mask=seen,
                decoder_input_ids=input_ids,
                decoder_attention_mask=attention_mask,
                past_key_values=past_key_values,
                use_cache=True,
            )

        return Continuation(read, {"encoded": encoded, "seen": given["attention_mask"]})

    def plain_inputs(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """By the names that transformers has."""
        return {"input_ids": inputs[IDS], "attention_mask": _seen(inputs[MASK]).long()}

    def scaled(self, orig_model: PreTrainedModel, hidden: Tensor) -> Tensor:
        """T5 shrinks what a head that is its embedding gets."""
        config = orig_model.config
        return hidden * config.hidden_size**-0.5 if getattr(config, "scale_decoder_outputs", False) else hidden


def _seen(mask: Tensor) -> Tensor:
    """The mask, of empty places with one position to look at: where nothing is seen, a softmax has no sum."""
    first = mask.new_zeros(mask.shape[-1])
    first[0] = True
    return mask | first
