"""Convert rows of published datasets, recognised by their columns, to text, messages, a picture or tokens."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from string import ascii_uppercase
from typing import Any, NamedTuple

from sftkit.config.schema import SourceConfig
from sftkit.data.reading import columns, conversation
from sftkit.data.reading.readers import RawRow, parse_json, parsed, wrong_kind
from sftkit.data.types import JsonObject, Row
from sftkit.errors import DataError, fault

Raw = JsonObject

WRONG_COLUMNS = {"row is not an object", "unknown columns", "conversation, not text", "text, not a conversation"} | {
    "nothing for an encoder",
    "a picture",
    "tokenized row",
    "tree of answers",
    "preference row",
}
"Reasons to reject a row for its columns, which all rows of a file share."

ELSEWHERE = "tokenized elsewhere"
"Name of the kind of rows that hold tokens."
GENERATED = "builtin:"
"Prefix of the names of pictures that are generated, not read."

RESERVED = {"messages", "conversations", "tools", "documents", "chat_template", "add_generation_prompt"} | {
    "continue_final_message",
    "return_assistant_tokens_mask",
}
"Arguments of rendering that a record may not set."


_PRESENT = frozenset((str, list, dict, int, bool))
"Types of cells that are neither null nor NaN."


def parse(raw: RawRow) -> Row:
    """Convert a raw row to a Row, as the settings of its source say; raises a DataError for a bad one, and LeftOut for
    one that `where` leaves out."""
    found = parsed(raw)
    if len(raw) == 2:
        return convert(found, raw[0])
    where, _, source = raw
    if isinstance(found, dict):
        columns.check_where(found, source, where)
        absent = columns.missing_columns(found, source)
        row = convert(columns.moved(found, source), where, source)
        return row.changed(unused=(*row.unused, *absent)) if absent else row
    return convert(found, where, source)


def convert(raw: object, where: str, source: SourceConfig | None = None) -> Row:
    """Convert one row as read to a Row; a row of unknown columns is a DataError that lists them. Null columns and NaN
    count as absent, and other spellings of a known name (Label, systemPrompt) as that name."""
    if not isinstance(raw, dict):
        raise wrong_kind(f"{where}: the row", raw, "an object with columns", reason="row is not an object")
    # NaN is the null of tables.
    given = raw
    if not _PRESENT.issuperset(map(type, raw.values())):
        given = {key: value for key, value in raw.items() if not (value is None or columns.is_nan(value))}
    present = columns.named(given, where)
    if "input_ids" in present and columns.is_empty(present["input_ids"]):
        present = {key: value for key, value in present.items() if key != "input_ids"}
    fitting, name, is_simple = _shapes(frozenset(present))
    row = fitting[0].make(present, where) if is_simple else None
    messages = row.messages if row is not None and source is None else None
    is_plain = isinstance(messages, list) and all(
        columns.is_plain(one) and one["role"] in conversation.ROLES for one in messages
    )
    if row is not None and is_plain and messages:
        return row.changed(shape=name)  # all that follows is about what such rows do not have
    if not fitting:
        columns.check_preferences(present, list, where)
        if "message_tree_id" in present:
            raise fault(where, "tree of answers")
        null = [key for key, value in raw.items() if value is None]
        empty = f"; null: {', '.join(null)}" if null else ""
        absent = [path for name, path in ((source and source.columns) or {}).items() if name not in present]
        empty += f"; not in this row: {', '.join(absent)}" if absent else ""
        advice = ""
        if len(present) == 1 and (mark := re.search(r"[;,\t|]", next(iter(present)))):
            advice = f" One column has {mark[0]!r} in its name: cells have commas between them in .csv, tabs in .tsv."
        if where.endswith("[0]") and (lists := [key for key, value in present.items() if isinstance(value, list)]):
            advice = f" If {lists[0]} holds the rows of a .json file, name it data."
        listed = ", ".join(present) or "(none)"
        raise fault(where, "unknown columns", columns=listed, empty=empty, advice=advice)
    # The first shape that fits: FORMATS has the more telling columns before those that many rows have.
    shape = fitting[0]
    of_tokens = shape.name == ELSEWHERE
    marked = {k: v for k, v in present.items() if k not in columns.MASKS} if of_tokens else present
    row = row or shape.make(present, where)
    # The fields of the row that no kind of rows decides.
    fields: dict[str, Any] = {"learned": columns.is_learned(marked, where), "shape": name}
    marks = (name for name in columns.MARKS if name in present and columns.understood(name, present[name]))
    used = {*shape.columns, *shape.extra, *marks, *columns.MARKS_OF_PARTS}
    if row.image is not None and row.text is None:
        return row.changed(**fields, unused=columns.unused_columns(present, used, lambda: row.captions))
    columns.check_media(present, where)
    if row.messages is None:
        if of_tokens and len(fitting) > 1:
            raise fault(where, "tokenized row", columns=", ".join(fitting[1].columns))
        columns.check_preferences(present, list, where)
        return row.changed(**fields, unused=columns.unused_columns(present, used, lambda: [row.text]))
    labels = {name for name in ("label", "kto_tag") if name in present and not columns.understood(name, present[name])}
    used |= {*columns.SYSTEM, *columns.WITH_ANSWERS} - labels
    fields |= _completed(row, present, shape, source)
    if not isinstance(row.messages, list):
        return row.changed(**fields)  # conversation.validated rejects it
    turns = cache(lambda: columns.turns_of(fields["messages"]))
    moved = (source and source.columns) or {}
    if not any(path.partition(".")[0] in columns.PREFERENCES for path in moved.values()):
        used |= {*columns.check_preferences(present, turns, where)}
    for other in fitting[1:]:
        used |= _repeated(other, shape, present, turns, where)

    def texts() -> list[object]:
        return [text for _, text in turns()]

    _check_context(present, used, texts, where)
    used |= {*columns.CONTEXT_COLUMNS}
    nested = columns.unread_keys(present["choices"], ("text", "label")) if "choices" in shape.columns else []
    unused = columns.unused_columns(present, used, texts)
    return row.changed(**fields, unused=(*unused, *(f"choices key {name}" for name in nested)))


def as_read(row: Row, decode: Callable[..., object]) -> str:
    """Return a row in one line, as inspection shows the first one of each shape. `decode`: the tokenizer's."""
    if row.ids is not None:
        return f"{len(row.ids):,} tokens: {_short(decode(row.ids[:200].tolist()))}"
    if row.segments is not None:
        return " | ".join(f"{'learned' if learned else 'context'}: {_short(text)}" for text, learned in row.segments)
    if row.messages is None:
        return _short(row.text if row.image is None else f"{row.image}: {row.captions[0]}")
    said = [message for message in row.messages if isinstance(message, dict)]
    return " | ".join(f"{one.get('role')}: {_short(one.get('content') or one.get('tool_calls'))}" for one in said)


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 80 else f"{text[:80]}..."


_CONVERSATIONS = (
    *("messages", "conversations", "conversation", "chat", "instruction", "prompt", "query", "question"),
    "question_stem",
)
"First columns of the kinds of rows that are conversations."


def _repeated(other: RowShape, shape: RowShape, raw: Raw, turns: Callable[[], columns.Turns], where: str) -> set[str]:
    """Return the columns of a second conversation in a row if it is the same as the first.

    Raises:
        DataError: it is another one, so which of the two is meant is not known.
    """
    if other.columns[0] not in _CONVERSATIONS or {*other.columns} < {*shape.columns}:
        return set()
    if "choices" in shape.columns and "choices" not in other.columns:
        return set()  # a question and its answer, which the choices belong to
    try:
        again = other.make(raw, where).messages or []
        second = [conversation.current_message(message, where) for message in again]
    except DataError:
        return set()  # columns of these names that hold something else
    if columns.turns_of(second) == turns():
        return {*other.columns}
    raise fault(where, "two conversations", first=", ".join(shape.columns), second=", ".join(other.columns))


def _check_context(raw: Raw, used: set[str], texts: Callable[[], list[object]], where: str) -> None:
    """Reject a conversation whose context or input is in none of its messages: its answers would be learned without
    what they are about."""
    for name in columns.CONTEXT_COLUMNS:
        value = raw.get(name)
        if name in used or columns.is_empty(value):
            continue
        if not isinstance(value, str) or not any(isinstance(text, str) and value.strip() in text for text in texts()):
            raise fault(where, "context outside the messages", name=name)


def require_text(row: Row) -> str:
    """Return the text of a row of base training; raises a DataError if it has none."""
    reject_picture(row)
    if row.text is None:
        raise fault(row.where, "conversation, not text")
    return row.text


def require_conversation(row: Row) -> list[JsonObject]:
    """Return the messages of a row of chat SFT; raises a DataError if it has none."""
    reject_picture(row)
    if row.messages is None:
        raise fault(row.where, "text, not a conversation")
    return row.messages


def require_source_and_texts(row: Row) -> tuple[str, Sequence[str]]:
    """Return (what an encoder reads, the texts that are learned of it): a picture and its captions, or a question and
    its answer. Raises a DataError for any other row."""
    if row.image is not None:
        if row.text is not None:
            raise _missing(row.image, row.where)
        return row.image, row.captions
    turns = conversation.validated(row, ()) if row.messages else []
    plain = not row.tools and not row.template_args and not any(turn.get("tool_calls") for turn in turns)
    if plain and [turn["role"] for turn in turns] == ["user", "assistant"]:
        return turns[0]["content"], [turns[1]["content"]]
    raise fault(row.where, "nothing for an encoder")


def reject_picture(row: Row) -> None:
    """Reject a row that only a model with an encoder learns from."""
    if row.image is not None and row.text is None:
        raise DataError(f"{row.where}: a picture with captions, which are for caption_train.py", reason="a picture")


def multiple_choice(question: str, choices: Sequence[str]) -> str:
    """Format a question with lettered options, as it is asked everywhere in sftkit:

        Which gas do plants take in?

        A. Oxygen
        B. Carbon dioxide

        Answer with the letter.

    The answer is the letter alone. Options are lettered by position, whatever labels (ARC: also 1-4) the data has.
    """
    options = "\n".join(f"{ascii_uppercase[i]}. {choice}" for i, choice in enumerate(choices))
    return f"{question.strip()}\n\n{options}\n\nAnswer with the letter."


def _completed(row: Row, raw: Raw, shape: RowShape, source: SourceConfig | None) -> dict[str, Any]:
    """Return the fields of what any conversation may have in columns of its own: turns before it, tools, a system text,
    arguments of the template. Messages are written as they are today."""
    where = row.where
    columns.check_answer_columns(raw, where)
    masked = "" if columns.is_empty(raw.get("mask")) else str(raw["mask"])
    tools = _tools(raw, where)
    system = _system_text(raw, where)
    if system.startswith("SYSTEM:") and tools is None:
        system, functions = _rare("functions_of")(system)
        tools = _wrapped(functions)
    found = {"tools": tools, "template_args": _template_args(raw, where), "masked_role": masked}
    if not isinstance(row.messages, list):
        return found
    names: Mapping[str, str] = conversation.ROLE_NAMES
    if source and source.roles:
        names = {**names, **{name.strip().casefold(): role for name, role in source.roles.items()}}
    column = "messages" if len(shape.columns) > 1 else shape.columns[0]
    messages: list[Any] = [
        conversation.current_message(message, f"{where}: {column}[{i}]", names)
        for i, message in enumerate(row.messages)
    ]
    context = row.context_messages
    if not columns.is_empty(raw.get("history")):
        if "history" not in shape.extra or not isinstance(raw[shape.columns[0]], str):
            raise fault(where, "malformed history / column")
        # Its answers are learned, as LLaMA-Factory does: a question of text is no context that could be learned.
        messages = [*_history(raw["history"], where), *messages]
        context = 0
    # Exports of chats have the same text in the column and in the first message. Two different texts are a mistake.
    first = messages[0] if messages and isinstance(messages[0], dict) else {}
    if first.get("role") in ("system", "developer"):
        if system and first.get("content") != system:
            raise fault(where, "two system texts")
    elif system := system or (source and source.system) or "":
        # The system message goes in front, so the context, if any, is one message longer.
        messages = [{"role": "system", "content": system}, *messages]
        context += bool(context)
    return {**found, "messages": messages, "context_messages": context}


def _system_text(raw: Raw, where: str) -> str:
    """Return the text of the columns system, system_prompt or system_message; empty without one."""
    if raw.keys().isdisjoint(columns.SYSTEM):
        return ""
    texts = {name: _text(raw, name, where) for name in columns.SYSTEM if name in raw}
    different = list(dict.fromkeys(text for text in texts.values() if text.strip()))
    if len(different) > 1:
        raise fault(where, "two system texts / columns", texts=" and ".join(texts))
    return different[0] if different else ""


def _history(history: Any, where: str) -> list[JsonObject]:
    """Return the turns of a column history: pairs of a question and its answer, as LLaMA-Factory and ms-swift have."""
    for pair in history if isinstance(history, list) else [None]:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise fault(where, "malformed history / pairs")
    return conversation.pairs_to_messages(history)


def _template_args(raw: Raw, where: str) -> JsonObject | None:
    """Return the arguments of the template: chat_template_kwargs, and documents for templates that render them."""
    args = raw.get("chat_template_kwargs")
    documents = raw.get("documents")
    if args is not None and not isinstance(args, dict):
        raise wrong_kind(f"{where}: chat_template_kwargs", args, "an object", reason="malformed template arguments")
    if taken := RESERVED & (args or {}).keys():
        raise fault(where, "malformed template arguments", taken=", ".join(sorted(taken)))
    if columns.is_empty(documents):
        return args or None
    if not isinstance(documents, list):
        raise wrong_kind(f"{where}: documents", documents, "a list", reason="malformed template arguments")
    return {**(args or {}), "documents": documents}


# ---- one function for each shape -------------------------------------------------------------------------------------


def _plain(raw: Raw, where: str, column: str) -> Row:
    """Convert a text."""
    return Row(where, text=_text(raw, column, where))


def _messages(raw: Raw, where: str, column: str) -> Row:
    """Take messages as they are, or from text: of JSON, or of turns after their speakers."""
    messages = raw[column]
    if isinstance(messages, str) and conversation.SPEAKER.match(messages):
        messages = _rare("transcript_messages")(messages, where)
    elif isinstance(messages, str) and messages.lstrip().startswith("["):
        messages = parse_json(messages, f"{where}: {column}")
    return Row(where, messages=messages)


def _conversations(raw: Raw, where: str, column: str) -> Row:
    """Convert turns: of ShareGPT (from, value), pairs of texts, or messages under this name."""
    row = _messages(raw, where, column)
    turns = row.messages
    if isinstance(turns, list) and turns and all(isinstance(turn, list) for turn in turns):
        return Row(where, messages=_history(turns, where))
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise DataError(f"{where}: {column} is not a list of objects", reason="malformed conversations")
    if turns and all(turn.keys() == {"human", "assistant"} for turn in turns):
        pairs = ((turn["human"], turn["assistant"]) for turn in turns)
        return Row(where, messages=conversation.pairs_to_messages(pairs))
    for i, turn in enumerate(turns):
        keys = columns.named(turn, where).keys()
        if "role" not in keys and not {"from", "value"} <= keys:
            problem = f"{where}: {column}[{i}] has the keys {', '.join(turn) or '(none)'}, expected from and value"
            raise DataError(problem, reason="malformed conversations")
    return row


def _rare(name: str) -> Callable[..., Any]:
    """Return a function of rare.py, which is loaded when a row needs it."""

    def convert(*args: Any) -> Any:
        from sftkit.data.reading import rare

        return getattr(rare, name)(*args)

    return convert


def _question(raw: Raw, where: str, question: str, answer: str) -> Row:
    """Convert a question with its answer as published: Alpaca (input, output) and Dolly (context, response), whose
    extra text goes below the instruction, and GSM8K, with reasoning and calculator marks in the answer."""
    asked = _text(raw, question, where)
    below = [_text(raw, name, where) for name in columns.CONTEXT_COLUMNS if not columns.is_empty(raw.get(name))]
    if len({text.strip() for text in below}) > 1:
        both = " and ".join(columns.CONTEXT_COLUMNS)
        raise fault(where, "context outside the messages / two", both=both)
    turn = "\n\n".join([asked, *below[:1]]), _text(raw, answer, where)
    return Row(where, messages=conversation.pairs_to_messages([turn]))


def _prompt(raw: Raw, where: str, prompt: str, answer: str) -> Row:
    """Convert prompt and completion (or response): two texts, or two lists of messages. Nothing of the prompt is
    learned."""
    sides: list[list[JsonObject]] = []
    for column, role in ((prompt, "user"), (answer, "assistant")):
        value = raw[column]
        if not isinstance(value, str | list):
            raise wrong_kind(f"{where}: {column}", value, "text or a list of messages", reason="column is not text")
        sides.append([{"role": role, "content": value}] if isinstance(value, str) else value)
    given, learned = sides
    return Row(where, messages=[*given, *learned], context_messages=len(given))


def _choices(raw: Raw, where: str, question: str, column: str, answer: str) -> Row:
    """Convert MMLU (choices: list, answer: index) or ARC (choices: text, label; answerKey: a label)."""
    asked = _text(raw, question, where)
    given = raw[column]
    choices = given.get("text") if isinstance(given, dict) else given
    labels: Any = given.get("label") if isinstance(given, dict) else None
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise fault(where, "malformed choices", column=column)
    labelled = isinstance(labels, list)
    if len(choices) > len(ascii_uppercase) or (labelled and len(labels) != len(choices)):
        count = f"{len(labels)} labels" if labelled else f"only {len(ascii_uppercase)} letters"
        raise DataError(f"{where}: {len(choices)} choices, but {count}", reason="malformed choices")
    labels = list(map(str, labels)) if labelled else list(ascii_uppercase[: len(choices)])
    own = labelled and answer == "answerKey"
    index = _answer_index(raw[answer], choices, labels, labelled=labelled, own=own, where=where)
    turn = multiple_choice(asked, choices), ascii_uppercase[index]
    return Row(where, messages=conversation.pairs_to_messages([turn]))


def _answer_index(key: object, choices: list[str], labels: list[str], *, labelled: bool, own: bool, where: str) -> int:
    """Return the index of the answer among the choices.

    Args:
        key: a label, as of ARC, whose labels may be numbers; the text of a choice; or an index, as of MMLU.
        labelled: the row has labels, so that a number may be one of them.
        own: key is declared to be one.
    """
    name = str(key)
    text = key.strip() if isinstance(key, str) else None
    meant = [i for i, label in enumerate(labels) if label == name and not isinstance(key, bool)]
    if not (own and meant):
        meant += [i for i, choice in enumerate(choices) if text is not None and choice.strip() == text]
    # An index only if it is neither: "2" among the texts 1 to 4 is the second.
    if not meant and not isinstance(key, bool) and (isinstance(key, int) or (text or "").isdecimal()):
        meant = [int(name)] if 0 <= int(name) < len(choices) else []
    if len(set(meant)) == 1:
        return meant[0]
    if meant:
        letters = ", ".join(ascii_uppercase[i] for i in sorted(set(meant)))
        advice = "Give its label in answerKey" if labelled else "Give its index as a number, counted from 0"
        raise fault(where, "answer names several choices", key=key, letters=letters, advice=advice)
    raise fault(where, "answer is none of the choices", key=key, choices=len(choices))


def _picture(raw: Raw, where: str, image: str, text: str) -> Row:
    """Convert a picture with captions. A picture is a file, relative to the row's own, or the name of a generated one;
    captions are one text or several. A record of `file_name` and `text` whose file does not exist counts as plain text:
    corpora have columns of file names too."""
    name = _text(raw, image, where)
    given = raw[text]
    captions = given if isinstance(given, list) else [given]
    if not captions or not all(isinstance(caption, str) for caption in captions):
        raise DataError(f"{where}: {text} is neither a text nor a list of texts", reason="column is not text")
    if not name.startswith(GENERATED):
        name = str(Path(where).parent / name)
    if name.startswith(GENERATED) or os.path.isfile(name):  # False for a name that no file can have
        return Row(where, image=name, captions=tuple(captions))
    if (image, text) != ("file_name", "text") or not isinstance(given, str):
        raise _missing(name, where)
    return Row(where, text=given, image=name, captions=(given,))


def _missing(image: str, where: str) -> DataError:
    problem = f"{where}: {image}: no such picture. Without the column that names it the text alone would be read"
    return DataError(problem, reason="picture is missing")


class RowShape(NamedTuple):
    """One kind of row."""

    name: str
    columns: tuple[str, ...]
    "Columns that must be there."
    convert: Callable[..., Row]
    "(row, place, *columns) -> Row"
    extra: tuple[str, ...] = ()
    "Further columns that it reads."

    def make(self, raw: Raw, where: str) -> Row:
        """Convert a row of this kind."""
        return self.convert(raw, where, *self.columns)


_QA = (*columns.CONTEXT_COLUMNS, "history")
FORMATS = (
    *(RowShape("pictures", pair, _picture) for pair in product(("image", "file_name"), ("captions", "caption"))),
    RowShape("pictures", ("image", "text"), _picture),
    RowShape(ELSEWHERE, ("input_ids",), _rare("tokens"), columns.NEXT_TO_IDS),
    RowShape(conversation.TREE, (conversation.TREE,), _conversations),
    RowShape("messages", ("messages",), _messages),
    RowShape("turns", ("conversations",), _conversations),
    RowShape("alpaca", ("instruction", "output"), _question, _QA),
    RowShape("dolly", ("instruction", "response"), _question, _QA),
    *(RowShape("prompt", ("prompt", answer), _prompt, ("history",)) for answer in ("completion", "response")),
    RowShape("query", ("query", "response"), _question, _QA),
    RowShape("calls", ("query", "answers"), _rare("calls")),
    *(RowShape("choices", (asked, "choices", "answerKey"), _choices) for asked in ("question", "question_stem")),
    RowShape("choices", ("question", "choices", "answer"), _choices),
    *(RowShape("question", ("question", answer), _question, _QA) for answer in ("answer", "response")),
    RowShape("input and output", ("input", "output"), _prompt, ("history",)),
    RowShape("pictures", ("file_name", "text"), _picture),
    *(RowShape("text", (column,), _plain) for column in ("text", "content")),
    *(RowShape("turns", (column,), _conversations) for column in ("conversation", "chat")),
    RowShape("segments", ("segments",), _rare("segments")),
)
"Kinds of rows, the first that fits is taken; a row with messages and a text column is a conversation."


_SIMPLE = ("messages", "turns", "alpaca", "dolly", "prompt", "query", "question", "input and output")
"Kinds of conversations of which most rows have nothing but their columns."
_MEANINGS = frozenset(
    (*columns.MARKS, *columns.MARKS_OF_PARTS, *columns.MEDIA, *columns.PREFERENCES, *columns.SYSTEM)
).union(columns.WITH_ANSWERS)


@lru_cache(maxsize=4096)
def _shapes(present: frozenset[str]) -> tuple[tuple[RowShape, ...], str, bool]:
    """Return the kinds of rows that have these columns, the name of the first with what it reads, such as alpaca
    (instruction, output, input), and whether it is a conversation next to metadata alone."""
    fitting = tuple(shape for shape in FORMATS if present.issuperset(shape.columns))
    if not fitting:
        return (), "", False
    first = fitting[0]
    read = [*first.columns, *(name for name in first.extra if name in present)]
    others = (one for one in fitting[1:] if one.columns[0] in _CONVERSATIONS and not {*one.columns} < {*first.columns})
    is_simple = first.name in _SIMPLE and present.isdisjoint(_MEANINGS) and not any(others)
    is_simple = is_simple and all(map(columns.is_metadata, present.difference(read)))
    return fitting, first.name if read == [first.name] else f"{first.name} ({', '.join(read)})", is_simple


# ---- cells -----------------------------------------------------------------------------------------------------------


def _text(raw: Raw, column: str, where: str) -> str:
    """Return a cell that must be text."""
    text = raw[column]
    if not isinstance(text, str):
        raise wrong_kind(f"{where}: {column}", text, "text", reason="column is not text")
    return text


def _tools(raw: Raw, where: str) -> list[JsonObject] | None:
    """Return tool schemas, given as a list or its JSON text; bare functions are wrapped in
    OpenAI's {type, function}."""
    given = {name: raw[name] for name in ("tools", "functions") if not columns.is_empty(raw.get(name))}
    if len(given) > 1:
        raise DataError(f"{where}: both tools and functions: keep one", reason="malformed tools")
    if not given:
        return None
    [(name, tools)] = given.items()
    if isinstance(tools, str):
        tools = parse_json(tools, f"{where}: {name}")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{where}: {name} is not a list of objects (or the JSON text of one)", reason="malformed tools")
    return _wrapped(tools)


def _wrapped(tools: list[JsonObject]) -> list[JsonObject] | None:
    """Return tools in OpenAI's shape; None if there are none."""
    # Tools of OpenAI's Responses API are bare functions with the type next to their name.
    bare = [{key: value for key, value in tool.items() if (key, value) != ("type", "function")} for tool in tools]
    wrapped = zip(tools, bare, strict=True)
    return [tool if "function" in tool else {"type": "function", "function": made} for tool, made in wrapped] or None
