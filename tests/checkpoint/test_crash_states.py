"""After a power failure at any moment of a run the next start resumes the newest checkpoint that was promised, to the bit."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from checkpoint_worker import Run
from crash_states import FileSystem, Recording, State, unrecovered
from helpers import cpu_runtime

from sftkit.checkpoint import manifest as step_folders
from sftkit.checkpoint import writer as checkpoint_writer
from sftkit.checkpoint.checkpoint import Checkpoints
from sftkit.checkpoint.manifest import entries, read_best, sweep
from sftkit.checkpoint.resume import find_checkpoint
from sftkit.checkpoint.writer import Writer
from sftkit.config.schema import CheckpointConfig, LogConfig
from sftkit.errors import ConfigError
from sftkit.optim.state import named_states
from sftkit.reports.files import read_rows
from sftkit.rundir import files as whole_files
from sftkit.rundir.killed import last_step
from sftkit.rundir.lock import take_lock
from sftkit.rundir.manifest import verify
from sftkit.rundir.names import (
    EVALS,
    EVENTS,
    LATEST,
    LOCK,
    METRICS_FILE,
    SAMPLES,
    TRAINING_STATE,
    UNFINISHED,
    being_written,
    latest_checkpoint,
    step_dir,
)
from sftkit.rundir.status import read_status
from sftkit.runtime import open as run_opening
from sftkit.runtime.open import claim_run_dir, open_run
from sftkit.runtime.start import Runtime
from sftkit.tracking.rows import read_metric_rows
from sftkit.tracking.tracker import ResumePoint, Tracker

RECIPE = "run: {seed: 0}\n"
CONFIG = CheckpointConfig(every=1, keep=2, best="val/loss")
LOSSES = {1: 3.0, 2: 1.0, 3: 2.0, 4: 0.5, 5: 4.0}
BOOT = "00000000-0000-0000-0000-000000000000"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_opening, "environment", lambda *_: {})


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


@contextmanager
def started(run_dir: Path, resume: str | None = "auto", step: int = 0) -> Iterator[tuple[Runtime, Tracker]]:
    """A start that has done its first step."""
    with closing(cpu_runtime()) as rt:
        open_run(str(run_dir), resume, RECIPE, rt)
        claim_run_dir(rt)
        yield rt, Tracker(run_dir, LogConfig(tracker="none"), rt, {}, ResumePoint(step))


def log(tracker: Tracker, step: int) -> None:
    tracker._append(METRICS_FILE, step, {"train/loss": 1.0 / step}, {})
    tracker.record_event("spike", step, f"Straße {step}")


def log_evaluation(tracker: Tracker, step: int) -> None:
    tracker.log_evals(step, {"val/loss": LOSSES[step]}, [{"prompt": "你好，世界", "answer": f"é{step}"}])


@dataclass
class Made:
    """What a run has made, by step."""

    tensors: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    "of weights and optimizer states, when the step was saved"
    files: dict[int, dict[str, bytes]] = field(default_factory=dict)
    "of its step directory"


def train(run_dir: Path, tokenizer: Any, last: int, promise: Callable[[int], None]) -> Made:
    """Run some steps, each of which is logged, saved and evaluated."""
    made = Made()
    with started(run_dir) as (rt, tracker):
        run = Run(run_dir, tokenizer, rt, config=CONFIG, recipe=RECIPE)
        run.checkpoints.archive_later_steps(0)
        tracker.open()
        for step in range(1, last + 1):
            run.steps(step - 1, step)
            log(tracker, step)
            run.checkpoints.save(step, {"tokens": step}, wait=True)
            promise(step)
            made.tensors[step], made.files[step] = tensors_of(run), files_of(step_dir(run_dir, step))
            run.checkpoints.evaluated(step, {"val/loss": LOSSES[step]})
            log_evaluation(tracker, step)
        assert rt.status is not None
        rt.status.write_end(None, stopped=False)
    return made


def tensors_of(run: Run) -> list[torch.Tensor]:
    tensors = [*run.orig_model.state_dict().values(), *named_states(run.optimizer, run.orig_model).values()]
    return [tensor.detach().clone() for tensor in tensors]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def after_reboot(folder: Path) -> None:
    """Let the locks that lie there be of a boot before this one."""
    for path in folder.rglob(LOCK):
        with suppress(ValueError):
            holder = json.loads(path.read_text()) | {"machine": BOOT, "started": psutil.boot_time() - 100}
            path.write_text(json.dumps(holder))


@dataclass
class Recovery:
    """Starts the run again after a crash, and asserts that it goes on from what was promised."""

    run_dir: str
    "below the root"
    made: Made
    tokenizer: Any
    loaded: set[int] = field(default_factory=set)
    "steps whose checkpoint was loaded: the same bytes load to the same tensors"

    def __call__(self, folder: Path, state: State) -> None:
        run_dir, promised = folder / self.run_dir, max(state.promised, default=0)
        after_reboot(folder)
        self.readers_see_what_is_whole(run_dir)
        with started(run_dir) as (rt, _):
            found = find_checkpoint(run_dir, "auto", rt)
            step = found.state["step"]
            assert step >= promised, f"resumes step {step}, and {promised} was promised ({found.skipped_checkpoints})"
            with pytest.raises(ConfigError, match="a run is at work there"):
                take_lock(run_dir)
            if step:
                assert files_of(step_dir(run_dir, step)) == self.made.files[step]
            run = Run(run_dir, self.tokenizer, rt, config=CONFIG, recipe=RECIPE) if step not in self.loaded else None
            if run is not None:
                run.checkpoints.resume(found)
                for there, here in zip(self.made.tensors.get(step, ()), tensors_of(run), strict=bool(step)):
                    assert torch.equal(there, here)
                self.loaded.add(step)
            self.goes_on(run_dir, rt, step)

    def readers_see_what_is_whole(self, run_dir: Path) -> None:
        """Before any start: what LATEST and BEST name is whole, and every reader of lines takes what there is."""
        for named in (latest_checkpoint(run_dir), (best := read_best(run_dir)) and run_dir / best.folder):
            assert named is None or verify(named) is None, verify(named)
        for name in (METRICS_FILE, EVALS, EVENTS, SAMPLES):
            read_rows(run_dir / name, [])
            read_metric_rows(run_dir / name)
        last_step(run_dir)
        read_status(run_dir)

    def goes_on(self, run_dir: Path, rt: Runtime, step: int) -> None:
        """Nothing that lies there is in the way of the next lines and the next checkpoint."""
        checkpoints = Checkpoints(run_dir, CONFIG, rt, None, self.tokenizer, None, RECIPE)  # type: ignore[arg-type]
        checkpoints.archive_later_steps(step)
        tracker = Tracker(run_dir, LogConfig(tracker="none"), rt, {}, ResumePoint(step)).open()
        log(tracker, step + 1)
        rows, evals = (read_metric_rows(run_dir / name) for name in (METRICS_FILE, EVALS))
        assert [row["step"] for row in rows] == list(range(1, step + 2)), "lines before the checkpoint are gone"
        assert [row["step"] for row in evals][: step - 1] == list(range(1, step)), "evaluations before it are gone"
        assert {row["step"] for row in read_metric_rows(run_dir / EVENTS)} >= set(range(1, step + 2))
        save_small(run_dir, step + 1)
        assert (run_dir / LATEST).read_text() == f"{step_dir(run_dir, step + 1).name}\n"
        assert find_checkpoint(run_dir, "auto", rt).state["step"] == step + 1
        best = read_best(run_dir)
        checkpoints.evaluated(step + 1, {"val/loss": 0.25})
        assert read_best(run_dir) == (f"step-{step + 1:06d}", "val/loss", 0.25), f"{best} hides a better one"


def save_small(run_dir: Path, step: int) -> None:
    """Publish a small step directory, as the writer does."""
    sweep(run_dir)
    temporary = being_written(step_dir(run_dir, step), "next")
    (temporary / TRAINING_STATE).parent.mkdir(parents=True)
    (temporary / TRAINING_STATE).write_text(json.dumps({"step": step}))
    files = entries(temporary, [temporary / TRAINING_STATE])
    Writer(run_dir, CONFIG, None, None)._publish(step, temporary, files)  # type: ignore[arg-type]
    left = [path.name for pattern in UNFINISHED for path in run_dir.glob(pattern)]
    assert not left, left


def faults(recording: Recording, recovery: Recovery, work: Path, limit: int) -> list[str]:
    """What is not recovered on either kind of file system."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)  # on what is thrown away
        for file_system in ("journal", "weak"):
            count, problems = unrecovered(recording, recovery, work / file_system, file_system, limit)
            print(f"{file_system}: {count} states, {len(problems)} not recovered")
            found += problems
    return found


def test_a_run_resumes_its_newest_promised_checkpoint_after_any_power_failure(
    disk: Path, tmp_path: Path, tokenizer
) -> None:
    with Recording(disk) as recording:
        made = train(disk / "runs" / "a", tokenizer, 4, recording.promise)
    found = faults(recording, Recovery("runs/a", made, tokenizer), tmp_path, limit=10)
    assert not found, "\n".join([f"{len(found)} states", *found[:20]])
