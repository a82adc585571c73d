"""Places in a rendered conversation: special tokens, marks, what an answer must contain, and the errors if
it does not."""

from __future__ import annotations

import re

from sftkit.data.reading.conversation import Message, answer_core, function_of
from sftkit.data.tokens.rendering import Span
from sftkit.errors import DataError


def within(span: Span, marks: list[Span]) -> list[Span]:
    """Return the parts of a span that are marked. The end-of-turn token, which some marks leave out,
    belongs to the last one."""
    start, end = span
    parts = [(max(a, start), min(b, end)) for a, b in marks if a < end and b > start]
    return [*parts[:-1], (parts[-1][0], end)] if parts else []


def end_of_marked(text: str, span: Span, end_tokens: tuple[str, ...]) -> int:
    """Return the end of a marked span: with the end-of-turn token if the marks leave it out, without whitespace
    after that token."""
    start, end = span
    trimmed = start + len(text[start:end].rstrip())
    if text[start:trimmed].endswith(end_tokens):
        return trimmed
    for token in end_tokens:
        following = re.compile(r"\s*" + re.escape(token)).match(text, end)
        if following:
            return following.end()
    return end


def required_texts(message: Message) -> list[str]:
    """Return the strings that the rendered answer must contain: its text and the names of the tools it calls."""
    return [p for p in (answer_core(message), *(function_of(c)["name"] for c in message.get("tool_calls", ()))) if p]


def common_prefix(texts: list[str]) -> str:
    """Return what all texts begin with."""
    first, last = min(texts), max(texts)  # in the order of the alphabet, so all others share what these two do
    return first[: next((i for i, (x, y) in enumerate(zip(first, last, strict=False)) if x != y), len(first))]


FAULTS = {
    "template refuses it": "the chat template refuses this conversation: {error}",
    "template does not render the answer": "messages[{k}]: the chat template does not render {missing!r} as part of "
    "this answer, so it could not be learned. Use a template that renders it (tool calls need a template that knows "
    "them): model.chat_template",
    "template does not render the reasoning": "messages[{k}]: the chat template does not render the reasoning of this "
    "answer, so it could not be learned. Set data.thinking=off to leave reasoning out, or take a template that "
    "renders it: model.chat_template",
    "template opens a thinking block before an answer without reasoning": "messages[{k}]: the chat template opens a "
    "thinking block before every answer, and this one has no reasoning. Set data.thinking=learn_empty to learn that "
    "the block is closed at once, or take a template that does not open it: model.chat_template",
    "template renders the prompt differently": "messages[{k}]: the prompt that the chat template makes for this "
    "answer is not how it renders the conversation: after {shared!r} the prompt has {prompt!r}, the conversation "
    "{text!r}. Use a template with {{% generation %}} marks: model.chat_template",
    "marked answer cannot be found": "messages[{k}]: this answer is marked as not to be learned, but the chat template "
    "renders it differently in the middle of a conversation, so it cannot be located: remove the record",
    "no end-of-turn token": "messages[{k}]: no end-of-turn token {token!r} after this answer",
    "template marks no answer": "messages[{k}]: the chat template marks no part of this answer",
    "template cannot begin with an answer": "messages[0]: the chat template cannot begin with an answer",
}
"Reason -> what is wrong with a conversation or one of its answers, messages[k]."


def fault(where: str, reason: str, **words: object) -> DataError:
    """Return the DataError for one of FAULTS.

    Args:
        words: what its text names.
    """
    return DataError(f"{where}: {FAULTS[reason].format(**words)}", reason=reason)
