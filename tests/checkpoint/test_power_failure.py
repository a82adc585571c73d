"""After a power failure at any moment of a run the next start resumes the newest checkpoint that was promised, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_worker import Run
from crash_states import (
    RECIPE,
    Recording,
    State,
    after_reboot,
    combinations,
    files_of,
    save_small,
    started,
    unrecovered,
)
from helpers import cpu_runtime

from sftkit.checkpoint import save as step_folders
from sftkit.checkpoint.checkpoint import Checkpoints
from sftkit.checkpoint.resume import find_checkpoint
from sftkit.checkpoint.save import Best, Entries, Writer, prune, read_best, remove
from sftkit.config.schema import CheckpointConfig, LogConfig
from sftkit.errors import ConfigError
from sftkit.optim.protocol import named_states
from sftkit.reports.values import read_rows
from sftkit.rundir import files as whole_files
from sftkit.rundir.files import append_all_or_nothing, flush, read_metric_rows, replace_text, verify
from sftkit.rundir.lock import take_lock
from sftkit.rundir.names import (
    BEST,
    EVALS,
    EVENTS,
    LATEST,
    MANIFEST,
    METRICS_FILE,
    SAMPLES,
    TRAINING_STATE,
    latest_checkpoint,
    step_dir,
    step_dirs,
    step_number,
)
from sftkit.rundir.status import last_step, read_status
from sftkit.runtime.start import Runtime
from sftkit.tracking.tracker import Tracker

CONFIG = CheckpointConfig(every=1, keep=2, best="val/loss")
FLUSH, PUBLISH = flush, Writer._publish
LOSSES = {1: 3.0, 2: 1.0, 3: 2.0, 4: 0.5}


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


def tracker_of(run_dir: Path, rt: Runtime, step: int = 0) -> Tracker:
    return Tracker(run_dir, LogConfig(wandb="off"), rt, {}, step=step)


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
    with started(run_dir) as rt:
        tracker = tracker_of(run_dir, rt)
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
        state.write(folder)
        after_reboot(folder)
        self.readers_see_what_is_whole(run_dir)
        with started(run_dir) as rt:
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
            continues(run_dir, rt, step)
            evaluated = [row["step"] for row in read_metric_rows(run_dir / EVALS)]
            assert evaluated[: step - 1] == list(range(1, step)), f"evaluations of steps {evaluated} are left"

    def readers_see_what_is_whole(self, run_dir: Path) -> None:
        """Before any start: what LATEST and BEST name is whole, and every reader of lines takes what there is."""
        for named in (latest_checkpoint(run_dir), (best := read_best(run_dir)) and run_dir / best.folder):
            assert named is None or verify(named) is None, verify(named)
        for name in (METRICS_FILE, EVALS, EVENTS, SAMPLES):
            read_rows(run_dir / name, [])
            read_metric_rows(run_dir / name)
        last_step(run_dir)
        read_status(run_dir)


def continues(run_dir: Path, rt: Runtime, step: int) -> None:
    """Nothing that lies there is in the way of the next lines and the next checkpoint."""
    there = checkpoints(run_dir, rt)
    there.archive_later_steps(step)
    tracker = tracker_of(run_dir, rt, step).open()
    log(tracker, step + 1)
    rows = [row["step"] for row in read_metric_rows(run_dir / METRICS_FILE)]
    assert rows == list(range(1, step + 2)), f"lines of steps {rows} are left before step {step + 1}"
    assert {row["step"] for row in read_metric_rows(run_dir / EVENTS)} >= set(rows)
    save_small(run_dir, step + 1)
    assert latest_checkpoint(run_dir) == step_dir(run_dir, step + 1)
    assert find_checkpoint(run_dir, "auto", rt).state["step"] == step + 1
    # A name in BEST of a checkpoint that is gone would be better than all that come.
    best = read_best(run_dir)
    is_there = best is not None and (run_dir / best.folder).is_dir()
    better = Best(f"step-{step + 1:06d}", "val/loss", 0.25 if is_there else 0.75)
    there.evaluated(step + 1, {"val/loss": better.value})
    assert read_best(run_dir) == better


def checkpoints(run_dir: Path, rt: Runtime) -> Checkpoints:
    """Checkpoints of no model: what they do with folders."""
    return Checkpoints(run_dir, CONFIG, rt, None, None, None, RECIPE)  # type: ignore[arg-type]


@pytest.mark.parametrize(("steps", "limit"), [(3, 2), pytest.param(4, 10, marks=pytest.mark.slow)])
def test_a_run_resumes_its_newest_promised_checkpoint_after_any_power_failure(
    disk: Path, tokenizer, steps: int, limit: int
) -> None:
    with Recording(disk) as recording:
        made = train(disk / "runs" / "a", tokenizer, steps, recording.promise)
    assert unrecovered(recording, Recovery("runs/a", made, tokenizer), limit) == []


# ---- step directories of one small file, in every combination of losses ----------------------------------------------


def check_small(folder: Path, state: State) -> None:
    """The newest checkpoint that was promised is found, LATEST names a whole one, and the next save works."""
    state.write(folder)
    newest = latest_checkpoint(folder)
    assert newest is None or verify(newest) is None, verify(newest)
    assert newest is None or step_number(newest) >= max(state.promised, default=0)
    with closing(cpu_runtime()) as rt:
        step = find_checkpoint(folder, "auto", rt).state["step"]
    assert step >= max(state.promised, default=0), f"resumes step {step}, and {max(state.promised)} was promised"
    save_small(folder, step + 1)
    assert latest_checkpoint(folder) == step_dir(folder, step + 1)


def saves(disk: Path) -> Recording:
    with Recording(disk) as recording:
        for step in range(1, 5):
            save_small(disk, step)
            recording.promise(step)
    return recording


def test_every_combination_of_losses_in_a_save_leaves_what_was_promised(disk: Path) -> None:
    recording = saves(disk)
    assert combinations(recording, "weak") <= 5000
    assert unrecovered(recording, check_small, limit=5000) == []


def test_a_checkpoint_is_not_there_without_the_lines_that_were_logged_before_it(disk: Path) -> None:
    with Recording(disk) as recording:
        for step in range(1, 4):
            append_all_or_nothing(disk / METRICS_FILE, f'{{"step": {step}}}\n')
            save_small(disk, step)
            append_all_or_nothing(disk / EVALS, f'{{"step": {step}}}\n')

    def check(folder: Path, state: State) -> None:
        state.write(folder)
        step = max(map(step_number, step_dirs(folder)), default=0)
        assert len(read_metric_rows(folder / METRICS_FILE)) >= step
        assert len(read_metric_rows(folder / EVALS)) >= step - 1

    assert unrecovered(recording, check, limit=40) == []


def latest_first(self: Writer, step: int, temporary: Path, files: Entries) -> None:
    replace_text(self.run_dir / LATEST, f"{step_dir(self.run_dir, step).name}\n")
    PUBLISH(self, step, temporary, files)


def pruned_first(self: Writer, step: int, temporary: Path, files: Entries) -> None:
    (self.run_dir / LATEST).unlink(missing_ok=True)
    prune(self.run_dir, 1)
    for folder in step_dirs(self.run_dir):
        remove(folder)
    PUBLISH(self, step, temporary, files)


def not_flushed(path: Path, kind: str) -> bool:
    """Whether a planted fault leaves out this flush."""
    if kind == "the files":
        return path.is_file() and path.name not in (MANIFEST, f".{LATEST}.tmp")
    if kind == "the manifest":
        return path.name == MANIFEST
    if kind == "folders of the checkpoint":
        return path.is_dir() and ".step-" in str(path)
    if kind == "the file LATEST":
        return path.name == f".{LATEST}.tmp"
    return path.is_dir() and ".step-" not in str(path)


@pytest.mark.parametrize(
    "fault",
    [
        "the files",
        "the manifest",
        "folders of the checkpoint",
        "the run directory",
        "the file LATEST",
        "order",
        "prune",
    ],
)
def test_a_flush_that_is_left_out_of_a_save_and_another_order_are_found(
    disk: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    with monkeypatch.context() as patch:
        if fault in ("order", "prune"):
            patch.setattr(Writer, "_publish", latest_first if fault == "order" else pruned_first)
        for module in (step_folders, whole_files):
            patch.setattr(module, "flush", lambda path: not_flushed(path, fault) or FLUSH(path))
        recording = saves(disk)
    assert unrecovered(recording, check_small, limit=64, enough=1)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [6, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("resume", ["auto", "step-000002"])
def test_a_start_that_goes_back_to_an_earlier_step_is_recovered(disk: Path, resume: str, limit: int) -> None:
    """Checkpoints after it, the best one among them, are put aside, lines after it dropped, and step 3 is saved again."""
    run_dir = disk / "a"
    with started(run_dir) as rt:
        tracker = tracker_of(run_dir, rt).open()
        for step in range(1, 5):
            log(tracker, step)
            save_small(run_dir, step, keep=4)
        replace_text(run_dir / BEST, "step-000004\nval/loss 0.5\n")
    if resume == "auto":
        (step_dir(run_dir, 4) / TRAINING_STATE).write_text("damaged")
        (step_dir(run_dir, 3) / TRAINING_STATE).write_text("damaged")
    before = {step: files_of(step_dir(run_dir, step)) for step in range(1, 5)}
    with (
        Recording(disk) as recording,
        started(run_dir, resume if resume == "auto" else str(run_dir / resume)) as rt,
    ):
        checkpoints(run_dir, rt).archive_later_steps(2)
        tracker = tracker_of(run_dir, rt, 2).open()
        log(tracker, 3)
        save_small(run_dir, 3, keep=4)
        recording.promise(3)

    def check(folder: Path, state: State) -> None:
        state.write(folder)
        after_reboot(folder)
        there = folder / "a"
        newest = latest_checkpoint(there)
        assert newest is not None
        for step, files in before.items():  # nothing is deleted on the way back
            found = [files_of(path) for path in there.glob(f"{step_dir(there, step).name}*")]
            assert files in found, f"step {step} is gone"
        assert resume == "auto" or verify(newest) is None, verify(newest)
        with started(there) as rt:
            step = find_checkpoint(there, "auto", rt).state["step"]
            assert step >= (3 if state.promised else 2)
            continues(there, rt, step)

    assert unrecovered(recording, check, limit) == []
