"""Print text of any origin to a terminal, with characters that could control it or hide text escaped; warnings
and errors in colour where a person watches."""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
import termios
from typing import Literal, TextIO

Level = Literal["warning", "error"]
_COLOURS: dict[Level, str] = {"warning": "\x1b[33m", "error": "\x1b[31m"}
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and newline: escape sequences begin with one
    "\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff0-\ufffb"  # bidi, zero width, separators
    "\u115f\u1160\u17b4\u17b5\u3164\uffa0\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"  # letters without a shape
    "\ud800-\udfff\U000e0000-\U000e0fff]"  # halves of a character, which cannot be written; tags
    # What scripts and emoji need, where neither can be: joiners behind an ASCII character, choices of a shape behind
    # one that begins no keycap, or behind another
    "|(?<![^\x00-\x7f])[\u034f\u180b-\u180d\u180f\u200c\u200d]|(?<![^\x00-\x22\x24-\x29\x2b-\x2f\x3a-\x7f\ufe00-\ufe0f])[\ufe00-\ufe0f]"
)


def visible(text: str) -> str:
    r"""Return text that cannot steer a terminal or hide on a page: control characters, direction marks, line separators
    and characters without width stand as Python writes them (\x1b, \u202e). Newlines and tabs stay."""
    return _STEERING.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def print_text(text: str, end: str = "\n", level: Level | None = None, *, error: bool = False) -> None:
    """Print text of any origin; a log on a full disk or a terminal that is gone ends no run. What the terminal has no
    character for is written out too.

    Args:
        error: to stderr.
        level: its colour on a terminal; None: plain.
    """
    stream = sys.stderr if error else sys.stdout
    try:
        print(_coloured(writable(text, stream.encoding), level, stream), file=stream, flush=True, end=end)
    except (OSError, ValueError):
        leave_lost_terminal()


def writable(text: str, encoding: str | None) -> str:
    """Return what `visible` does, with characters that the encoding does not have written out too."""
    encoding = encoding or "utf-8"
    return visible(text).encode(encoding, "backslashreplace").decode(encoding)


def _coloured(text: str, level: Level | None, stream: TextIO) -> str:
    """Return the text in the colour of its level, on a terminal that has colours, unless NO_COLOR
    is set (no-color.org)."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown")
    if level is None or plain or not stream.isatty():
        return text
    # Line by line: a colour that goes on over a line break would stay if the output is cut there.
    return re.sub(".+", lambda line: f"{_COLOURS[level]}{line[0]}\x1b[0m", text)


def leave_lost_terminal() -> None:
    """Point stdout and stderr at /dev/null where their terminal was closed. Every write to such a terminal fails, in
    libraries too, and Python ends with code 120 if text is left that it could not write."""
    # EIO is what a closed terminal answers; a pipe or a file answers ENOTTY and is left alone.
    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


class TerminalHandler(logging.Handler):
    """Prints log records with `print_text`. sys.stderr is looked up each time: a progress bar may have replaced it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the formatted record, in the colour of its level."""
        try:
            level: Level = "error" if record.levelno >= logging.ERROR else "warning"
            print_text(self.format(record), error=True, level=level if record.levelno >= logging.WARNING else None)
        # as logging.Handler asks: an error in logging must not end the program
        except Exception:
            self.handleError(record)
