"""What a conversation must look like before a template may render it; everything else is a DataError that says why."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from sftkit.data.types import Row
from sftkit.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")

Message = dict[str, Any]


def validated(row: Row, special_tokens: Iterable[str]) -> list[Message]:
    """The row's messages with string content and parsed tool arguments, or a DataError.

    Null content becomes "" beside tool calls, text parts are joined, null keys (Arrow's fill) are dropped, and tool
    arguments that are JSON text become an object, which is what published templates expect; other text stays as it is.
    """
    messages = row.messages
    if not isinstance(messages, list):
        raise DataError(f"{row.where}: messages is {_kind(messages)}, expected a list of messages")
    if not messages:
        raise DataError(f"{row.where}: messages is empty")
    result = [_message(message, f"{row.where}: messages[{i}]") for i, message in enumerate(messages)]
    _refuse_special_tokens(row, result, tuple(special_tokens))
    return result


def require_answer(messages: list[Message], where: str) -> None:
    """A conversation to learn from has at least one assistant turn, and none of them is empty."""
    answers = [(i, message) for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise DataError(f"{where}: no assistant turn (roles: {roles}), nothing to learn")
    for i, message in answers:
        if not message["content"].strip() and not message.get("tool_calls"):
            raise DataError(f"{where}: messages[{i}]: empty answer (assistant with neither text nor tool calls)")


def answer_core(message: Message) -> str:
    """The part of an answer that every template keeps: trimmed, without a thinking block that may be left out."""
    return message["content"].rsplit("</think>", 1)[-1].strip()


def function_of(call: Message) -> Message:
    """The {name, arguments} of a tool call, in OpenAI's shape or bare."""
    return call["function"] if isinstance(call.get("function"), dict) else call


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise DataError(f"{where} is {_kind(message)}, expected an object with role and content")
    message = {key: value for key, value in message.items() if value is not None or key == "content"}
    role = message.get("role")
    if role not in ROLES:
        raise DataError(f"{where}: role {json.dumps(role, default=str)} is not one of {', '.join(ROLES)}")
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], where)
        if not message["tool_calls"]:
            del message["tool_calls"]
    message["content"] = _content(message, where)
    return message


def _content(message: Message, where: str) -> str:
    calls_tools = message["role"] == "assistant" and "tool_calls" in message
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        if calls_tools:
            return ""
        state = "null" if "content" in message else "missing"
        raise DataError(f"{where}: content is {state} (allowed only for an assistant that calls tools)")
    if not isinstance(content, list):
        raise DataError(f"{where}: content is {_kind(content)}, expected text or a list of text parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else _kind(part)
        if kind != "text" or not isinstance(part.get("text"), str):
            raise DataError(f"{where}: content has a part of type {kind}; only text parts can be trained on")
        texts.append(part["text"])
    return "".join(texts)


def _tool_calls(calls: Any, where: str) -> list[Message]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise DataError(f"{where}: tool_calls must be a list of objects")
    return [_tool_call(call, f"{where}: tool_calls[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Message, where: str) -> Message:
    function = dict(function_of(call))
    if not isinstance(function.get("name"), str):
        raise DataError(f"{where} has no function name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    function["arguments"] = {} if arguments is None else arguments
    kept = {key: value for key, value in call.items() if key not in ("function", "name", "arguments")}
    return {"type": "function", **kept, "function": function}


def _refuse_special_tokens(row: Row, messages: list[Message], special_tokens: tuple[str, ...]) -> None:
    pattern = _pattern(special_tokens)
    if pattern is None:
        return
    for i, message in enumerate(messages):
        for text in _strings(message):
            if found := pattern.search(text):
                near = text[max(0, found.start() - 20) : found.end() + 20]
                raise DataError(
                    f"{row.where}: messages[{i}] contains the tokenizer's special token {found.group()!r} "
                    f"(near {near!r}), which would forge the end or start of a turn. Remove it from the text"
                )
    for text in _strings(row.tools):
        if found := pattern.search(text):
            raise DataError(f"{row.where}: tools contain the tokenizer's special token {found.group()!r}")


@lru_cache(maxsize=8)
def _pattern(special_tokens: tuple[str, ...]) -> re.Pattern[str] | None:
    by_length = sorted((token for token in special_tokens if token), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, by_length))) if by_length else None


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _kind(value: Any) -> str:
    names = {"NoneType": "null", "str": "text", "dict": "an object", "list": "a list", "bool": "a truth value"}
    return names.get(type(value).__name__, "a number" if isinstance(value, int | float) else type(value).__name__)
