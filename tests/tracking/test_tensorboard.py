"""TensorBoard's event files, read back by TensorBoard's own reader, against metrics.jsonl and evals.jsonl."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import cpu_runtime
from test_tracker import METRICS

from sftkit.config import rules
from sftkit.config.load import read_config
from sftkit.config.schema import LogConfig
from sftkit.errors import ConfigError
from sftkit.tracking.tracker import Tracker

SETTINGS = {"optim": {"lr": 0.5}, "model": {"path": "a <b>"}}
SAMPLE = {"prompt": "1 | 2\n<think>", "reference": "r", "answer": "a", "stop": "eos"}


def train(folder: Path, log: LogConfig, first: int, last: int, run_id: str | None = None) -> Tracker:
    """A start that resumes after step `first` and logs lines until `last`, with an evaluation at each even step."""
    with Tracker(folder, log, cpu_runtime(), SETTINGS, step=first, run_id=run_id).open() as tracker:
        for step in range(first + 1, last + 1):
            tracker.log_metrics(step, 9, {**METRICS, "train/loss": step + 100 * first + 1 / 3})
            if step % 2 == 0:
                tracker.log_evals(step, {"val/loss": step / 7}, [SAMPLE], {"train/lr": METRICS["train/lr"]})
        tracker.record_event("spike", last, "loss 9 is far above 1")
    return tracker


def read(folder: Path) -> Any:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    return accumulator.EventAccumulator(str(folder / "tensorboard"), {"scalars": 0, "tensors": 0}).Reload()


def points(reader: Any) -> list[tuple[str, int, float]]:
    return sorted((tag, one.step, one.value) for tag in reader.Tags()["scalars"] for one in reader.Scalars(tag))


def expected(folder: Path) -> list[tuple[str, int, float]]:
    """Every number of the run's own lines, as fp32."""
    texts = [(folder / f"{name}.jsonl").read_text() for name in ("metrics", "evals")]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    values = [(name, row["step"], value) for row in lines for name, value in row.items()]
    values = [each for each in values if each[0] not in ("step", "time") and each[2] is not None]
    return sorted((name, step, float(np.float32(value))) for name, step, value in values)


def texts(reader: Any, tag: str) -> dict[int, str]:
    return {one.step: one.tensor_proto.string_val[0].decode() for one in reader.Tensors(f"{tag}/text_summary")}


def test_a_resumed_run_has_the_points_of_its_own_lines_each_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    log = LogConfig(tracker=("tensorboard",))
    train(tmp_path, log, 0, 5)  # ends after its checkpoint of step 2
    train(tmp_path, log, 2, 4)
    reader = read(tmp_path)
    assert points(reader) == expected(tmp_path)
    assert [one.step for one in reader.Scalars("train/loss")] == [1, 2, 3, 4]
    assert [round(one.value) for one in reader.Scalars("train/loss")] == [1, 2, 203, 204]
    assert not (tmp_path / "wandb").exists()


def test_texts_have_settings_samples_events_and_the_end_and_no_markup_of_the_model(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    train(tmp_path, LogConfig(tracker=("tensorboard",)), 0, 4)
    reader = read(tmp_path)
    assert '"lr": 0.5' in texts(reader, "settings")[0].replace("&quot;", '"')
    samples = texts(reader, "samples")
    assert sorted(samples) == [2, 4]
    assert all(text.count("&lt;think&gt;") == 1 and "1 &#124; 2<br>" in text for text in samples.values())
    assert texts(reader, "alerts/spike of loss or gradient norm") == {4: "WARN: loss 9 is far above 1"}
    assert texts(reader, "run/state") == {0: "running", 4: "finished"}


def test_both_dashboards_get_a_run_and_the_resumed_one_continues_both(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    log = LogConfig(tracker=("wandb", "tensorboard"), wandb="offline")
    first = train(tmp_path, log, 0, 2)
    second = train(tmp_path, log, 2, 3, first.run_id)
    assert first.run_id == second.run_id is not None
    assert len([*tmp_path.glob("wandb/offline-run-*")]) == 2
    assert points(read(tmp_path)) == expected(tmp_path)


def test_without_a_tracker_only_the_runs_own_files_are_written(tmp_path: Path) -> None:
    assert train(tmp_path, LogConfig(tracker=()), 0, 2).run_id is None
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_writer_that_does_not_start_costs_no_line(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    train(tmp_path, LogConfig(tracker=("tensorboard",)), 0, 2)
    assert "tensorboard does not start" in caplog.text
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def recipe(folder: Path, tracker: str) -> Path:
    text = "run: {dir: runs/x}\nmodel: {path: m}\ndata: {train: [{path: builtin:docs}]}\ntrain: {max_steps: 1}\n"
    (folder / "sft.yaml").write_text(text + f"log: {{tracker: {tracker}}}\n")
    return folder / "sft.yaml"


def test_a_missing_package_and_an_unknown_tracker_are_errors_of_the_recipe(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    made = recipe(tmp_path, "[wandb, tensorboard]")
    with pytest.raises(ConfigError, match=r"log\.tracker: .*tensorboard is missing: \S+ -m pip install 'sftkit\["):
        read_config(made, [], world_size=1, more=[rules.run_can_be_written])
    assert read_config(made, [], world_size=1).log.tracker == ("wandb", "tensorboard"), "read without the package"
    for value, problem in (("trackio", "was removed: take wandb or tensorboard"), ("[tensorbord]", '"tensorboard"')):
        with pytest.raises(ConfigError, match=problem):
            read_config(recipe(tmp_path, value), [], world_size=1)
    assert read_config(recipe(tmp_path, "wandb"), [], world_size=1).log.tracker == ("wandb",)
    assert read_config(recipe(tmp_path, "[]"), [], world_size=1).log.tracker == ()
