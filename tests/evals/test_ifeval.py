"""IFEval's rules: equal to lm-evaluation-harness's classes."""

from __future__ import annotations

import importlib.machinery
import random
import sys
import types
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from helpers import SHARED_DATA

from sftkit.errors import ConfigError, DataError
from sftkit.evals import tasks
from sftkit.evals.task import ExampleScores
from sftkit.evals.tasks import ifeval
from sftkit.evals.tasks.data import CheckedRow, DatasetSplit
from sftkit.evals.tasks.ifeval import RULES
from sftkit.generation.repl import Answer

DATA = SHARED_DATA / "eval"
has_data = pytest.mark.skipif(not DATA.is_dir(), reason="needs the shared data")

TEXTS = [
    "",
    "   ",
    "Hello",
    "Yes. No! Maybe? Fine.",
    "Mr. Smith (e.g. Bob) left... Then he said \"Hi.\" She left! 'What?' he asked. 1. First item. 2. second item.",
    "J. R. R. Tolkien wrote it. The U.S. is big. The U.S. Army etc. and so on. It cost 3.50 dollars. Plan B. The end...",
    'a.\n\nb! c?! "d." (e.) f [g] {h.} i',
    ". . . hm -- well -- ok.... Fine",
    "*Hi!* there. **Bold.** Text: see p. 3, vol. IV. He has a Ph.D. in math. Dr. Who? Inc. The firm.",
    "DON'T STOP. IT'S NASA'S. \"CANNOT\" I'm 'TIS GONNA (NASA) A-B *WORD* #TAG U.S.A. x.Y `C` «D» “E” — F; G&H",
    "# Title\n\n* one\n* two\n- three\n\n**Four:** five\n\n> six.\n\n1. seven\n2. Eight. Nine",
    "Visit www.example.com. Then e-mail a.b@c.org! Is it 5 p.m. already? At 6 a.m. We slept. On Feb. 3 it ended.",
    "He asked: 'Why?'. She said (quietly.) Nothing. “Curly.” And ‘single.’ Then.",
    "\n\n  Indented. \n\n\tTabs!  \n",
    "Ünïcode. Ça va? Où? 你好。再见。 Да. Нет!",
]


# ---- sentences and words ---------------------------------------------------------------------------------------------


def test_sentences_end_where_a_reader_would_end_them() -> None:
    text = 'Dr. Smith met J. Doe at 5 p.m. on Monday. "Really?" she asked. The U.S. is far (see Fig. 3). Yes!'
    assert ifeval.sentences(text) == [
        "Dr. Smith met J. Doe at 5 p.m. on Monday.",
        '"Really?"',
        "she asked.",
        "The U.S. is far (see Fig. 3).",
        "Yes!",
    ]


# ---- rules -----------------------------------------------------------------------------------------------------------


class NoLetters(Exception):
    pass


def detect(text: str) -> str:
    """A stand-in for langdetect: English is mostly ASCII, all else is Hindi."""
    letters = [letter for letter in text if letter.isalpha()]
    if not letters:
        raise NoLetters
    return "en" if sum(letter.isascii() for letter in letters) > len(letters) / 2 else "hi"


@pytest.fixture
def langdetect(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("langdetect")
    module.__dict__.update(
        detect=detect, LangDetectException=NoLetters, DetectorFactory=types.SimpleNamespace(seed=None)
    )
    module.__spec__ = importlib.machinery.ModuleSpec("langdetect", None)
    monkeypatch.setitem(sys.modules, "langdetect", module)


def reading(rows: Sequence[dict[str, Any]]) -> Callable[[DatasetSplit], list[CheckedRow]]:
    return lambda split: [CheckedRow(row, "rows.jsonl", i) for i, row in enumerate(rows)]


def prompt(*rules: tuple[str, dict[str, Any]], key: int = 1) -> dict[str, Any]:
    names, arguments = [name for name, _ in rules], [given for _, given in rules]
    return {"key": key, "prompt": "Write.", "instruction_id_list": names, "kwargs": arguments}


def marks_of(row: dict[str, Any], text: str) -> ExampleScores:
    task = ifeval.build("ifeval", reading([row]), None, "completion", None)
    return task.judge(task.examples, [Answer(text, "length", 1)])[0]


@pytest.fixture
def theirs(langdetect: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """lm-evaluation-harness's checks with NLTK's algorithms, its trained sentence model replaced."""
    nltk = pytest.importorskip("nltk")
    pytest.importorskip("lm_eval")
    sentences_of, treebank = ifeval._tokenizers()
    monkeypatch.setattr(nltk, "download", lambda *_, **__: True)
    immutable = types.ModuleType("immutabledict")
    immutable.__dict__["immutabledict"] = dict
    monkeypatch.setitem(sys.modules, "immutabledict", immutable)
    from lm_eval.tasks.ifeval import instructions_util, utils

    monkeypatch.setattr(instructions_util, "count_sentences", lambda text: len(sentences_of.tokenize(text)))
    words = lambda text: [word for part in sentences_of.tokenize(text) for word in treebank.tokenize(part)]  # noqa: E731
    monkeypatch.setattr(nltk, "word_tokenize", words)
    return utils


def variant(row: dict[str, Any], draw: random.Random) -> str:
    """A text that may well follow the rules of a row."""
    text = draw.choice(TEXTS) + " " + draw.choice(TEXTS)
    changes: list[Callable[[str], str]] = [
        str.upper,
        str.lower,
        lambda t: f'"{t}"',
        lambda t: t.replace(",", ""),
        lambda t: f"<<T>>\n{t}",
        lambda t: "\n".join(f"* {line}" for line in t.split("\n")[: draw.randrange(7)]),
        lambda t: "\n".join(f"- {i}" for i in range(draw.randrange(7))),
        lambda t: f"{t}\n\nP.S. hi",
        lambda t: f"{t}\n\nP. P. S hi",
        lambda t: "\n***\n".join(["a", t, "", "b"][: draw.randrange(5)]),
        lambda t: f"{t}******{t[::-1]}",
        lambda t: draw.choice(('```json\n{"a": [1]}\n```', "{}", "```{a}```", "[1, 2")),
        lambda t: row["prompt"] + t,
        lambda t: "".join(
            f"{draw.choice(('Section', 'SECTION', 'Day', 'Audience'))} {i}\nx [name]\n" for i in range(8)
        ),
        lambda t: "Here:\n" + " ".join(draw.choice(("*a*", "**b**", "* *", "** **", "c")) for _ in range(9)),
        lambda t: draw.choice(("My answer is yes.", "I say: My answer is maybe.", "my answer is no.")),
        lambda t: "\n\n".join(t.split("\n")),
        lambda t: f"{t} " * 40,
        lambda t: "नमस्ते दुनिया",
    ]
    for _ in range(draw.randrange(3)):
        text = draw.choice(changes)(text)
    for given in row["kwargs"]:
        given = {key: value for key, value in given.items() if value is not None and draw.random() < 0.7}
        text += given.get("end_phrase", "") + " ".join(given.get("keywords", ()))
        text += " ".join([*given.get("forbidden_words", ())[:1], *[given.get("keyword", "")] * draw.randrange(6)])
        text = given.get("prompt_to_repeat", "") + text
        if "section_spliter" in given:
            text = f"{given['section_spliter']} 1\nx\n" * draw.randrange(3, 9)
        if "num_paragraphs" in given and "first_word" not in given:
            text = "\n***\n".join(draw.choice(("a", "a", "a", "a", "a", "")) for _ in range(given["num_paragraphs"]))
        if "first_word" in given:
            paragraphs = ["x y"] * given.get("num_paragraphs", 2)
            paragraphs[min(given.get("nth_paragraph", 1), len(paragraphs)) - 1] = f"{given['first_word'].title()}, z"
            text = "\n\n".join(paragraphs)
    return text


@pytest.mark.slow
@has_data
def test_every_rule_decides_as_lm_eval_does(theirs: Any) -> None:
    task = tasks.load_task("ifeval", str(DATA))
    draw = random.Random(0)
    seen: Counter[tuple[str, bool]] = Counter()
    for question, row in zip(task.examples, tasks.rows.read_split(ifeval.PROMPTS, str(DATA)), strict=True):
        given = [{key: value for key, value in named.items() if value is not None} for named in row["kwargs"]]
        if any(named.get("letter", "a") in "#!" for named in given):
            continue  # lm_eval draws another letter at random
        example = theirs.InputExample(row["key"], row["instruction_id_list"], row["prompt"], given)
        for _ in range(6):
            text = variant(dict(row), draw)
            ours = task.judge([question], [Answer(text, "length", 1)])[0]
            strict = theirs.test_instruction_following_strict(example, text)
            loose = theirs.test_instruction_following_loose(example, text)
            assert ours["inst_strict"] == strict.follow_instruction_list, (row["instruction_id_list"], given, text)
            assert ours["inst_loose"] == loose.follow_instruction_list, (row["instruction_id_list"], given, text)
            assert ours["prompt_strict"] == strict.follow_all_instructions
            assert ours["prompt_loose"] == loose.follow_all_instructions
            seen.update(zip(row["instruction_id_list"], strict.follow_instruction_list, strict=True))
    assert {name for name, _ in seen} == set(RULES)
    rare = {name for name in RULES if min(seen[name, True], seen[name, False]) < 3}
    assert not rare, {name: (seen[name, True], seen[name, False]) for name in rare}


def test_loose_forgives_asterisks_and_a_first_and_last_line() -> None:
    row = prompt(("startend:quotation", {}), ("punctuation:no_comma", {}))
    marks = marks_of(row, 'Sure, here it is:\n**"Fine"**\nAnything else?')
    assert marks == {"prompt_strict": 0, "inst_strict": [0, 0], "prompt_loose": 1, "inst_loose": [1, 1]}


def test_an_empty_answer_follows_nothing() -> None:
    assert marks_of(prompt(("punctuation:no_comma", {})), "  \n")["prompt_strict"] == 0


def test_a_sign_that_is_asked_for_is_counted() -> None:
    row = prompt(("keywords:letter_frequency", {"letter": "#", "let_frequency": 2, "let_relation": "at least"}))
    assert marks_of(row, "# a # b")["prompt_strict"] == 1
    assert marks_of(row, "# a")["prompt_strict"] == 0


def test_a_missing_package_is_an_error_before_rows_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ifeval, "find_spec", lambda package: None if package == "langdetect" else package)
    with pytest.raises(ConfigError, match=r'"ifeval" needs langdetect: .*pip install \'sftkit\[eval\]\''):
        ifeval.build("ifeval", lambda split: pytest.fail(f"read {split}"), None, "completion", None)


def test_a_word_counts_as_capital_by_the_parts_of_a_contraction() -> None:
    assert ifeval.capital_words("NASA said: I DON'T know. Yes, Sir!") == 4


@pytest.mark.usefixtures("langdetect")
def test_rules_about_a_language_are_decided_by_langdetect() -> None:
    rows = [prompt(("language:response_language", {"language": "hi"}), ("change_case:english_capital", {}))]
    task = ifeval.build("ifeval", reading(rows), None, "chat", None)
    assert task.examples[0].prompt == ({"role": "user", "content": "Write."},)
    judged = task.judge(task.examples * 2, [Answer(text, "length", 1) for text in ("नमस्ते", "HELLO")])
    assert [marks["inst_strict"] for marks in judged] == [[1, 0], [0, 1]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (prompt(("keywords:existance", {})), '"keywords:existance" is not one of'),
        (prompt(("keywords:existence", {})), "does not fit keywords:existence"),
        (prompt(("keywords:existence", {"keywords": ["c++("]})), "does not fit keywords:existence"),
        (prompt(("length_constraints:number_words", {"num_words": 3, "relation": "more"})), '"more" is not one of'),
        (prompt(("punctuation:no_comma", {"comma": 1})), "does not fit punctuation:no_comma"),
        (prompt(("punctuation:no_comma", {})) | {"kwargs": []}, "not one entry for each"),
    ],
)
def test_rows_that_cannot_be_judged_are_errors_before_anything_is_asked(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match="jsonl: row 0") as caught:
        ifeval.build("ifeval", reading([row]), None, "completion", None)
    assert message in str(caught.value)


def test_arguments_of_other_rules_may_be_there_as_null() -> None:
    arguments = {"keywords": None, "num_words": 2, "relation": "less than", "letter": None}
    assert marks_of(prompt(("length_constraints:number_words", arguments)), "one")["prompt_strict"] == 1


def test_few_shot_examples_are_refused() -> None:
    with pytest.raises(ConfigError, match="ifeval has a fixed prompt and takes no shots"):
        tasks.load_task("ifeval", shots=1)
