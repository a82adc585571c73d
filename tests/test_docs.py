"""What benchmarks/reliability/README.md and tests/README.md say of the tests."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from sftkit.config.commands import SCRIPTS
from sftkit.config.keys import key_table, section_classes

ROOT = Path(__file__).parents[1]
CASES = ROOT / "benchmarks" / "reliability" / "README.md"


def test_every_test_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", CASES.read_text()))
    texts = [file.read_text() for file in (ROOT / "tests").rglob("*.py")]
    assert named - {name for text in texts for name in re.findall(r"def (test_\w+)", text)} == set()
    assert len(named) > 60


def test_the_number_of_cases_in_the_readme_is_that_of_the_page() -> None:
    cases = re.findall(r"^\| .*`test_", CASES.read_text(), re.MULTILINE)
    link = f"[{len(cases)} cases, each with its tests](benchmarks/reliability/README.md#cases)"
    assert link in (ROOT / "README.md").read_text()


def test_times_are_written_beside_their_cases_and_what_was_not_run_keeps_its_own(tmp_path: Path) -> None:
    tool = runpy.run_path(str(ROOT / "benchmarks" / "reliability" / "times.py"))
    case = '<testcase name="{}" time="{}">{}</testcase>'
    cases = [case.format(*of) for of in (("test_a[1]", 2.2, ""), ("test_a[2]", 3.2, ""), ("test_b", 9, "<failure/>"))]
    (tmp_path / "run.xml").write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    rows = (
        "| it is killed | the others end | `test_a`* |  |\n| a | b | `test_b` | 7 |\n| a | b | `test_a`, `test_b` | |\n"
    )
    page = f"| fault | promise | test | s |\n|---|---|---|---|\n{rows}\n| a | `test_a` |\n"
    timed = tool["with_times"](page, tool["seconds_of"]([tmp_path / "run.xml"]))
    assert timed == page.replace("`test_a`* |  |", "`test_a`* | 5 |")


def test_programs_are_written_as_a_clone_has_them() -> None:
    bare = re.compile(r"`(?:wandb (?:sync|login)|hf \w+)\b[^`]*`")
    files = [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "labs").rglob("*.md"),
        *(ROOT / "recipes").rglob("*.yaml"),
    ]
    assert {file.name: found for file in files if (found := bare.findall(file.read_text()))} == {}


def test_the_page_of_the_tests_has_a_line_for_each_folder_and_names_files_that_are_there() -> None:
    tests = ROOT / "tests"
    page = (tests / "README.md").read_text()
    folders = {path.name for path in tests.iterdir() if any(path.glob("*.*"))} - {"__pycache__"}
    assert set(re.findall(r"^\| `(\w+)/` \| ", page, re.MULTILINE)) == folders
    files = {path.relative_to(tests).as_posix() for path in tests.rglob("test_*.py")}
    named = set(re.findall(r"`((?:\w+/)?test_\w+\.py)`", page))
    assert {name for name in named if not any(file.endswith(name) for file in files)} == set()
    assert len(named) > 20


GUIDES = ("which_settings.md", "after_training.md", "coming_from.md", "multi_node.md")


def test_guides_name_settings_and_commands_that_exist() -> None:
    text = "\n".join((ROOT / "docs" / name).read_text() for name in GUIDES)
    sections = "|".join(section_classes())
    settings = set(re.findall(rf"(?:`|\s)((?:{sections})\.[a-z_]+)(?=[`:=, ])", text))
    assert settings - key_table().keys() == set()
    assert len(settings) > 60
    words = set(re.findall(r"(?:`|/bin/)sftkit ([a-z]+)", text))
    assert words - {"convert", "launch", *SCRIPTS} == set()
    assert len(words) > 8


def test_the_page_of_settings_has_ten_rows_of_symptom_setting_and_reason() -> None:
    rows = (ROOT / "docs" / "which_settings.md").read_text().partition("|---|---|---|\n")[2].splitlines()
    table = [row.strip("|").split(" | ") for row in rows if row.startswith("|")]
    assert len(table) == 10
    assert all(len(row) == 3 and "`" in row[1] for row in table)
