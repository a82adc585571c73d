"""What reaches a terminal or a page: text of any origin, with whatever could steer or hide there written out."""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
import termios

_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and newline: escape sequences begin with one
    "\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff0-\ufffb"  # bidi, zero width, separators
    "\u115f\u1160\u17b4\u17b5\u3164\uffa0\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"  # letters and marks without a shape
    "\ud800-\udfff\U000e0000-\U000e0fff]"  # halves of a character, which cannot be written; tags
    # What scripts and emoji need, where neither can be: joiners behind an ASCII character, choices of a shape behind one that
    # begins no keycap, or behind another
    "|(?<![^\x00-\x7f])[\u034f\u180b-\u180d\u180f\u200c\u200d]"
    "|(?<![^\x00-\x22\x24-\x29\x2b-\x2f\x3a-\x7f\ufe00-\ufe0f])[\ufe00-\ufe0f]"
)


def visible(text: str) -> str:
    r"""Return text that cannot steer a terminal or hide on a page: control characters, direction marks, line separators and
    characters without width stand as Python writes them (\x1b, \u202e). Newlines and tabs stay."""
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(text: str, error: bool = False, end: str = "\n") -> None:
    """Print text of any origin; a log on a full disk or a terminal that is gone ends no run. What the terminal has no
    character for is written out too."""
    stream = sys.stderr if error else sys.stdout
    try:
        encoding = stream.encoding or "utf-8"
        print(visible(text).encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True, end=end)
    except (OSError, ValueError):
        leave_lost_terminal()


def leave_lost_terminal() -> None:
    """Let what goes to a terminal that was closed go nowhere. Every write to it fails, in libraries too, and with text that
    it did not take Python ends with code 120."""
    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


class VisibleFormatter(logging.Formatter):
    """Log records as `say` prints text."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))
