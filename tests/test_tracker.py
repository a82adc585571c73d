"""metrics.jsonl is the record; wandb mirrors it; neither ever stops training."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from accelerate import Accelerator
from helpers import cpu_runtime

from sftkit.config import LogConfig
from sftkit.runtime import Runtime
from sftkit.tracker import Tracker, drop_rows_after, wandb_mode

METRICS = {
    "train/loss": 1.5,
    "train/grad_norm": 0.5,
    "train/lr": 1e-3,
    "perf/tok_per_sec": 1000.0,
    "perf/target_tok_per_sec": 500.0,
    "perf/mfu": None,
    "perf/step_seconds": 0.1,
    "perf/data_wait_pct": 0.0,
    "perf/peak_memory_gib": 1.0,
    "data/padding_pct": 2.0,
    "compile/graphs": 2,
    "compile/recompiles": 0,
    "compile/graph_breaks": 0,
    "compile/seconds": 3.0,
}


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_logged_step_is_a_line_with_the_documented_names(tmp_path: Path, capsys) -> None:
    with Tracker(tmp_path, LogConfig(wandb="off"), cpu_runtime(), {}) as tracker:
        tracker.log_metrics(10, 100, METRICS)
        tracker.log_evals(10, {"val/loss": 2.0}, [{"prompt": "p", "reference": "r", "answer": "a"}])
    (row,) = rows(tmp_path / "metrics.jsonl")
    assert row["step"] == 10
    assert {k: row[k] for k in METRICS} == METRICS
    documented = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
    assert [name for name in METRICS if f"`{name}`" not in documented] == []
    assert rows(tmp_path / "evals.jsonl")[0]["val/loss"] == 2.0
    assert rows(tmp_path / "samples.jsonl") == [{"step": 10, "prompt": "p", "reference": "r", "answer": "a"}]
    out = capsys.readouterr().out
    assert "step  10/100" in out
    assert "mfu    -" in out


def test_an_offline_wandb_run_can_be_read_back(tmp_path: Path) -> None:
    rt = Runtime(Accelerator(cpu=True, log_with="wandb"), "fp32")
    with Tracker(tmp_path, LogConfig(wandb="offline"), rt, {"optim": {"lr": 0.5}}) as tracker:
        for step in (1, 2, 3):
            tracker.log_metrics(step, 3, {**METRICS, "train/loss": 1.0 / step})
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    wandb = shutil.which("wandb", path=str(Path(sys.executable).parent))
    assert wandb is not None
    done = subprocess.run([wandb, "leet", "inspect", "--json", str(file)], capture_output=True, text=True, timeout=60)
    history = [line for line in done.stdout.splitlines() if '"type":"history"' in line.replace(" ", "")]
    assert len(history) == 3, done.stdout[:2000] + done.stderr[:2000]
    assert "train/loss" in history[0]
    assert "perf/tok_per_sec" in history[0]


def test_a_resumed_run_continues_its_wandb_run(tmp_path: Path) -> None:
    ids = []
    for step in (0, 1):
        rt = Runtime(Accelerator(cpu=True, log_with="wandb"), "fp32")
        with Tracker(tmp_path, LogConfig(wandb="offline"), rt, {}, step, ids[0] if ids else None) as tracker:
            tracker.log_metrics(step + 1, 2, METRICS)
            ids.append(tracker.run_id)
    assert ids[0] == ids[1] is not None
    folders = [path.name for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert len(folders) == 2
    assert all(str(ids[0]) in name for name in folders)


def test_a_tracker_that_raises_does_not_stop_training(tmp_path: Path, caplog) -> None:
    class Broken:
        def log(self, _: object) -> None:
            raise RuntimeError("server gone")

    tracker = Tracker(tmp_path, LogConfig(wandb="off"), cpu_runtime(), {})
    tracker._wandb = Broken()
    with caplog.at_level(logging.WARNING, logger="sftkit"):
        tracker.log_metrics(1, 2, METRICS)
        tracker.log_metrics(2, 2, METRICS)
    assert len(rows(tmp_path / "metrics.jsonl")) == 2
    assert caplog.text.count("server gone") == 1


def test_a_wandb_that_breaks_in_the_middle_is_closed_and_its_folder_is_told(tmp_path: Path, caplog, capsys) -> None:
    class Broken:
        dir = str(tmp_path / "wandb" / "run-1" / "files")
        closed = False

        def log(self, _: object) -> None:
            raise RuntimeError("server gone")

        def finish(self, exit_code: int) -> None:
            self.closed = True

    tracker, run = Tracker(tmp_path, LogConfig(wandb="off"), cpu_runtime(), {}), Broken()
    tracker._wandb, tracker._wandb_dir, tracker._mode = run, tmp_path / "wandb" / "run-1", "online"
    with tracker:
        tracker.log_metrics(1, 2, METRICS)
    assert run.closed
    assert f"`wandb sync {tmp_path}/wandb/run-1`" in capsys.readouterr().out


def test_a_wandb_that_does_not_finish_is_left_after_a_while(tmp_path: Path, caplog, capsys, monkeypatch) -> None:
    class Hanging:
        def finish(self, exit_code: int) -> None:
            time.sleep(60)

    monkeypatch.setattr("sftkit.tracker.FINISH_SECONDS", 0.3)
    tracker = Tracker(tmp_path, LogConfig(wandb="off"), cpu_runtime(), {})
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, logger="sftkit"), tracker:
        tracker._wandb, tracker._mode = Hanging(), "online"
    assert time.monotonic() - began < 5
    assert "wandb does not finish: no answer in time" in caplog.text
    assert "wandb sync" in capsys.readouterr().out


def test_a_full_disk_costs_lines_and_not_the_run(tmp_path: Path, caplog) -> None:
    tracker = Tracker(tmp_path, LogConfig(wandb="off"), cpu_runtime(), {})
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING, logger="sftkit"):
        tracker.log_metrics(1, 2, METRICS)
    assert "1 lines are lost ([Errno 28]" in caplog.text


ONLINE = """
import sys
from pathlib import Path
from accelerate import Accelerator
from test_tracker import METRICS
from sftkit.config import LogConfig
from sftkit.runtime import Runtime
from sftkit.tracker import Tracker

rt = Runtime(Accelerator(cpu=True, log_with="wandb"), "fp32")
with Tracker(Path(sys.argv[1]), LogConfig(wandb="online"), rt, {}) as tracker:
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
        home = {"HOME": str(tmp_path), "WANDB_BASE_URL": url, "WANDB_API_KEY": "0" * 40, "PYTHONPATH": "tests"}
        done = subprocess.run(
            [sys.executable, "-c", ONLINE, str(tmp_path)],
            env={**os.environ, **home}, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=120,
        )  # fmt: skip
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
from sftkit.config import LogConfig
from sftkit.runtime import Runtime
from sftkit.tracker import Tracker

rt = Runtime(Accelerator(cpu=True, log_with="wandb"), "fp32")
with Tracker(Path(sys.argv[1]), LogConfig(wandb="offline"), rt, {}) as tracker:
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


def test_a_wandb_whose_own_process_dies_in_the_middle_costs_no_row_and_no_failure(tmp_path: Path) -> None:
    without_a_service = {name: value for name, value in os.environ.items() if "WANDB" not in name}  # of an earlier test
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_SERVICE, str(tmp_path)],
        env={**without_a_service, "HOME": str(tmp_path), "PYTHONPATH": "tests"},
        cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "trained" in done.stdout
    assert done.stderr.count("wandb does not take a row") == 1
    assert "wandb sync" in done.stdout
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == list(range(1, 41))


def test_wandb_is_online_with_a_key_and_offline_without(monkeypatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert wandb_mode(None) == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert wandb_mode(None) == "online"
    assert wandb_mode("off") == "off"
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
    Tracker(tmp_path, LogConfig(wandb="off"), cpu_runtime(), {}, first_step=4)
    assert rows(tmp_path / name) == []
