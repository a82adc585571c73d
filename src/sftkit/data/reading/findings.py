"""Data warnings: count what is wrong or odd in the rows of a source by reason, with the first example of each."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from sftkit.data.types import Finding, Kind
from sftkit.errors import DataError
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


def advised(error: DataError) -> DataError:
    """Return the error of a bad row that ends a run, with what to do about such rows."""
    advice = "fix the row, or skip and count all such rows with data.on_bad_row=skip"
    return DataError(f"{error} ({advice})", reason=error.reason)
