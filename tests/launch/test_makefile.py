"""make: a variable that nothing reads is refused."""

from __future__ import annotations

import subprocess

import pytest
from helpers import ROOT


def make(*words: str) -> subprocess.CompletedProcess[str]:
    """What make would do."""
    return subprocess.run(
        ["make", "--dry-run", *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("word", ["RECPE=recipes/smoke/sft.yaml", "args=train.max_steps=1", "train.max_steps=1"])
def test_an_unknown_variable_is_refused_with_those_that_there_are(word: str) -> None:
    done = make("sft", word)
    assert done.returncode == 2
    assert f"unknown: {word.partition('=')[0]}. What can be set, in capitals: RECIPE=" in done.stderr
    assert "python" not in done.stdout


def test_known_variables_reach_the_command() -> None:
    done = make("-j2", "sft", "RECIPE=a.yaml", "ARGS=train.max_steps=1", "PYTHON=python3")
    assert done.returncode == 0, done.stderr
    assert "-m sftkit.launch scripts/chat_sft.py a.yaml train.max_steps=1" in done.stdout
