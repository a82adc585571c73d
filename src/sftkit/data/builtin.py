"""Data made on this machine: documents out of the standard library, and small chat tasks with exact answers.

`docs` is real English and Python for base training: help topics, docstrings and short functions; files are parsed,
never imported. `tasks` are chat conversations of one or two problems for mid-training and SFT. A problem is a family
and its operands; their hash decides whether it is held out, so no held-out problem occurs in training in any phrasing,
under any system message, in any turn.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal, TypeVar

Split = Literal["train", "heldout"]
T = TypeVar("T")

TRAIN_CONVERSATIONS = 48_000
HELDOUT_PER_FAMILY = 80
TWO_TURNS = 0.5
"Share of the conversations with two problems."
SYSTEM_MESSAGE = 0.2
"Share of the conversations that begin with a system message."

# ---- documents -------------------------------------------------------------------------------------------------------

SKIPPED_FOLDERS = re.compile(
    r"tests?|idle_test|idlelib|(site|dist)-packages|lib2to3|turtledemo|ensurepip|encodings|pydoc_data|_pyrepl|config-.*"
)
LONGEST_WHOLE_FUNCTION = 30
"Lines; of a longer function only the signature and docstring are taken."
SHORTEST_DOCUMENT = 120
"Characters."


def docs(split: Split) -> Iterator[str]:
    """Documents of English and Python in a fixed order, without duplicates; every 50th (by hash) is held out."""
    seen = set()
    for text in _all_docs():
        key = _hash(text)
        if key not in seen and (key % 50 == 0) == _is_heldout_split(split):
            yield text
        seen.add(key)


def _all_docs() -> Iterator[str]:
    yield from (text.strip() for _, text in sorted(_help_topics().items()))
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not any(map(SKIPPED_FOLDERS.fullmatch, parts)):
            yield from _documents_of_file(path)


def _help_topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        return {}
    return topics


def _documents_of_file(path: Path) -> Iterator[str]:
    """The module's docstring, then one document per documented top-level class or function."""
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old modules
            module = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return
    lines = source.split("\n")  # as ast counts them; splitlines would also split at form feeds
    pieces = [(ast.get_docstring(module) or "",), *(_pieces(node, lines) for node in module.body)]
    for text in map("\n\n".join, pieces):
        if len(text) >= SHORTEST_DOCUMENT:
            yield textwrap.dedent(text).strip()


def _pieces(node: ast.AST, lines: list[str]) -> Sequence[str]:
    """Source of a documented function, or of a class's head and its documented methods; nothing for anything else."""
    if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return ()
    own, is_class = [], isinstance(node, ast.ClassDef)
    if ast.get_docstring(node, clean=False) is not None:
        last_line = node.end_lineno or node.lineno
        if is_class or last_line - node.lineno >= LONGEST_WHOLE_FUNCTION:
            last_line = node.body[0].end_lineno or node.lineno
        own = ["\n".join(lines[node.lineno - 1 : last_line])]
    return own + [piece for child in node.body if is_class for piece in _pieces(child, lines)]


# ---- tasks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A conversation of one or two problems; `family` and `answer` are those of the last."""

    family: str
    messages: list[dict[str, Any]]
    "OpenAI shape; ends with the assistant's answer."
    answer: str
    problems: tuple[str, ...]
    "Identity of the problem of each turn: family and operands, the same in every wording."


@dataclass(frozen=True)
class Problem:
    """A question with one right answer; `identity` is the same in every wording."""

    identity: str
    question: str
    answer: str


# Words that documentation is full of, so that a small tokenizer trained on `docs` has them whole.
CATEGORIES = {
    "a color": ["red", "green", "blue", "black", "white", "orange", "pink", "gray"],
    "an action": ["read", "write", "open", "close", "send", "find", "start", "wait"],
    "a number": ["zero", "one", "two", "three", "four", "five", "six", "ten"],
    "a time": ["day", "week", "month", "year", "hour", "minute", "date"],
    "a direction": ["left", "right", "up", "down", "back", "north", "east", "west"],
    "a part of a program": ["file", "path", "text", "code", "key", "line", "string", "class"],
}
WORDS = [word for words in CATEGORIES.values() for word in words]
THINGS = [word for name in ("a number", "a part of a program") for word in CATEGORIES[name]]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = re.findall(r"[A-Z][a-z]+", "JanuaryFebruaryMarchAprilMayJuneJulyAugustSeptemberOctoberNovemberDecember")
EVENTS = ["party", "lesson", "test", "game", "race", "show", "trip", "walk", "talk", "meeting"]
UNITS = [("km", "m", "000"), ("kg", "g", "000"), ("m", "cm", "00"), ("cm", "mm", "0"), ("l", "ml", "000")]
POSITIONS = {"first": 0, "second": 1, "last": -1}


_makers: dict[str, Callable[[Random], Problem]] = {}


def _family(*phrasings: str) -> Callable:
    """Make a function of rng -> (operands, answer, fields for the phrasings) the family of that name."""

    def register(draw: Callable[[Random], tuple[str, str, dict[str, Any]]]) -> Callable:
        def make(rng: Random) -> Problem:
            operands, answer, fields = draw(rng)
            return Problem(f"{draw.__name__}: {operands}", _choose(rng, phrasings).format(**fields), answer)

        _makers[draw.__name__] = make
        return draw

    return register


# Random.random() is the one method whose sequence Python promises to keep, so everything is drawn through it.
def _choose(rng: Random, items: Sequence[T]) -> T:
    return items[int(rng.random() * len(items))]


def _sample(rng: Random, items: Sequence[T], k: int) -> list[T]:
    """k distinct items in random order."""
    pool = list(items)
    return [pool.pop(int(rng.random() * len(pool))) for _ in range(k)]


@_family(
    "The {a} is {on} {x}. The {b} is {later}. When is the {b}?",
    "The {b} is {later} than the {a}, which is {on} {x}. When is the {b}?",
    "If the {a} is {on} {x} and the {b} is {later}, when is the {b}?",
    "When is the {b}? It is {later} than the {a}, and the {a} is {on} {x}.",
)
def calendar(rng: Random):
    names, unit = _choose(rng, [(DAYS, "day"), (MONTHS, "month")])
    first, second = _sample(rng, EVENTS, 2)
    start, shift = int(rng.random() * len(names)), _choose(rng, [-1, 1, 2])
    later = {-1: f"one {unit} earlier", 1: f"one {unit} later", 2: f"two {unit}s later"}[shift]
    fields = {"a": first, "b": second, "x": names[start], "later": later, "on": "on" if unit == "day" else "in"}
    return f"{first} {names[start]} {second} {shift}", names[(start + shift) % len(names)], fields


@_family(
    "Which word is {which}: {list}?",
    "What is the {which} word of this list: {list}?",
    "Give the {which} word. {list}",
    "List: {list}. Name the {which} word.",
)
def pick(rng: Random):
    words, which = _sample(rng, WORDS, _choose(rng, [3, 4])), _choose(rng, list(POSITIONS))
    listed = ", ".join(words)
    return f"{which} {listed}", words[POSITIONS[which]], {"which": which, "list": listed}


@_family(
    "Reverse this list: {list}",
    "Write these words in the reverse order: {list}",
    "Say {list} backwards, from the end.",
    "List: {list}. Turn it around.",
)
def reverse(rng: Random):
    words = _sample(rng, WORDS, _choose(rng, [2, 3]))
    return " ".join(words), ", ".join(words[::-1]), {"list": ", ".join(words)}


@_family(
    "Sort these numbers: {list}",
    "Put {list} in order.",
    "Write {list} from low to high.",
    "Numbers: {list}. Sort them.",
)
def sort(rng: Random):
    numbers = _sample(rng, range(10), 3)
    answer = ", ".join(map(str, sorted(numbers)))
    return answer, answer, {"list": ", ".join(map(str, numbers))}


@_family(
    "Which is {word}, {a} or {b}?",
    "Which number is {word}: {a} or {b}?",
    "Of {a} and {b}, name the {word} one.",
    "Numbers: {a}, {b}. Which of the two is {word}?",
)
def compare(rng: Random):
    tens = _sample(rng, range(1, 10), 2)
    a, b = (10 * ten + int(rng.random() * 10) for ten in tens)
    word = _choose(rng, ["larger", "smaller"])
    answer = max(a, b) if word == "larger" else min(a, b)
    return f"{min(a, b)} {max(a, b)}", str(answer), {"a": a, "b": b, "word": word}


@_family(
    "What is {a} {op} {b}?",
    "{a} {op} {b} = ?",
    "Calculate {a} {op} {b}.",
    "Give the result of {a} {op} {b}.",
)
def arithmetic(rng: Random):
    """Two digits and one, without a carry."""
    low, digit = sorted((int(rng.random() * 10), _choose(rng, range(1, 10))))
    tens = 10 * _choose(rng, range(1, 10))
    if rng.random() < 0.5:
        low, digit = (low, digit) if low + digit < 10 else (9 - digit, low)
        return f"{tens + low} + {digit}", str(tens + low + digit), {"a": tens + low, "b": digit, "op": "+"}
    return f"{tens + digit} - {low}", str(tens + digit - low), {"a": tens + digit, "b": low, "op": "-"}


@_family(
    "Write {n} {unit} in {smaller}.",
    "How much is {n} {unit} in {smaller}?",
    "Convert {n} {unit} to {smaller}.",
    "{n} {unit} is how many {smaller}?",
)
def units(rng: Random):
    number, (unit, smaller, zeros) = _choose(rng, range(2, 200)), _choose(rng, UNITS)
    return f"{number} {unit}", f"{number}{zeros} {smaller}", {"n": number, "unit": unit, "smaller": smaller}


@_family(
    "Is {word} in this list: {list}?",
    "Does the list {list} contain {word}?",
    "List: {list}. Is {word} in it?",
    "Do you see {word} here? {list}",
)
def contains(rng: Random):
    *words, other = _sample(rng, WORDS, _choose(rng, [4, 5]))
    is_in = rng.random() < 0.5
    word, listed = _choose(rng, words) if is_in else other, ", ".join(words)
    return f"{word} {listed}", "yes" if is_in else "no", {"word": word, "list": listed}


@_family(
    "How many times is {letter} in: {letters}?",
    "Count the letter {letter} in: {letters}",
    "Letters: {letters}. How often do you see {letter}?",
    "In {letters}, how many are {letter}?",
)
def count(rng: Random):
    letter, *others = _sample(rng, LETTERS, 4)
    times, length = _choose(rng, [0, 1, 2, 3]), _choose(rng, [4, 5])
    letters = " ".join(_sample(rng, [letter] * times + [_choose(rng, others) for _ in range(length - times)], length))
    return f"{letter} {letters}", str(times), {"letter": letter, "letters": letters}


@_family(
    "Write with dashes: {letters}",
    "Put dashes between these letters: {letters}",
    "Letters: {letters}. Join them with dashes.",
    "Spell {letters} with dashes.",
)
def spell(rng: Random):
    letters = _sample(rng, LETTERS, _choose(rng, [3, 4]))
    return " ".join(letters), "-".join(letters), {"letters": " ".join(letters)}


@_family(
    "{facts} What is in the {color} box?",
    "{facts} What does the {color} box hold?",
    "What is in the {color} box? {facts}",
    "{facts} Name the thing in the {color} box.",
)
def lookup(rng: Random):
    colors, things = _sample(rng, CATEGORIES["a color"], 3), _sample(rng, THINGS, 3)
    asked = _choose(rng, range(3))
    facts = [f"The {color} box holds {thing}." for color, thing in zip(colors, things, strict=True)]
    fields = {"facts": " ".join(facts), "color": colors[asked]}
    return f"{' '.join(facts)} {colors[asked]}", things[asked], fields


@_family(
    "Which of these is {category}: {list}?",
    "Find {category}: {list}",
    "List: {list}. Which word is {category}?",
    "One of these is {category}, which? {list}",
)
def category(rng: Random):
    names = _sample(rng, list(CATEGORIES), 3)
    words = [_choose(rng, CATEGORIES[name]) for name in names]
    asked, listed = _choose(rng, range(3)), ", ".join(words)
    return f"{names[asked]} {listed}", words[asked], {"category": names[asked], "list": listed}


FAMILIES: tuple[str, ...] = tuple(_makers)

PLAIN_SYSTEM_MESSAGES = ("You are a helpful assistant.", "Answer briefly.", "Give only the answer.")
CAPITALS = "Answer in capital letters."
CAPITALS_FAMILY = "contains"
"The one family that is also asked under CAPITALS, which turns yes into YES."


def tasks(split: Split) -> Iterator[Task]:
    """Conversations in a fixed order, the families in turn; the same on every machine and Python."""
    rng, heldout = Random(f"sftkit tasks {split}"), _is_heldout_split(split)
    total = HELDOUT_PER_FAMILY * len(FAMILIES) if heldout else TRAIN_CONVERSATIONS
    asked: set[str] = set()
    for i in range(total):
        task = _conversation(FAMILIES[i % len(FAMILIES)], rng, heldout)
        while heldout and task.messages[-2]["content"] in asked:
            task = _conversation(task.family, rng, heldout)
        asked.add(task.messages[-2]["content"])
        yield task


def _conversation(family: str, rng: Random, heldout: bool) -> Task:
    families, messages, problems, answer = [family], [], [], ""
    capitals = family == CAPITALS_FAMILY and rng.random() < SYSTEM_MESSAGE
    if capitals or rng.random() < SYSTEM_MESSAGE:
        messages.append({"role": "system", "content": CAPITALS if capitals else _choose(rng, PLAIN_SYSTEM_MESSAGES)})
    if rng.random() < TWO_TURNS:
        families.insert(0, CAPITALS_FAMILY if capitals else _choose(rng, FAMILIES))
    for name in families:
        problem = _problem(name, rng, heldout)
        answer = problem.answer.upper() if capitals else problem.answer
        messages.append({"role": "user", "content": problem.question})
        messages.append({"role": "assistant", "content": answer})
        problems.append(problem.identity)
    return Task(family, messages, answer, tuple(problems))


def _problem(family: str, rng: Random, heldout: bool) -> Problem:
    """A problem of this side of the split: every tenth is held out."""
    while True:
        problem = _makers[family](rng)
        if (_hash(problem.identity) % 10 == 0) == heldout:
            return problem


def _is_heldout_split(split: str) -> bool:
    if split not in ("train", "heldout"):
        raise ValueError(f'split: "{split}" is not one of train, heldout.')
    return split == "heldout"


def _hash(text: str) -> int:
    """The same in every process, unlike hash()."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big")
