"""What is wrong or odd in the rows of a source: counted by reason, with the first example of each."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from sftkit.data.types import Finding, Kind
from sftkit.runtime.words import counted

MAX_EXAMPLE = 500
"The most characters of an example: the names of a row's columns may be its whole text."
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
    first = where.replace("\n", "\\n")  # as in errors.DataError
    first = first if len(first) <= MAX_EXAMPLE else f"{first[:MAX_EXAMPLE]}..."
    known = tally.get((kind, reason), Finding(kind, reason, 0, first))
    tally[kind, reason] = replace(known, rows=known.rows + rows)


def sort_findings(tally: Tally, repeat: int = 1) -> tuple[Finding, ...]:
    """Sort findings: rows that are not learned from first, then by frequency. Counts are over `repeat`
    passes, as for all of a source."""
    findings = sorted(tally.values(), key=lambda one: (one.kind == "accepted", -one.rows))
    return tuple(replace(one, rows=one.rows * repeat) for one in findings)


def finding_text(finding: Finding) -> str:
    """Format a finding: `2 bad rows skipped, not JSON; the first: a.jsonl:7: not JSON: ...`."""
    rows = counted(finding.rows, "bad row" if finding.kind == "skipped" else "row")
    return f"{rows} {finding.kind}, {finding.reason}; the first: {finding.first}"


def log_findings(name: str, findings: Iterable[Finding]) -> None:
    """Log one line for each reason."""
    for one in findings:
        log.warning("%s: %s", name, finding_text(one))


@contextmanager
def without_logging() -> Iterator[None]:
    """Keep `log_findings` quiet, for a caller that shows what was found itself."""
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
