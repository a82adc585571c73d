"""Words about numbers, for lines that people read."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 row, 2,000 rows.

    Args:
        noun: one whose plural has an s.
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def first_of(names: Sequence[object], most: int = 3, between: str = ", ") -> str:
    """Return the first names and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join(map(str, names[:most])) + more
