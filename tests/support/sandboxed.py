"""Shared parts of the sandbox tests: whether the sandbox works here, and one program with its tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sftkit_sandbox import programs
from sftkit_sandbox.programs import ProgramLimits, ProgramTests, ProgramVerdict

try_it = programs.check_sandbox.__wrapped__
"Run `check_sandbox`, ignoring earlier results."
MISSING = programs.check_sandbox()
works = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
SHORT = ProgramLimits(cpu_seconds=1, wall_seconds=60)
AWAKE = ProgramLimits(wall_seconds=1.5)
"For programs that sleep: no other limit ends them."


def run(program: str, tests: str = "", *names: str, limits: ProgramLimits | None = None) -> ProgramVerdict:
    """The verdict on a program whose tests use its `names`."""
    return programs.run_tests(ProgramTests(program, tests, names), limits)


def change_launcher(monkeypatch: pytest.MonkeyPatch, folder: Path, *changes: tuple[str, str, str]) -> None:
    """Start sandboxes from a copy of the sources with changes: module, old text, new text."""
    package = folder / "sftkit_sandbox"
    source = Path(programs.PACKAGE_FOLDER) / package.name
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    for module, there, instead in changes:
        text = (package / f"{module}.py").read_text()
        assert there in text
        (package / f"{module}.py").write_text(text.replace(there, instead))
    monkeypatch.setattr(programs, "LAUNCH", programs.LAUNCH.replace(programs.PACKAGE_FOLDER, str(folder)))
