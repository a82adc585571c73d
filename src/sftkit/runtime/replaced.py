"""An attribute with another value for some time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Give an attribute of an object or module another value within the context."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def replaced_in_each(name: str, values: Mapping[Any, object]) -> Iterator[None]:
    """Give an attribute of each object another value within the context; afterwards one that its class had alone is
    its class's again.

    Args:
        values: object -> value.
    """
    # vars, not getattr: a value of the class must not become the object's own.
    before = {owner: vars(owner)[name] for owner in values if name in vars(owner)}
    try:
        for owner, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for owner in values:
            if owner in before:
                setattr(owner, name, before[owner])
            else:
                delattr(owner, name)
