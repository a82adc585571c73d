"""A save that fails in a real run: an event, an alert on the dashboard, a field of run_status.json, and then none."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import resume_worker
from accelerate import Accelerator
from resume_worker import run
from wandb_file import records_of

from sftkit.checkpoint.checkpoint import Checkpoints
from sftkit.config.schema import LogConfig
from sftkit.rundir.names import step_dirs
from sftkit.rundir.status import RunStatus
from sftkit.runtime.start import Runtime

LIMIT = 20_000
"Bytes of a file: less than the weights of the tiny model, more than what is logged."


@pytest.fixture
def alerts(tmp_path: Path) -> Any:
    """What wandb's own reader finds of the alerts of an offline run."""

    def read() -> list[dict[str, Any]]:
        (file,) = tmp_path.glob("run/wandb/offline-run-*/*.wandb")
        return [record["alert"] for record in records_of(file) if record["type"] == "alert"]

    return read


def test_a_save_that_fails_is_an_event_an_alert_and_a_field_of_the_status_until_one_succeeds(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, alerts: Any
) -> None:
    plain, save, failed = resume_worker.config, Checkpoints.save, []
    ended = RunStatus.save_ended

    def with_wandb(folder: Path, log_every: int) -> Any:
        return replace(plain(folder, log_every), log=LogConfig(every=log_every, wandb="offline"))

    def on_a_small_quota(self: Checkpoints, step: int, state: dict[str, Any], wait: bool = False) -> Path:
        if step != 10:
            return save(self, step, state, wait=wait)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, hard))
        try:
            folder = save(self, step, state, wait=wait)
            self.finish()
            return folder
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def noted(self: RunStatus, step: int, failure: str | None) -> None:
        ended(self, step, failure)
        failed.append(json.loads((tmp_path / "run" / "run_status.json").read_text())["failed_save"])

    monkeypatch.setattr(resume_worker, "config", with_wandb)
    monkeypatch.setattr(Checkpoints, "save", on_a_small_quota)
    monkeypatch.setattr(RunStatus, "save_ended", noted)
    rt = Runtime(Accelerator(cpu=True), "fp32")
    rt.open_status(tmp_path / "run").open(tmp_path / "run")
    (tmp_path / "run").mkdir()
    rt.open_status(tmp_path / "run").begin({})
    run(tmp_path / "run", tokenizer, rt)
    assert [folder.name for folder in step_dirs(tmp_path / "run")] == ["step-000005", "step-000014"]
    before, now, after = failed
    assert (before, after) == (None, None)
    assert (now["step"], "File too large" in now["error"]) == (10, True)
    status = json.loads((tmp_path / "run" / "run_status.json").read_text())
    assert (status["status"], status["failed_save"]) == ("finished", None)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["kind"] == "checkpoint_failed"]
    assert event["step"] == 10
    assert event["text"].startswith("checkpoint not written: ")
    assert "File too large" in event["text"]
    (alert,) = [alert for alert in alerts() if alert["title"] == "checkpoint not written"]
    assert (alert["level"], "File too large" in alert["text"]) == ("ERROR", True)
