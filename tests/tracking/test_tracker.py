"""metrics.jsonl is the record; a dashboard gets a copy; neither ever stops training."""

from __future__ import annotations

import json
import logging
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import preloaded
import pytest
from accelerate import Accelerator
from helpers import cpu_runtime
from wandb_file import Offline, records_of

from sftkit.config.schema import LogConfig
from sftkit.errors import CheckpointError, ConfigError, NonFiniteError, RecompileError, ReplicaError, SpikeError
from sftkit.reports.collect import newest_adapter_rows
from sftkit.rundir.files import drop_rows_after, read_metric_rows
from sftkit.runtime.start import Runtime
from sftkit.tracking.dashboard.remote import DashboardWriter, Ending, LoggedTable, wandb_mode
from sftkit.tracking.tracker import Tracker, eval_line, train_line

METRICS = {
    "train/loss": 1.5,
    "train/grad_norm": 0.5,
    "train/lr": 1e-3,
    "perf/tok_per_sec": 1000.0,
    "perf/target_tok_per_sec": 500.0,
    "perf/mfu": None,
    "perf/step_seconds": 0.1,
    "perf/data_wait_pct": 0.0,
    "mem/peak_gib": 1.0,
    "data/padding_pct": 2.0,
    "compile/graphs": 2,
    "compile/recompiles": 0,
    "compile/graph_breaks": 0,
    "compile/seconds": 3.0,
}


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Fake:
    """A dashboard that keeps what it gets, or does what it is told to with every row."""

    name, run_id = "wandb", "abc"

    def __init__(self, on_row: Callable[[], None] = lambda: None, on_finish: Callable[[], None] = lambda: None) -> None:
        self.on_row, self.on_finish = on_row, on_finish
        self.seen: list[tuple[Any, ...]] = []
        self.ending: Ending | None = None
        self.abandoned = False

    def row(self, step: int, values: dict[str, float | None]) -> None:
        self.on_row()
        self.seen.append(("row", step, values))

    def table(self, step: int, table: LoggedTable) -> None:
        self.seen.append(("table", step, table))

    def summary(self, values: dict[str, Any]) -> None:
        self.seen.append(("summary", values))

    def alert(self, title: str, step: int, text: str, level: str) -> None:
        self.seen.append(("alert", title, step, text, level))

    def finish(self, ending: Ending) -> None:
        self.on_finish()
        self.ending = ending

    def abandon(self) -> None:
        self.abandoned = True

    def where(self, complete: bool) -> str | None:
        return None if complete else "`wandb sync runs/x/wandb/run-1`"


def logged_remotely(folder: Path, dashboard: Fake) -> Tracker:
    tracker = Tracker(folder, LogConfig(wandb="off"), cpu_runtime(), {}).open()
    tracker._dashboards = [DashboardWriter(dashboard)]  # type: ignore[arg-type]
    return tracker


@cache
def wandb_records(folder: Path) -> list[dict[str, Any]]:
    """Every record of an offline run, through wandb's own reader."""
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    return records_of(file)


def test_every_logged_step_is_a_line_with_the_documented_names(tmp_path: Path, capsys) -> None:
    with Tracker(tmp_path, LogConfig(wandb="off"), cpu_runtime(), {}).open() as tracker:
        tracker.log_metrics(10, 100, METRICS)
        tracker.log_evals(10, {"val/loss": 2.0}, [{"prompt": "p", "reference": "r", "answer": "a"}])
    (row,) = rows(tmp_path / "metrics.jsonl")
    assert row["step"] == 10
    assert {k: row[k] for k in METRICS} == METRICS
    documented = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert [name for name in METRICS if f"`{name}`" not in documented] == []
    assert rows(tmp_path / "evals.jsonl")[0]["val/loss"] == 2.0
    assert rows(tmp_path / "samples.jsonl") == [{"step": 10, "prompt": "p", "reference": "r", "answer": "a"}]
    out = capsys.readouterr().out
    assert "step  10/100" in out
    assert "mfu" not in out  # which this hardware has none of


def test_a_line_ends_with_the_time_that_the_steps_left_take() -> None:
    values: dict[str, float | None] = {
        **METRICS,
        "perf/tok_per_sec": 231_029.0,
        "perf/mfu": 0.223,
        "mem/peak_gib": None,
    }
    assert train_line(700, 40_700, values) == (
        "step   700/40700  loss  1.5000  grad   0.500  lr 1.00e-03    231,029 tok/s  mfu 22.3%    0.100 s/step  wait  0.0%  "
        "pad  2.0%  mem     - GiB  graphs 2+0  eta 1:06:40"
    )
    assert "mfu" not in train_line(700, 1500, {**values, "perf/mfu": None})


def test_several_adapters_are_side_by_side_on_console_and_dashboard(tmp_path: Path, capsys) -> None:
    of_each = [{"name": "a", "rank": 8, "lr": 1e-3, "steps": 20}, {"name": "bee", "rank": 16, "lr": 1e-4, "steps": 20}]
    (tmp_path / "preflight.json").write_text(json.dumps({"adapters": of_each}))
    tracker, dashboard = Tracker(tmp_path, LogConfig(wandb="off"), cpu_runtime(), {"adapters": of_each}).open(), Fake()
    tracker._dashboards = [DashboardWriter(dashboard)]
    with tracker:
        for step, loss in ((10, 1.5), (20, 1.75)):
            tracker.log_metrics(step, 20, METRICS | {"train/loss/a": 1.25, "train/loss/bee": None})
            tracker.log_evals(step, {"val/a/loss": loss, "val/bee/loss": 2.0}, [])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "  loss of each: a 1.2500  bee      -"
    assert "  lr " not in lines[0]
    assert lines[-4:-2] == [
        "  evaluation at step 20:",
        "  adapter  rank  lr      steps  training loss  validation loss  best  at step",
    ]
    assert lines[-2:] == [
        "  a        8     0.001   20     1.25           1.75             1.5   10",
        "  bee      16    0.0001  20     –              2                2     10",
    ]
    table = next(one[2] for one in reversed(dashboard.seen) if one[0] == "table")
    assert table.name == "adapters"
    assert table.rows[0] == ["a", 8, 1e-3, 20, 1.25, 1.75, 1.5, 10.0]


def test_the_table_of_adapters_begins_with_the_lowest_validation_loss_and_ends_with_those_without(
    tmp_path: Path,
) -> None:
    (tmp_path / "preflight.json").write_text(json.dumps({"adapters": [{"name": name} for name in "abcd"]}))
    losses = {"val/b/loss": 2.0, "val/c/loss": 1.0, "val/d/loss": 1.5}
    (tmp_path / "evals.jsonl").write_text(json.dumps({"step": 1, **losses}) + "\n")
    assert [row["adapter"] for row in newest_adapter_rows(tmp_path)] == ["c", "d", "b", "a"]


@pytest.fixture(scope="module")
def offline_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with a real wandb run, whose steps go back once."""
    folder = tmp_path_factory.mktemp("offline")
    rt = Runtime(Accelerator(cpu=True), "fp32")
    with Tracker(folder, LogConfig(wandb="offline"), rt, {"optim": {"lr": 0.5}}).open() as tracker:
        for step, recompiles in ((10, 0), (5, 2), (11, 1)):
            tracker.log_metrics(step, 20, {**METRICS, "train/loss": 1.0 / step, "compile/recompiles": recompiles})
        for step, loss in ((11, 2.0), (20, 3.0)):
            sample = {"prompt": f"why {step}?", "reference": "r", "answer": "a" * 3000, "stop": "length"}
            result = {"task": "mmlu", "metric": "acc", "value": 0.5, "low": 0.4, "high": 0.6, "chance": 0.25}
            values = {"val/loss": loss, "eval/mmlu/acc": 0.5}
            file = folder / "evals" / f"step-{step:06d}" / "results.json"
            file.parent.mkdir(parents=True)
            file.write_text(json.dumps([{**result, "examples": 100, "settings": {"shots": 5}}]))
            tracker.log_evals(step, values, [sample])
        tracker.event("recompile", 11, "tensor 'x' size mismatch, expected 4, actual 5")
        tracker.event("nonfinite", 12, "step 12: the loss is not finite")
    return folder


def test_wandb_has_every_row_though_steps_go_back_and_evaluations_share_a_step(offline_run: Path) -> None:
    history = [record["history"]["item"] for record in wandb_records(offline_run) if record["type"] == "history"]
    assert [item["step"] for item in history if "train/loss" in item] == [10, 5, 11]
    assert [(item["step"], item["val/loss"]) for item in history if "val/loss" in item] == [(11, 2), (20, 3)]


def test_wandb_shows_every_metric_over_step_and_sums_up_as_documented(offline_run: Path) -> None:
    records = wandb_records(offline_run)
    defined = {record["metric"].get("name"): record["metric"] for record in records if record["type"] == "metric"}
    assert set(METRICS) - {"perf/mfu"} <= defined.keys()  # the one that is null is in no row
    assert {metric["step_metric"] for metric in defined.values()} == {"step"}
    summary: dict[str, Any] = {}
    for record in records:
        if record["type"] == "summary":
            summary |= record["summary"]["update"]
    assert summary["val/loss"] == {"min": 2}
    assert summary["eval/mmlu/acc"] == {"max": 0.5}
    assert summary["compile/recompiles"] == {"max": 2}
    assert summary["perf/tok_per_sec"] == {"mean": 1000}
    assert summary["train/loss"] == pytest.approx(1 / 11)


def test_events_are_alerts_and_lines_of_the_file(offline_run: Path) -> None:
    alerts = [record["alert"] for record in wandb_records(offline_run) if record["type"] == "alert"]
    assert [(alert["title"], alert["level"]) for alert in alerts] == [
        ("recompile after the warm-up", "WARN"),
        ("loss or gradient norm not finite", "ERROR"),
    ]
    assert alerts[0]["text"] == "step 11: tensor 'x' size mismatch, expected 4, actual 5"
    assert {alert["wait_duration"] for alert in alerts} == {"600000"}
    found = rows(offline_run / "events.jsonl")
    assert [(row["step"], row["kind"]) for row in found] == [(11, "recompile"), (12, "nonfinite")]
    assert found[0]["text"] == "tensor 'x' size mismatch, expected 4, actual 5"
    assert found[0]["time"] > 1e9


def test_the_samples_table_has_all_evaluations_and_results_have_their_intervals(offline_run: Path) -> None:
    (folder,) = offline_run.glob("wandb/offline-run-*/files/media/table")
    newest = max(folder.glob("samples_*.table.json"), key=lambda path: int(path.name.split("_")[1]))
    table = json.loads(newest.read_text())
    assert table["columns"] == ["step", "prompt", "reference", "answer", "stop"]
    assert [(row[0], row[1], len(row[3]), row[4]) for row in table["data"]] == [
        (11, "why 11?", 2000, "length"),
        (20, "why 20?", 2000, "length"),
    ]
    assert len(rows(offline_run / "samples.jsonl")[0]["answer"]) == 3000
    results = [json.loads(path.read_text()) for path in (folder / "eval").glob("results_*.table.json")]
    found = {table["data"][0][0]: dict(zip(table["columns"], table["data"][0], strict=True)) for table in results}
    assert found.keys() == {11, 20}
    assert found[11] == {
        "step": 11, "task": "mmlu", "metric": "acc", "value": 0.5, "low": 0.4, "high": 0.6, "chance": 0.25,
        "examples": 100,
    }  # fmt: skip


def test_the_run_has_its_settings(offline_run: Path) -> None:
    updates = [record["config"]["update"] for record in wandb_records(offline_run) if record["type"] == "config"]
    assert {"optim": {"lr": 0.5}} in updates


def test_a_resumed_run_continues_its_wandb_run(tmp_path: Path) -> None:
    ids = []
    for step in (0, 1):
        rt = Runtime(Accelerator(cpu=True), "fp32")
        with Tracker(
            tmp_path, LogConfig(wandb="offline"), rt, {}, step=step, run_id=ids[0] if ids else None
        ).open() as tracker:
            tracker.log_metrics(step + 1, 2, METRICS)
            ids.append(tracker.run_id)
    assert ids[0] == ids[1] is not None
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"), key=lambda path: path.stat().st_mtime)
    assert len(folders) == 2
    assert all(str(ids[0]) in path.name for path in folders)
    first, second = (Offline(path).summed["summary"] for path in folders)
    assert (first["run/state"], "run/error" in first) == ("finished", False)
    assert (second["run/state"], second["run/error"]) == ("finished", ""), "no longer that of an earlier end"


def gone() -> None:
    raise RuntimeError("server gone")


def test_a_dashboard_that_raises_costs_its_own_rows_and_is_complained_of_once(tmp_path: Path, caplog, capsys) -> None:
    dashboard = Fake(on_row=gone)
    with caplog.at_level(logging.WARNING, logger="sftkit"), logged_remotely(tmp_path, dashboard) as tracker:
        tracker.log_metrics(1, 2, METRICS)
        tracker.log_metrics(2, 2, METRICS)
    assert len(rows(tmp_path / "metrics.jsonl")) == 2
    assert caplog.text.count("server gone") == 1
    assert dashboard.ending == Ending("finished", 0, {"run/state": "finished"})
    assert "wandb: 2 rows were not sent; metrics.jsonl has all; `wandb sync" in capsys.readouterr().out


def test_a_dashboard_that_never_answers_holds_neither_training_nor_its_end(
    tmp_path: Path, caplog, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("sftkit.tracking.dashboard.remote.QUEUE_ROWS", 10)
    monkeypatch.setattr("sftkit.tracking.dashboard.remote.FINISH_SECONDS", 0.3)
    dashboard = Fake(on_row=lambda: threading.Event().wait())
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, logger="sftkit"), logged_remotely(tmp_path, dashboard) as tracker:
        for step in range(1, 101):
            tracker.log_metrics(step, 100, METRICS)
    assert time.monotonic() - began < 5
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == list(range(1, 101))
    assert caplog.text.count("has not answered for") == 1
    assert "wandb does not finish: no answer in time" in caplog.text
    assert dashboard.abandoned
    assert " rows were not sent; metrics.jsonl has all; `wandb sync" in capsys.readouterr().out


def test_a_slow_dashboard_gets_every_row_before_the_end(tmp_path: Path) -> None:
    dashboard = Fake(on_row=lambda: time.sleep(0.02))
    with logged_remotely(tmp_path, dashboard) as tracker:
        for step in range(1, 31):
            tracker.log_metrics(step, 30, METRICS)
    assert [seen[1] for seen in dashboard.seen] == list(range(1, 31))
    assert dashboard.ending == Ending("finished", 0, {"run/state": "finished"})


def test_a_dashboard_that_does_not_finish_is_left_after_a_while(tmp_path: Path, caplog, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sftkit.tracking.dashboard.remote.FINISH_SECONDS", 0.3)
    dashboard = Fake(on_finish=lambda: time.sleep(60))
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, logger="sftkit"), logged_remotely(tmp_path, dashboard):
        pass
    assert time.monotonic() - began < 5
    assert "wandb does not finish: no answer in time" in caplog.text
    assert dashboard.abandoned
    assert "wandb sync" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NonFiniteError("step 7: not finite"), "nonfinite"),
        (SpikeError("step 7: loss 9 is far above 1"), "spike"),
        (ReplicaError("step 7: ranks differ"), "replicas"),
        (CheckpointError("step-000007 could not be written"), "checkpoint_failed"),
        (RecompileError("guard"), "recompile"),
    ],
)
def test_what_ends_a_run_is_an_event_and_a_failed_run_on_the_dashboard(
    tmp_path: Path, error: Exception, kind: str
) -> None:
    dashboard = Fake()
    tracker = logged_remotely(tmp_path, dashboard)
    tracker.advance(7)
    with pytest.raises(type(error)), tracker:
        raise error
    (event,) = rows(tmp_path / "events.jsonl")
    assert (event["step"], event["kind"], event["text"]) == (7, kind, str(error))
    assert [seen[0] for seen in dashboard.seen] == ["alert"]
    assert dashboard.ending is not None
    assert dashboard.ending.exit_code == (2 if isinstance(error, ConfigError) else 1)
    assert dashboard.ending.summary == {"run/state": "failed", "run/error": str(error)}


def test_a_run_that_fails_is_a_failed_run_on_wandb_with_its_error_and_the_checks_so_far(tmp_path: Path) -> None:
    rt = Runtime(Accelerator(cpu=True), "fp32")
    tracker = Tracker(tmp_path, LogConfig(wandb="offline"), rt, {}).open()
    tracker.log_metrics(7, 20, METRICS)
    check = {"name": "No recompiles", "ok": False, "found": "1", "expected": "0", "how": "records"}
    (tmp_path / "proof.json").write_text(json.dumps({"rows": [check]}))  # as train.proof.write_proof_on_error leaves it
    with pytest.raises(NonFiniteError), tracker:
        raise NonFiniteError("step 8: not finite")
    found = Offline(tmp_path)
    assert (found.summed["state"], found.summed["exit_code"]) == ("failed", 1)
    assert found.summed["summary"]["run/state"] == "failed"
    assert found.summed["summary"]["run/error"] == "step 8: not finite"
    assert found.summed["summary"]["proof/failed"] == 1
    assert [row["verdict"] for row in found.table("proof")] == ["FAIL"]


def test_waiting_for_data_in_three_lines_in_a_row_is_one_event_and_the_first_line_does_not_count(
    tmp_path: Path,
) -> None:
    tracker = Tracker(tmp_path, LogConfig(wandb="off"), cpu_runtime(), {}).open()
    for step, wait in enumerate([90.0, 25.0, 30.0, 5.0, 21.0, 22.0, 23.0, 24.0, 20.0], start=1):
        tracker.log_metrics(step, 20, {**METRICS, "perf/data_wait_pct": wait})
    (event,) = rows(tmp_path / "events.jsonl")
    assert (event["step"], event["kind"]) == (7, "starvation")
    assert "23 %" in event["text"]


def test_events_of_a_list_that_grows_are_told_once_and_survive_a_resume(tmp_path: Path, capsys) -> None:
    tracker = Tracker(tmp_path, LogConfig(wandb="off"), cpu_runtime(), {}).open()
    tracker.new_events("recompile", 5, ["a.py:1"])
    tracker.new_events("recompile", 9, ["a.py:1", "b.py:2"])
    assert capsys.readouterr().out.splitlines() == ["step 5: a.py:1", "step 9: b.py:2"]
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"step": 9, "ki')  # killed in the middle
    Tracker(tmp_path, LogConfig(wandb="off"), cpu_runtime(), {}, step=4).open().event("spike", 6, "step 6: high")
    assert [row["step"] for row in rows(tmp_path / "events.jsonl")] == [5, 9, 6]
    assert capsys.readouterr().out.splitlines() == ["step 6: high"]


def test_the_console_shows_all_values_of_a_few_and_one_of_each_of_many_tasks() -> None:
    assert eval_line({"val/loss": 2.0, "eval/copy/acc": 0.5, "eval/copy/low": 0.4}) == "loss 2.000  copy/acc 0.500"
    many = {f"eval/task{i}/{name}": 0.1 * i for i in range(9) for name in ("acc", "acc_norm", "low", "high")}
    results = [{"task": f"task{i}", "value": 0.1 * i} for i in range(3)]
    line = eval_line({"val/loss": 2.0, "eval/centred_mean": 0.3, **many}, results)
    assert line == "loss 2.000  centred_mean 0.300  task0 0.000  task1 0.100  task2 0.200"
    own = {"val/loss": 2.0, "eval/centred_mean": 0.7, "eval/families/acc": 0.7, **many}
    assert eval_line(own, [{"task": "families", "value": 0.7}]) == "loss 2.000  families 0.700"
    both = [{"task": "captions", "metric": name, "value": 0.5} for name in ("exact_match", "token_f1")]
    assert eval_line({"val/loss": 2.0}, both) == "loss 2.000  captions/exact_match 0.500  captions/token_f1 0.500"


def test_rows_with_line_separators_in_a_text_are_read_back_whole(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, LogConfig(wandb="off"), cpu_runtime(), {}).open()
    tracker.log_evals(1, {}, [{"prompt": "a\u2028b\x85c", "reference": "", "answer": "", "stop": "length"}])
    drop_rows_after(tmp_path / "samples.jsonl", 1)
    assert [row["prompt"] for row in read_metric_rows(tmp_path / "samples.jsonl")] == ["a\u2028b\x85c"]


def test_evaluations_of_the_stretch_that_a_resume_repeats_go_with_their_rows(tmp_path: Path) -> None:
    def names(first_step: int) -> list[str]:
        Tracker(tmp_path, LogConfig(wandb="off"), cpu_runtime(), {}, step=first_step).open()
        return sorted(path.name for path in (tmp_path / "evals").iterdir())

    for name in ("step-000000", "step-000004", "step-000006", "final", "mine"):
        (tmp_path / "evals" / name).mkdir(parents=True)
        (tmp_path / "evals" / name / "results.json").write_text('[{"settings": {"model": "runs/x/step-000006"}}]')
    assert names(first_step=6) == ["final", "mine", "step-000000", "step-000004", "step-000006"]
    assert names(first_step=4) == ["mine", "step-000000", "step-000004"]


def test_a_full_disk_costs_lines_and_not_the_run(tmp_path: Path, caplog) -> None:
    tracker = Tracker(tmp_path, LogConfig(wandb="off"), cpu_runtime(), {}).open()
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING, logger="sftkit"):
        tracker.log_metrics(1, 2, METRICS)
    assert "1 lines are lost ([Errno 28]" in caplog.text


@contextmanager
def full_at(size: int) -> Iterator[None]:
    """Files take so many bytes: what does not fit is written as far as it does, as on a disk that fills."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_leaves_whole_lines_and_events_wait_for_room(tmp_path: Path, caplog) -> None:
    for name in ("metrics", "events"):  # so long that nothing else comes near the limit
        row = json.dumps({"step": 0, "text": "é" * 500_000}, ensure_ascii=False)
        (tmp_path / f"{name}.jsonl").write_text(f"{row}\n")
    with Tracker(tmp_path, LogConfig(wandb="off"), cpu_runtime(), {}).open() as tracker:
        tracker.log_metrics(1, 9, METRICS)
        with full_at((tmp_path / "metrics.jsonl").stat().st_size + 100):
            tracker.log_metrics(2, 9, METRICS)
            tracker.event("checkpoint_failed", 2, "step 2: a checkpoint was not written" + "." * 5000)
            tracker.log_metrics(3, 9, METRICS)
            tracker.event("spike", 3, "step 3: a spike" + "." * 5000)
        assert "1 lines are lost" in caplog.text
        assert "2 lines wait for room" in caplog.text
        tracker.log_metrics(4, 9, METRICS)
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [0, 1, 4]
    assert [row.get("kind") for row in rows(tmp_path / "events.jsonl")] == [None, "checkpoint_failed", "spike"]


def test_events_that_a_full_disk_did_not_take_are_written_at_the_end(tmp_path: Path) -> None:
    with Tracker(tmp_path, LogConfig(wandb="off"), cpu_runtime(), {}).open() as tracker:
        (tmp_path / "events.jsonl").symlink_to("/dev/full")
        tracker.event("spike", 3, "a spike")
        (tmp_path / "events.jsonl").unlink()
    assert [row["step"] for row in rows(tmp_path / "events.jsonl")] == [3]


PYTHONPATH = f"{preloaded.PYTHONPATH}{os.pathsep}tests/tracking"

ONLINE = """
import sys
from pathlib import Path
from accelerate import Accelerator
from test_tracker import METRICS
from sftkit.config.schema import LogConfig
from sftkit.runtime.start import Runtime
from sftkit.tracking.tracker import Tracker

rt = Runtime(Accelerator(cpu=True), "fp32")
with Tracker(Path(sys.argv[1]), LogConfig(wandb="online"), rt, {}).open() as tracker:
    for step in (1, 2):
        tracker.log_metrics(step, 2, METRICS)
print("trained", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("server", ["refuses", "accepts and says nothing"])
def test_a_wandb_server_that_is_down_costs_seconds_and_no_row(tmp_path: Path, server: str) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if server != "refuses":
            listening.listen(16)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        home = {
            "HOME": str(tmp_path),
            "WANDB_BASE_URL": url,
            "WANDB_API_KEY": "0" * 40,
            "PYTHONPATH": PYTHONPATH,
        }
        done = preloaded.run(["-c", ONLINE, tmp_path], env={**os.environ, **home}, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "trained" in done.stdout
    assert "wandb online does not start" in done.stderr
    assert "wandb sync" in done.stdout
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [1, 2]


WITHOUT_A_SERVICE = """
import sys
from pathlib import Path
import psutil
from accelerate import Accelerator
from test_tracker import METRICS
from sftkit.config.schema import LogConfig
from sftkit.runtime.start import Runtime
from sftkit.tracking.tracker import Tracker

rt = Runtime(Accelerator(cpu=True), "fp32")
with Tracker(Path(sys.argv[1]), LogConfig(wandb="offline"), rt, {}).open() as tracker:
    for step in range(1, 41):
        tracker.log_metrics(step, 40, METRICS)
        if step == 2:
            services = psutil.Process().children(recursive=True)
            assert services
            for process in services:
                process.kill()
            psutil.wait_procs(services)
print("trained", flush=True)
"""


def test_a_wandb_whose_own_process_dies_in_the_middle_costs_no_row_and_no_failure_and_no_file_has_the_key(
    tmp_path: Path,
) -> None:
    without_a_service = {name: value for name, value in os.environ.items() if "WANDB" not in name}  # of an earlier test
    key = "c0ffee" * 6 + "beef"
    home = {"HOME": str(tmp_path), "PYTHONPATH": PYTHONPATH, "WANDB_API_KEY": key}
    done = preloaded.run(["-c", WITHOUT_A_SERVICE, tmp_path], env={**without_a_service, **home}, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "trained" in done.stdout
    assert done.stderr.count("wandb does not take a row") == 1
    assert "wandb sync" in done.stdout
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == list(range(1, 41))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert [path for path in files if key.encode() in path.read_bytes()] == []
    assert key not in done.stdout + done.stderr


STOPPED_SERVICE = """
import sys, time
from pathlib import Path
import psutil
from accelerate import Accelerator
from test_tracker import METRICS
from sftkit.tracking.dashboard import remote
from sftkit.config.schema import LogConfig
from sftkit.runtime.start import Runtime
from sftkit.tracking.tracker import Tracker

remote.FINISH_SECONDS = 3.0
rt = Runtime(Accelerator(cpu=True), "fp32")
with Tracker(Path(sys.argv[1]), LogConfig(wandb="offline"), rt, {}).open() as tracker:
    tracker.log_metrics(1, 2000, METRICS)
    services = psutil.Process().children(recursive=True)
    assert services
    for process in services:
        process.suspend()
    began = time.monotonic()
    for step in range(2, 2001):
        tracker.log_metrics(step, 2000, METRICS)
    assert time.monotonic() - began < 20
print("trained", flush=True)
"""


@pytest.mark.slow
def test_a_wandb_process_that_is_stopped_costs_no_row_and_does_not_hold_the_end_of_python(tmp_path: Path) -> None:
    without_a_service = {name: value for name, value in os.environ.items() if "WANDB" not in name}
    home = {"HOME": str(tmp_path), "PYTHONPATH": PYTHONPATH}
    done = preloaded.run(["-c", STOPPED_SERVICE, tmp_path], env={**without_a_service, **home}, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "trained" in done.stdout
    assert done.stderr.count("wandb has not answered for 1000 rows") == 1
    assert "wandb does not finish: no answer in time" in done.stderr
    assert "rows were not sent" in done.stdout
    assert len(rows(tmp_path / "metrics.jsonl")) == 2000


def test_wandb_is_online_with_a_key_and_offline_without(monkeypatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert wandb_mode(None) == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert wandb_mode(None) == "online"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert wandb_mode(None) == "offline"


def test_resuming_drops_the_rows_of_the_lost_stretch_and_half_written_ones(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s}) + "\n" for s in (1, 2, 3)) + '{"step": 4, "tr')
    drop_rows_after(path, 2)
    assert [row["step"] for row in rows(path)] == [1, 2]


@pytest.mark.parametrize("name", ["metrics.jsonl", "evals.jsonl"])
def test_a_new_tracker_starts_at_its_first_step(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"step": 5}\n')
    with Tracker(tmp_path, LogConfig(wandb="offline"), cpu_runtime(), {}, step=4):
        pass  # nothing is touched before the run has done a step
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert rows(tmp_path / name) == [{"step": 5}]
    Tracker(tmp_path, LogConfig(wandb="off"), cpu_runtime(), {}, step=4).open()
    assert rows(tmp_path / name) == []
