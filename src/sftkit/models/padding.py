"""Padding of the vocabulary to a multiple of some number of rows, which suits the matrix products of
the head. In memory only.

The rows behind those of the tokens are zeros: no token looks them up, no logit is made of them, and no file has them.
They stay zeros: their gradient is 0, and so is each update or decay of them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from transformers import PreTrainedModel

from sftkit.errors import ConfigError
from sftkit.models.structure import TOKEN_ROWS, embedding_of, output_projection, vocab_size
from sftkit.models.vocabulary import NewRows, new_rows, resize, set_new_rows, vocabulary_of


def pad_vocabulary(orig_model: PreTrainedModel, multiple: int) -> None:
    """Grow embedding and head in place to a multiple of `multiple` rows; config.vocab_size stays
    the number of token rows.

    A model on the meta device gets the zeros when its weights are read.

    Raises:
        ConfigError: a model with an encoder, whose vocabulary belongs to a model inside it.
    """
    if orig_model.config.is_encoder_decoder:
        raise ConfigError(
            f"model.pad_vocab_to_multiple_of: {type(orig_model).__name__} has an encoder, and only the vocabulary of "
            "causal models is padded: remove the setting"
        )
    tokens = vocab_size(orig_model)
    rows = -(-tokens // multiple) * multiple
    if rows == tokens:
        return
    resize(orig_model, rows)
    # resize has set it to all rows; files and other programs are to know those of tokens only.
    orig_model.config.get_text_config().vocab_size = orig_model.vocab_size = tokens
    setattr(orig_model, TOKEN_ROWS, tokens)
    if (new := new_rows(orig_model)) is not None:
        set_new_rows(orig_model, replace(new, tokens=tokens))
    with torch.no_grad():
        for tensor in vocabulary_of(orig_model):
            if not tensor.is_meta:
                tensor[tokens:] = 0
    # For logits outside the train step: evaluation, generation, checks. The step's loss takes Head.tokens instead.
    output_projection(orig_model).register_forward_hook(partial(_drop_padding, tokens))


def _drop_padding(tokens: int, _: torch.nn.Module, __: tuple[torch.Tensor, ...], logits: torch.Tensor) -> torch.Tensor:
    """Return the logits [..., V] without those of padding, as a forward hook of the head."""
    return logits[..., :tokens]


def padding_rows(orig_model: PreTrainedModel) -> int:
    """Return how many rows of embedding and head are padding."""
    return embedding_of(orig_model).shape[0] - vocab_size(orig_model)


def rows_of_files(orig_model: PreTrainedModel) -> NewRows | None:
    """Return which rows a file written from this model has; None: all."""
    tokens = vocab_size(orig_model)
    return NewRows(tokens, tokens, (), tokens) if padding_rows(orig_model) else None


def without_padding(orig_model: PreTrainedModel) -> dict[int, int]:
    """Return the id of each padded parameter and how many of its rows belong to tokens; empty without padding."""
    if not padding_rows(orig_model):
        return {}
    return {id(tensor): vocab_size(orig_model) for tensor in vocabulary_of(orig_model)}


def describe_padding(orig_model: PreTrainedModel) -> str | None:
    """Return a line about the padding; None: there is none."""
    if not padding_rows(orig_model):
        return None
    rows = embedding_of(orig_model).shape[0]
    return f"vocabulary padded from {vocab_size(orig_model):,} to {rows:,} rows: zeros, out of logits and files"
