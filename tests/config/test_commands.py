"""A command that is printed can be pasted where it was printed: in a clone, in a folder that `sftkit init` made, elsewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from sftkit.config import commands
from sftkit.config.commands import SCRIPTS, first_run, install, invocation, program_path, running, shipped, typed

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The bin of an environment in this folder, with the programs of ours."""
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "sftkit", "accelerate"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.chdir(tmp_path)
    return programs


def test_a_program_is_named_from_here_by_the_search_path_or_in_full(environment, tmp_path, monkeypatch) -> None:
    assert program_path("python") == ".venv/bin/python"
    (tmp_path / "else where").mkdir()
    monkeypatch.chdir(tmp_path / "else where")
    monkeypatch.setenv("PATH", "/nowhere")
    assert program_path("python") == str(environment / "python")
    assert program_path("sftkit", tmp_path) == ".venv/bin/sftkit"
    monkeypatch.setenv("PATH", str(environment))
    assert (program_path("python"), program_path("sftkit")) == ("python", "sftkit")


def test_commands_are_those_of_a_clone_where_scripts_lie_and_words_of_sftkit_elsewhere(environment, tmp_path) -> None:
    text = "first .venv/bin/python scripts/chat.py runs/x --prompt 'Hi?'\n.venv/bin/python -m sftkit.launch scripts/mid_train.py y"
    assert typed(text) == "first .venv/bin/sftkit chat runs/x --prompt 'Hi?'\n.venv/bin/sftkit mid y"
    (tmp_path / "scripts").mkdir()
    for name in ("chat.py", "mid_train.py"):
        (tmp_path / "scripts" / name).write_text("from sftkit.runtime.script import script")
    assert typed(text) == text
    assert invocation("scripts/chat.py", "a run") == ".venv/bin/python scripts/chat.py 'a run'"
    assert install("sftkit[eval]") == ".venv/bin/python -m pip install 'sftkit[eval]'"


def test_a_shipped_script_is_started_again_by_its_word(environment, monkeypatch) -> None:
    script = f"{commands.ROOT}/scripts/chat_sft.py"
    assert invocation(script, "x.yaml", launcher=True) == ".venv/bin/sftkit sft x.yaml"
    monkeypatch.setattr(sys, "argv", [script])
    assert running() == ".venv/bin/sftkit sft"
    monkeypatch.setattr(sys, "argv", ["mine/own.py"])
    assert running() == ".venv/bin/python mine/own.py"
    assert first_run() == "make one: .venv/bin/sftkit chain recipes/smoke"


def test_what_the_command_started_names_itself_by_the_word_that_was_typed(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts/inspect_data.py"])
    assert running("python -m sftkit.x") == "python -m sftkit.x"
    monkeypatch.setenv(commands.TYPED, "prepare")
    monkeypatch.chdir(ROOT)
    assert running() == running("python -m sftkit.x") == "sftkit prepare"
    assert typed(".venv/bin/python scripts/inspect_data.py x").endswith("sftkit prepare x")
    assert typed(".venv/bin/python scripts/chat.py x").endswith("sftkit chat x")


def test_a_file_of_this_folder_comes_before_the_shipped_one(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = "recipes/smoke/sft.yaml"
    assert shipped(recipe) == str(ROOT / recipe)
    assert shipped("recipes/none.yaml") == "recipes/none.yaml"
    assert shipped("README.md") == "README.md"
    (tmp_path / "recipes/smoke").mkdir(parents=True)
    (tmp_path / recipe).touch()
    assert shipped(recipe) == recipe


def test_every_script_has_a_word() -> None:
    assert sorted({*SCRIPTS.values()}) == sorted(path.name for path in (ROOT / "scripts").glob("*.py"))


@pytest.mark.parametrize("folder", ["scripts", "docs", "accelerate_configs", "recipes"])
def test_a_line_to_paste_names_the_program_of_the_environment(folder: str) -> None:
    bare = re.compile(
        r"^(?:# +)?(?:[A-Z_]+=\S+ )*(?:python3?(?! -m venv)|accelerate|torchrun|pip) [\w-].*", re.MULTILINE
    )
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".yaml")]
    files += [ROOT / "README.md", ROOT / "CONTRIBUTING.md"] if folder == "docs" else []
    found = {path.name: bare.findall(path.read_text()) for path in files}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_what_is_printed_writes_no_command_without_its_program() -> None:
    bare = re.compile(
        r"(?<!\.venv/bin/)python scripts/|(?<!\.venv/bin/)(?<!\$)accelerate launch --|: pip install|make (?:smoke|sft|chat)\b"
    )
    found = {path.name: bare.findall(path.read_text()) for path in (ROOT / "src").rglob("*.py")}
    assert {name: lines for name, lines in found.items() if lines} == {}
