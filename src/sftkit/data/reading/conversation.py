"""Check conversations before a template renders them: roles, content, tool calls, special tokens in texts.

docs/data_formats.md, "Odd records", lists which odd conversations are accepted on purpose and which are rejected. Turns
of other shapes are converted to messages here too: of ShareGPT (from, value), pairs, texts with speakers.
"""

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache

from sftkit.data.reading.columns import ARGUMENTS, MARKS, MESSAGE, check_keys, has_marker, is_empty, is_plain, named
from sftkit.data.reading.readers import loads, parse_json, wrong_kind
from sftkit.data.types import JsonObject, Row
from sftkit.errors import DataError, fault

_OF_FUNCTION = frozenset(("function", "name", *ARGUMENTS))
ROLES = ("system", "developer", "user", "assistant", "tool")

NO_MEDIA = "place of a picture in the text"
"Data warning about a text with a marker of pictures, videos or sound."
THOUGHT = re.compile(r"\A\s*<think>(.*?)</think>\s*", re.DOTALL)
"Reasoning that is written into the content."

Message = JsonObject


def validated(row: Row, special_tokens: Iterable[str]) -> list[Message]:
    """Return the row's messages with string content and parsed tool arguments, or raise a DataError.

    Null content becomes "" next to tool calls, text parts are joined, null keys (Arrow's fill) are dropped, and tool
    arguments that are JSON text become an object, which is what published templates expect; other text stays as it is
    (`oddities` names it).
    """
    messages = row.messages
    if not isinstance(messages, list):
        raise wrong_kind(f"{row.where}: messages", messages, "a list of messages", reason="messages is not a list")
    if not messages:
        raise DataError(f"{row.where}: messages is empty", reason="no messages")
    result = [
        m if is_plain(m) and m["role"] in ROLES else _message(m, f"{row.where}: messages[{i}]")
        for i, m in enumerate(messages)
    ]
    _reject_special_tokens(row, result, tuple(special_tokens))
    return result


def require_answer(messages: list[Message], where: str) -> None:
    """Reject a conversation to learn from that has no assistant turn, or an empty one."""
    roles = dict.fromkeys(message["role"] for message in messages)
    if "assistant" not in roles:
        said = ", ".join(roles)
        raise DataError(f"{where}: no assistant turn (roles: {said}), nothing to learn", reason="no assistant turn")
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and not answer_core(message) and not message.get("tool_calls"):
            raise fault(where, "empty answer", i=i)


def oddities(messages: list[Message], where: str) -> dict[str, str]:
    """Return the data warnings about a conversation that is accepted: reason -> place and text of the first one."""
    found: dict[str, str] = {}
    open_calls: list[str | None] = []  # ids of calls whose result has not come yet
    for i, message in enumerate(messages):
        if message["role"] != "assistant" and has_marker(message["content"]):
            what = f"{where}: messages[{i}] has <image>, <video> or <audio> in it, and there is nothing to see or hear"
            found.setdefault(NO_MEDIA, what)
        # Several calls may be open at once, and their results come in any order.
        if message["role"] == "tool":
            if not _answers(open_calls, message.get("tool_call_id")):
                what = f"{where}: messages[{i}] is the result of no call in the turn before it"
                found.setdefault("tool result without a call", what)
            continue
        calls = message.get("tool_calls", ())
        open_calls = [call.get("id") for call in calls]
        for k, call in enumerate(calls):
            if not isinstance(_arguments(function_of(call).get("arguments")), dict):
                what = f"{where}: messages[{i}]: tool_calls[{k}]: arguments are not a JSON object, or have a key twice"
                found.setdefault("tool arguments kept as text", what)
    return found


def _answers(open_calls: list[str | None], call_id: str | None) -> bool:
    """Return whether a result belongs to an open call, and close that call. Ids count if both have one."""
    # The call with the same id, else one without; a result without an id closes a call without, else the first one.
    for known in (call_id, None) if call_id is not None else (None, *open_calls):
        if known in open_calls:
            open_calls.remove(known)
            return True
    return False


def answer_core(message: Message) -> str:
    """Return the part of an answer that every template keeps: stripped, without a thinking block at its beginning."""
    content: str = message["content"]
    return (THOUGHT.sub("", content) if "<think>" in content else content).strip()


def split_thoughts(content: str) -> tuple[list[str], str]:
    """Return the texts of the thinking blocks at the beginning of an answer's content, and what follows them."""
    thoughts: list[str] = []
    if "<think>" not in content:
        return thoughts, content
    while block := THOUGHT.match(content):
        thoughts.append(block[1])
        content = content[block.end() :]
    return thoughts, content


def function_of(call: Message) -> Message:
    """Return the {name, arguments} of a tool call, in OpenAI's shape or bare."""
    return call["function"] if isinstance(call.get("function"), dict) else call


def _message(message: object, where: str) -> Message:
    """Return a message with checked role, content and tool calls; null keys are dropped."""
    message = current_message(message, where)
    if not isinstance(message, dict):
        wanted = "an object with role and content (a row is one conversation)"
        raise wrong_kind(where, message, wanted, reason="message is not an object")
    # A key with null is one that Arrow has filled in, except for content, where null means that there is none.
    message = {key: value for key, value in message.items() if value is not None or key == "content"}
    role = message.get("role")
    if role is None:
        raise fault(where, "unknown role / none", keys=", ".join(message), roles=", ".join(ROLES))
    if role not in ROLES:
        raise fault(where, "unknown role / message", role=json.dumps(role, default=str), roles=", ".join(ROLES))
    check_keys(message, where)
    if "tool_calls" in message:
        calls = message["tool_calls"]
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise DataError(f"{where}: tool_calls must be a list of objects", reason="malformed tool call")
        message["tool_calls"] = [_tool_call(call, f"{where}: tool_calls[{i}]") for i, call in enumerate(calls)]
        if not calls:
            del message["tool_calls"]
        elif role != "assistant":
            raise fault(where, "malformed tool call", role=role)
    message["content"] = _content(message, where)
    return message


def _content(message: Message, where: str) -> str:
    """Return a message's content as one string."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        if message["role"] == "assistant" and "tool_calls" in message:
            return ""
        state = "null" if "content" in message else f"missing next to {', '.join(message)}"
        raise fault(where, "no content", state=state)
    if not isinstance(content, list):
        raise wrong_kind(f"{where}: content", content, "text or a list of text parts", reason="content is not text")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise fault(where, "content is not text", kind=kind)
        if marked := [key for key in MARKS if part.get(key) is not None]:
            raise fault(where, "marks of parts / content", mark=marked[0])
    return "".join(part["text"] for part in content)


def _tool_call(call: Message, where: str) -> Message:
    """Return a tool call in OpenAI's shape."""
    function = dict(function_of(call))
    if not isinstance(function.get("name"), str):
        raise DataError(f"{where} has no function name", reason="malformed tool call")
    given = {key: function.pop(key) for key in ARGUMENTS if key in function}
    said = [value for value in given.values() if not is_empty(value)]
    if len(said) > 1:
        raise DataError(f"{where} has {' and '.join(given)}: keep one", reason="malformed tool call")
    function["arguments"] = _arguments(said[0] if said else given.get("arguments"))
    # Ids and whatever else the data has stay, since templates may write them.
    kept = {key: value for key, value in call.items() if key not in _OF_FUNCTION}
    return {"type": "function", **kept, "function": function}


def _arguments(arguments: object) -> object:
    """Return tool arguments as an object, {} if there are none; unchanged if they are something else, or name
    a key twice."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _reject_special_tokens(row: Row, messages: list[Message], special_tokens: tuple[str, ...]) -> None:
    """Reject a special token in messages, tools or template arguments. Of tokenizers whose <think> is one, a thinking
    block at the beginning of an answer is allowed."""
    pattern = special_pattern(special_tokens)
    # First in all of them at once. repr changes only characters that no special token has.
    others = ([message for message in messages if len(message) != 2], row.tools, row.template_args)
    plain = [message["content"] for message in messages if len(message) == 2]
    with suppress(TypeError, ValueError, RecursionError):
        whole = "\0".join((*plain, *ROLES, "role", "content", repr(others) if any(others) else ""))
        firsts = _first_characters(special_tokens)
        if firsts is not None and not (any(map(whole.__contains__, firsts)) and pattern.search(whole)):
            return
    given = {"messages": messages, "tools": row.tools or (), "chat_template_kwargs": [row.template_args]}
    places = ((column, i, value) for column, values in given.items() for i, value in enumerate(values))
    for column, i, text in ((c, i, text) for c, i, value in places for text in _strings(_without_think_tags(value))):
        if found := pattern.search(text):
            near = text[max(0, found.start() - 20) : found.end() + 20]
            forged = (
                f"the tokenizer's special token {found.group()!r} (near {near!r}), which would forge the end or start "
                "of a turn. Remove it from the text"
            )
            if column != "messages":
                raise DataError(f"{row.where}: {column} holds {forged}", reason="special token beside the messages")
            if re.search("think|thought|reason", found.group(), re.IGNORECASE):
                forged += ", or keep the reasoning of an answer in its field reasoning_content"
            raise DataError(f"{row.where}: messages[{i}] contains {forged}", reason="special token in text")


def _without_think_tags(value: object) -> object:
    """Return an answer without the tags, but with the text, of thinking blocks at its beginning; others as they are."""
    if not isinstance(value, dict) or value.get("role") != "assistant" or not isinstance(value.get("content"), str):
        return value
    thoughts, rest = split_thoughts(value["content"])
    return {**value, "content": "\n".join([*thoughts, rest])} if thoughts else value


@lru_cache(maxsize=8)
def _first_characters(special_tokens: tuple[str, ...]) -> frozenset[str] | None:
    """Return the characters that special tokens begin with; None: repr has some of them with an escape."""
    as_they_are = all(repr(token) == f"'{token}'" for token in special_tokens)
    return frozenset(token[0] for token in special_tokens if token) if as_they_are else None


@lru_cache(maxsize=8)
def special_pattern(special_tokens: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that finds the next special token of a text, the longest if several begin there."""
    # The longest first: a pattern takes the first that fits.
    by_length = sorted((token for token in special_tokens if token), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, by_length)) or r"(?!)")


def _strings(value: object) -> Iterable[str]:
    """Yield all strings in a value, keys of mappings included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


# ---- other shapes ----------------------------------------------------------------------------------------------------


TREE = "tree of answers"
"Column of the messages along one path of a tree, by which the row is recognised."
ROLE_NAMES = {
    **{role: role for role in ROLES},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "model", "chatgpt", "bing"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), "tool_call"),
    **dict.fromkeys(("observation", "function", "tool_response", "ipython"), "tool"),
}
"Name of a speaker, in any case -> role; tool_call: an answer whose text is the JSON of its calls."
_TODAY = frozenset((*MESSAGE, "name"))
"Keys of a message that is written as it is today."


def current_message(message: object, where: str, names: Mapping[str, str] = ROLE_NAMES) -> object:
    """Return a message as it is written today: known names of keys and roles, role and content for from and value, and
    tool_calls for function_call (OpenAI until 2023). What is no object stays, for the check of messages.

    Args:
        names: ROLE_NAMES, with those of the source.
    """
    is_known = names is ROLE_NAMES and isinstance(message, dict) and _TODAY.issuperset(message)
    if not isinstance(message, dict) or (is_known and message.get("role") in ROLES):
        return message
    message = named(message, where)
    if "from" in message and "value" in message:
        message = _of_turn(message, where, names)
    role = message.get("role")
    if (role not in ROLES or names is not ROLE_NAMES) and isinstance(role, str):
        role = names.get(role.strip().casefold(), role)
        calls = message.get("content")
        if role == "tool_call":
            calls = parse_json(calls, f"{where}: {message['role']}") if isinstance(calls, str) else calls
            calls = calls if isinstance(calls, list) else [calls]
            if not all(isinstance(call, dict) and "name" in call for call in calls):
                raise DataError(f"{where}: {message['role']} without a name", reason="malformed tool call")
            wrapped = [{"type": "function", "function": call} for call in calls]
            return {**message, "role": "assistant", "content": "", "tool_calls": wrapped}
        message = message if role == message["role"] else {**message, "role": role}
    call = message.get("function_call")
    if call is None:
        return message
    if not isinstance(call, dict):
        raise wrong_kind(f"{where}: function_call", call, "an object with name", reason="malformed tool call")
    if message.get("tool_calls"):
        raise DataError(f"{where}: both function_call and tool_calls: keep one", reason="malformed tool call")
    rest = {key: value for key, value in message.items() if key != "function_call"}
    return {**rest, "content": message.get("content"), "tool_calls": [{"type": "function", "function": call}]}


def _of_turn(turn: JsonObject, where: str, names: Mapping[str, str]) -> JsonObject:
    """Return a turn of ShareGPT with role and content."""
    speaker = turn["from"]
    role = names.get(speaker.strip().casefold()) if isinstance(speaker, str) else None
    if role is None:
        raise fault(where, "unknown role / turn", given=speaker, roles=", ".join(names))
    said = {"role": speaker if role == "tool_call" else role, "content": turn["value"]}
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    for key, value in said.items():
        if rest.get(key) not in (None, "", value, speaker):
            raise fault(where, "malformed conversations", key=key)
    return {**rest, **said}


def pairs_to_messages(pairs: Iterable[Iterable[object]]) -> list[JsonObject]:
    """Return the messages of pairs of a question and its answer."""
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair, strict=True)]


SPEAKER = re.compile(r"(?:\A\s*|\n\n\s*)(Human|Assistant|SYSTEM|USER|ASSISTANT|FUNCTION RESPONSE):")
"Begins a turn in the text of turns."
