"""Train a byte-level BPE tokenizer: any text round-trips, each digit is a token, chat turns have special tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from sftkit.config.schema import SourceConfig
from sftkit.data import sources

END_OF_TEXT, PAD, IM_START, IM_END = "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, PAD, IM_START, IM_END)

# Text is split into these first, and no token crosses a split: a word with the space before it, one digit, a run
# of signs, white space.
PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def ids_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    """Return the fields of a new model's config that follow from its tokenizer."""
    return {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def train_tokenizer(texts: Iterable[str], vocab_size: int, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Train a tokenizer of at most `vocab_size` entries, the four special tokens (ids 0-3) and
    all 256 bytes among them.

    Documents end with <|endoftext|>, which is eos; nothing is put before them. The same texts give the same tokenizer.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        extra_special_tokens=[IM_START, IM_END],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat_template
    return fast


def training_texts(tokenizer_sources: Iterable[SourceConfig], on_bad_row: Literal["error", "skip"]) -> Iterator[str]:
    """Yield the texts of all rows: their text, the captions of pictures, or the content of each message."""
    for source in tokenizer_sources:
        for row in sources.read(source, on_bad_row):
            if row.text is not None:
                yield row.text
            else:
                yield from row.captions
                yield from (str(message.get("content") or "") for message in row.messages or ())
