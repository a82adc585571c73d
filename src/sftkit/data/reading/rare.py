"""Convert rows of shapes that few sources have: trees of answers, texts of turns, calls, tokens, segments.

A tree of answers (OASST) becomes the conversations along its paths, where the rows are read: rows of one message each
belong together. All other functions convert one row, as those in rows.py do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np

from sftkit.data.reading import columns
from sftkit.data.reading.conversation import SPEAKER, TREE, pairs_to_messages
from sftkit.data.reading.readers import RawRow, parse_json, parsed, wrong_kind
from sftkit.data.types import JsonObject, Row
from sftkit.errors import DataError, fault

_OF_TREES = ("message_tree_id", "tree_state", "lang")
"Keys of a tree's first message that say something about the whole tree."
_OF_NODES = ("message_id", "parent_id", "message_tree_id", "tree_state", "text", "replies", "rank", "deleted")
"Keys of a tree's message that are read here, or that only say where it is."


def conversations(rows: Iterable[RawRow], tree: Literal["best", "all"]) -> Iterator[RawRow]:
    """Yield the conversations of trees: of a row with all of a tree, or of rows of one message each, which follow
    one another. Only the rows of one tree are in memory. Other rows stay as they are."""
    flat: list[tuple[str, JsonObject]] = []
    for raw in rows:
        try:
            row: Any = parsed(raw)
        except DataError as error:
            row = error  # a bad row where it is parsed
        is_flat = isinstance(row, dict) and {"message_id", "message_tree_id", "text", "role"} <= row.keys()
        if flat and not (is_flat and row["message_tree_id"] == flat[0][1]["message_tree_id"]):
            yield from _joined(flat, tree)
            flat = []
        if is_flat:
            flat.append((raw[0], row))
        elif isinstance(row, dict) and isinstance(row.get("prompt"), dict) and "replies" in row["prompt"]:
            about = {key: value for key, value in row.items() if key != "prompt"}
            yield from _paths(raw[0], row["prompt"], about, tree)
        else:
            yield raw[0], row
    if flat:
        yield from _joined(flat, tree)


def _joined(flat: list[tuple[str, JsonObject]], tree: Literal["best", "all"]) -> Iterator[RawRow]:
    """Yield the conversations of a tree whose messages are rows. A message without its parent is a bad row."""
    nodes: dict[str, JsonObject] = {}
    roots = []
    for where, row in flat:
        node = {**row, "replies": []}
        parent = row.get("parent_id")
        if str(row["message_id"]) in nodes or (parent is not None and str(parent) not in nodes):
            yield where, fault(where, "broken tree", parent=parent)
            continue
        if parent is None:
            roots.append((where, node))
        else:
            nodes[str(parent)]["replies"].append(node)
        nodes[str(row["message_id"])] = node
    for where, root in roots:
        yield from _paths(where, root, {}, tree)


def _paths(where: str, root: JsonObject, about: JsonObject, tree: Literal["best", "all"]) -> Iterator[RawRow]:
    """Yield a tree's conversations up to an answer: the best one, or all of them. Those that share an answer all learn
    it here; hygiene.repeated_answers knows which of them are used."""
    about = {key: root[key] for key in _OF_TREES if key in root} | about
    ends: set[int] = set()
    number = 0
    waiting = [[root]]
    while waiting:
        path = waiting.pop()
        given: Any = path[-1].get("replies") or []
        if not isinstance(given, list) or not all(isinstance(reply, dict) for reply in given):
            yield where, wrong_kind(f"{where}: replies", given, "a list of messages", reason="broken tree")
            return
        # The best is first, and replies without a rank, such as questions, stay in their order.
        replies = sorted(given, key=lambda reply: rank if isinstance(rank := reply.get("rank"), int) else len(given))
        waiting += [[*path, reply] for reply in reversed(replies[:1] if tree == "best" else replies)]
        if replies:
            continue
        last = max((i for i, node in enumerate(path) if node.get("role") == "assistant"), default=0)
        if last and id(path[last]) in ends:
            continue  # two questions without an answer follow it
        messages = []
        for node in path[: last + 1]:
            message = {key: value for key, value in node.items() if key not in _OF_NODES}
            message["content"] = node.get("text")
            if node.get("role") == "assistant" and node.get("deleted"):
                message["train"] = False
            messages.append(message)
        ends.add(id(path[last]))
        number += 1
        yield (where if number == 1 else f"{where}, path {number}"), {**about, TREE: messages}


# ---- texts of turns --------------------------------------------------------------------------------------------------


_CALL = re.compile(r"<functioncall>\s*(\{.*\})", re.DOTALL)
_QUOTED = re.compile(r"""\{\s*"name":\s*"([^"]+)",\s*"arguments":\s*'(.*)'\s*\}""", re.DOTALL)
"A call of Glaive's, whose arguments are JSON in single quotation marks."
_FUNCTIONS = re.compile(r",? with access to the following functions\. Use them if required -?\s*(?=\{)")


def transcript_messages(text: str, where: str) -> list[JsonObject]:
    """Return the messages of the text of turns, with Glaive's function calls as tool calls."""
    roles = {"FUNCTION RESPONSE": "tool", "Human": "user"}
    messages: list[JsonObject] = []
    _, *turns = SPEAKER.split(text)
    for speaker, said in zip(turns[::2], turns[1::2], strict=True):
        content = said.strip().removesuffix("<|endoftext|>").strip()
        message = {"role": roles.get(speaker, speaker.lower()), "content": content}
        if message["role"] == "assistant" and (call := _CALL.search(content)):
            quoted = _QUOTED.fullmatch(call[1])
            function = {"name": quoted[1], "arguments": quoted[2].replace("\\'", "'")} if quoted else None
            message["tool_calls"] = [
                {"type": "function", "function": function or parse_json(call[1], f"{where}: function call")}
            ]
            message["content"] = (content[: call.start()] + content[call.end() :]).strip()
        messages.append(message)
    return messages


def functions_of(system: str) -> tuple[str, list[JsonObject]]:
    """Return a system text of Glaive's without the functions that it lists, and these; all of the text if they are no
    JSON."""
    text = system.removeprefix("SYSTEM:").strip()
    functions: list[JsonObject] = []
    if (listed := _FUNCTIONS.search(text)) is None:
        return text, functions
    at = listed.end()
    while at < len(text):
        try:
            function, at = json.JSONDecoder().raw_decode(text, at)
        except ValueError:
            return text, []
        functions.append(function)
        at += len(text[at:]) - len(text[at:].lstrip())
    return f"{text[: listed.start()]}.", functions


# ---- rows ------------------------------------------------------------------------------------------------------------


def calls(raw: JsonObject, where: str, question: str, column: str) -> Row:
    """Convert a question with the calls that answer it (xLAM), as a list or its JSON text."""
    given = raw[column]
    given = parse_json(given, f"{where}: {column}") if isinstance(given, str) else given
    if not isinstance(given, list) or not all(isinstance(call, dict) for call in given):
        raise DataError(f"{where}: {column} is not a list of calls", reason="malformed tool call")
    [asked, answer] = pairs_to_messages([(raw[question], "")])
    return Row(where, messages=[asked, {**answer, "tool_calls": given}])


def tokens(raw: JsonObject, where: str, column: str) -> Row:
    """Convert a row that was tokenized elsewhere; labels and masks say which tokens are learned."""
    ids = _numbers(raw, column, where)
    kept = _numbers(raw, "attention_mask", where, len(ids), most=1)
    masks = [_numbers(raw, name, where, len(ids), most=1) for name in columns.MASKS]
    labels = _numbers(raw, "labels", where, len(ids), least=-100)
    at = np.flatnonzero(np.ones(len(ids)) if kept is None else kept)
    if len(at) and at[-1] - at[0] != len(at) - 1:
        raise fault(where, "malformed tokens / attention_mask")
    positions = _numbers(raw, "position_ids", where, len(ids))
    if positions is not None and (np.diff(positions[at]) != 1).any():
        raise fault(where, "malformed tokens / position_ids")
    ids = ids[at]
    is_target = np.ones(len(ids), dtype=bool)
    if labels is not None:
        labels = labels[at]
        is_target = labels != -100
        if (wrong := np.flatnonzero(is_target & (labels != ids))).size:
            shifted = labels[:-1], ids[1:]
            is_shifted = len(ids) > 2 and bool(np.all((shifted[0] == -100) | (shifted[0] == shifted[1])))
            words = {"label": labels[wrong[0]], "token": ids[wrong[0]], "i": at[wrong[0]]}
            if is_shifted:
                raise fault(where, "malformed tokens / shifted", **words)
            raise fault(where, "malformed tokens / labels", **words)
    for mask in masks:
        is_target &= True if mask is None else mask[at] == 1
    masked = labels is not None or any(mask is not None for mask in masks)
    return Row(where, ids=ids.astype(np.int32), is_target=is_target if masked else None)


def _numbers(
    raw: JsonObject, name: str, where: str, size: int | None = None, *, least: int = 0, most: int = 2**31 - 1
) -> Any:
    """Return a column of whole numbers, int64 [size]; None if it is not there."""
    if name not in raw:
        return None
    try:
        numbers = np.asarray(raw[name])
    except ValueError:  # lists of several lengths
        numbers = np.zeros(0)
    if numbers.ndim != 1 or numbers.dtype.kind not in ("bi" if most == 1 else "i") or size not in (None, len(numbers)):
        raise fault(where, "malformed tokens / numbers", name=name, size="" if size is None else f"{size} ")
    if len(numbers) and (numbers.min() < least or numbers.max() > most):
        raise fault(where, "malformed tokens / range", name=name, least=least, most=most)
    return numbers.astype(np.int64)


def segments(raw: JsonObject, where: str, column: str) -> Row:
    """Convert texts that are tokenized apart, as they are written (input_output of Axolotl): label says whether it
    is learned."""
    given: list[Any] = (raw[column] if isinstance(raw[column], list) else []) or [None]
    for one in given:
        if not (isinstance(one, dict) and isinstance(one.get("text"), str) and isinstance(one.get("label"), bool)):
            raise fault(where, "malformed segments")
    return Row(where, segments=tuple((one["text"], one["label"]) for one in given))
