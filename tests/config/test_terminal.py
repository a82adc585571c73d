"""Text of any origin on a terminal or a page: what could steer it or hide there is written out."""

from __future__ import annotations

import ast
import io
import logging
import sys

import pytest
from helpers import ROOT

from sftkit.config.terminal import Level, TerminalHandler, print_text, styled, visible

STEERING = {
    "colour": ("\x1b[31m", r"\x1b[31m"),
    "link": ("\x1b]8;;http://x\x1b\\", "\\x1b]8;;http://x\\x1b\\"),
    "clipboard": ("\x1b]52;c;AAAA\x07", r"\x1b]52;c;AAAA\x07"),
    "C1": ("\x9b2J", r"\x9b2J"),
    "back over the line": ("a\rb\x08c", r"a\rb\x08c"),
    "bidi override": ("\u202ecba\u202c", r"\u202ecba\u202c"),
    "bidi isolate": ("\u2067a\u2069", r"\u2067a\u2069"),
    "direction mark": ("a\u200fb", r"a\u200fb"),
    "no width": ("a\u200bb\ufeffc\u2060", r"a\u200bb\ufeffc\u2060"),
    "joiner between letters": ("pay\u200dpal", r"pay\u200dpal"),
    "letters without a shape": ("a\u3164\u115f\u1160b\uffa0\u17b4", r"a\u3164\u115f\u1160b\uffa0\u17b4"),
    "marks without a shape": ("a\u034fb\U0001d173", r"a\u034fb\U0001d173"),
    "bytes as choices of a shape": ("a\ufe01 \u2714\ufe0f\ufe02", "a\\ufe01 \u2714\ufe0f\\ufe02"),
    "separators": ("a\u2028b\u2029c\x85d", r"a\u2028b\u2029c\x85d"),
    "tags": ("a\U000e0041", r"a\U000e0041"),
    "half a character": ("a\ud800", r"a\ud800"),
}
PLAIN = ("", "a\tb\nc", "Straße 你好 שלום עולם", "می\u200cخواهم", "👩\u200d👩\u200d👧 ✔\ufe0f 1\ufe0f\u20e3", r"\x1b")


@pytest.mark.parametrize(("text", "shown"), STEERING.values(), ids=STEERING)
def test_what_could_steer_a_terminal_or_hide_is_written_out(text: str, shown: str, capsys) -> None:
    assert visible(text) == shown
    assert visible(shown) == shown
    print_text(text)
    print_text(text, error=True, end="|")
    assert capsys.readouterr() == (f"{shown}\n", f"{shown}|")
    record = logging.LogRecord("x", logging.WARNING, "x.py", 1, "row: %s", (text,), None)
    TerminalHandler().emit(record)
    assert capsys.readouterr() == ("", f"row: {shown}\n")


def test_what_a_terminal_has_no_character_for_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    print_text("ü")
    assert written.getvalue() == b"\\xfc\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("level", "env", "shown"),
    [
        ("error", {}, "\x1b[31ma\x1b[0m\n\n\x1b[31mb\\x1b[0m\x1b[0m\n"),
        ("warning", {}, "\x1b[33ma\x1b[0m\n\n\x1b[33mb\\x1b[0m\x1b[0m\n"),
        (None, {}, "a\n\nb\\x1b[0m\n"),
        ("error", {"NO_COLOR": "1"}, "a\n\nb\\x1b[0m\n"),
        ("error", {"TERM": "dumb"}, "a\n\nb\\x1b[0m\n"),
    ],
)
def test_warnings_and_errors_are_coloured_on_a_terminal_only(
    level: Level | None, env: dict[str, str], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"NO_COLOR": "", "TERM": "xterm", **env}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    print_text("a\n\nb\x1b[0m", error=True, level=level)
    assert terminal.getvalue() == shown
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    print_text("a\n\nb\x1b[0m", error=True, level=level)
    assert log.getvalue() == "a\n\nb\\x1b[0m\n"


def test_log_records_have_the_colour_of_their_level_and_go_where_stderr_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    handler = TerminalHandler()
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    for level in (logging.INFO, logging.WARNING, logging.ERROR):
        handler.emit(logging.LogRecord("x", level, "x.py", 1, "%d", (level,), None))
    assert terminal.getvalue() == "20\n\x1b[33m30\x1b[0m\n\x1b[31m40\x1b[0m\n"


@pytest.mark.parametrize("text", PLAIN)
def test_other_text_stays_as_it_is(text: str) -> None:
    assert visible(text) == text


def test_a_styled_text_has_its_own_style_and_nobody_elses(capsys: pytest.CaptureFixture[str]) -> None:
    print_text(styled("text\x9b \x1b[2J\u202e", "32"), is_styled=True)
    assert capsys.readouterr().out == "\x1b[32mtext\\x9b \\x1b[2J\\u202e\x1b[0m\n"


def test_only_the_module_for_it_prints() -> None:
    """A print elsewhere would let text of data through: `print_text`, the consoles and the log are the ways to a terminal."""
    found = []
    for path in [path for folder in ("src", "scripts", "labs") for path in (ROOT / folder).rglob("*.py")]:
        text = path.read_text()
        if not any(word in text for word in ("print(", "Console(", ".write", "ArgumentParser")):
            continue
        for node in ast.walk(ast.parse(text)):
            prints = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            plain = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Console"
            writes = isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.stdout.write", "sys.stderr.write")
            parser = isinstance(node, ast.Attribute) and ast.unparse(node) == "argparse.ArgumentParser"
            if prints or plain or writes or parser:
                found.append(f"{path.relative_to(ROOT)}: {ast.unparse(node)[:60]}")
    assert sorted(line.partition(":")[0] for line in found) == [
        "labs/explain/breaks.py",  # a case of what breaks a graph; it prints nothing
        "src/sftkit/config/commands.py",
        "src/sftkit/config/terminal.py",
    ], found
