"""Rows of a vocabulary that the model's files do not provide: rows of added tokens, and padding.

A base model becomes a chat model by adding tokens that its tokenizer lacks, with rows of embedding and head. Padding
the rows to a multiple of some number suits the head's matrix products. It exists only in memory: the rows after those
of the tokens are zeros, no token looks them up, they make no logits, and no file holds them. They stay zero, because
their gradient is 0 and so is every update or decay.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sftkit.errors import config_error, hint
from sftkit.models.structure import TOKEN_ROWS, embedding_of, output_projection, vocab_size
from sftkit.ops.tensors import local, local_region

MEAN_ROWS = 1024
"Number of rows that the mean reads at a time."

_ADDED = "sftkit_added_tokens"
_NEW_ROWS = "sftkit_new_rows"
"""Attributes of a tokenizer and of a model. Neither is saved, so objects loaded from a checkpoint have no
added tokens.
"""


@dataclass(frozen=True)
class AddedTokens:
    """The tokens that add_tokens added to a tokenizer."""

    tokens: tuple[str, ...]
    ids: tuple[int, ...]
    known: int
    "Ids below this belong to tokens that the tokenizer already had."


@dataclass(frozen=True)
class NewRows:
    """The rows of a vocabulary that the model's files lack, or that belong to no token there."""

    before: int
    "rows in the files"
    known: int
    "rows of known tokens: new rows are their mean"
    ids: tuple[int, ...]
    "rows of added tokens, which may be among `before`"
    tokens: int | None = None
    "first row of padding, which is zeros (models/vocabulary.py); None: no padding"

    def among(self, start: int, size: int) -> list[int]:
        """Return the positions of new rows among rows start to start + size, counted from start; rows that only round
        up a grown vocabulary are new too.
        """
        ids = set(self.ids)
        return [i for i in range(self.padding(start, size)) if start + i >= self.before or start + i in ids]

    def padding(self, start: int, size: int) -> int:
        """Return the position of the first padding row among rows start to start + size; `size` if there is none."""
        return size if self.tokens is None else max(0, min(self.tokens - start, size))


def add_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> None:
    """Make each a special token of the tokenizer; missing tokens are added after all others, in this order.

    bos, eos and pad do not change: text still ends with eos, and generation also stops at the template's end of turn.
    """
    vocabulary = tokenizer.get_vocab()
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    # By default transformers takes the list for all extra tokens: the existing ones would lose their special status.
    tokenizer.add_special_tokens(
        {"extra_special_tokens": [token for token in tokens if token not in special]},
        replace_extra_special_tokens=False,
    )
    absent = tuple(token for token in tokens if token not in vocabulary)
    if absent:
        ids = tuple(map(tokenizer.get_vocab().__getitem__, absent))
        setattr(tokenizer, _ADDED, AddedTokens(absent, ids, max(vocabulary.values()) + 1))


def added_tokens(tokenizer: PreTrainedTokenizerBase) -> AddedTokens | None:
    """Return the tokens that add_tokens added; None if there are none."""
    return getattr(tokenizer, _ADDED, None)


def new_rows(orig_model: PreTrainedModel) -> NewRows | None:
    """Return the rows of the vocabulary that make_rows made; None if all rows come from the files or are padding."""
    return getattr(orig_model, _NEW_ROWS, None)


def check_rows(orig_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Reject a tokenizer with tokens that have no row in the model.

    Added tokens get their rows later. Special tokens that neither text nor the template produces need none: the
    tokenizer of Gemma 3 1B has one for images, its model does not.

    Raises:
        ConfigError: another token of the tokenizer has no row.
    """
    rows = vocab_size(orig_model)
    added = added_tokens(tokenizer)
    special = tokenizer.added_tokens_decoder
    written = [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token]
    for token, i in tokenizer.get_vocab().items():
        if i < rows or (added is not None and token in added.tokens):
            continue
        if i in special and special[i].special and token not in written and token not in str(tokenizer.chat_template):
            continue
        raise config_error("token without a row", tokens=len(tokenizer), rows=rows, token=token, i=i)


def make_rows(orig_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, multiple: int = 64) -> None:
    """Make rows of embedding and head for the tokens added to the tokenizer.

    Spare rows of the model are used first; a model that must grow grows to a multiple of some rows. Each new row
    is the mean of the rows of known tokens. A model on the meta device gets the new rows when its weights are
    read (models/weights.py).

    Raises:
        ConfigError: the model has no linear head.
    """
    added = added_tokens(tokenizer)
    if added is None:
        return
    before = vocab_size(orig_model)
    if max(added.ids) >= before:
        resize(orig_model, -(-(max(added.ids) + 1) // multiple) * multiple)
    _make(orig_model, NewRows(before, min(added.known, before), added.ids))


def make_room_for(orig_model: PreTrainedModel, ids: Sequence[int]) -> None:
    """Make rows of embedding and head for tokens whose rows an adapter holds; nothing if the model has them.

    Raises:
        ConfigError: the model would get other rows too, which no file holds.
    """
    before = vocab_size(orig_model)
    new = tuple(i for i in sorted(ids) if i >= before)
    if not new:
        return
    if absent := set(range(before, new[-1])) - {*new}:
        raise config_error("row in no file", new=new[-1], before=before, absent=min(absent))
    resize(orig_model, new[-1] + 1)
    _make(orig_model, NewRows(before, before, new))


def _make(orig_model: PreTrainedModel, new: NewRows) -> None:
    set_new_rows(orig_model, new)
    for tensor in vocabulary_of(orig_model):
        if not tensor.is_meta:
            fill(tensor, tensor, new)


def set_new_rows(orig_model: PreTrainedModel, new: NewRows | None) -> None:
    """Record for new_rows which rows the model's files lack."""
    setattr(orig_model, _NEW_ROWS, new)


def resize(orig_model: PreTrainedModel, rows: int) -> None:
    """Resize embedding, head and config.vocab_size to `rows`; the caller fills the new rows."""
    # transformers draws the new rows at random in any case (mean_resizing only chooses the distribution), and they
    # are overwritten. The fork preserves the random state.
    with torch.random.fork_rng(devices=[]):
        orig_model.resize_token_embeddings(rows, mean_resizing=False)


def vocabulary_of(orig_model: PreTrainedModel) -> list[Tensor]:
    """Return the parameters with a row for each token: embedding [V, H], then the head's weight [V, H] unless tied,
    and bias [V].
    """
    embedding = embedding_of(orig_model)
    projection = output_projection(orig_model)
    weights = [embedding] if projection.weight is embedding else [embedding, projection.weight]
    return weights if projection.bias is None else [*weights, projection.bias]


@torch.no_grad()
def fill(tensor: Tensor, source: Any, new: NewRows) -> None:
    """Fill this rank's shard of a vocabulary in place: rows of `source`, the mean in new rows, zeros in padding.

    Args:
        tensor: a tensor of vocabulary_of, whole or sharded.
        source: a tensor or a safetensors slice with at least `new.before` rows; may be `tensor` itself.
    """
    shard = local(tensor)
    (start, size), *columns = local_region(tensor)
    others = tuple(slice(first, first + number) for first, number in columns)
    there = max(0, min(new.before - start, size))
    # The file has fewer rows than the model: it may hold only the first rows of this rank's shard.
    if source is not tensor and there:
        shard[:there].copy_(source[(slice(start, start + there), *others)])
    rows = new.among(start, size)
    if rows:
        shard[rows] = mean_row(source, new.known, shard.dtype, others).to(shard)
    shard[new.padding(start, size) :] = 0


def mean_row(source: Any, rows: int, dtype: torch.dtype, columns: tuple[slice, ...] = ()) -> Tensor:
    """Return the mean of the first rows, rounded to the run's precision, as fp64 summed in fp64: the same on
    every rank.
    """
    total = torch.zeros((), dtype=torch.float64)
    for first in range(0, rows, MEAN_ROWS):
        part = source[(slice(first, min(first + MEAN_ROWS, rows)), *columns)]
        total = total + part.to(dtype).to(torch.float64).sum(0).cpu()
    return total / rows


def describe_added_tokens(orig_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return a line about the added tokens and their rows; None if there are none."""
    added = added_tokens(tokenizer)
    new = new_rows(orig_model)
    if added is None or new is None:
        return None
    names = ", ".join(f"{token} ({i})" for token, i in zip(added.tokens, added.ids, strict=True))
    rows = vocab_size(orig_model)
    grown = f"grow from {new.before:,} to {rows:,} rows" if rows > new.before else f"have room in their {rows:,} rows"
    tied = output_projection(orig_model).weight is embedding_of(orig_model)
    return hint("added tokens", names=names, tied="tied " * tied, grown=grown, known=new.known)


def pad_vocabulary(orig_model: PreTrainedModel, multiple: int) -> None:
    """Grow embedding and head in place to a multiple of `multiple` rows; config.vocab_size stays the number of
    token rows.

    A model on the meta device gets the zeros when its weights are read.

    Raises:
        ConfigError: the model has an encoder, so the vocabulary belongs to a model inside it.
    """
    if orig_model.config.is_encoder_decoder:
        raise config_error("padded vocabulary with an encoder", cls=type(orig_model).__name__)
    tokens = vocab_size(orig_model)
    rows = -(-tokens // multiple) * multiple
    if rows == tokens:
        return
    resize(orig_model, rows)
    # resize set it to all rows, but files and other programs must see only the rows of tokens.
    orig_model.config.get_text_config().vocab_size = orig_model.vocab_size = tokens
    setattr(orig_model, TOKEN_ROWS, tokens)
    if (new := new_rows(orig_model)) is not None:
        set_new_rows(orig_model, replace(new, tokens=tokens))
    with torch.no_grad():
        for tensor in vocabulary_of(orig_model):
            if not tensor.is_meta:
                tensor[tokens:] = 0
    # For logits outside the train step: evaluation, generation, checks. The step's loss uses Head.tokens instead.
    output_projection(orig_model).register_forward_hook(lambda _, __, logits: logits[..., :tokens])


def padding_rows(orig_model: PreTrainedModel) -> int:
    """Return the number of padding rows of embedding and head."""
    return embedding_of(orig_model).shape[0] - vocab_size(orig_model)


def rows_of_files(orig_model: PreTrainedModel) -> NewRows | None:
    """Return the number of rows that a file of this model holds; None if it holds all."""
    tokens = vocab_size(orig_model)
    return NewRows(tokens, tokens, (), tokens) if padding_rows(orig_model) else None


def without_padding(orig_model: PreTrainedModel) -> dict[int, int]:
    """Map the id of each padded parameter to its number of token rows; empty without padding."""
    if not padding_rows(orig_model):
        return {}
    return {id(tensor): vocab_size(orig_model) for tensor in vocabulary_of(orig_model)}


def describe_padding(orig_model: PreTrainedModel) -> str | None:
    """Return a line about the padding; None without padding."""
    if not padding_rows(orig_model):
        return None
    rows = embedding_of(orig_model).shape[0]
    return f"vocabulary padded from {vocab_size(orig_model):,} to {rows:,} rows: zeros, not in logits and files"
