"""What docs/architecture.md draws, and what the glossary and the page on extending name, is in the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from test_imports import ROOMS, ROOT, SRC, TORCH_FREE

PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("architecture", "glossary", "extending")}
ROOMS_DRAWN, FLOW, STEP = re.findall(r"^```mermaid\n(.*?)^```$", PAGES["architecture"], re.MULTILINE | re.DOTALL)
_PLACE = re.compile(r"\b((?:\w+/)+\w+\.py) (\w+)")
"file and name in it, as pictures and glossary write them"
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


@pytest.mark.parametrize("text", [FLOW, STEP, PAGES["glossary"]], ids=["flow", "step", "glossary"])
def test_every_name_is_in_the_file_that_it_is_said_to_be_in(text: str) -> None:
    places = set(_PLACE.findall(text))
    assert len(places) >= 5
    assert {(file, name) for file, name in places if name not in names_in(SRC / file)} == set()


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


def test_every_name_in_code_that_the_page_on_extending_gives_is_there() -> None:
    words = set(re.findall(r"`([A-Z]\w+|[a-z]+_\w+)`", PAGES["extending"]))
    sources = "\n".join(file.read_text() for folder in (SRC, ROOT / "tests") for file in folder.rglob("*.py"))
    assert len(words) > 20
    assert {word for word in words if not re.search(rf"\b{word}\b", sources)} == set()


def test_the_table_of_rooms_names_modules_that_are_there_and_what_a_room_may_import() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| ([^|]*) \|$", PAGES["architecture"], re.MULTILINE)
    above: list[str] = []
    for room, holds, imports in rows:
        modules = {path.stem for path in (SRC / room).rglob("*")}
        assert set(re.findall(r"`(\w+)/?`", holds)) - {"sftkit"} <= modules, room
        named = set(re.findall(r"\w+", imports)) & {*ROOMS, room}
        allowed = set(above) - named if imports.startswith("all") else named
        assert allowed == set(ROOMS[room]), room
        above.append(room)
    assert above == list(ROOMS)
