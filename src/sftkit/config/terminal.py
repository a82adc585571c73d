"""Guard terminals and files: print text of any origin, with the characters escaped that could control a terminal or
hide text, and recognise secrets. No setting may hold a secret, since settings are saved and logged.

secrets.yaml has what secrets look like; names, paths and commits in paths look like none of them.
"""

import errno
import logging
import os
import re
import sys
import termios
from functools import cache
from typing import Any, Literal, TextIO

from sftkit.errors import texts

Level = Literal["warning", "error"]
_COLOURS: dict[Level, str] = {"warning": "\x1b[33m", "error": "\x1b[31m"}
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and newline: escape sequences begin with one
    "\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff0-\ufffb"  # bidi, zero width, separators
    "\u115f\u1160\u17b4\u17b5\u3164\uffa0\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"  # letters without a shape
    "\ud800-\udfff\U000e0000-\U000e0fff]"  # halves of a character, which cannot be written; tags
    # Characters that scripts and emoji need, where neither can be: joiners after an ASCII character, choices of a shape
    # after a character that begins no keycap, or after another choice
    "|(?<![^\x00-\x7f])[\u034f\u180b-\u180d\u180f\u200c\u200d]|(?<![^\x00-\x22\x24-\x29\x2b-\x2f\x3a-\x7f\ufe00-\ufe0f])[\ufe00-\ufe0f]"
)


def visible(text: str) -> str:
    r"""Return text that cannot steer a terminal or hide on a page: control characters, direction marks, line separators
    and characters without width stand as Python writes them (\x1b, \u202e). Newlines and tabs stay."""
    return _STEERING.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def print_text(
    text: str, end: str = "\n", level: Level | None = None, *, error: bool = False, is_styled: bool = False
) -> None:
    """Print text of any origin; a log on a full disk or a terminal that is gone ends no run. What the terminal has no
    character for is written out too.

    Args:
        error: to stderr.
        level: its colour on a terminal; None: plain.
        is_styled: it is made of what `styled` returns, so nothing in it is left to escape.
    """
    stream = sys.stderr if error else sys.stdout
    try:
        text = text if is_styled else writable(text, stream.encoding)
        if level is not None and has_colours(stream):
            # Line by line: a colour that continues over a line break would stay if the output is cut there.
            text = re.sub(".+", lambda line: f"{_COLOURS[level]}{line[0]}\x1b[0m", text)
        print(text, file=stream, flush=True, end=end)
    except (OSError, ValueError):
        leave_lost_terminal()


def has_colours(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that shows colours, and nobody has asked for none (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") not in ("dumb", "unknown")


def styled(text: str, style: str) -> str:
    """Return text as it is printed on stdout, in a style of terminals, such as 4;32, green and underlined."""
    return f"\x1b[{style}m{writable(text, sys.stdout.encoding)}\x1b[0m"


def writable(text: str, encoding: str | None) -> str:
    """Return what `visible` does, with characters that the encoding does not have written out too."""
    encoding = encoding or "utf-8"
    return visible(text).encode(encoding, "backslashreplace").decode(encoding)


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


@cache
def _secrets() -> list[tuple[str, re.Pattern[str]]]:
    """Return (kind, pattern) of config/secrets.yaml."""
    table: Any = texts("config/secrets.yaml")
    start = r"(?<![A-Za-z0-9])"
    return [(kind, re.compile(text.replace("START", start))) for kind, found in table.items() for text in found]


_SNAPSHOT = re.compile(r"/snapshots/[0-9a-f]{40}(?=/|$)")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def secret_in(text: str, key: str = "") -> str | None:
    """Return the kind of secret that the text seems to hold; None if it holds none. model.revision may be
    a commit's 40 hex digits."""
    if key == "model.revision" and _COMMIT.fullmatch(text):
        return None
    text = _SNAPSHOT.sub("/snapshots/", text)  # a folder of the hub's cache, named by a commit
    return next((kind for kind, pattern in _secrets() if pattern.search(text)), None)
