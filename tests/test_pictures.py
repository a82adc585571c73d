"""What docs/engineering/architecture.md draws, and what glossary and the page on extending name, is in the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from test_imports import ROOMS, ROOT, SRC, TORCH_FREE

ENGINEERING = ROOT / "docs" / "engineering"
PAGES = {name: (ENGINEERING / f"{name}.md").read_text() for name in ("architecture", "glossary", "extending")}
ROOMS_DRAWN, FLOW, STEP = re.findall(r"^```mermaid\n(.*?)^```$", PAGES["architecture"], re.MULTILINE | re.DOTALL)
MASK = PAGES["architecture"].partition("## Where the loss mask is made")[2].partition("\n## ")[0]
_PLACE = re.compile(r"\b((?:\w+/)+\w+\.py) (\w+)")
"file and name in it, as pictures and glossary write them"
_PYTHON = re.compile(r"`((?:\w+/)+\w+\.py)`")
_FILE = re.compile(r"`((?:\w+/)+\w+\.(?:py|md|yaml))`")


@cache
def names_in(file: Path) -> set[str]:
    """What a module defines at its top level."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def reached(room: str) -> set[str]:
    """The rooms that a room imports, and those that they import."""
    return set(ROOMS[room]).union(*map(reached, ROOMS[room]))


def test_the_arrows_between_rooms_are_the_imports_that_follow_from_no_others() -> None:
    labels = dict(re.findall(r'(\w+)\["(\w+)"\]', ROOMS_DRAWN))
    drawn = [
        (labels.get(a, a), labels.get(b, b)) for a, b in re.findall(r"^ *(\w+) --> (\w+)", ROOMS_DRAWN, re.MULTILINE)
    ]
    expected = {
        (room, other)
        for room, allowed in ROOMS.items()
        for other in allowed
        if not any(other in reached(between) for between in allowed)
    }
    assert len(drawn) == len(set(drawn))
    assert set(drawn) == expected


def test_the_rooms_marked_as_free_of_torch_are_those_that_are_held_to_it() -> None:
    (marked,) = re.findall(r"^ *class ([\w,]+) noTorch$", ROOMS_DRAWN, re.MULTILINE)
    assert set(marked.split(",")) == {part for part in TORCH_FREE if part in ROOMS}


@pytest.mark.parametrize("text", [FLOW, STEP, MASK, PAGES["glossary"]], ids=["flow", "step", "mask", "glossary"])
def test_every_name_is_in_the_file_that_it_is_said_to_be_in(text: str) -> None:
    places = set(_PLACE.findall(text))
    assert len(places) >= 5
    assert {
        (file, name)
        for file, name in places
        if name not in names_in((ROOT if file.startswith("labs/") else SRC) / file)
    } == set()


def test_the_picture_of_a_step_has_no_semicolon_which_would_end_a_line_of_mermaid() -> None:
    assert ";" not in STEP


def test_what_flows_in_the_picture_are_classes_of_the_code() -> None:
    flowing = {word for label in re.findall(r'-- "([^"]+)" -->', FLOW) for word in re.findall(r"\b[A-Z]\w+", label)}
    classes = {
        node for file in SRC.rglob("*.py") for node in re.findall(r"^class (\w+)", file.read_text(), re.MULTILINE)
    }
    assert len(flowing) >= 8
    assert flowing - classes == set()


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_is_there(page: str) -> None:
    named = {file for file in _FILE.findall(PAGES[page]) if "NAME" not in file and not file.startswith("runs/")}
    missing = {file for file in named if not any((folder / file).exists() for folder in (ROOT, SRC))}
    assert missing == set()
    assert len(named) >= 3


@cache
def words_in(file: Path) -> set[str]:
    """All names in the code of a module, not those of its comments and docstrings."""
    fields = ("id", "name", "attr", "arg")
    return {getattr(node, field, None) for node in ast.walk(ast.parse(file.read_text())) for field in fields}


def named_in(page: str) -> list[tuple[str, list[str]]]:
    """The names of code on a page, each with the files of which one must have it: the one that follows it after "of" or
    "in", else those of its sentence, else those of its list item, table row or paragraph."""
    found = []
    for item in re.split(r"\n(?=\d\. |- |\||\n|#)", page):
        for sentence in re.split(r"(?<=[.;])\s+", item):
            for match in re.finditer(r"`([A-Z]\w+|[a-z]*_\w+)`(?:\s(?:of|in)\s`([\w/]+\.py)`)?", sentence):
                files = [match[2]] if match[2] else _PYTHON.findall(sentence) or _PYTHON.findall(item)
                found.append((match[1], [file for file in files if "NAME" not in file]))
    return found


def not_there(page: str) -> set[str]:
    """The names on a page that none of their files has."""
    return {name for name, files in named_in(page) if not any(name in words_in(ROOT / file) for file in files)}


def test_every_name_on_the_page_on_extending_is_in_the_file_that_its_sentence_names() -> None:
    assert len(named_in(PAGES["extending"])) > 30
    assert not_there(PAGES["extending"]) == set()


@pytest.mark.parametrize(("name", "mistake"), [("MODEL_KINDS", "KINDS"), ("TASK_METRICS", "METRICS")])
def test_a_name_that_only_another_file_has_is_found(name: str, mistake: str) -> None:
    assert not_there(PAGES["extending"].replace(f"`{name}`", f"`{mistake}`")) == {mistake}


def test_the_table_of_rooms_is_in_their_order_and_names_modules_that_are_there() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGES["architecture"], re.MULTILINE)
    named = [room for room, _ in rows]
    assert named == [room for room in ROOMS if room in named]
    assert len(named) >= 10
    for room, holds in rows:
        modules = {path.stem for path in (SRC / room).rglob("*")}
        assert set(re.findall(r"`(\w+)/?`", holds)) - {"sftkit"} <= modules, room
