"""A check that a run makes of itself; proof.json and the report show them."""

from __future__ import annotations

from dataclasses import dataclass

from sftkit.rundir.names import DOES_NOT_APPLY


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


def does_not_apply(reason: str) -> str:
    """Return what a check has found that has nothing to check in this run."""
    return f"{DOES_NOT_APPLY}: {reason}"
