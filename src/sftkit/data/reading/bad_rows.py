"""Bad rows that end a run: the first few are told together and the others counted, so that one look mends them all."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from sftkit.errors import BadRowsError, DataError
from sftkit.runtime.words import counted

MAX_TOLD = 5
"Bad rows that are told, each on a line."
MAX_LOOKAHEAD_SECONDS = 1.0
"Seconds that rows after the first bad one are looked at."
MAX_LINE = 100
"The most characters that a line after the first has behind its place: what is accepted is listed at length, and once \
is enough."

BAD_ROWS_ADVICE = "fix {}, or skip and count all such rows with data.on_bad_row=skip"

T = TypeVar("T")


@dataclass
class BadRows:
    """Bad rows of one source, in order; falsy while there are none."""

    lines: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    "of all of them, each once"
    rows: int = 0
    not_read_after: str = ""
    "the last row that was looked at; empty: all were"
    _until: float = 0.0

    def __bool__(self) -> bool:
        """Return whether there is a bad row."""
        return self.rows > 0

    def add(self, where: str, error: DataError) -> None:
        """Take a bad row."""
        if not self.rows:
            self._until = time.monotonic() + MAX_LOOKAHEAD_SECONDS
        text, most = str(error), len(where) + MAX_LINE
        if self.rows < MAX_TOLD:
            self.lines.append(f"{text[:most]}..." if self.rows and len(text) > most else text)
        if error.reason not in self.reasons:
            self.reasons.append(error.reason)
        self.rows += 1

    def enough(self, where: str) -> bool:
        """Return whether there are bad rows and the time to look for more is up.

        Args:
            where: the row that was looked at last.
        """
        if not self.rows or time.monotonic() < self._until:
            return False
        self.not_read_after = where
        return True

    def error(self, *, advice: bool = True) -> BadRowsError:
        """Return the error that ends the run.

        Args:
            advice: tell that such rows can be left out, too.
        """
        lines, more = list(self.lines), self.rows - len(self.lines)
        said = [f"and {counted(more, 'more bad row')}"] if more else []
        if self.not_read_after:
            said.append(f"rows after {self.not_read_after} were not looked at")
        if said:
            lines.append("; ".join(said))
        if advice:
            what = BAD_ROWS_ADVICE.format("the row" if self.rows == 1 else "them")
            if self.rows == 1:
                lines[0] += f" ({what})"
            else:
                lines.append(f"({what})")
        return BadRowsError(lines, self.reasons[0])


def until_broken(items: Iterable[T], bad: BadRows) -> Iterator[T]:
    """Yield the items; a source that cannot be read any further after a bad row is one more, which ends them."""
    try:
        yield from items
    except DataError as error:
        if not bad:
            raise
        bad.add("", error)
