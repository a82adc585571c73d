"""Apply the settings of a source to its rows before they are converted: `tree`, `where` on columns, and `columns`.

A tree of answers (OASST) becomes the conversations along its paths, where the rows are read: rows of one message each
belong together. The other settings travel with a row and are applied where it is parsed, by any process.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Literal

from sftkit.config.schema import SourceConfig, where_columns
from sftkit.data.reading import columns
from sftkit.data.reading.readers import RawRow, parsed
from sftkit.data.types import JsonObject
from sftkit.errors import ConfigError, DataError, LeftOut, fault

TREE = "tree of answers"
"Column of the messages along one path of a tree, by which the row is recognised."
_OF_TREES = ("message_tree_id", "tree_state", "lang")
"Keys of a tree's first message that say something about the whole tree."
_OF_NODES = ("message_id", "parent_id", "message_tree_id", "tree_state", "text", "replies", "rank", "deleted")
"Keys of a tree's message that are read here, or that only say where it is."


def check(source: SourceConfig) -> None:
    """Reject names in `columns` that no row has a meaning for.

    Raises:
        ConfigError: the name, and the nearest one that has.
    """
    for name in source.columns or ():
        if columns.standard_name(name) not in columns.KNOWN:
            near = difflib.get_close_matches(name, columns.KNOWN, n=1)
            meant = f'. Did you mean "{near[0]}"?' if near else ""
            problem = f"data source {source.path}: columns.{name} is no column that rows are read by{meant}"
            raise ConfigError(problem)


def with_settings(rows: Iterable[RawRow], source: SourceConfig) -> Iterator[RawRow]:
    """Yield rows of a source, with trees as conversations, and each row with the source if its settings say how rows
    are parsed."""
    found = iter(rows) if source.tree is None else _conversations(rows, source.tree)
    if not (source.columns or source.roles or source.system or where_columns(source)):
        return found
    return ((raw[0], raw[1], source) for raw in found)


# ---- columns ---------------------------------------------------------------------------------------------------------


def check_where(row: JsonObject, source: SourceConfig, where: str) -> None:
    """Leave a row out whose columns are not as the source's `where` says.

    Raises:
        LeftOut: the first column that has another value.
    """
    for name, wanted in where_columns(source).items():
        found, _ = _take(row, name)
        if not any(_same(found, one) for one in (wanted if isinstance(wanted, list) else [wanted])):
            raise LeftOut(f"{where}: {name} is {found!r}", reason=f"where: {name}")


def _same(found: object, wanted: object) -> bool:
    """Return whether a value is the wanted one; the cell of a CSV file may write it out. True is not 1."""
    values = (None if columns.is_nan(found) else found, columns.cell(found))
    return any(value == wanted and isinstance(value, bool) == isinstance(wanted, bool) for value in values)


def moved(row: JsonObject, source: SourceConfig) -> JsonObject:
    """Return a row with the columns where the source's `columns` finds them. What is left of an object stays, and so
    does a column whose place another one takes, under another name, so that both count as unused."""
    result = row
    values: JsonObject = {}
    for name, path in (source.columns or {}).items():
        found, result = _take(result, path)
        if found is not None:
            values[name] = found
    return {(f"{name} of the row" if name in values else name): value for name, value in result.items()} | values


def _take(row: JsonObject, path: str) -> tuple[object, JsonObject]:
    """Return the value at a path, None if it has none, and the row without it."""
    name, _, inner = path.partition(".")
    if path in row:  # a name may have a point in it
        name, inner = path, ""
    rest = {key: value for key, value in row.items() if key != name}
    if not inner:
        return row.get(name), rest
    if not isinstance(row.get(name), dict):
        return None, row
    found, left = _take(row[name], inner)
    return found, ({**row, name: left} if left else rest)


# ---- trees -----------------------------------------------------------------------------------------------------------


def _conversations(rows: Iterable[RawRow], tree: Literal["best", "all"]) -> Iterator[RawRow]:
    """Yield the conversations of trees: of a row with all of a tree, or of rows of one message each, which stand
    together. Only the rows of one tree are in memory. Other rows stay as they are."""
    flat: list[tuple[str, JsonObject]] = []
    for raw in rows:
        try:
            row = parsed(raw)
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
    """Yield a tree's conversations up to an answer: the best one, or all of them. An answer that an earlier one has is
    marked as not to be learned there."""
    about = {key: root[key] for key in _OF_TREES if key in root} | about
    seen: set[int] = set()
    number = 0
    waiting = [[root]]
    while waiting:
        path = waiting.pop()
        replies = [reply for reply in path[-1].get("replies") or () if isinstance(reply, dict)]
        # The best is first, and replies without a rank, such as questions, stay in their order.
        replies.sort(key=lambda reply: rank if isinstance(rank := reply.get("rank"), int) else len(replies))
        waiting += [[*path, reply] for reply in reversed(replies[:1] if tree == "best" else replies)]
        if replies:
            continue
        last = max((i for i, node in enumerate(path) if node.get("role") == "assistant"), default=0)
        if last and id(path[last]) in seen:
            continue  # it ends with a question, and the conversation up to there is known
        messages = []
        for node in path[: last + 1]:
            message = {key: value for key, value in node.items() if key not in _OF_NODES}
            message["content"] = node.get("text")
            if node.get("role") == "assistant" and (id(node) in seen or node.get("deleted")):
                message["train"] = False
            messages.append(message)
        seen.update(map(id, path))
        number += 1
        yield (where if number == 1 else f"{where}, path {number}"), {**about, TREE: messages}
