"""Splits and slices of a source, in the notation of datasets: train, train[:1000], train[10%:]."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TypeVar

from sftkit.config.schema import SourceConfig
from sftkit.errors import ConfigError

T = TypeVar("T")
FARTHEST = 10_000
"The most rows before a slice that are skipped to look at its beginning."


def base_split(spec: str) -> str:
    """Return a split without its slice: train of train[:1000]."""
    return spec.split("[", 1)[0].strip()


def sliced(rows: Callable[[], Iterator[T]], source: SourceConfig) -> Iterator[T]:
    """Return the rows that a slice such as train[:1000], train[10%:] or train[-100:] means."""
    start, stop = _bounds(source)
    total = sum(1 for _ in rows()) if _is_relative(start) or _is_relative(stop) else 0
    return islice(rows(), _index(start, total) if start else 0, _index(stop, total) if stop else None)


def sliced_beginning(rows: Callable[[], Iterator[T]], source: SourceConfig) -> Iterator[T]:
    """Return the rows of a slice from its first one on, perhaps with some after it; none if
    finding the first takes long."""
    start, stop = _bounds(source)
    start = "0" if start is None or start == "0%" else start
    if _is_relative(start) or int(start) > FARTHEST:
        return iter(())
    return islice(rows(), int(start), None if stop is None or _is_relative(stop) else int(stop))


def _bounds(source: SourceConfig) -> tuple[str | None, str | None]:
    """Return what stands before and after the colon of a slice."""
    spec = source.split.strip()
    if spec == base_split(spec):
        return None, None
    match = re.fullmatch(r"[^\[\]]+\[(-?\d+%?)?:(-?\d+%?)?\]", spec)
    if match is None:
        raise ConfigError(f"data source {source.path}: split {spec!r}; expected train, train[:1000] or train[10%:90%]")
    for bound in match.groups():
        if bound and bound.endswith("%") and abs(int(bound[:-1])) > 100:
            raise ConfigError(f"data source {source.path}: {bound} in split {source.split!r} is more than 100%")
    return match[1], match[2]


def _is_relative(bound: str | None) -> bool:
    """Return whether a bound of a slice depends on how many rows there are."""
    return bound is not None and (bound.startswith("-") or bound.endswith("%"))


def _index(bound: str, total: int) -> int:
    """Return a bound of a slice as a row number."""
    rows = round(int(bound[:-1]) * total / 100) if bound.endswith("%") else int(bound)
    return max(0, rows + total) if bound.startswith("-") else rows
