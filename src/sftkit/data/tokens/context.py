"""Check that a chat template renders every part of a conversation: tools, instructions, questions, results of tools,
earlier calls. A template silently leaves out parts that it does not know, so the answers would be learned without the
text that they follow from."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from jinja2.exceptions import TemplateError

from sftkit.data.reading.conversation import Message, answer_core, function_of
from sftkit.data.tokens.template import Template
from sftkit.data.types import JsonObject
from sftkit.errors import DataError

Tools = list[JsonObject] | None
Render = Callable[[list[Message], Tools], str]
"(messages, tools) -> the text that the template makes of them; raises jinja's TemplateError."

DROPPED_ANSWER = "template leaves an earlier answer out"
"An oddity: the server of such a template would leave it out as well."
_ADVICE = "Take a template that renders {} (model.chat_template), or take {} out of the record"
_LEFT_OUT = {
    "tools": ("template does not render the tools", "these tools", "it", "them"),
    "system": ("template leaves out a system message", "this system message", "it", "it"),
    "tool": ("template does not render a tool result", "this tool result", "tool results", "it"),
    "user": ("template leaves out a message", "this message", "it", "it"),
    "call": ("template does not render a tool call", "the tool calls of this answer", "them", "them"),
}
"Part that a template left out -> reason, the name of the part, and two words of the advice."


def check_context(
    messages: list[Message], tools: Tools, text: str, render: Render, *, template: Template, where: str, args: object
) -> dict[str, str]:
    """Reject a conversation of which a template leaves something out; return the oddities, as conversation.oddities.

    The words of a message may occur elsewhere in the text too. So a conversation whose own words are not found, or that
    is the first of its shape, is rendered once more, with marks in it that no data has.

    Args:
        text: what the template makes of messages and tools.
        render: the same for others.
        args: the template's arguments.

    Raises:
        DataError: something is left out.
    """
    shape = (_shape(messages), bool(tools), any(map(_described, tools or ())), repr(args))
    words = all(_stands_in(text, messages, tools))
    if words and shape in template.whole_shapes:
        return {}
    marks: dict[str, tuple[str, int]] = {}
    try:
        marked = render(_marked(messages, marks), _marked_tools(tools, marks))
    except TemplateError:
        # It rejects what the marks changed, so its words must do.
        marked = "" if not words else "".join(marks)
    lost = sorted({place for mark, place in marks.items() if mark not in marked}, key=lambda place: place[1])
    odd: dict[str, str] = {}
    for what, i in lost:
        if what == "answer":
            odd.setdefault(
                DROPPED_ANSWER, f"{where}: messages[{i}]: the chat template leaves out the text of this answer"
            )
            continue
        reason, name, rendered, taken = _LEFT_OUT[what]
        at = f"messages[{i}]" if i >= 0 else "tools"
        advice = _ADVICE.format(rendered, taken)
        problem = f"{where}: {at}: the chat template leaves out {name}, which the answers depend on. {advice}"
        raise DataError(problem, reason=reason)
    if not odd:
        template.whole_shapes.add(shape)
    return odd


def _shape(messages: list[Message]) -> Hashable:
    """Return what a template may look at before it leaves a message out: the kinds of its messages and neighbours."""
    kinds = [(m["role"], bool(m["content"].strip()), len(m.get("tool_calls", ()))) for m in messages]
    around = zip([None, *kinds], kinds, [*kinds[1:], None], strict=False)
    return frozenset((min(i, 1), *three) for i, three in enumerate(around))


def _stands_in(text: str, messages: list[Message], tools: Tools) -> Iterator[bool]:
    """Yield whether the words of each part are in the text."""
    cursor = 0
    for message in messages:
        answer = message["role"] == "assistant"
        content = answer_core(message) if answer else message["content"].strip()
        # Behind the last one that was found, so that words which are said twice are there twice. Some templates move
        # system messages to the front, and some write results as JSON.
        found = text.find(content, cursor)
        cursor = found + len(content) if found >= 0 else cursor
        moved = message["role"] in ("system", "developer") and content in text
        quoted = json.dumps(content, ensure_ascii=False)[1:-1]
        yield found >= 0 or moved or (quoted != content and quoted in text)
        yield all(function_of(call)["name"] in text for call in message.get("tool_calls", ()))
    yield all(str(function_of(tool).get("name", "")) in text for tool in tools or ())


def _mark(marks: dict[str, tuple[str, int]], what: str, i: int) -> str:
    """Return a new text that no data has, part of a name too, and note whose it is."""
    mark = f"_kept{len(marks)}by_template_"
    marks[mark] = what, i
    return mark


def _marked(messages: list[Message], marks: dict[str, tuple[str, int]]) -> list[Message]:
    """Return the messages with a mark at the end of each text, and in each tool call."""
    result = []
    for i, message in enumerate(messages):
        role = message["role"]
        marked = dict(message)
        if message["content"].strip():
            what = str({"assistant": "answer", "developer": "system"}.get(role, role))
            if role != "assistant" or answer_core(message):
                marked["content"] += _mark(marks, what, i)
        if calls := message.get("tool_calls"):
            marked["tool_calls"] = [_marked_call(call, marks, i) for call in calls]
        result.append(marked)
    return result


def _marked_call(call: Message, marks: dict[str, tuple[str, int]], i: int) -> Message:
    function: dict[str, Any] = dict(call["function"])
    function["name"] += _mark(marks, "call", i)
    arguments = function["arguments"]
    if isinstance(arguments, dict) and arguments:
        mark = _mark(marks, "call", i)
        function["arguments"] = {**arguments, mark: mark}
    elif isinstance(arguments, str) and arguments.strip():
        function["arguments"] += _mark(marks, "call", i)
    return {**call, "function": function}


def _marked_tools(tools: Tools, marks: dict[str, tuple[str, int]]) -> Tools:
    if not tools:
        return tools
    result = []
    for tool in tools:
        function = function_of(tool)
        marked = {**function, "name": f"{function.get('name', '')}{_mark(marks, 'tools', -1)}"}
        if _described(tool):
            marked["description"] = f"{function['description']}{_mark(marks, 'tools', -1)}"
        result.append({**tool, "function": marked})
    return result


def _described(tool: JsonObject) -> bool:
    text = function_of(tool).get("description")
    return isinstance(text, str) and bool(text.strip())
