"""The mask policy of a conversation: which answers are learned, with which reasoning, by the data and the recipe.

Also here: the parts of a rendered text that a mark or an answer covers, and the errors if an answer is not in it. The
mask itself, a value for each token, is made in tokens/chat.py.
"""

import re
from collections.abc import Mapping
from typing import Literal

from sftkit.data.reading.columns import MARKS, NUMBER_MARKS, REASONING, TRUTH_MARKS
from sftkit.data.reading.conversation import THOUGHT, Message, answer_core, function_of, split_thoughts
from sftkit.data.reading.readers import wrong_kind
from sftkit.data.tokens.rendering import Span
from sftkit.data.tokens.template import Template
from sftkit.data.types import Row
from sftkit.errors import DataError, fault


def within(span: Span, marks: list[Span]) -> list[Span]:
    """Return the parts of a span that are marked. The end-of-turn token, which some marks leave out, belongs to
    the last one."""
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
    # in the order of the alphabet, so all others share what these two do
    first = min(texts)
    last = max(texts)
    return first[: next((i for i, (x, y) in enumerate(zip(first, last, strict=False)) if x != y), len(first))]


Targets = Literal["assistant", "last_turn", "all"]

CONTEXT = "not_learned_prompt"
"Why an answer is context only: it is in the column `prompt`."
MARKED = "not_learned_marked"
"The same: the data marks it."
EARLIER = "not_learned_earlier_turn"
"The same: it is in an earlier turn (data.targets=last_turn)."


def not_learned(row: Row, messages: list[Message], targets: Targets) -> dict[int, str]:
    """Return the answers that are context only, by their index in messages, and why.

    A message's own marks, such as `weight` (OpenAI's fine-tuning format: 0 or 1) and `train` (true or false), hold for
    every setting of targets: no setting learns text that is marked as bad. So do marks of the whole row.

    Raises:
        DataError: a mark of another value, or a message that is not an answer and is marked as learned; where every
            token is learned, one that is marked as not learned, or a role that the row masks.
    """
    if targets == "all" and row.masked_role:
        raise fault(row.where, "marks of parts / role", role=row.masked_role)
    reasons: dict[int, str] = {}
    last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=0)
    last_user = max((i for i, message in enumerate(messages[:last]) if message["role"] == "user"), default=-1)
    for i, message in enumerate(messages):
        marked = _marked(message, f"{row.where}: messages[{i}]")
        if message["role"] != "assistant":
            if marked is False and targets == "all":
                raise fault(row.where, "bad train mark", i=i, role=message["role"])
            continue
        # Marks of the data count before the recipe.
        if marked is False or not row.learned:
            reasons[i] = MARKED
        elif i < row.context_messages and targets != "all":
            reasons[i] = CONTEXT
        elif i < last_user and targets == "last_turn":
            reasons[i] = EARLIER
    return reasons


def without_marks(messages: list[Message]) -> list[Message]:
    """Return the messages as a template should see them."""
    return [{key: value for key, value in m.items() if key not in MARKS} for m in messages]


def _marked(message: Message, where: str) -> bool | None:
    """Return whether all marks of a message are true: it is learned; None: it has no mark."""
    marks = {name: message[name] for name in MARKS if name in message}
    for name, value in marks.items():
        if name in TRUTH_MARKS and not isinstance(value, bool):
            raise DataError(f"{where}: {name} {value!r} is not true or false", reason="bad train mark")
        if value not in (0, 1) or (name in NUMBER_MARKS and isinstance(value, bool)):
            problem = f"{where}: {name} {value!r} is not 0 or 1: an answer is learned or it is not"
            raise DataError(problem, reason="bad weight")
    if message["role"] != "assistant" and any(marks.values()):
        problem = f"{where}: a message of role {message['role']} is marked as learned: only answers are"
        raise DataError(problem, reason="bad train mark")
    return all(marks.values()) if marks else None


Thinking = Literal["auto", "learn_empty", "off"]
_OTHER_BLOCK = re.compile(r"\A\s*<(\w+)>(.*?)</\1>", re.DOTALL)
"A block at the start of an answer by tags that no template knows, such as <thinking>."


def reasoning_of(message: Message) -> str:
    """Return the reasoning before an answer, from a field or from its content; empty if it has none."""
    for key in REASONING:
        if isinstance(message.get(key), str) and message[key].strip():
            return str(message[key]).strip()
    thoughts, _ = split_thoughts(message["content"])
    return next(filter(None, map(str.strip, thoughts)), "")


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
            blocks, rest = split_thoughts(message["content"])
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
        inline, rest = split_thoughts(message["content"])
        texts.update(map(str.strip, inline))
        fields = ", ".join(given)
        if (block := _OTHER_BLOCK.match(rest)) and block[2].strip() in texts - {""}:
            raise fault(where, "two reasonings of an answer / same", i=i, places=fields or "<think>", tag=block[1])
        if len(texts - {""}) > 1:
            more = " and <think> in content" if inline else ""
            raise fault(where, "two reasonings of an answer / different", i=i, fields=fields, more=more)


def template_arguments(
    template: Template, messages: list[Message], k: int, args: Mapping[str, object] | None, thinking: Thinking
) -> dict[str, object]:
    """Return the template's arguments for messages up to answer k: thinking is turned on where that turn has reasoning,
    and off elsewhere, unless the recipe or the record sets it."""
    result = dict(args or {})
    name = template.thinking_argument
    if name and name not in result and name not in template.fixed and thinking != "learn_empty":
        last_user = next((i for i in range(k, 0, -1) if messages[i]["role"] == "user"), 0)
        result[name] = any(m["role"] == "assistant" and reasoning_of(m) for m in messages[last_user : k + 1])
    return result
