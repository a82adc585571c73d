"""The process group primer prints what the page shows."""

from __future__ import annotations

import os
import subprocess
import sys

from helpers import ROOT


def test_the_demo_prints_what_the_page_shows() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    words = [sys.executable, "-m", "sftkit.launch", "--demo"]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    page = (ROOT / "docs" / "distributed.md").read_text()
    assert page.partition("sftkit.launch --demo\n")[2].partition("```")[0] == done.stdout
    assert done.stderr == ""
