"""make: a variable that nothing reads is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers import ROOT


def make(*words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """What make would do, told as to a user: not as a make within the one that may have started these tests."""
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    return subprocess.run(
        ["make", "--dry-run", *words], cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("word", ["RECPE=recipes/smoke/sft.yaml", "args=train.max_steps=1", "train.max_steps=1"])
def test_an_unknown_variable_is_refused_with_those_that_there_are(word: str) -> None:
    done = make("sft", word)
    assert done.returncode == 2
    assert f"unknown: {word.partition('=')[0]}. What can be set, in capitals: RECIPE=" in done.stderr
    assert "python" not in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("smoke", "RECIPE=x"),
            "make smoke does not read RECIPE, which is for: base mid sft inspect validate explain. See make help",
        ),
        (("chat", "RECIPE=x"), "make chat does not read RECIPE"),
        (("eval", "PLAN=x"), "make eval does not read PLAN, which is for: bench."),
        (("inspect",), "make inspect needs RECIPE="),
        (("validate",), "make validate needs RECIPE="),
    ],
)
def test_a_variable_is_refused_where_it_is_not_read_and_asked_for_where_it_is_needed(
    words: tuple[str, ...], said: str
) -> None:
    done = make(*words)
    assert (done.returncode, done.stdout) == (2, "")  # before anything would be installed
    assert said in done.stderr


@pytest.mark.parametrize("words", [("inspect", "RECIPE=x"), ("bench", "PLAN=x"), ("base", "RECIPE=x"), ("smoke",)])
def test_targets_read_what_is_theirs(words: tuple[str, ...]) -> None:
    done = make(*words)
    assert done.returncode == 0, done.stderr
    assert words[-1].removeprefix("RECIPE=").removeprefix("PLAN=") in done.stdout


def test_a_first_adapter_is_trained_on_the_model_of_the_smoke_chain(tmp_path: Path) -> None:
    """In a clone without runs the chain comes first."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed").touch()
    adapter = "-m sftkit.launch scripts/chat_sft.py recipes/smoke/lora.yaml train.max_steps=1"
    lines = make("lora", "ARGS=train.max_steps=1", folder=tmp_path).stdout.splitlines()
    assert [line.removeprefix(".venv/bin/python ") for line in lines] == ["scripts/run_chain.py recipes/smoke", adapter]
    (tmp_path / "runs" / "smoke" / "mid").mkdir(parents=True)
    (tmp_path / "runs" / "smoke" / "mid" / "LATEST").touch()
    (line,) = make("lora", "ARGS=train.max_steps=1", folder=tmp_path).stdout.splitlines()
    assert line.endswith(adapter)


def test_known_variables_reach_the_command() -> None:
    done = make("-j2", "sft", "RECIPE=a.yaml", "ARGS=train.max_steps=1", "PYTHON=python3")
    assert done.returncode == 0, done.stderr
    assert "-m sftkit.launch scripts/chat_sft.py a.yaml train.max_steps=1" in done.stdout
