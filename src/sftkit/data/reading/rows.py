"""Rows of published datasets, recognised by their columns, to one shape: text, or messages with optional tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from sftkit.data.reading.readers import RawRow, parse_json, parsed, wrong_kind
from sftkit.data.reading.sharegpt import turn_to_message
from sftkit.data.types import JsonObject, Row
from sftkit.errors import DataError

Raw = JsonObject

ACCEPTED = """messages [tools] | conversations (from, value) [tools] | instruction, output [input] |
instruction, response [context] | prompt, completion | prompt, response | question, choices, answer or answerKey |
question, answer | image or file_name with caption, captions or text | text | content; \
beside any conversation: system, chat_template_kwargs"""

WRONG_COLUMNS = {"row is not an object", "unknown columns", "conversation, not text", "text, not a conversation"} | {
    "nothing for an encoder",
    "a picture",
}
"Reasons to refuse a row for its columns, which all rows of a file share."

GENERATED = "builtin:"
"Prefix of the names of pictures that are generated, not read."

RESERVED = {"messages", "conversations", "tools", "documents", "chat_template", "add_generation_prompt"} | {
    "continue_final_message",
    "return_assistant_tokens_mask",
}
"Arguments of rendering that a record may not set."


def parse(raw: RawRow) -> Row:
    """Convert a raw row to a Row; raises a DataError for a bad one."""
    return convert(parsed(raw), raw[0])


def convert(raw: object, where: str) -> Row:
    """Convert one row as read to a Row; a row of unknown columns is a DataError that lists them. Null
    columns count as absent."""
    if not isinstance(raw, dict):
        raise wrong_kind(f"{where}: the row", raw, "an object with columns", reason="row is not an object")
    present = {key: value for key, value in raw.items() if value is not None}
    # The first shape that fits: FORMATS has the more telling columns before those that many rows have.
    for columns, make in FORMATS:
        if all(column in present for column in columns):
            return _completed(make(present, where), present)
    null = [key for key in raw if key not in present]
    empty = f"; null: {', '.join(null)}" if null else ""
    shapes = " ".join(ACCEPTED.split())
    raise DataError(
        f"{where}: columns {', '.join(present) or '(none)'}{empty} are none of the accepted ones: {shapes}",
        reason="unknown columns",
    )


def require_text(row: Row) -> str:
    """Return the text of a row of base training; raises a DataError if it has none."""
    refuse_picture(row)
    if row.text is None:
        raise DataError(
            f"{row.where}: a conversation, but this script learns from plain text. Conversations are for mid_train.py "
            "and chat_sft.py",
            reason="conversation, not text",
        )
    return row.text


def require_conversation(row: Row) -> list[JsonObject]:
    """Return the messages of a row of chat SFT; raises a DataError if it has none."""
    refuse_picture(row)
    if row.messages is None:
        raise DataError(
            f"{row.where}: a text without turns, but this script learns from conversations (messages, or instruction "
            "and output). Text is for base_train.py and mid_train.py",
            reason="text, not a conversation",
        )
    return row.messages


def require_source_and_texts(row: Row) -> tuple[str, Sequence[str]]:
    """Return (what an encoder reads, the texts that are learned of it): a picture and its captions, or a question and
    its answer. Raises a DataError for any other row."""
    if row.image is not None:
        if row.text is not None:
            raise _missing(row.image, row.where)
        return row.image, row.captions
    turns = row.messages or []
    if [turn["role"] for turn in turns] == ["user", "assistant"]:
        return turns[0]["content"], [turns[1]["content"]]
    raise DataError(
        f"{row.where}: neither a picture with captions (image or file_name, and caption, captions or text) nor a "
        "question with its answer (prompt, completion), one of which this script needs. Texts and conversations are "
        "for the other stages",
        reason="nothing for an encoder",
    )


def refuse_picture(row: Row) -> None:
    """Refuse a row that only a model with an encoder learns from."""
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
    options = "\n".join(f"{_letter(i)}. {choice}" for i, choice in enumerate(choices))
    return f"{question.strip()}\n\n{options}\n\nAnswer with the letter."


_LETTERS = 26


def _letter(index: int) -> str:
    """Return A for 0, B for 1, ..."""
    return chr(ord("A") + index)


def _turns(user: str, assistant: str) -> list[JsonObject]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def _completed(row: Row, raw: Raw) -> Row:
    """Add the columns that any conversation may have beside it: `system`, as its first message, and
    `chat_template_kwargs`, arguments of the template."""
    if row.messages is None:
        return row
    system, args = _text(raw, "system", row.where) if "system" in raw else "", raw.get("chat_template_kwargs")
    if args is not None and not isinstance(args, dict):
        raise wrong_kind(f"{row.where}: chat_template_kwargs", args, "an object", reason="malformed template arguments")
    if taken := RESERVED & (args or {}).keys():
        raise DataError(
            f"{row.where}: chat_template_kwargs has {', '.join(sorted(taken))}, which sftkit sets itself",
            reason="malformed template arguments",
        )
    row = replace(row, template_args=args or None)
    if not system.strip() or not isinstance(row.messages, list):
        return row
    # The column and the first message may say the same, as exports of chats do; two different texts are a mistake.
    first = row.messages[0] if row.messages and isinstance(row.messages[0], dict) else {}
    if first.get("role") in ("system", "developer"):
        if first.get("content") == system:
            return row
        raise DataError(
            f"{row.where}: the column system and the first message are both system texts, and they differ: drop one "
            "of them, or put both into the first message",
            reason="two system texts",
        )
    # The system message goes in front, so what is context is one message longer.
    context = row.context_messages + 1 if row.context_messages else 0
    return replace(row, messages=[{"role": "system", "content": system}, *row.messages], context_messages=context)


# ---- one function for each shape -------------------------------------------------------------------------------------


def _messages(raw: Raw, where: str) -> Row:
    return Row(where, messages=raw["messages"], tools=_tools(raw, where))


def _conversations(raw: Raw, where: str) -> Row:
    """Convert ShareGPT's columns; some datasets have role and content under this name too."""
    turns = raw["conversations"]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise DataError(f"{where}: conversations is not a list of objects", reason="malformed conversations")
    messages = [turn_to_message(turn, f"{where}: conversations[{i}]") for i, turn in enumerate(turns)]
    return Row(where, messages=messages, tools=_tools(raw, where))


def _question(question: str, answer: str, extra: str | None = None) -> Callable[[Raw, str], Row]:
    """Return a converter of questions with answers as published: Alpaca (input, output) and Dolly (context, response),
    whose extra text goes below the instruction, and GSM8K, with reasoning and calculator marks in the answer."""

    def make(raw: Raw, where: str) -> Row:
        asked, more = _text(raw, question, where), raw.get(extra) if extra else None
        if isinstance(more, str) and more.strip():
            asked = f"{asked}\n\n{more}"
        return Row(where, messages=_turns(asked, _text(raw, answer, where)))

    return make


def _prompt(raw: Raw, where: str) -> Row:
    """Convert prompt and completion (or response): two texts, or two lists of messages. Of the
    prompt nothing is learned."""
    answer = "completion" if "completion" in raw else "response"
    sides: list[list[JsonObject]] = []
    for column, role in (("prompt", "user"), (answer, "assistant")):
        value = raw[column]
        if not isinstance(value, str | list):
            raise wrong_kind(f"{where}: {column}", value, "text or a list of messages", reason="column is not text")
        sides.append([{"role": role, "content": value}] if isinstance(value, str) else value)
    given, learned = sides
    return Row(where, messages=[*given, *learned], tools=_tools(raw, where), context_messages=len(given))


def _choices(raw: Raw, where: str) -> Row:
    """Convert MMLU (choices: list, answer: index) and ARC (choices: text and label, answerKey: a label)."""
    question = _text(raw, "question" if "question" in raw else "question_stem", where)
    given, key = raw["choices"], raw.get("answerKey", raw.get("answer"))
    choices, labels = (given.get("text"), given.get("label")) if isinstance(given, dict) else (given, None)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise DataError(
            f"{where}: choices is not a list of texts, or an object with text and label", reason="malformed choices"
        )
    if len(choices) > _LETTERS or (isinstance(labels, list) and len(labels) != len(choices)):
        said = f"{len(labels)} labels" if isinstance(labels, list) else f"only {_LETTERS} letters"
        raise DataError(f"{where}: {len(choices)} choices, but {said}", reason="malformed choices")
    own = isinstance(labels, list) and "answerKey" in raw
    labels = list(map(str, labels)) if isinstance(labels, list) else [_letter(i) for i in range(len(choices))]
    index = _answer_index(key, choices, labels, own=own, where=where)
    return Row(where, messages=_turns(multiple_choice(question, choices), _letter(index)))


def _answer_index(key: object, choices: list[str], labels: list[str], *, own: bool, where: str) -> int:
    """Return the index of the answer among the choices.

    Args:
        key: a label, as of ARC, whose labels may be numbers; the text of a choice; or an index, as of MMLU.
        own: the row has labels, and key is declared to be one.
    """
    name, text = str(key), key.strip() if isinstance(key, str) else None
    meant = [i for i, label in enumerate(labels) if label == name and not isinstance(key, bool)]
    if not (own and meant):
        meant += [i for i, choice in enumerate(choices) if text is not None and choice.strip() == text]
    # An index only if it is neither: "2" among the texts 1 to 4 is the second.
    if not meant and not isinstance(key, bool) and (isinstance(key, int) or (text or "").isdecimal()):
        meant = [int(name)] if 0 <= int(name) < len(choices) else []
    if len(set(meant)) == 1:
        return meant[0]
    if meant:
        raise DataError(
            f"{where}: answer {key!r} names several choices: {', '.join(_letter(i) for i in sorted(set(meant)))}. Give "
            "its index as a number, counted from 0",
            reason="answer names several choices",
        )
    raise DataError(
        f"{where}: answer {key!r} is none of the {len(choices)} choices", reason="answer is none of the choices"
    )


def _plain(column: str) -> Callable[[Raw, str], Row]:
    """Return a converter of rows of plain text."""
    return lambda raw, where: Row(where, text=_text(raw, column, where))


def _picture(image: str, text: str) -> Callable[[Raw, str], Row]:
    """Return a converter of pictures with captions. A picture is a file, relative to the row's own, or the name of a
    generated one; captions are one text or several. A record with `text` whose file does not exist counts as plain
    text, as corpora have columns of file names too."""

    def make(raw: Raw, where: str) -> Row:
        name, said = _text(raw, image, where), raw[text]
        captions = said if isinstance(said, list) else [said]
        if not captions or not all(isinstance(caption, str) for caption in captions):
            raise DataError(f"{where}: {text} is neither a text nor a list of texts", reason="column is not text")
        if not name.startswith(GENERATED):
            name = str(Path(where).parent / name)
        if name.startswith(GENERATED) or Path(name).is_file():
            return Row(where, image=name, captions=tuple(captions))
        if text != "text" or not isinstance(said, str):
            raise _missing(name, where)
        return Row(where, text=said, image=name, captions=(said,))

    return make


def _missing(image: str, where: str) -> DataError:
    return DataError(f"{where}: {image}: no such picture", reason="picture is missing")


FORMATS: tuple[tuple[tuple[str, ...], Callable[[Raw, str], Row]], ...] = (
    *((pair, _picture(*pair)) for pair in product(("image", "file_name"), ("captions", "caption", "text"))),
    (("messages",), _messages),
    (("conversations",), _conversations),
    (("instruction", "output"), _question("instruction", "output", "input")),
    (("instruction", "response"), _question("instruction", "response", "context")),
    (("prompt", "completion"), _prompt),
    (("prompt", "response"), _prompt),
    (("question", "choices", "answerKey"), _choices),
    (("question_stem", "choices", "answerKey"), _choices),
    (("question", "choices", "answer"), _choices),
    (("question", "answer"), _question("question", "answer")),
    (("text",), _plain("text")),
    (("content",), _plain("content")),
)
"Columns that must be there, first match wins; a row with messages and a text column is a conversation."


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
    tools = raw.get("tools")
    if tools is None or tools in ("", []):
        return None
    if isinstance(tools, str):
        tools = parse_json(tools, f"{where}: tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{where}: tools is not a list of objects (or the JSON text of one)", reason="malformed tools")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools] or None
