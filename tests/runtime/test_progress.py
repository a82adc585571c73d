"""What a user sees while something takes long: a line on stderr, once for all ranks."""

from __future__ import annotations

import pytest

from sftkit.runtime.script import working


@pytest.mark.parametrize(("rank", "shown"), [("0", "tokenizing [red]rows\\x1b[2J\n"), ("1", "")])
def test_what_takes_long_is_a_line_of_stderr_and_on_other_ranks_nothing(
    rank: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    with working("tokenizing [red]rows\x1b[2J"):
        assert capsys.readouterr() == ("", shown)
