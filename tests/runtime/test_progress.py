"""What a user sees while something takes long: a line that moves on a real terminal, a plain one elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launched import Terminal

SHOWN = """
import logging, sys, time
from pathlib import Path
from sftkit.config.terminal import TerminalHandler, print_text
from sftkit.runtime.script import TrainingBar, working

logging.basicConfig(level=logging.INFO, handlers=[TerminalHandler()], format="%(message)s")
go_on = Path(sys.argv[1])

def wait(number):
    print_text(f"at {number}")
    while not go_on.with_suffix(f".{number}").exists():
        time.sleep(0.02)

with working("tokenizing [red]rows\x1b[2J"):
    wait(1)
    print_text("a line of the run")
    logging.warning("a warning")
bar = TrainingBar(0, 1500)
if sys.stdout.isatty():
    bar.start()
bar.step, bar.newest = 120, "loss 0.7193  231,029 tok/s"
wait(2)
with working("evaluating families, 960 examples"):
    wait(3)
print_text("step  120/1500")
if sys.stdout.isatty():
    bar.stop()
print_text("the end")
"""
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def start(folder: Path, streams, **env: str) -> subprocess.Popen[bytes]:
    program = folder / "shown.py"
    program.write_text(SHOWN)
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR")}
    return subprocess.Popen(
        [sys.executable, program, folder / "go"], env={**plain, "TERM": "xterm-256color", **env}, **streams
    )


def until(ready) -> None:
    deadline = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def watch(folder: Path, columns: int, **env: str) -> str:
    """Everything that the program writes to a terminal of that width."""
    screen = Terminal(columns)
    device = screen.device
    process = start(folder, {"stdin": device, "stdout": device, "stderr": device}, **env)
    try:
        for number, shown in ((1, "tokenizing"), (2, "120/1500"), (3, "evaluating families")):
            until(lambda shown=shown, number=number: f"at {number}" in screen.text and shown in screen.text)
            (folder / f"go.{number}").touch()
        assert process.wait(60) == 0
        until(lambda: "the end" in screen.text)
    finally:
        process.kill()
        process.wait()
        screen.close()
    return screen.text


@pytest.mark.parametrize("columns", [80, 160])
def test_on_a_terminal_a_last_line_moves_and_the_rest_goes_above_it(tmp_path: Path, columns: int) -> None:
    text = watch(tmp_path, columns)
    assert "tokenizing [red]rows\\x1b[2J" in text  # no markup, and nothing that steers
    assert "\x1b[33ma warning\x1b[0m" in text
    assert "\x1b[?25l" not in text, "a killed process would leave a terminal without a cursor"
    bars = [line for line in CONTROL.sub("", text).split("\n") if "120/1500" in line and "eta" in line]
    assert "loss 0.7193  231,029 tok/s" in bars[-1]
    for line in re.split(r"[\r\n]+", CONTROL.sub("", text)):
        assert len(line) <= columns, line
    assert screen_of(text) == ["at 1", "a line of the run", "a warning", "at 2", "at 3", "step  120/1500", "the end"]


def screen_of(text: str) -> list[str]:
    """The lines that are left on the screen: of what rich writes, lines are erased (2K), and the cursor goes up (1A)."""
    rows, row = [""], 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if part == "\n":
            row += 1
            rows += [""] * (row == len(rows))
        elif part.endswith("A") and part[0] == "\x1b":
            row -= int(part[2:-1])
        elif part == "\x1b[2K":
            rows[row] = ""
        elif part[0] not in "\x1b\r":
            rows[row] += part
    return [line.rstrip() for line in rows if line.strip()]


@pytest.mark.parametrize("env", [{}, {"RANK": "1"}])
def test_elsewhere_it_is_a_line_and_on_other_ranks_nothing(tmp_path: Path, env: dict[str, str]) -> None:
    for number in (1, 2, 3):
        (tmp_path / f"go.{number}").touch()
    process = start(tmp_path, {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}, **env)
    out, err = (text.decode() for text in process.communicate(timeout=60))
    first, second = ("", "") if env else ("tokenizing [red]rows\\x1b[2J\n", "evaluating families, 960 examples\n")
    assert err == f"{first}a warning\n{second}"
    assert out.splitlines() == ["at 1", "a line of the run", "at 2", "at 3", "step  120/1500", "the end"]
