"""A check that a run makes of itself; proof.json and the report show them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One check, ready to show."""

    name: str
    ok: bool | None
    "None: it does not apply here, or could not be made"
    found: str
    expected: str
    how: str
    "what was compared with what"
