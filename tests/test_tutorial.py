"""The commands of docs/tutorial.md: each is one that there is, the recipe is one that is taken, and all of them do what the page says."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

from sftkit.config.commands import SCRIPTS
from sftkit.config.load import read_config

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
"What a reader types, but for the installation."
_FILE = re.compile(r"^cat > (\S+) <<'(\w+)'\n(.*?)^\2$", re.MULTILINE | re.DOTALL)
FILES = {match[1]: match[3] for block in BLOCKS for match in _FILE.finditer(block)}
"The files that the reader writes, by path."
COMMANDS = [line for block in BLOCKS for line in _FILE.sub("", block).splitlines() if line]
PROGRAMS = {"python": sys.executable, "sftkit": f"{sys.executable} -m sftkit"}
TARGETS = re.findall(r"^make (\w+)$", PAGE, re.MULTILINE)


def write_files(folder: Path) -> None:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def test_a_command_is_a_word_of_sftkit_or_a_file_that_the_page_writes() -> None:
    words = [shlex.split(command) for command in COMMANDS]
    ours = [rest for program, *rest in words if program == ".venv/bin/sftkit"]
    python = [rest for program, *rest in words if program == ".venv/bin/python"]
    assert {word for word, *_ in ours} <= SCRIPTS.keys()
    assert {file for file, *_ in python} <= FILES.keys()
    assert {program for program, *_ in words} == {".venv/bin/sftkit", ".venv/bin/python", "mkdir", "head"}
    assert len(ours) >= 5
    assert len(python) == 2


def test_the_target_of_make_is_in_the_makefile() -> None:
    assert TARGETS == ["install"]
    assert re.search(r"^install:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_recipe_of_the_page_is_taken(tmp_path: Path) -> None:
    write_files(tmp_path)
    cfg = read_config(str(tmp_path / "shop" / "sft.yaml"), [])
    assert cfg.run.dir == "runs/shop"
    assert [source.path for source in (*cfg.data.train, *cfg.data.val)] == ["shop/train.jsonl", "shop/val.jsonl"]


def test_the_data_of_the_page_keeps_one_wording_of_each_question_for_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(FILES["shop/make_data.py"], {})
    train, val = ((tmp_path / "shop" / f"{name}.jsonl").read_text().splitlines() for name in ("train", "val"))
    assert not set(train) & set(val)
    assert f"val: {len(val)} rows" in PAGE
    assert f"train: {len(train)} rows" in PAGE
    assert train[0] in PAGE


@pytest.mark.slow
def test_the_commands_of_the_page_end_with_a_model_that_answers(tmp_path: Path) -> None:
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]  # of this checkout
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    said = ""
    for block in BLOCKS:
        typed = re.sub(r"\.venv/bin/(sftkit|python)", lambda match: PROGRAMS[match[1]], block)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", typed],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=1200,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        said += done.stdout
    evals = [json.loads(line) for line in (tmp_path / "runs" / "shop" / "evals.jsonl").read_text().splitlines()]
    losses = [line["val/loss"] for line in evals]
    assert losses[-1] < losses[0] / 10
    assert said.count("The cake costs 18 dollars.") == 2  # by sftkit chat, and by transformers alone
