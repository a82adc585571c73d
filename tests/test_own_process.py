"""A test that takes its process down fails alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import own_process

TESTS = """
import os, pytest
started_by = os.environ.get("SFTKIT_TEST_STARTED_BY")
alone = pytest.mark.own_process

@alone
@pytest.mark.parametrize("word", ["a b", "c[d]"])
def test_in_a_process_of_its_own(word):
    assert int(started_by) == os.getppid()

@alone
def test_that_dies():
    os.abort()

@alone
def test_that_fails():
    print("what it printed")
    assert started_by is None

@alone
def test_that_skips():
    pytest.skip("for a good reason")

def test_that_comes_last():
    assert started_by is None
"""


def test_one_that_dies_or_fails_is_told_with_its_output_and_all_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from own_process import pytest_pyfunc_call\n")
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    own_process: x\n    gpu: y\naddopts = -m 'not gpu'\n"
    )
    (tmp_path / "test_it.py").write_text(TESTS)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"PYTHONPATH": str(Path(own_process.__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "--tb=short"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    assert lines[-1].split(" in ")[0].strip("= ") == "2 failed, 3 passed, 1 skipped", done.stdout
    assert "PASSED test_it.py::test_that_comes_last" in lines
    assert "its process ended with -6" in done.stdout
    assert "its process ended with 1" in done.stdout
    assert "what it printed" in done.stdout
    assert "for a good reason" in done.stdout
