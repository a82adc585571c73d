"""A real run on wandb, offline, read back from its file: identity, config, tables, summary, axes, every panel's names."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import preloaded
import pytest
from helpers import ROOT
from wandb_file import Offline

from sftkit.reports.values import applies
from sftkit.tracking.names import RUN_VALUES, TABLES, find_metric

ENV = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
TINY = (
    *("train.max_steps=4", "train.global_batch_size=4", "train.micro_batch_size=2", "compile.backend=eager"),
    *("log.every=1", "log.wandb=offline", "eval.at_start=true", "eval.max_examples=1"),
    *("eval.samples=1", "eval.max_new_tokens=4", "checkpoint.every=2"),
    *(
        "data.train=[{path: 'builtin:docs', max_rows: 20}, {path: 'builtin:docs', name: more, sample: {rows: 10}}]",
        "data.val=[{path: 'builtin:docs', split: heldout, max_rows: 2}]",
    ),
    "model.train_tokenizer.sources=[{path: 'builtin:docs', max_rows: 20}]",
)


def command(folder: Path, *own: str) -> list[str]:
    where = (f"run.dir={folder}/demo/base", f"data.cache_dir={folder}/cache")
    return ["scripts/base_train.py", "recipes/smoke/base.yaml", *TINY, *where, *own]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wandb")
    done = preloaded.run(command(folder, "log.project=first-look"), env={**ENV, "WANDB_TAGS": "mine"})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return folder / "demo" / "base"


@pytest.fixture(scope="module")
def offline(demo: Path) -> Offline:
    return Offline(demo)


def test_a_run_has_its_chain_stage_tags_and_notes(offline: Offline) -> None:
    assert (offline.run["run_group"], offline.run["job_type"]) == ("demo", "base")
    assert (offline.run["display_name"], offline.run["project"]) == ("demo-base", "first-look")
    assert offline.run["tags"][0] == "mine"
    assert {"one process", "reference", "packed"} < set(offline.run["tags"])
    assert re.search(
        r"qwen3 with 0\.\d M parameters on docs, more \(\d+ documents, .*packed rows.* CPU",
        offline.run["notes"],
    )


def test_the_config_has_what_was_resolved_beside_the_recipe_and_where_it_ran(offline: Offline) -> None:
    config = offline.summed["config"]
    assert config["optim"]["name"] == "auto"
    resolved, environment = config["resolved"], config["environment"]
    assert (resolved["optimizer"], resolved["attention"], resolved["stage"]) == ("adamw", "reference", "base")
    assert (resolved["row_length"], resolved["shapes"], resolved["parameters"] > 1e5) == (128, ["2x128"], True)
    assert resolved["trained_parameters"] == resolved["parameters"]
    assert environment["packages"]["torch"]
    assert {"git", "device", "world_size", "python"} < environment.keys()


def test_proof_and_preflight_are_tables_and_values_of_the_run(demo: Path, offline: Offline) -> None:
    proof = json.loads((demo / "proof.json").read_text())["rows"]
    shown = {row["check"]: row["verdict"] for row in offline.table("proof")}
    verdicts = {True: "PASS", False: "FAIL", None: "not checked"}
    assert shown == {check["name"]: verdicts[check["ok"]] if applies(check) else "does not apply" for check in proof}
    summary = offline.summed["summary"]
    assert summary["proof/passed"] == sum(check["ok"] is True for check in proof) > 8
    assert summary["proof/failed"] == sum(check["ok"] is False for check in proof)
    preflight = json.loads((demo / "preflight.json").read_text())
    assert summary["preflight/documents"] == sum(row["documents"] for row in preflight["sources"][:2])
    assert [row["split"] for row in offline.table("preflight/sources")] == ["train", "train", "val"]
    assert len(offline.table("preflight/layouts")) == len(preflight["layouts"])


def test_every_row_can_be_drawn_over_tokens_flops_and_seconds(demo: Path, offline: Offline) -> None:
    rows = [row for row in offline.history if "train/loss" in row or "val/loss" in row]
    assert all({"train/tokens", "train/flops", "train/seconds"} <= row.keys() for row in rows)
    assert len(rows) == 6
    evaluated = [(row["step"], row["train/tokens"]) for row in rows if "val/loss" in row]
    logged = {row["step"]: row["train/tokens"] for row in rows if "train/loss" in row}
    assert evaluated == [(0, 0), (4, logged[4])]
    assert "train/tokens" not in json.loads((demo / "evals.jsonl").read_text().splitlines()[0])


def test_means_leave_out_the_first_window(demo: Path, offline: Offline) -> None:
    rows = [json.loads(line) for line in (demo / "metrics.jsonl").read_text().splitlines()]
    speeds = [row["perf/tok_per_sec"] for row in rows]
    assert offline.summed["summary"]["perf/tok_per_sec"] == {"mean": pytest.approx(sum(speeds[1:]) / 3)}


def test_the_end_of_the_run_is_told(offline: Offline) -> None:
    assert (offline.summed["state"], offline.summed["exit_code"]) == ("finished", 0)
    assert offline.summed["summary"]["run/state"] == "finished"


def test_everything_that_is_sent_is_documented(offline: Offline) -> None:
    own = {"step", *TABLES}
    every = {name for row in offline.history for name in row if not name.startswith("_")} - own
    sent = {name for name in every if not name.startswith(tuple(f"{table}." for table in TABLES))}
    assert [name for name in sorted(sent) if find_metric(name) is None] == []
    beside = {name for name in offline.summed["summary"] if not name.startswith("_")} - sent - own
    assert sorted(beside - RUN_VALUES.keys()) == []


def test_every_panel_and_column_of_the_workspace_has_its_name_in_the_run(offline: Offline) -> None:
    pytest.importorskip("wandb_workspaces")
    from sftkit.tracking.dashboard import panels

    view = panels.workspace("me", "p")
    history, summary = {name for row in offline.history for name in row}, offline.summary_keys()
    elsewhere = {"perf/mfu", "mem/ooms.max", "perf/mfu.mean", "validate/speedup", "validate/failed"}  # no GPU; validate
    for section in panels.spec(view)["section"]["panelBankConfig"]["sections"]:
        for panel in section["panels"]:
            config = panel["config"]
            if panel["viewType"] == "Scalar Chart":
                assert config["metrics"][0].removeprefix("summary_metrics.") in summary | elsewhere, config
            elif panel["viewType"] == "Run History Line Plot":
                pattern = config.get("metricRegex")
                assert {*config["metrics"], config["xAxis"]} <= history | elsewhere, config
                assert pattern is None or any(re.search(pattern, name) for name in history), config
            else:
                text = json.dumps(config)
                assert any(f'"{name}"' in text and name in summary for name in TABLES), text[:300]
    columns = view.runset_settings.pinned_columns
    named = {column.removeprefix("summary:") for column in columns if column.startswith("summary:")}
    assert named <= summary | elsewhere


@pytest.mark.slow
def test_a_run_that_is_stopped_says_so(tmp_path: Path) -> None:
    words = command(
        tmp_path, "train.max_steps=100000", "compile.enabled=false", "eval.at_start=false", "eval.every=null"
    )
    process = preloaded.Process(words, env=ENV)
    metrics, deadline = tmp_path / "demo" / "base" / "metrics.jsonl", time.monotonic() + 240
    while not (metrics.exists() and metrics.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=240)
    found = Offline(tmp_path / "demo" / "base")
    assert found.summed["exit_code"] == 128 + signal.SIGTERM
    assert found.summed["summary"]["run/state"] == "preempted"
    assert found.summed["summary"]["run/signal"] == "SIGTERM"
    assert [record for record in found.records if record["type"] == "preempting"]


@pytest.mark.slow
def test_a_run_with_a_dashboard_leaves_no_frame_of_a_spinner_on_a_terminal(tmp_path: Path) -> None:
    """wandb and libraries draw spinners and bars where stderr is a terminal; a line of ours may come in between."""
    screen, terminal = pty.openpty()
    words = [sys.executable, *command(tmp_path, "eval.at_start=false")]
    process = subprocess.Popen(words, cwd=ROOT, env=ENV, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown = b""
    with suppress(OSError):  # the end of a terminal whose last process has closed it
        while part := os.read(screen, 4096):
            shown += part
    text = shown.decode()
    assert process.wait() == 0, text[-3000:]
    assert "the run is kept on disk" in text
    assert re.findall(r"\r(?!\r?\n)|\x1b\[[0-9;]*[A-HJKSTfsu]|[\u2800-\u28ff]", text) == []
