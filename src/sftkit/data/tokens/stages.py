"""What each stage learns from a record, as the partial that `loader.load_examples` takes.

A stage script and scripts/inspect_data.py take it from here, so inspection shows what is learned. They share a cache,
whose key names the function and all that is bound to it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from transformers import PreTrainedTokenizerBase

from sftkit.config.schema import DataConfig
from sftkit.config.tables import STAGE_SCRIPTS
from sftkit.data.tokens import chat, text
from sftkit.data.tokens.loss_mask import Targets
from sftkit.data.types import Tokenized
from sftkit.errors import ConfigError

OfStage = Callable[[DataConfig, PreTrainedTokenizerBase, int], partial[Tokenized]]


def base(data: DataConfig, tokenizer: PreTrainedTokenizerBase, max_length: int) -> partial[Tokenized]:
    """Return the tokenizing of base training: plain text, every token a target; conversations are refused.

    Raises:
        ConfigError: settings of conversations.
    """
    _refuse_targets(
        data, "base_train.py learns every token of texts; remove the setting, or run mid_train.py or chat_sft.py"
    )
    return partial(text.tokenize, tokenizer=tokenizer, max_length=max_length)


def mid(data: DataConfig, tokenizer: PreTrainedTokenizerBase, max_length: int) -> partial[Tokenized]:
    """Return the tokenizing of mid-training: text and conversations, every token a target unless
    data.targets says otherwise."""
    return _conversations(text.tokenize_any, data, tokenizer, max_length, data.targets or "all")


def sft(data: DataConfig, tokenizer: PreTrainedTokenizerBase, max_length: int) -> partial[Tokenized]:
    """Return the tokenizing of SFT: conversations, the assistant's tokens targets unless data.targets says
    otherwise; text is refused."""
    return _conversations(chat.tokenize, data, tokenizer, max_length, data.targets or "assistant")


def caption(data: DataConfig, tokenizer: PreTrainedTokenizerBase, max_length: int) -> partial[Tokenized]:
    """Return the tokenizing of captions: an encoder reads a picture or a text, and every token of its
    caption or answer is a target.

    Raises:
        ConfigError: settings of conversations.
    """
    _refuse_targets(data, "caption_train.py learns every token of captions; remove the setting")
    return partial(text.tokenize_captions, tokenizer=tokenizer, max_length=max_length, too_long=data.too_long)


def _refuse_targets(data: DataConfig, reason: str) -> None:
    if data.targets not in (None, "all"):
        raise ConfigError(f"data.targets={data.targets}: {reason}")


def _conversations(
    tokenize: Callable[..., Tokenized],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    targets: Targets,
) -> partial[Tokenized]:
    learning = chat.Learning(targets, data.thinking, data.split_turns)
    return partial(tokenize, tokenizer=tokenizer, max_length=max_length, too_long=data.too_long, learning=learning)


DATA_OF_STAGES: dict[str, tuple[str, OfStage]] = {
    stage: (STAGE_SCRIPTS[stage], tokenizing)
    for stage, tokenizing in {"base": base, "mid": mid, "sft": sft, "caption": caption}.items()
}
"Stage -> its script, and the function that returns its tokenizing."
