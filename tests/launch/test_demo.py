"""The primer of process groups prints what the page shows."""

from __future__ import annotations

import os
import subprocess
import sys

import preloaded
import pytest
from helpers import ROOT

from sftkit.launch import launch

ENV = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
SHOWN = (ROOT / "labs" / "patterns" / "README.md").read_text().partition("labs/primer.py\n")[2].partition("```")[0]


def check(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == SHOWN
    assert done.stderr == ""


def test_two_processes_print_what_the_page_shows() -> None:
    check(preloaded.run(["labs/primer.py"], 2, ENV))


def test_a_word_like_an_option_is_no_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for more in ([], ["recipe.yaml"]):
        monkeypatch.setattr(sys, "argv", ["sftkit.launch", "--cpu", *more])
        with pytest.raises(SystemExit) as end:
            launch.main()
        assert end.value.code == 2
        assert capsys.readouterr().err == "--cpu: no such option. To train: SCRIPT RECIPE [key=value ...]\n"
