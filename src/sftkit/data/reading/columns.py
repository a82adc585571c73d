"""The meaning of columns and message keys, and data warnings by reason with the first example of each.

Known names are honoured or rejected, metadata is ignored, and all other names are counted as unused.
"""

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

from sftkit.config.schema import COUNTED, SourceConfig, where_columns
from sftkit.data.types import Finding, JsonObject, Kind
from sftkit.errors import DataError, LeftOut, did_you_mean, fault
from sftkit.runtime.script import counted, first_of

MAX_EXAMPLE = 500
"The most characters of an example: the names of a row's columns may be its whole text."
MAX_UNUSED = 20
"The most columns and keys of a source that are counted by name: objects with data as keys have any number."
MORE_UNUSED = "further columns and keys"
"Counts each of them in each row."
DROPPED = {"dropped_too_long": "too long", "dropped_no_target": "without a target"}
"Tokenized.note of a row that is left out without being bad -> the reason that is reported."

log = logging.getLogger(__name__)

Tally = dict[tuple[str, str], Finding]
"(kind, reason) -> what was found, in the order in which it was first met."


def add(tally: Tally, kind: Kind, reason: str, where: str, rows: int = 1) -> None:
    """Count rows; the example that is there already stays.

    Args:
        kind, reason: as in Finding.
        where: file:line of the first of them, and what is wrong there.
    """
    known = tally.get((kind, reason))
    if known is None and kind == "unused" and sum(one == kind for one, _ in tally) >= MAX_UNUSED:
        reason = MORE_UNUSED
        known = tally.get((kind, reason))
    if known is None:
        first = where.replace("\n", "\\n")  # as in errors.DataError
        known = Finding(kind, reason, 0, first if len(first) <= MAX_EXAMPLE else f"{first[:MAX_EXAMPLE]}...")
    tally[kind, reason] = Finding(kind, reason, known.rows + rows, known.first)


def sort_findings(tally: Tally, repeat: float = 1) -> tuple[Finding, ...]:
    """Sort findings: rows that are not learned from first, how rows are read last, then by frequency. Counts are over
    `repeat` passes, as for all of a source."""
    order = {"accepted": 1, "unused": 2, "read": 3}
    findings = sorted(tally.values(), key=lambda one: (order.get(one.kind, 0), -one.rows))
    return tuple(replace(one, rows=round(one.rows * repeat)) for one in findings)


NOT_FOUND = "no column "
"How an unused name begins that the source's `columns` looks for and a row does not have."


def finding_text(finding: Finding) -> str:
    """Format a finding: `2 bad rows skipped, not JSON; the first: a.jsonl:7: not JSON: ...`, or `12,000 rows have a
    column quality, which is not used; the first: a.jsonl:1`."""
    if finding.reason == MORE_UNUSED:
        return f"further columns and keys are not used, of more than {MAX_UNUSED}; the first: {finding.first}"
    if finding.kind == "read":
        return f"{counted(finding.rows, 'row')} read as {finding.reason}; the first: {finding.first}"
    if finding.kind == "unused":
        rows = f"{counted(finding.rows, 'row')} {'has' if finding.rows == 1 else 'have'}"
        what = finding.reason if finding.reason.startswith(NOT_FOUND) else f"a {finding.reason}, which is not used"
        return f"{rows} {what}; the first: {finding.first}"
    nouns = {"skipped": "bad row", "left out": "document"}
    rows = counted(finding.rows, nouns.get(finding.kind, "row"))
    return f"{rows} {finding.kind}, {finding.reason}; the first: {finding.first}"


def log_findings(name: str, findings: Iterable[Finding]) -> None:
    """Log one line for each reason that rows are left out, odd, or not used whole."""
    for one in findings:
        if one.kind != "read":
            log.warning("%s: %s", name, finding_text(one))


@contextmanager
def without_logging() -> Iterator[None]:
    """Keep `log_findings` quiet, for a caller that shows what was found itself."""
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


def advised(error: DataError) -> DataError:
    """Return the error of a bad row that ends a run, with what to do about such rows."""
    advice = "fix the row, or skip and count all such rows with data.on_bad_row=skip"
    return DataError(f"{error} ({advice})", reason=error.reason)


SYSTEM = ("system", "system_prompt", "system_message")
"Columns with the text of the system message."
CONTEXT_COLUMNS = ("context", "input")
"Columns whose text belongs to the question."
WITH_ANSWERS = ("tools", "functions", "documents", "chat_template_kwargs", "mask", "label", "kto_tag", "history")
"Further columns that have a meaning next to any conversation."
TRUTH_MARKS = ("train", "training", "loss")
"Marks of a message or a row that are true or false."
NUMBER_MARKS = ("weight", "loss_scale")
"Marks that are 0 or 1."
FLAG_MARKS = ("loss_mask", "step_loss_mask")
"Marks that are 0, 1, true or false."
MARKS = (*TRUTH_MARKS, *NUMBER_MARKS, *FLAG_MARKS)
"True or 1: it is learned; false or 0: it is not."
PARTS = "train_detail"
"Key of an answer that says which of its characters are learned (Axolotl)."
MARKS_OF_PARTS = (PARTS, "assistant_masks", "assistant_mask", "completion_mask", "masked")
"Marks next to a row that are not honoured: of characters, of tokens, or with the opposite meaning."
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
"Columns of rows that show more than text."
PREFERENCES = ("chosen", "chosen_messages", "rejected", "rejected_response", "rejected_messages")
"Columns of a good and a bad answer to one question."
MASKS = ("assistant_masks", "assistant_mask", "completion_mask")
"Columns next to input_ids that are 1 for each token that is learned."
NEXT_TO_IDS = (*MASKS, "labels", "attention_mask", "position_ids")
"Columns that are read next to input_ids."
ASSISTANT = ("assistant", "gpt", "model", "chatgpt", "bot")
"Names of the role that is learned, in a column mask."
REASONING = ("reasoning_content", "reasoning", "thinking")
"Fields of an answer that published data keeps the reasoning before it in."
MESSAGE = ("role", "content", "tool_calls", "tool_call_id", *MARKS, *REASONING)
"Keys of a message that are read, the reasoning and calls those of an answer."
ARGUMENTS = ("arguments", "parameters", "args", "input")
"Keys that hold the arguments of a tool call: OpenAI, Llama, LangChain, Anthropic."
_OF_FUNCTIONS = frozenset(("name", *ARGUMENTS))
_OF_CALLS = _OF_FUNCTIONS.union(("type", "function", "id"))
_MARKS = frozenset((*MARKS, *MARKS_OF_PARTS))
REJECTED_KEYS = {
    "refusal": "put its text into content",
    "audio": "only text is learned",
    "prefix": "the answer would continue a text that is given: join the two, or put the given part into the question",
    "partial": "the answer would continue a text that is given: join the two, or put the given part into the question",
    "mask": "say train: true or train: false",
    **dict.fromkeys(MARKS_OF_PARTS, "mark whole messages, with train: true or train: false"),
    **dict.fromkeys(MEDIA, "only text is learned"),
}
"Keys of a message that training cannot honour, and what to do instead."
_REJECTED = frozenset(REJECTED_KEYS)
_READ = frozenset(("role", "content", "tool_call_id", *MARKS, *REJECTED_KEYS))
_METADATA = """
_id id uuid guid idx index ind row_id hash sha256 md5 source dataset dataset_name subset config origin
category categories subject topic domain tags tree_state lang language languages model model_name generator url license
date timestamp created created_at updated_at meta metadata length num_tokens token_count num_turns token_type_ids
file_name filename path file_path"""
METADATA = frozenset(_METADATA.split())
"Names that describe a row or message and do not affect learning."
SHAPES = """messages conversations instruction output response prompt completion question question_stem choices answer
answerKey text content caption captions file_name input_ids from value function_call query answers conversation chat
segments labels attention_mask position_ids"""
"Columns by which rows are recognised, and keys of turns in other shapes."
Turns = list[tuple[object, object]]
_MARKER = re.compile(r"<(image|video|audio)>")

# ---- names -----------------------------------------------------------------------------------------------------------


def _snake(name: str) -> str:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip())
    return re.sub(r"[\s-]+", "_", words).casefold()


KNOWN = (*SYSTEM, *CONTEXT_COLUMNS, *WITH_ANSWERS, *PREFERENCES, *MESSAGE, *REJECTED_KEYS, *SHAPES.split())
_NAMES = frozenset((*KNOWN, "name"))  # that of a tool next to its result
_STANDARD = {_snake(name): name for name in KNOWN}


@lru_cache(maxsize=4096)
def standard_name(name: str) -> str:
    """Return the known name that a column or key is another spelling of: label for Label, system_prompt for
    systemPrompt; any other name as it is."""
    return _STANDARD.get(_snake(name), name)


@lru_cache(maxsize=4096)
def is_metadata(name: str) -> bool:
    """Return whether a name describes a row or message and does not affect learning."""
    snake = _snake(name)
    return snake in METADATA or snake.endswith("_id") or snake.startswith(("__", "unnamed:")) or not snake


def is_nan(value: object) -> bool:
    """Return whether a value is NaN, which is not equal to itself."""
    return isinstance(value, float) and value != value


def is_empty(value: object) -> bool:
    """Return whether a value is empty: null, blank text, an empty list or object, or NaN, the null of tables."""
    return not value.strip() if isinstance(value, str) else value is None or value in ([], {}) or is_nan(value)


def named(found: JsonObject, where: str) -> JsonObject:
    """Return a row or message under the known names of its columns or keys.

    Raises:
        DataError: one of them is there twice, in two spellings and with two values.
    """
    if _NAMES.issuperset(found) or all(standard_name(name) == name for name in found):
        return found
    result: JsonObject = {}
    for name, value in found.items():
        known = standard_name(name)
        if known in result and not is_empty(result[known]):
            if not is_empty(value) and value != result[known]:
                raise fault(where, "one column in two spellings", known=known, column=name)
            continue
        result[known] = value
    return result


# ---- rows ------------------------------------------------------------------------------------------------------------


def is_learned(row: JsonObject, where: str) -> bool:
    """Return whether a row is to be learned, by its own marks. Most rows have none.

    A column of a mark's name with a value of another kind, such as a measured `loss` or the `weight` of a parcel as
    text, is no mark and counts as unused: see `understood`.

    Raises:
        DataError: a weight that is neither 0 nor 1, or marks of tokens, characters or messages.
    """
    if row.keys().isdisjoint(_MARKS):
        return True
    for name in MARKS_OF_PARTS:
        if not is_empty(row.get(name)) and row[name] is not False:
            raise fault(where, "marks of parts / column", name=name)
    learned = True
    for name in MARKS:
        value = cell(row.get(name))
        marks = isinstance(value, list) and (name not in TRUTH_MARKS or all(isinstance(one, bool) for one in value))
        if marks and value:
            raise fault(where, "marks of parts / list", name=name)
        if name in NUMBER_MARKS and isinstance(value, int | float) and (isinstance(value, bool) or value not in (0, 1)):
            raise fault(where, "bad weight", name=name, value=value)
        if understood(name, value):
            learned = learned and bool(value)
    return learned


def understood(name: str, value: object) -> bool:
    """Return whether the value of a column label, kto_tag or of a mark is a truth value."""
    value = cell(value)
    if name in NUMBER_MARKS:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, bool) or (name in FLAG_MARKS and isinstance(value, int) and value in (0, 1))


def cell(value: object) -> object:
    """Return the truth value or number that a cell of a CSV file writes out; anything else as it is."""
    if not isinstance(value, str):
        return value
    text = value.strip().casefold()
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text) if re.search(r"[.e]", text) else int(text)
    except ValueError:
        return value


def check_answer_columns(row: JsonObject, where: str) -> None:
    """Reject a conversation whose row labels its answer as bad, or asks to learn other roles than the assistant.

    Raises:
        DataError: `label: false` as in KTO, or `mask` with anything but a role that is not learned anyway.
    """
    for name in ("label", "kto_tag"):
        if understood(name, row.get(name)) and cell(row[name]) is False:
            raise fault(where, "answer labelled false", column=name)
    mask = row.get("mask")
    if not is_empty(mask) and (not isinstance(mask, str) or mask.strip().casefold() in ASSISTANT):
        raise fault(where, "marks of parts / mask", mask=mask)


def check_media(row: JsonObject, where: str) -> None:
    """Reject a row of text that has pictures, videos or sound."""
    if row.keys().isdisjoint(MEDIA):
        return
    for name in MEDIA:
        if not is_empty(row.get(name)):
            raise fault(where, "pictures or sound with a text", name=name)


def check_preferences(row: JsonObject, turns_of_row: Callable[[], Turns], where: str) -> list[str]:
    """Reject a row with a chosen and a rejected answer, unless its own messages end with the chosen one. Return the
    columns that repeat these messages.

    Args:
        turns_of_row: returns (role, content) of its messages; empty: a text.
    """
    if row.keys().isdisjoint(PREFERENCES):
        return []
    turns = turns_of_row()
    given = [name for name in PREFERENCES if isinstance(row.get(name), str | list | dict) and not is_empty(row[name])]
    chosen = [name for name in given if name.startswith("chosen")]

    def ends_turns(answer: object) -> bool:
        if isinstance(answer, str):
            return answer.strip() == turns[-1][1]
        last = turns_of(answer)
        return bool(last) and last == turns[-len(last) :]

    if not given or (chosen and turns and all(ends_turns(row[name]) for name in chosen)):
        return chosen
    raise fault(where, "preference row", columns=", ".join(given))


def turns_of(messages: object) -> Turns:
    """Return (role, content) of the messages that are not from the system, to compare conversations."""
    found = [message for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []
    return [
        (message.get("role"), text.strip() if isinstance(text := message.get("content"), str) else text)
        for message in found
        if message.get("role") not in ("system", "developer")
    ]


def unused_columns(row: JsonObject, used: Collection[str], texts: Callable[[], Iterable[object]]) -> tuple[str, ...]:
    """Return the columns of a row that nothing reads and that are not metadata, as findings count them.

    Args:
        used: columns that are read.
        texts: what the row teaches; a column that repeats one of them is not lost.
    """
    found = [name for name in row if name not in used and not is_metadata(name) and not is_empty(row[name])]
    if not found:
        return ()
    given = texts() if any(isinstance(row[name], str) for name in found) else ()
    known = {text.strip() for text in given if isinstance(text, str)}
    lost = (name for name in found if not isinstance(row[name], str) or row[name].strip() not in known)
    return tuple(f"column {_shown(name)}" for name in lost)


def has_marker(text: str) -> bool:
    """Return whether a text has the place of a picture, video or sound: <image>, which is not closed as a tag is."""
    found = _MARKER.search(text)
    return found is not None and f"</{found[1]}>" not in text


# ---- settings of a source --------------------------------------------------------------------------------------------


def check_where(row: JsonObject, source: SourceConfig, where: str) -> None:
    """Leave a row out whose columns are not as the source's `where` says.

    Raises:
        LeftOut: the first column that has another value.
    """
    for name, wanted in where_columns(source).items():
        found, _ = _take(row, name)
        allowed = wanted if isinstance(wanted, list) else [wanted]
        if found is None and None not in allowed and name not in (there := column_names(row)):
            meant = did_you_mean(name, [*there, *COUNTED], ". ")
            text = f"{where}: there is no column {name}, only {first_of(there, 12)}{meant}"
            raise LeftOut(text, reason=f"where: {name}{NO_COLUMN}")
        if not any(_same(found, one) for one in allowed):
            raise LeftOut(f"{where}: {name} is {found!r}", reason=f"where: {name}")


NO_COLUMN = ", which they do not have"
"End of the reason of rows that have no column of a condition."


def column_names(row: JsonObject) -> list[str]:
    """Return the columns of a row, and those of the objects in them, as settings of a source name them."""
    inner = [f"{name}.{key}" for name, value in row.items() if isinstance(value, dict) for key in value]
    return [*row, *inner]


def _same(found: object, wanted: object) -> bool:
    """Return whether a value is the wanted one; the cell of a CSV file may write it out. True is not 1."""
    values = (None if is_nan(found) else found, cell(found))
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


def missing_columns(row: JsonObject, source: SourceConfig) -> tuple[str, ...]:
    """Return what the source's `columns` names and a row does not have, as findings count it."""
    columns = (source.columns or {}).items()
    return tuple(missing_column(name, path) for name, path in columns if _take(row, path)[0] is None)


def missing_column(name: str, path: str) -> str:
    """Return how findings count rows without the column `path` that the setting columns.`name` names."""
    return f"{NOT_FOUND}{path}, which columns.{name} names"


def is_recognised(name: str) -> bool:
    """Return whether the shape of a row is known by its column of this name."""
    return standard_name(name) in SHAPES.split()


def has_column(row: JsonObject, path: str) -> bool:
    """Return whether a row has a column at a path, null or not."""
    name, _, inner = path.partition(".")
    return path in row or (bool(inner) and isinstance(row.get(name), dict) and has_column(row[name], inner))


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


# ---- messages --------------------------------------------------------------------------------------------------------


def is_plain(message: object) -> bool:
    """Return whether a message is a role and a text, which most are and which need no further look at their keys."""
    if not isinstance(message, dict) or len(message) != 2:
        return False
    return isinstance(message.get("content"), str) and "role" in message


def check_keys(message: JsonObject, where: str) -> None:
    """Reject a message with a key that training cannot honour."""
    if _REJECTED.isdisjoint(message):
        return
    for key, advice in REJECTED_KEYS.items():
        if key == PARTS and message["role"] == "assistant":
            continue
        if not is_empty(message.get(key)) and message[key] is not False:
            raise DataError(f"{where}: {key} is not supported in a message: {advice}", reason="unsupported message key")


def unused_keys(
    messages: Iterable[JsonObject], renders: Callable[[str, str], bool], *, reasoning: bool = True
) -> tuple[str, ...]:
    """Return the keys of messages, of their text parts and of their tool calls that nothing reads and that are not
    metadata, as findings count them.

    Args:
        messages: as they were read, checked.
        renders: returns, of a role and a key, whether the chat template renders it.
        reasoning: the reasoning of answers is read.
    """
    found: dict[str, None] = {}
    of_answers = _READ.union(("tool_calls", *REASONING) if reasoning else ("tool_calls",))
    for message in messages:
        if is_plain(message):
            continue
        role = message["role"]
        for key in message.keys() - (of_answers if role == "assistant" else _READ):
            if not is_metadata(key) and not is_empty(message[key]) and not renders(role, key):
                found[f"message key {_shown(key)}"] = None
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else ():
            found.update((f"content part key {name}", None) for name in unread_keys(part, ("type", "text")))
        for call in message.get("tool_calls") or ():
            for value, prefix, known in ((call, "", _OF_CALLS), (call.get("function"), "function.", _OF_FUNCTIONS)):
                for name in unread_keys(value, known):
                    found[f"tool call key {prefix}{name}"] = None
    return tuple(sorted(found))


def unread_keys(value: object, known: Collection[str]) -> list[str]:
    """Return the keys of an object that are neither known nor metadata, as they are shown; none of anything else."""
    if not isinstance(value, dict) or all(map(known.__contains__, value)):
        return []
    return [_shown(k) for k in value if k not in known and not is_metadata(k) and not is_empty(value[k])]


def _shown(name: str) -> str:
    """Return a name for one line of a log, however long it is and whatever it holds."""
    printable = name if name.isprintable() else repr(name)[1:-1]
    return printable if len(printable) <= 80 else f"{printable[:80]}..."
