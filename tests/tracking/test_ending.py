"""How a dashboard learns that a run was stopped or has failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sftkit.errors import ConfigError, NonFiniteError
from sftkit.rundir.status import RunStatus
from sftkit.tracking.dashboard.remote import KILLED, Ending, Means, Wandb, ending_of


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({"status": "finished", "signal": None}, Ending("finished", 0, {"run/state": "finished"})),
        (
            {"status": "stopped", "signal": "SIGINT"},
            Ending("stopped", 130, {"run/state": "stopped", "run/signal": "SIGINT"}),
        ),
        (
            {"status": "preempted", "signal": "SIGTERM"},
            Ending("preempted", 143, {"run/state": "preempted", "run/signal": "SIGTERM"}),
        ),
        ({"status": "preempted", "signal": None}, Ending("preempted", 124, {"run/state": "preempted"})),
    ],
)
def test_a_run_that_was_told_to_stop_ends_with_its_signal_or_the_time_limit(
    tmp_path: Path, status: dict[str, Any], expected: Ending
) -> None:
    (tmp_path / "run_status.json").write_text(json.dumps(status))
    assert ending_of(tmp_path, None, None) == expected


def test_a_failed_run_tells_the_cause_and_not_what_it_did_to_this_rank(tmp_path: Path) -> None:
    own, other = RunStatus(tmp_path, 0, 2), RunStatus(tmp_path, 1, 2)
    other.at(7, "step")
    other.failed(NonFiniteError("step 7: not finite"))
    lost = ending_of(tmp_path, own, RuntimeError("gloo: connection closed by peer"))
    assert lost == Ending(
        "failed", 1, {"run/state": "failed", "run/error": "rank 1 failed at step 7 (step): step 7: not finite"}
    )
    assert ending_of(tmp_path, None, ConfigError("data.train: empty")).exit_code == 2
    assert ending_of(tmp_path, None, KeyError("x")).summary["run/error"] == "KeyError: 'x'"


def test_a_secret_in_the_text_of_an_error_is_not_sent(tmp_path: Path) -> None:
    told = ending_of(tmp_path, None, OSError("https://me:passw0rd@host/x: refused")).summary["run/error"]
    assert told == "OSError: its text holds what looks like a URL with a password, and is in run_status.json alone"


class FakeRun:
    """What a wandb run is told at its end."""

    id, dir = "abc", "/x/files"

    def __init__(self) -> None:
        self.summary: dict[str, Any] = {}
        self.told: list[Any] = []

    def define_metric(self, *_: Any, **__: Any) -> None:
        pass

    def mark_preempting(self) -> None:
        self.told.append("preempting")

    def finish(self, exit_code: int) -> None:
        self.told.append(exit_code)


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        (Ending("finished", 0, {}), [0]),
        (Ending("failed", 1, {}), [1]),
        (Ending("stopped", 130, {}), [KILLED]),
        (Ending("preempted", 143, {}), ["preempting", 143]),
    ],
)
def test_wandb_shows_a_stopped_run_as_killed_and_a_preempted_one_as_preempted(ending: Ending, told: list[Any]) -> None:
    run = FakeRun()
    Wandb(run, "offline").finish(ending)
    assert run.told == told


def test_means_leave_out_the_first_line_of_a_start_unless_it_is_the_only_one() -> None:
    means = Means()
    assert means.add({"perf/step_seconds": 9.0, "train/loss": 2.0}) == {"perf/step_seconds": 9.0}
    assert means.add({"perf/step_seconds": 1.0}) == {"perf/step_seconds": 1.0}
    assert means.add({"perf/step_seconds": 3.0, "perf/mfu": 0.4}) == {"perf/step_seconds": 2.0, "perf/mfu": 0.4}
    assert means.add({"val/loss": 1.0}) == {}
