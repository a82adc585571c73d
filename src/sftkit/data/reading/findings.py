"""Data warnings: count what is wrong or odd in the rows of a source by reason, with the first example of each reason.

`BadRows` collects the rows that end a run: the first few are reported together and the others counted, so that a user
can fix all of them at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from sftkit.data.types import Finding, Kind
from sftkit.errors import BadRowsError, DataError
from sftkit.runtime.script import counted

MAX_EXAMPLE = 500
"The most characters of an example: the names of a row's columns may be its whole text."
MAX_UNUSED = 20
"The most columns and keys of a source that are counted by name: objects with data as keys have any number."
MORE_UNUSED = "further columns and keys"
"Counts each of them in each row."
DROPPED = {"dropped_too_long": "too long", "dropped_no_target": "without a target"}
"Tokenized.note of a row that is left out without being bad -> the reason that is reported."

log = logging.getLogger(__name__)

Tally = dict[tuple[str, str], Finding]
"(kind, reason) -> what was found, in the order in which it was first met."


def add(tally: Tally, kind: Kind, reason: str, where: str, rows: int = 1) -> None:
    """Count rows; the example that is there already stays.

    Args:
        kind, reason: as in Finding.
        where: file:line of the first of them, and what is wrong there.
    """
    if kind == "unused" and (kind, reason) not in tally and sum(known == kind for known, _ in tally) >= MAX_UNUSED:
        reason = MORE_UNUSED
    first = where.replace("\n", "\\n")  # as in errors.DataError
    first = first if len(first) <= MAX_EXAMPLE else f"{first[:MAX_EXAMPLE]}..."
    known = tally.get((kind, reason), Finding(kind, reason, 0, first))
    tally[kind, reason] = replace(known, rows=known.rows + rows)


def sort_findings(tally: Tally, repeat: int = 1) -> tuple[Finding, ...]:
    """Sort findings: rows that are not learned from first, unused columns last, then by frequency. Counts are over
    `repeat` passes, as for all of a source."""
    order = {"accepted": 1, "unused": 2}
    findings = sorted(tally.values(), key=lambda one: (order.get(one.kind, 0), -one.rows))
    return tuple(replace(one, rows=one.rows * repeat) for one in findings)


def finding_text(finding: Finding) -> str:
    """Format a finding: `2 bad rows skipped, not JSON; the first: a.jsonl:7: not JSON: ...`, or `12,000 rows have a
    column quality, which is not used; the first: a.jsonl:1`."""
    if finding.reason == MORE_UNUSED:
        return f"further columns and keys are not used, of more than {MAX_UNUSED}; the first: {finding.first}"
    if finding.kind == "unused":
        rows = f"{counted(finding.rows, 'row')} {'has' if finding.rows == 1 else 'have'}"
        return f"{rows} a {finding.reason}, which is not used; the first: {finding.first}"
    rows = counted(finding.rows, "bad row" if finding.kind == "skipped" else "row")
    return f"{rows} {finding.kind}, {finding.reason}; the first: {finding.first}"


def log_findings(name: str, findings: Iterable[Finding]) -> None:
    """Log one line for each reason."""
    for one in findings:
        log.warning("%s: %s", name, finding_text(one))


@contextmanager
def without_logging() -> Iterator[None]:
    """Keep `log_findings` quiet, for a caller that shows what was found itself."""
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


MAX_TOLD = 5
"Bad rows that are reported, each on a line."
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
        text = str(error)
        most = len(where) + MAX_LINE
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
            advice: whether to add that such rows can be skipped.
        """
        lines = list(self.lines)
        more = self.rows - len(self.lines)
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
