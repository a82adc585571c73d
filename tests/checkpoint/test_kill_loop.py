"""The command that kills a run again and again (benchmarks/reliability), with a few kills."""

from __future__ import annotations

import json
from pathlib import Path

import preloaded
import pytest

from sftkit.runtime.hardware import git_state


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_as_the_one_left_alone(tmp_path: Path) -> None:
    words = ["benchmarks/reliability/kill_loop.py", "--kills", "3", "--steps", "120", "--out", str(tmp_path / "runs")]
    done = preloaded.run([*words, "--result", str(tmp_path / "result.json")], timeout=1500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["kills"], result["faults"], result["differences_from_the_run_left_alone"]) == (3, [], [])
    assert result["status"] == "finished"
    assert result["commit"] == git_state()
    assert [record["latest"] for record in result["records"]] == sorted(r["latest"] for r in result["records"])
