"""Models that read one text and write another: T5 and those like it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import transformers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sftkit.config.schema import DataConfig
from sftkit.data.types import EncoderInputs, Examples
from sftkit.models import auto_classes
from sftkit.models.encoder_decoder import EncoderDecoder, require_inputs, special_ids
from sftkit.models.kind import Continuation, ids_of
from sftkit.models.structure import vocab_size

IDS, MASK = "encoder_input_ids", "encoder_attention_mask"


class TextToText(EncoderDecoder):
    """Read a text, write another; texts for the encoder are padded to data.max_length. See models.kind.ModelKind."""

    auto_class = getattr(transformers, auto_classes.TEXT_TO_TEXT)

    def scratch(self, fields: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Fill in the vocabulary size and the special ids."""
        return {**ids_of(tokenizer), **special_ids(tokenizer), **fields}

    def with_inputs(
        self,
        orig_model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        examples: Examples,
        max_length: int,
        data: DataConfig,
    ) -> Examples:
        """Tokenize the encoder's texts: ids, int64 [I, data.max_length], truncated there, and a mask of the
        same shape, True at tokens."""
        require_inputs(examples, "text")
        texts = list(dict.fromkeys(examples.encoder_sources))
        number = {text: i for i, text in enumerate(texts)}
        found = tokenizer(texts, truncation=True, max_length=max_length, padding="max_length", verbose=False)
        arrays = {IDS: np.asarray(found["input_ids"]), MASK: np.asarray(found["attention_mask"], dtype=bool)}
        index = np.fromiter((number[text] for text in examples.encoder_sources), np.int64)
        return replace(examples, encoder_inputs=EncoderInputs(arrays, index))

    def made_up_inputs(self, orig_model: PreTrainedModel, documents: int, length: int) -> EncoderInputs | None:
        """Return random tokens; every second text is only half as long."""
        ids = np.random.default_rng(1).integers(0, vocab_size(orig_model), (documents, length))
        mask = np.ones((documents, length), dtype=bool)
        mask[1::2, length // 2 :] = False
        return EncoderInputs({IDS: ids, MASK: mask}, np.arange(documents))

    def encoder_positions(self, orig_model: PreTrainedModel, length: int) -> int:
        """Return data.max_length."""
        return length

    def encode(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the encoded positions [I, S, H] and bool [I, S], True where there is a token."""
        mask = _seen(inputs[MASK])
        encoded = orig_model.get_encoder()(input_ids=inputs[IDS], attention_mask=mask[:, None, None, :])
        return encoded.last_hidden_state, mask

    def continuation(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> Continuation:
        """Return the whole model, called with the output of its encoder."""
        given = self.plain_inputs(orig_model, inputs)
        encoded = orig_model.get_encoder()(**given).last_hidden_state

        # encoder_outputs: else transformers would encode the text again for each token.
        def read(*, encoded: Tensor, seen: Tensor, **call: Any) -> Any:
            return orig_model(
                encoder_outputs=(encoded,),
                attention_mask=seen,
                decoder_input_ids=call["input_ids"],
                decoder_attention_mask=call["attention_mask"],
                past_key_values=call["past_key_values"],
                use_cache=True,
            )

        return Continuation(read, {"encoded": encoded, "seen": given["attention_mask"]})

    def plain_inputs(self, orig_model: PreTrainedModel, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return ids and mask by the names that transformers gives them."""
        return {"input_ids": inputs[IDS], "attention_mask": _seen(inputs[MASK]).long()}

    def scaled(self, orig_model: PreTrainedModel, hidden: Tensor) -> Tensor:
        """Return the hidden states, scaled down where the embedding is the head, as T5 does."""
        config = orig_model.config
        return hidden * config.hidden_size**-0.5 if getattr(config, "scale_decoder_outputs", False) else hidden


def _seen(mask: Tensor) -> Tensor:
    """Return the mask, with one visible position in empty places: a softmax over nothing is NaN."""
    first = mask.new_zeros(mask.shape[-1])
    first[0] = True
    return mask | first
