"""Places in a rendered conversation: special tokens, marks, what an answer must contain, and the errors if it does
not."""

from __future__ import annotations

import re
from functools import lru_cache

from sftkit.data.conversation import Message, answer_core, function_of
from sftkit.data.template import Span
from sftkit.errors import DataError


@lru_cache(maxsize=8)
def special_pattern(special_tokens: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that finds the next special token of a text, the longest if several begin there."""
    by_length = sorted((token for token in special_tokens if token), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, by_length)) or r"(?!)")


def within(span: Span, marks: list[Span]) -> list[Span]:
    """Return the parts of a span that are marked. The end-of-turn token, which some marks leave out,
    belongs to the last one."""
    start, end = span
    parts = [(max(a, start), min(b, end)) for a, b in marks if a < end and b > start]
    return [*parts[:-1], (parts[-1][0], end)] if parts else []


def end_of_marked(text: str, span: Span, end_tokens: tuple[str, ...]) -> int:
    """Return the end of a marked span: with the end-of-turn token if the marks leave it out, without whitespace after
    that token."""
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
    shortest, longest = min(texts), max(texts)  # in the order of the alphabet, so all others share what these two do
    return shortest[: common_length(shortest, longest)]


def common_length(a: str, b: str) -> int:
    """Return how many leading characters two texts share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def template_refuses(where: str, error: Exception) -> DataError:
    """Return the DataError for a conversation that the template refuses."""
    return DataError(f"{where}: the chat template refuses this conversation: {error}", reason="template refuses it")


def not_rendered(where: str, k: int, missing: str) -> DataError:
    """Return the DataError for an answer of which the template leaves out `missing`."""
    shown = missing if len(missing) <= 40 else missing[:40] + "..."
    return DataError(
        f"{where}: messages[{k}]: the chat template does not render {shown!r} as part of this answer, so it could not "
        "be learned. Use a template that renders it (tool calls need a template that knows them): model.chat_template",
        reason="template does not render the answer",
    )


def reasoning_not_rendered(where: str, k: int) -> DataError:
    """Return the DataError for an answer whose reasoning the template leaves out."""
    return DataError(
        f"{where}: messages[{k}]: the chat template does not render the reasoning of this answer, so it could not be learned. "
        "Set data.thinking=off to leave reasoning out, or take a template that renders it: model.chat_template",
        reason="template does not render the reasoning",
    )


def opened_without_reasoning(where: str, k: int) -> DataError:
    """Return the DataError for an answer without reasoning where the prompt opens a thinking block."""
    return DataError(
        f"{where}: messages[{k}]: the chat template opens a thinking block before every answer, and this one has no reasoning. "
        "Set data.thinking=learn_empty to learn that the block is closed at once, or take a template that does not open it: "
        "model.chat_template",
        reason="template opens a thinking block before an answer without reasoning",
    )


def prompt_differs(where: str, k: int, text: str, prompt: str) -> DataError:
    """Return the DataError for a prompt that is not how the rendered conversation begins."""
    at = common_length(text, prompt)
    return DataError(
        f"{where}: messages[{k}]: the prompt that the chat template makes for this answer is not how it renders the "
        f"conversation: after {text[max(0, at - 20) : at]!r} the prompt has {prompt[at : at + 20]!r}, the conversation "
        f"{text[at : at + 20]!r}. Use a template with {{% generation %}} marks: model.chat_template",
        reason="template renders the prompt differently",
    )


def marked_not_found(where: str, k: int) -> DataError:
    """Return the DataError for an answer that is not to be learned and cannot be found."""
    return DataError(
        f"{where}: messages[{k}]: this answer is marked as not to be learned, but the chat template renders it otherwise in the "
        "middle of a conversation, so where it stands is not known: take the record out",
        reason="marked answer cannot be found",
    )


def no_end_of_turn(where: str, k: int, token: str) -> DataError:
    """Return the DataError for an answer that no end-of-turn token follows."""
    return DataError(
        f"{where}: messages[{k}]: no end-of-turn token {token!r} after this answer", reason="no end-of-turn token"
    )


def nothing_marked(where: str, k: int) -> DataError:
    """Return the DataError for an answer that the template's marks leave out."""
    return DataError(
        f"{where}: messages[{k}]: the chat template marks no part of this answer", reason="template marks no answer"
    )


def cannot_begin_with_an_answer(where: str) -> DataError:
    """Return the DataError for a template that cannot render a conversation without a question."""
    return DataError(
        f"{where}: messages[0]: the chat template cannot begin with an answer",
        reason="template cannot begin with an answer",
    )
