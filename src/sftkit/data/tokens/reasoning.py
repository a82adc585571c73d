"""The reasoning before an answer: where published data keeps it, and which arguments the template gets for it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from sftkit.data.reading.columns import REASONING
from sftkit.data.reading.conversation import THOUGHT, Message
from sftkit.data.reading.readers import wrong_kind
from sftkit.data.tokens.template import Template
from sftkit.errors import DataError

Thinking = Literal["auto", "learn_empty", "off"]
_OTHER_BLOCK = re.compile(r"\A\s*<(\w+)>(.*?)</\1>", re.DOTALL)
"A block at the start of an answer by tags that no template knows, such as <thinking>."


def reasoning_of(message: Message) -> str:
    """Return the reasoning before an answer, from a field or from its content; empty if it has none."""
    for key in REASONING:
        if isinstance(message.get(key), str) and message[key].strip():
            return str(message[key]).strip()
    return next(filter(None, _inline(message["content"])[0]), "")


def _inline(content: str) -> tuple[list[str], str]:
    """Return the texts of the thinking blocks at the beginning of an answer's content, and what follows them."""
    found = []
    while block := THOUGHT.match(content):
        found.append(block[1].strip())
        content = content[block.end() :]
    return found, content


def with_other_reasoning(message: Message, reasoning: str) -> Message:
    """Return an answer that has reasoning with another text in its place."""
    fields = {key: reasoning for key in REASONING if message.get(key)}
    content = THOUGHT.sub(lambda _: f"<think>\n{reasoning}\n</think>\n\n", message["content"])
    return {**message, **fields, "content": content}


def with_reasoning(messages: list[Message], template: Template, thinking: Thinking) -> list[Message]:
    """Return messages with the reasoning of answers where the template renders it, or without it."""
    result = []
    for message in messages:
        if message["role"] == "assistant" and (reasoning := reasoning_of(message)):
            # Moved to where this template looks for it: a field of its own, or a thinking block in the text.
            blocks, rest = _inline(message["content"])
            # The reasoning once, though a field and the text have it, or the text twice.
            field = any(message.get(key) for key in REASONING) or len(blocks) > 1
            field = field or bool(template.reasoning_key and not template.renders_thoughts)
            message = {key: value for key, value in message.items() if key not in REASONING}
            if thinking == "off" or field:
                opened, end, answer = rest.partition("</think>")
                # A block without its beginning, as a server returns it that has put that into the prompt.
                message["content"] = answer.lstrip() if end and opened.strip() == reasoning else rest
            if thinking == "off":
                pass
            elif field and template.renders_thoughts and not template.reasoning_key:
                message["content"] = f"<think>\n{reasoning}\n</think>\n\n{message['content']}"
            elif field:
                message[template.reasoning_key or REASONING[0]] = reasoning
        result.append(message)
    return result


def check_reasoning(messages: list[Message], where: str) -> None:
    """Reject an answer with several reasonings, or one that is not text.

    Raises:
        DataError: it has several, or something else in one of the fields.
    """
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        given = {key: message[key] for key in REASONING if message.get(key)}
        for key, value in given.items():
            if not isinstance(value, str):
                raise wrong_kind(f"{where}: messages[{i}]: {key}", value, "text", reason="reasoning is not text")
        texts = {value.strip() for value in given.values()}
        inline, rest = _inline(message["content"])
        texts.update(inline)
        if (block := _OTHER_BLOCK.match(rest)) and block[2].strip() in texts - {""}:
            raise DataError(
                f"{where}: messages[{i}]: the same reasoning is in {', '.join(given) or '<think>'} and in <{block[1]}> "
                "at the start of content, so it would be learned twice: keep one",
                reason="two reasonings of an answer",
            )
        if len(texts - {""}) > 1:
            raise DataError(
                f"{where}: messages[{i}]: two different reasonings before one answer ({', '.join(given)}"
                f"{' and <think> in content' if inline else ''}): keep one",
                reason="two reasonings of an answer",
            )


def template_arguments(
    template: Template, messages: list[Message], k: int, args: Mapping[str, object] | None, thinking: Thinking
) -> dict[str, object]:
    """Return the template's arguments for messages up to answer k: thinking is turned on where that turn has reasoning,
    and off elsewhere, unless the recipe or the record says otherwise."""
    result, name = dict(args or {}), template.thinking_argument
    if name and name not in result and name not in template.fixed and thinking != "learn_empty":
        last_user = next((i for i in range(k, 0, -1) if messages[i]["role"] == "user"), 0)
        result[name] = any(m["role"] == "assistant" and reasoning_of(m) for m in messages[last_user : k + 1])
    return result
