"""The verdicts of a validation on wandb, read back from the offline file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from made_validation import result_of, trio
from wandb_file import Offline

from labs.validate.judge import speedup
from labs.validate.run import judged
from labs.validate.verdicts import send_result, speeds_of, values
from sftkit.config.schema import LogConfig
from sftkit.tracking.names import RUN_VALUES


def test_verdicts_are_tables_and_the_speed_up_is_a_number(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_TAGS", "mine")
    lines = [line | {"compile/recompiles": 2} for line in trio().compiled.lines]
    one = trio(compiled=replace(trio().compiled, lines=lines))
    result = judged(result_of(one))
    said = send_result(result, tmp_path / "validate" / "sft", LogConfig(wandb="offline"))
    assert said is not None
    assert "wandb sync" in said
    found = Offline(tmp_path / "validate" / "sft")
    assert (found.run["job_type"], found.run["display_name"], found.run["tags"]) == (
        "validate",
        "validate-sft",
        ["mine"],
    )
    summary = found.summed["summary"]
    assert summary["validate/speedup"] == pytest.approx(speedup(one))
    assert (summary["validate/failed"], found.summed["exit_code"]) == (1, 1)
    assert {name for name in summary if name.startswith("validate/")} - {
        "validate/verdicts",
        "validate/speed",
    } <= RUN_VALUES.keys()
    rows = found.table("validate/verdicts")
    assert [row["verdict"] for row in rows[:2]] == ["FAIL", "PASS"]
    assert len(rows) == len(result["verdicts"])
    (speed,) = found.table("validate/speed")
    assert (speed["layout"], speed["speedup"]) == ("packed", pytest.approx(speedup(one)))


def test_runs_that_failed_have_no_speed_up_and_no_dashboard_is_no_line(tmp_path: Path) -> None:
    result = judged(result_of(trio(), error="out of memory"))
    assert speeds_of(result) == []
    assert "validate/speedup" not in values(result["verdicts"], [])
    assert send_result(result, tmp_path, LogConfig(wandb="off")) is None
