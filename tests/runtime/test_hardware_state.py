"""The commit that a run says it is of."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sftkit.runtime.hardware import git_state


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_a_change_makes_a_commit_dirty_and_a_new_result_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ("src/a.py", "benchmarks/ledger.jsonl", "benchmarks/lab/plan.yaml", "benchmarks/lab/results/results.json")
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("first\n")
    monkeypatch.chdir(tmp_path)
    assert git_state() is None
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    head = git(tmp_path, "rev-parse", "--short=12", "HEAD")
    assert git_state() == head

    (tmp_path / "benchmarks/ledger.jsonl").write_text("second\n")
    (tmp_path / "benchmarks/lab/results/results.json").write_text("second\n")
    (tmp_path / "untracked.txt").touch()
    monkeypatch.chdir(tmp_path / "src")
    assert git_state() == head

    for name in ("src/a.py", "benchmarks/lab/plan.yaml"):
        (tmp_path / name).write_text("second\n")
        assert git_state() == f"{head}-dirty", name
        git(tmp_path, "checkout", "-q", name)
