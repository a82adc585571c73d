"""Numbers with their nouns."""

from __future__ import annotations

from sftkit.runtime.script import counted


def test_a_number_agrees_with_its_noun() -> None:
    assert [counted(n, "bad row") for n in (0, 1, 2, 2000)] == [
        "0 bad rows",
        "1 bad row",
        "2 bad rows",
        "2,000 bad rows",
    ]
