"""Data that every machine has or makes: documents (`docs`), pictures with captions (`pictures`), chat tasks (`tasks`).

Documents are real English and Python for base training, out of Python's standard library: help topics, docstrings and
short functions. Files are parsed, never imported.

Pictures determine their caption, so that learning can be measured: a grid of colours, named one after the other. Each
colour has a level of red, of green and of blue, and its name spells them: bakapa would be black, which stands for
nothing. A caption has as many tokens as its words and the end: 90 % have 5 to 32, 9 % 33 to 64 and 1 % 65 to 256.
Trained on such captions a tokenizer of 1,024 entries has a token for each word.

Tasks are conversations of one or two problems with exact answers, for mid-training and SFT. A problem is a family and
its operands. Their hash decides whether it is held out, so no held-out problem occurs in training in any phrasing,
under any system message, in any turn.
"""

import ast
import hashlib
import re
import sysconfig
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from itertools import product, tee
from pathlib import Path
from random import Random
from typing import Any, Literal, TypeVar

import numpy as np

from sftkit.data.types import JsonObject
from sftkit.errors import ConfigError, texts

Split = Literal["train", "heldout"]


def is_heldout_split(split: str) -> bool:
    """Return whether a split is the held-out one; raises ValueError for an unknown split."""
    if split not in ("train", "heldout"):
        raise ValueError(f'split: "{split}" is not one of train, heldout.')
    return split == "heldout"


def stable_hash(text: str) -> int:
    """Return 64 bits that are the same in every process, unlike hash()."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big")


SKIPPED_FOLDERS = re.compile(
    r"tests?|idle_test|idlelib|(site|dist)-packages|lib2to3|turtledemo|ensurepip|encodings|pydoc_data|_pyrepl|config-.*"
)


LONGEST_WHOLE_FUNCTION = 30
"Lines; of a longer function only the signature and docstring are taken."


SHORTEST_DOCUMENT = 120
"Characters."


def docs(split: Split) -> Iterator[str]:
    """Yield documents of English and Python in a fixed order, without duplicates; every 50th (by hash) is held out."""
    heldout = is_heldout_split(split)
    return (text for text in copy(_all_docs()) if (stable_hash(text) % 50 == 0) == heldout)


@cache
def _all_docs() -> Iterator[str]:
    """Return an iterator over both splits. It is never advanced itself, so each copy begins at the first document; what
    one copy has read is kept for the others."""
    return tee(_read_docs(), 1)[0]


def _read_docs() -> Iterator[str]:
    """Yield every text once."""
    seen: set[str] = set()
    for text in _every_text():
        if text not in seen:
            seen.add(text)
            yield text


def _every_text() -> Iterator[str]:
    yield from (text.strip() for _, text in sorted(_help_topics().items()))
    # Sorted, as the order of a folder's files depends on the file system.
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not any(map(SKIPPED_FOLDERS.fullmatch, path.relative_to(root).parts)):
            yield from _documents_of_file(path)


def _help_topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        return {}
    return topics


def _documents_of_file(path: Path) -> Iterator[str]:
    """Yield the module's docstring, then one document per documented top-level class or function."""
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old modules
            module = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return
    lines = source.split("\n")  # as ast counts them; splitlines would also split at form feeds
    chunks = [(ast.get_docstring(module) or "",), *(_chunks(node, lines) for node in module.body)]
    for text in map("\n\n".join, chunks):
        if len(text) >= SHORTEST_DOCUMENT:
            yield textwrap.dedent(text).strip()


def _chunks(node: ast.AST, lines: list[str]) -> Sequence[str]:
    """Return the source of a documented function, or of a class's head and its documented methods; nothing
    for anything else."""
    if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return ()
    own = []
    is_class = isinstance(node, ast.ClassDef)
    if ast.get_docstring(node, clean=False) is not None:
        last_line = node.end_lineno or node.lineno
        if is_class or last_line - node.lineno >= LONGEST_WHOLE_FUNCTION:
            last_line = node.body[0].end_lineno or node.lineno
        own = ["\n".join(lines[node.lineno - 1 : last_line])]
    return own + [chunk for child in node.body if is_class for chunk in _chunks(child, lines)]


PICTURES = {"train": 40_000, "heldout": 2_000}
PREFIX = "builtin:pictures/"
LENGTHS = ((0.90, 5, 32), (0.99, 33, 64), (1.00, 65, 256))
"(share of the captions up to here, fewest tokens, most tokens)"
SIDES = (6, 8, 16)
"Cells along a side of the grid; a picture has the smallest grid that holds its caption."
LEVELS = np.array([0, 85, 170, 255], dtype=np.uint8)
NAMES = tuple(map("".join, product(("ba", "de", "fi", "go"), ("ka", "le", "mi", "no"), ("pa", "re", "si", "tu"))))
"Names of the 64 colours; the first is black."


def pictures(split: Split) -> Iterator[dict[str, str]]:
    """Yield rows in a fixed order, the same on every machine: the name of a picture and its caption."""
    for number in range(PICTURES[split]):
        caption = " ".join(NAMES[colour] for colour in _colours(split, number))
        yield {"image": f"{PREFIX}{split}/{number}", "caption": caption}


def picture(name: str, size: tuple[int, int, int]) -> np.ndarray:
    """Make the picture of that name: uint8 [3, height, width].

    Raises:
        ConfigError: the size has not three channels.
    """
    channels, height, width = size
    if channels != 3:
        raise ConfigError(f"{PREFIX}*: these pictures have 3 channels, and the encoder takes {channels}")
    split, number = name.removeprefix(PREFIX).split("/")
    colours = _colours(split, int(number))
    side = next(side for side in SIDES if side * side >= len(colours))
    cells = np.zeros(side * side, dtype=np.int64)
    cells[: len(colours)] = colours
    levels = np.stack([LEVELS[cells // 16], LEVELS[cells // 4 % 4], LEVELS[cells % 4]]).reshape(3, side, side)
    rows, columns = (np.arange(length) * side // length for length in (height, width))
    return levels.take(columns, axis=2).take(rows, axis=1)


def _colours(split: str, number: int) -> list[int]:
    """Return the colours that a picture's caption names, as indices into NAMES."""
    # Random.random() is the one method whose sequence Python promises to keep.
    rng = Random(f"sftkit pictures {split} {number}")
    share = rng.random()
    min_words, max_words = next((low, high) for limit, low, high in LENGTHS if share < limit)
    words = min_words + int(rng.random() * (max_words - min_words + 1)) - 1  # the end is a token, too
    return [1 + int(rng.random() * (len(NAMES) - 1)) for _ in range(words)]


T = TypeVar("T")

TRAIN_CONVERSATIONS = 48_000
HELDOUT_PER_FAMILY = 80
TWO_TURNS = 0.5
"Share of the conversations with two problems."
SYSTEM_MESSAGE = 0.2
"Share of the conversations that begin with a system message."


@dataclass(frozen=True)
class TaskConversation:
    """A conversation of one or two problems; `family` and `answer` are those of the last."""

    family: str
    messages: list[JsonObject]
    "OpenAI shape; ends with the assistant's answer."
    answer: str
    problems: tuple[str, ...]
    "Identity of the problem of each turn: family and operands, the same in every wording."


# Words that documentation is full of, too. A word in a question is written without a space before it (one,two), as it
# is at the beginning of an answer, so that both are the same token and an answer is a copy.
CATEGORIES = {
    "a color": ["red", "green", "blue", "black", "white", "pink"],
    "an action": ["read", "write", "open", "close", "send", "find"],
    "a number": ["zero", "one", "two", "three", "four", "ten"],
    "a time": ["day", "week", "month", "year", "hour", "minute"],
    "a direction": ["left", "right", "up", "down", "north", "south"],
    "a part of a program": ["file", "path", "text", "code", "line", "class"],
}
WORDS = [word for words in CATEGORIES.values() for word in words]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = re.findall(r"[A-Z][a-z]+", "JanuaryFebruaryMarchAprilMayJuneJulyAugustSeptemberOctoberNovemberDecember")
OCCASIONS = ["party", "lesson", "test", "game", "race", "show", "trip", "walk", "talk", "meeting"]
UNITS = {"km": ("m", "000"), "kg": ("g", "000"), "m": ("cm", "00"), "cm": ("mm", "0"), "l": ("ml", "000")}
POSITIONS = {"first": 0, "second": 1, "last": -1}

Drawn = tuple[str, str, dict[str, object]]
"Operands, answer, and the fields of the wording."
Draw = Callable[[Random], Drawn]
TaskProblem = tuple[str, str, str]
"Identity, which is the same in every wording, question and its one right answer."


# Random.random() is the one method whose sequence Python promises to keep, so everything is drawn through it.
def _choose(rng: Random, items: Sequence[T]) -> T:
    return items[int(rng.random() * len(items))]


def _sample(rng: Random, items: Sequence[T], k: int) -> list[T]:
    """Return k distinct items in random order."""
    pool = list(items)
    return [pool.pop(int(rng.random() * len(pool))) for _ in range(k)]


def calendar(rng: Random) -> Drawn:
    """Draw the day or month one after or before another."""
    names, unit = _choose(rng, [(DAYS, "day"), (MONTHS, "month")])
    first, second = _sample(rng, OCCASIONS, 2)
    start = int(rng.random() * len(names))
    shift = _choose(rng, [-1, 1])
    later = f"one {unit} later" if shift == 1 else f"one {unit} earlier"
    fields = {"a": first, "b": second, "x": names[start], "later": later, "on": "on" if unit == "day" else "in"}
    return f"{first} {names[start]} {second} {shift}", names[(start + shift) % len(names)], fields


def pick(rng: Random) -> Drawn:
    """Draw the first, second or last of three words."""
    words = _sample(rng, WORDS, 3)
    which = _choose(rng, list(POSITIONS))
    return f"{which} {words}", words[POSITIONS[which]], {"which": which, "list": ",".join(words)}


def reverse(rng: Random) -> Drawn:
    """Draw two or three words in reverse order."""
    words = _sample(rng, WORDS, _choose(rng, [2, 3]))
    return str(words), ",".join(words[::-1]), {"list": ",".join(words)}


def sort(rng: Random) -> Drawn:
    """Draw three digits in ascending order."""
    numbers = [str(number) for number in _sample(rng, range(10), 3)]
    answer = ",".join(sorted(numbers))
    return answer, answer, {"list": ",".join(numbers)}


def compare(rng: Random) -> Drawn:
    """Draw the larger or smaller of two two-digit numbers."""
    a, b = (10 * tens + int(rng.random() * 10) for tens in _sample(rng, range(1, 10), 2))
    word = _choose(rng, ["larger", "smaller"])
    answer = max(a, b) if word == "larger" else min(a, b)
    return f"{min(a, b)} {max(a, b)}", str(answer), {"a": a, "b": b, "word": word}


def arithmetic(rng: Random) -> Drawn:
    """Draw a two-digit number plus or minus 1 to 4, without a carry."""
    tens = 10 * _choose(rng, range(1, 10))
    small = _choose(rng, range(1, 5))
    low = tens + _choose(rng, range(10 - small))
    high = low + small
    operands, answer = _choose(rng, [(f"{low}+{small}", high), (f"{high}-{small}", low)])
    return operands, str(answer), {"sum": operands}


def units(rng: Random) -> Drawn:
    """Draw a quantity in the next smaller unit."""
    number, unit = _choose(rng, range(2, 200)), _choose(rng, list(UNITS))
    smaller, zeros = UNITS[unit]
    return f"{number} {unit}", f"{number}{zeros} {smaller}", {"n": number, "unit": unit, "to": smaller}


def contains(rng: Random) -> Drawn:
    """Draw whether a list of two words has one of a category."""
    *names, other = _sample(rng, list(CATEGORIES), 3)
    words = [_choose(rng, CATEGORIES[name]) for name in names]
    is_in = rng.random() < 0.5
    name = _choose(rng, names) if is_in else other
    return f"{name} {words}", "yes" if is_in else "no", {"name": name, "list": ",".join(words)}


def count(rng: Random) -> Drawn:
    """Draw a number of letters."""
    letters = " ".join(_sample(rng, LETTERS, _choose(rng, range(2, 7))))
    return letters, str(len(letters.split())), {"letters": letters}


def spell(rng: Random) -> Drawn:
    """Draw three or four letters, joined by dashes."""
    letters = _sample(rng, LETTERS, _choose(rng, [3, 4]))
    return str(letters), "-".join(letters), {"letters": ",".join(letters)}


def sequence(rng: Random) -> Drawn:
    """Draw three neighboring numbers, upwards or downwards, and the fourth, within the same ten."""
    tens = 10 * _choose(rng, range(1, 50))
    start = _choose(rng, range(7))
    step = _choose(rng, [-1, 1])
    *numbers, answer = [str(tens + start + i) for i in range(4)][::step]
    listed = ",".join(numbers)
    return listed, answer, {"list": listed}


def category(rng: Random) -> Drawn:
    """Draw which of three words is of a category."""
    names = _sample(rng, list(CATEGORIES), 3)
    words = [_choose(rng, CATEGORIES[name]) for name in names]
    asked = _choose(rng, range(3))
    return f"{names[asked]} {words}", words[asked], {"name": names[asked], "list": ",".join(words)}


_WORDINGS: Any = texts("data/demo/families.yaml")
"Family, a function of this module -> its phrasings, and the text below each."
FAMILIES: tuple[str, ...] = tuple(_WORDINGS)

PLAIN_SYSTEM_MESSAGES = ("You are a helpful assistant.", "Answer briefly.", "Give only the answer.")
CAPITALS = "Answer in capital letters."
CAPITALS_FAMILY = "contains"
"The one family that is also asked under CAPITALS, which turns yes into YES."


def tasks(split: Split) -> Iterator[TaskConversation]:
    """Yield conversations in a fixed order, the families in turn; the same on every machine and Python."""
    rng = Random(f"sftkit tasks {split}")
    heldout = is_heldout_split(split)
    total = HELDOUT_PER_FAMILY * len(FAMILIES) if heldout else TRAIN_CONVERSATIONS
    asked: set[str] = set()
    for i in range(total):
        task = _conversation(FAMILIES[i % len(FAMILIES)], rng, heldout=heldout)
        # Held-out questions are scored, so each counts once; training may repeat some.
        while heldout and task.messages[-2]["content"] in asked:
            task = _conversation(task.family, rng, heldout=heldout)
        asked.add(task.messages[-2]["content"])
        yield task


def _conversation(family: str, rng: Random, *, heldout: bool) -> TaskConversation:
    """Draw a conversation of one or two problems, the last one of `family`."""
    families = [family]
    messages = []
    problems = []
    answer = ""
    capitals = family == CAPITALS_FAMILY and rng.random() < SYSTEM_MESSAGE
    if capitals or rng.random() < SYSTEM_MESSAGE:
        messages.append({"role": "system", "content": CAPITALS if capitals else _choose(rng, PLAIN_SYSTEM_MESSAGES)})
    if rng.random() < TWO_TURNS:
        families.insert(0, CAPITALS_FAMILY if capitals else _choose(rng, FAMILIES))
    for name in families:
        identity, question, answer = _problem(name, rng, heldout=heldout)
        answer = answer.upper() if capitals else answer
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        problems.append(identity)
    return TaskConversation(family, messages, answer, tuple(problems))


def _problem(family: str, rng: Random, *, heldout: bool) -> TaskProblem:
    """Draw a problem of this side of the split: every tenth (by hash) is held out."""
    draw: Draw = globals()[family]
    wording = _WORDINGS[family]
    while True:
        operands, answer, fields = draw(rng)
        question = f"{_choose(rng, wording['phrasings'])}\n{wording['below']}".strip().format(**fields)
        identity = f"{family}: {operands}"
        if (stable_hash(identity) % 10 == 0) == heldout:
            return identity, question, answer
