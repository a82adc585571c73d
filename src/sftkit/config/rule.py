"""Types of the rules between settings: what a rule reads, and what it yields."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Problem = tuple[str, str]
"Key, and what is wrong with it."
Get = Callable[[str], Any]
"""Value of a dotted key, default included: Any, for the rule knows the type of what it asks for. Raises Unusable for a
key that already has a problem."""
Rule = Callable[[Get], Iterator[Problem]]


class Unusable(Exception):
    """The rule asks for a value that was already reported: skip the rule. Its text is the key that has the problem."""
