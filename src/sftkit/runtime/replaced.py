"""An attribute with another value for some time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Give an attribute of an object or module another value within the context."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
