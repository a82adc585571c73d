"""What is wrong or odd in the rows of a source: counted by reason, with the first example of each."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from sftkit.data.types import Finding
from sftkit.errors import DataError

MOST_TEXT = 500
"Characters of an example: a row may be all one column name."

log = logging.getLogger(__name__)

Tally = dict[tuple[str, str], Finding]
"(kind, reason) -> what was found, in the order in which it was first met."


def add(tally: Tally, found: Finding) -> None:
    """Count rows; the example that is there already stays."""
    known = tally.get((found.kind, found.reason))
    tally[found.kind, found.reason] = found if known is None else replace(known, rows=known.rows + found.rows)


def skipped(error: DataError) -> Finding:
    """One row that was left out."""
    return Finding("skipped", error.reason, 1, _short(str(error)))


def accepted(reason: str, where: str) -> Finding:
    """One row that is learned from, although it is odd."""
    return Finding("accepted", reason, 1, _short(where))


def ordered(tally: Tally, repeat: int = 1) -> tuple[Finding, ...]:
    """Skipped rows first, then the most frequent; counted over `repeat` passes, as everything of a source is."""
    found = sorted(tally.values(), key=lambda one: (one.kind == "accepted", -one.rows))
    return tuple(replace(one, rows=one.rows * repeat) for one in found)


def text(found: Finding) -> str:
    """2 bad rows skipped, not JSON; the first: a.jsonl:7: not JSON: ..."""
    rows = f"{found.rows:,} {'bad ' if found.kind == 'skipped' else ''}row{'' if found.rows == 1 else 's'} {found.kind}"
    return f"{rows}, {found.reason}; the first: {found.first}"


def tell(name: str, found: Iterable[Finding]) -> None:
    """One line of the log for each reason."""
    for one in found:
        log.warning("%s: %s", name, text(one))


def _short(words: str) -> str:
    return words if len(words) <= MOST_TEXT else f"{words[:MOST_TEXT]}..."
