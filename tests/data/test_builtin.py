"""The built-in data: its answers are right, its splits are disjoint, and it is the same in every process."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections import Counter

import pytest

from sftkit.data.demo import builtin

# A second way to the answer and to the problem's identity, from the words of the question alone. ----------------------

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = """January February March April May June July
August September October November December""".split()  # noqa: SIM905
UNITS = {"km": (1000, "m"), "kg": (1000, "g"), "m": (100, "cm"), "cm": (10, "mm"), "l": (1000, "ml")}


def solve_calendar(question):
    name = next(word for word in re.findall(r"[A-Z][a-z]+", question) if word in DAYS + MONTHS)
    names = DAYS if name in DAYS else MONTHS
    shift = -1 if "earlier" in question else 1
    first, second = re.findall(r"[Tt]he (\w+)", question)[:2]
    assert re.search(rf"[Ww]hen is (the {second}|that)\?$", question)
    return names[(names.index(name) + shift) % len(names)], (first, name, second, shift)


def solve_pick(question):
    order, listed = question.split("\n")
    words, which = listed.split(","), re.search(r"first|second|last", order)[0]
    return {"first": words[0], "second": words[1], "last": words[-1]}[which], (which, *words)


def solve_reverse(question):
    words = question.split("\n")[1].split(",")
    return ",".join(reversed(words)), tuple(words)


def solve_sort(question):
    numbers = sorted(map(int, question.split("\n")[1].split(",")))
    return ",".join(map(str, numbers)), tuple(numbers)


def solve_compare(question):
    order, listed = question.split("\n")
    pair = sorted(map(int, listed.split(",")))
    return str(pair["larger" in order]), tuple(pair)


def solve_arithmetic(question):
    a, op, b = re.search(r"(\d+)([+-])(\d+)", question).groups()
    return str(int(a) + int(b) if op == "+" else int(a) - int(b)), (a, op, b)


def solve_units(question):
    order, amount = question.split("\n")
    number, unit = amount.split(" ")
    factor, smaller = UNITS[unit]
    assert smaller in re.findall(r"\w+", order)
    return f"{int(number) * factor} {smaller}", (number, unit)


def solve_contains(question):
    order, listed = question.split("\n")
    name = max((name for name in builtin.CATEGORIES if name in order), key=len)
    return "yes" if set(listed.split(",")) & set(builtin.CATEGORIES[name]) else "no", (name, listed)


def solve_count(question):
    letters = question.split("\n")[1].split(" ")
    return str(len(letters)), tuple(letters)


def solve_spell(question):
    letters = question.split("\n")[1].split(",")
    return "-".join(letters), tuple(letters)


def solve_sequence(question):
    a, b, c = map(int, question.split("\n")[1].split(","))
    assert b - a == c - b
    return str(c + b - a), (a, b, c)


def solve_category(question):
    order, listed = question.split("\n")
    name = max((name for name in builtin.CATEGORIES if name in order), key=len)
    (answer,) = [word for word in listed.split(",") if word in builtin.CATEGORIES[name]]
    return answer, (name, listed)


def turns(task: builtin.TaskConversation):
    """(family, question, answer, identity) of each problem of a conversation."""
    talk = [message for message in task.messages if message["role"] != "system"]
    for i, problem in enumerate(task.problems):
        yield problem.split(":")[0], talk[2 * i]["content"], talk[2 * i + 1]["content"], problem


@pytest.fixture(scope="module")
def train() -> list[builtin.TaskConversation]:
    return list(builtin.tasks("train"))


@pytest.fixture(scope="module")
def heldout() -> list[builtin.TaskConversation]:
    return list(builtin.tasks("heldout"))


# ---- tasks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", builtin.FAMILIES)
def test_every_answer_is_what_a_second_solver_reads_from_the_question(family, train, heldout):
    solve, seen = globals()[f"solve_{family}"], 0
    for task in [*train[:12_000], *heldout]:
        capitals = task.messages[0]["content"] == builtin.CAPITALS
        for name, question, answer, _ in turns(task):
            if name == family:
                expected = solve(question)[0]
                assert answer == (expected.upper() if capitals else expected), question
                seen += 1
    assert seen > 500


def test_a_conversation_alternates_and_ends_with_its_answer(train, heldout):
    for task in [*train, *heldout]:
        roles = [message["role"] for message in task.messages]
        assert roles[roles[0] == "system" :] == ["user", "assistant"] * len(task.problems)
        assert task.messages[-1]["content"] == task.answer
        assert task.problems[-1].startswith(f"{task.family}: ")


def test_no_heldout_problem_is_in_training_in_any_phrasing_or_turn(train, heldout):
    def identities(tasks):
        return {problem for task in tasks for problem in task.problems}

    def read_from_the_question(tasks):
        return {(name, globals()[f"solve_{name}"](q)[1]) for task in tasks for name, q, _, _ in turns(task)}

    assert not identities(train) & identities(heldout)
    assert not read_from_the_question(train) & read_from_the_question(heldout)


def test_every_family_has_distinct_heldout_questions_and_a_wide_training_set(train, heldout):
    assert Counter(task.family for task in heldout) == dict.fromkeys(builtin.FAMILIES, builtin.HELDOUT_PER_FAMILY)
    assert len({task.messages[-2]["content"] for task in heldout}) == len(heldout)
    by_family = Counter(problem.split(":")[0] for problem in {p for task in train for p in task.problems})
    assert all(by_family[family] >= 100 for family in builtin.FAMILIES)
    assert len(train) == builtin.TRAIN_CONVERSATIONS


def test_conversations_come_with_and_without_a_second_turn_and_a_system_message(train):
    assert {len(task.problems) for task in train} == {1, 2}
    system = Counter(t.messages[0]["content"] for t in train if t.messages[0]["role"] == "system")
    assert set(system) == {*builtin.PLAIN_SYSTEM_MESSAGES, builtin.CAPITALS}


def test_the_capitals_system_message_changes_the_answer(heldout):
    in_capitals = [task.answer for task in heldout if task.messages[0]["content"] == builtin.CAPITALS]
    assert set(in_capitals) == {"YES", "NO"}
    assert {t.answer for t in heldout if t.family == builtin.CAPITALS_FAMILY} == {"YES", "NO", "yes", "no"}


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="train, heldout"):
        next(builtin.tasks("test"))  # type: ignore[arg-type]


# ---- documents -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def docs() -> dict[str, list[str]]:
    return {"train": list(builtin.docs("train")), "heldout": list(builtin.docs("heldout"))}


@pytest.mark.slow
def test_documents_are_megabytes_of_text_without_duplicates(docs):
    everything = docs["train"] + docs["heldout"]
    assert sum(map(len, everything)) > 2_000_000
    assert len(set(everything)) == len(everything)
    assert min(map(len, everything)) >= 50


@pytest.mark.slow
def test_about_two_percent_of_the_documents_are_held_out(docs):
    share = len(docs["heldout"]) / len(docs["train"])
    assert 0.01 < share < 0.04


def test_no_more_files_are_read_than_the_documents_that_are_asked_for_need(monkeypatch):
    read, parse = [], builtin._documents_of_file
    monkeypatch.setattr(builtin, "_documents_of_file", lambda path: read.append(path) or parse(path))
    monkeypatch.setattr(builtin, "_all_docs", lambda: builtin.tee(builtin._read_docs(), 1)[0])
    topics = len({text.strip() for text in builtin._help_topics().values()})
    assert len(list(itertools.islice(builtin.docs("train"), topics + 20))) == topics + 20
    assert 0 < len(read) < 30


@pytest.mark.slow
def test_documents_hold_no_task(docs):
    assert not [text for text in docs["train"] if "larger?\n" in text or "<|im_start|>" in text]


def test_documents_do_not_need_the_help_topics(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    assert builtin._help_topics() == {}


def test_a_source_with_a_form_feed_keeps_its_lines(tmp_path):
    path = tmp_path / "old.py"
    path.write_text(f'x = 1\n\x0c\ndef f():\n    """{"Says what it does. " * 10}"""\n    return 1\n')
    (text,) = builtin._documents_of_file(path)
    assert text.startswith("def f():")
    assert text.endswith("return 1")


# ---- both ------------------------------------------------------------------------------------------------------------

DIGEST = """
import hashlib, itertools, pathlib, json
from sftkit.data.demo import builtin
digest = hashlib.sha256()
for text in builtin._documents_of_file(pathlib.Path(json.__file__)):
    digest.update(text.encode())
for task in itertools.islice(builtin.tasks("train"), 2000):
    digest.update(repr(task).encode())
print(digest.hexdigest())
"""


def test_the_data_does_not_depend_on_the_hash_seed():
    def digest(seed):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        return subprocess.run(
            [sys.executable, "-c", DIGEST], env=env, capture_output=True, text=True, check=True
        ).stdout

    assert digest("1") == digest("2") != ""
