"""Types of the rules between settings: what a rule reads, and what it yields."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sftkit.config.topology import Topology

Problem = tuple[str, str]
"Key, and what is wrong with it."
Get = Callable[[str], Any]
"""Value of a dotted key, default included: Any, for the rule knows the type of what it asks for. Raises Unusable for a
key that already has a problem."""
Rule = Callable[[Get], Iterator[Problem]]


@dataclass(frozen=True)
class OfLaunch:
    """A rule that also asks how the processes of the launch share the work."""

    find: Callable[[Get, Topology], Iterator[Problem]]


class Unusable(Exception):
    """The rule asks for a value that was already reported: skip the rule. Its text is the key that has the problem."""
