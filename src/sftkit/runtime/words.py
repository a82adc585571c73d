"""Words about numbers, for lines that people read."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 row, 2,000 rows.

    Args:
        noun: one whose plural has an s.
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def first_of(names: list[str], most: int = 3) -> str:
    """Return the first names and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
