"""What is wrong or odd in the rows of a source: counted by reason, with the first example of each."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from sftkit.data.types import Finding
from sftkit.errors import DataError
from sftkit.runtime.words import counted

MAX_TEXT = 500
"The most characters of an example: the names of a row's columns may be its whole text."
DROPPED = {"dropped_too_long": "too long", "dropped_no_target": "without a target"}
"Tokenized.note of a row that is left out without being bad -> the reason that is reported."

log = logging.getLogger(__name__)

Tally = dict[tuple[str, str], Finding]
"(kind, reason) -> what was found, in the order in which it was first met."


def add(tally: Tally, finding: Finding) -> None:
    """Count rows; the example that is there already stays."""
    known = tally.get((finding.kind, finding.reason))
    tally[finding.kind, finding.reason] = finding if known is None else replace(known, rows=known.rows + finding.rows)


def skipped(error: DataError) -> Finding:
    """Return the finding of one row that was left out."""
    return Finding("skipped", error.reason, 1, _short(str(error)))


def dropped(note: str, where: str) -> Finding:
    """Return the finding of one row that was left out although nothing is wrong with it.

    Args:
        note: Tokenized.note, one of DROPPED.
    """
    return Finding("dropped", DROPPED[note], 1, _short(where))


def accepted_findings(reason: str, where: str) -> Finding:
    """Return the finding of one row that is learned from, although it is odd."""
    return Finding("accepted", reason, 1, _short(where))


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


def _short(words: str) -> str:
    words = words.replace("\n", "\\n")  # as in errors.DataError
    return words if len(words) <= MAX_TEXT else f"{words[:MAX_TEXT]}..."
