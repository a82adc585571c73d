"""Estimate what data.split_turns=true would cost if it is off, from a sample of the first conversations of a source."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate, islice
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from sftkit.config.schema import DataConfig, SourceConfig
from sftkit.data.reading import rows
from sftkit.data.reading.origin import find_source
from sftkit.data.reading.slices import base_split
from sftkit.data.tokens import chat
from sftkit.data.tokens.answers import HISTORY
from sftkit.data.tokens.learned import Targets
from sftkit.data.types import Row, Tokenized
from sftkit.errors import ConfigError, DataError

ROWS_READ = 2_000
"Rows of a source that are read again at most."
_ALL_LEARNED = 0.95
"""Share of targets in a source's tokens from which all of its tokens count as learned, but for marked answers; in chat
SFT prompts are not targets."""
SAMPLED_ANSWERS = 200
"Answers in the conversations of the sample, which are tokenized again in both ways: about a second."


def estimate_turns(
    source: SourceConfig, facts: dict[str, Any], data: DataConfig, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> dict[str, Any] | None:
    """Return what learning the answers that are left out now would add to a source; None: nothing is left out, or
    nothing of it was found.

    Tokens and documents per answer left out are measured on conversations that are tokenized again, with split_turns
    off and on, and multiplied by the answers left out in all of the source.

    Args:
        facts: the source as preflight.data.source_facts has it.

    Returns:
        conversations: those measured; tokens, documents: what would be added; factor: tokens then over tokens now.
    """
    # What the stage learns where the recipe does not say: told from the counts, as this is given no stage.
    targets = data.targets or ("all" if facts["targets"] > _ALL_LEARNED * facts["tokens"] else "assistant")
    excluded = facts["answers"].get(_excluded_count_name(targets), 0)
    if data.split_turns or not excluded:
        return None
    # An estimate must not end at a long document.
    too_long = "truncate" if data.too_long == "error" else data.too_long
    tokenize = partial(chat.tokenize, tokenizer=tokenizer, max_length=max_length, too_long=too_long)
    learning = chat.Learning(targets, data.thinking)
    found = [one for row in _sample(source) if (one := _added(row, tokenize, learning))]
    if not found:
        return None
    answers, tokens, documents = (sum(numbers) for numbers in zip(*found, strict=True))
    more = round(tokens * excluded / answers)
    return {
        "conversations": len(found),
        "tokens": more,
        "documents": round(documents * excluded / answers),
        "factor": 1.0 + more / facts["tokens"],
    }


def _sample(source: SourceConfig) -> list[Row]:
    """Return some of the first conversations with more than one answer, until they have SAMPLED_ANSWERS, at random and
    always the same."""
    found = _several_answers(source)
    order = np.random.default_rng(0).permutation(len(found)).tolist()
    # Answers in the conversations before each: the sample ends with the one that reaches SAMPLED_ANSWERS.
    before = accumulate((found[i][1] for i in order), initial=0)
    return [found[i][0] for i, answers in zip(order, before, strict=False) if answers < SAMPLED_ANSWERS]


def _several_answers(source: SourceConfig) -> list[tuple[Row, int]]:
    """Return conversations with more than one answer among the first rows, and how many they have. What cannot be read
    is left out: tokenizing has reported it."""
    if "%" in source.split or "-" in source.split:  # a slice that would read the whole file for its total
        source = replace(source, split=base_split(source.split))
    found: list[tuple[Row, int]] = []
    with suppress(OSError, ConfigError, DataError):
        for raw in islice(find_source(source).rows(), ROWS_READ):
            with suppress(DataError):
                row = rows.parse(raw)
                messages = row.messages if isinstance(row.messages, list) else []
                answers = [m for m in messages if isinstance(m, dict) and m.get("role") == "assistant"]
                if len(answers) > 1:
                    found.append((row, len(answers)))
    return found


def _added(row: Row, tokenize: Callable[..., Tokenized], learning: chat.Learning) -> tuple[int, int, int] | None:
    """Return (answers left out now, tokens that would be added, documents that would be added) of a conversation; None:
    it leaves out none, or would be refused."""
    excluded = _excluded_count_name(learning.targets)
    try:
        off = tokenize(row, learning=replace(learning, split_turns=False))
        if not off.counts[excluded]:
            return None
        on = tokenize(row, learning=replace(learning, split_turns=True))
    except DataError:
        return None
    # One less for each document: its last token is only ever a target, so it takes no position.
    tokens, before = (sum(len(example.ids) - 1 for example in one.examples) for one in (on, off))
    return off.counts[excluded], tokens - before, len(on.examples) - len(off.examples)


def _excluded_count_name(targets: Targets) -> str:
    """Return the name of the count of answers that split_turns would add: of a conversation that is learned whole,
    those whose reasoning is dropped."""
    return "reasoning_left_out" if targets == "all" else HISTORY
