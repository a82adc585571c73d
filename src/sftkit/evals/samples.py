"""Sample answers: which rows of the validation sources are asked, and what of a row is the prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from transformers import PreTrainedTokenizerBase

from sftkit.config.schema import SourceConfig
from sftkit.data.tokens import chat, sources
from sftkit.data.types import Row, Tokenized
from sftkit.errors import DataError


def sample_rows(validation: Sequence[SourceConfig], tokenize: partial[Tokenized], num_samples: int) -> list[Row]:
    """Return the first rows of the validation sources, in turn, that can be learned from as a whole;
    asked as they are trained."""
    heads = [list(islice(usable_rows(source, tokenize), num_samples)) for source in validation]
    in_turn = [head[i] for i in range(num_samples) for head in heads if i < len(head)]
    return in_turn[:num_samples]


def usable_rows(source: SourceConfig, tokenize: partial[Tokenized]) -> Iterator[Row]:
    """Yield rows that fit in a training row and do not begin with an answer, as their first answer is trained."""
    learning: chat.Learning = tokenize.keywords.get("learning", chat.ANSWERS)
    for row in sources.read_source(source, "skip"):
        try:
            # Tokenized only to learn whether it is usable; the prompt is made of the row itself.
            tokenized = tokenize(row)
        except DataError:
            continue
        if not tokenized.examples or tokenized.note is not None:
            continue
        if row.messages is None:
            yield row
        elif row.messages and row.messages[0]["role"] != "assistant":
            yield chat.as_trained(row, _first_answer(row), tokenize.keywords["tokenizer"], learning.thinking)


def _first_answer(row: Row) -> int:
    """Return the index of the first answer that is not given as context, else of the first one."""
    assistant = [i for i, message in enumerate(row.messages or ()) if message["role"] == "assistant"]
    return next((i for i in assistant if i >= row.context_messages), assistant[0])


def sample_prompt(row: Row, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], str, str]:
    """Return (token ids, prompt text, reference): a conversation up to its first answer, or the start of a text."""
    if row.messages is None:
        text = row.text or ""
        return tokenizer(text[:80])["input_ids"], text[:80], text[80:240]
    first = _first_answer(row)
    shown = "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in row.messages[:first])
    prompt = chat.render_prompt(replace(row, messages=row.messages[:first]), tokenizer)
    return prompt, shown, str(row.messages[first].get("content") or "")
