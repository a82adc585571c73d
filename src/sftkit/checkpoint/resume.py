"""Find the checkpoint from which a start resumes: once, before anything that depends on it is made."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from sftkit.data.batches.pack import PlanSegment
from sftkit.errors import CheckpointError, ConfigError
from sftkit.rundir.files import UNREADABLE
from sftkit.rundir.manifest import verify
from sftkit.rundir.names import RECIPE, TRAINING_STATE, step_dirs
from sftkit.runtime.start import Runtime

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResumeCheckpoint:
    """What train.resume means."""

    setting: str | None
    folder: Path | None = None
    "a step directory whose every file verifies; None: a new start"
    state: dict[str, Any] = field(default_factory=lambda: {"step": 0})
    "what was given to `save`, and the step"
    segments: Sequence[PlanSegment] = ()
    "how the global batches of its steps were made, in order"
    skipped_checkpoints: Sequence[str] = ()
    "why newer checkpoints are not resumed"


NO_CHECKPOINT = ResumeCheckpoint(None)


def find_checkpoint(run_dir: Path, setting: str | None, rt: Runtime) -> ResumeCheckpoint:
    """Return the checkpoint that `setting` means, the same on all ranks; every rank calls it.

    Args:
        setting: null starts anew; "auto" takes the newest directory whose manifest verifies; else a directory.

    Raises:
        ConfigError: the one that is named does not verify, or none of those that are there does.
        CheckpointError: what is on the disk cannot be read.
    """
    return rt.from_main(lambda: _find(run_dir, setting))


def _find(run_dir: Path, setting: str | None) -> ResumeCheckpoint:
    try:
        skipped: list[str] = []
        folder = None if setting is None else _named(setting) if setting != "auto" else _newest(run_dir, skipped)
        if folder is None:
            return ResumeCheckpoint(setting)
        state, segments = _read_state(folder)
        return ResumeCheckpoint(setting, folder, state, segments, skipped)
    # A disk that cannot be read is not an empty one: a new start would put the run aside that is there.
    except OSError as error:
        raise CheckpointError(
            f"train.resume={setting}: {run_dir if setting == 'auto' else setting} cannot be read ({error}), so what "
            "can be resumed is not known. Nothing was changed: start again when the disk can be read, or name "
            "another step directory"
        ) from None


def _problem(folder: Path) -> str | None:
    """Return why a step directory cannot be resumed; None: its files verify, and its state can be read."""
    if (problem := verify(folder)) is not None:
        return problem
    try:
        _read_state(folder)
    except (*UNREADABLE, yaml.YAMLError) as error:  # hashes that fit say that nothing was damaged, not who wrote it
        return f"{folder / TRAINING_STATE}: no state of a run ({type(error).__name__}: {str(error)[:100]})"
    return None


def _read_state(folder: Path) -> tuple[dict[str, Any], Sequence[PlanSegment]]:
    """Return the state of a checkpoint, and the segments of the steps before it."""
    state = json.loads((folder / TRAINING_STATE).read_text())
    if not isinstance(state["step"], int):
        raise TypeError("step is no whole number")
    return state, _segments(state, folder)


def _named(setting: str) -> Path:
    if problem := _problem(Path(setting)):
        raise ConfigError(f"train.resume={setting}: {problem}")
    return Path(setting)


def _newest(run_dir: Path, skipped: list[str]) -> Path | None:
    for folder in reversed(step_dirs(run_dir)):
        problem = _problem(folder)
        if problem is None:
            return folder
        log.warning("checkpoint skipped: %s", problem)
        # Noted too: the run writes down why it went back further than its newest checkpoint.
        skipped.append(f"checkpoint skipped: {problem}")
    # None verifies although some are there: what to give up is for a person to decide.
    if skipped:
        lines = "\n  ".join(skipped)
        raise ConfigError(
            f"train.resume=auto: no checkpoint in {run_dir} verifies:\n  {lines}\nName one that is whole "
            "(train.resume=PATH), or start anew with train.resume=null: this run is then renamed, not overwritten"
        )
    return None


def _segments(state: dict[str, Any], folder: Path) -> Sequence[PlanSegment]:
    """Return the segments of the steps before the checkpoint. A checkpoint of a version that kept none has one,
    which its identity tells."""
    # The key is the word that files have for segments. A segment that began at this step has made no batch yet: this
    # start makes its own.
    if "stretches" in state:
        kept = [PlanSegment(**segment) for segment in state["stretches"]]
        return [segment for segment in kept if segment.after_step < state["step"]]
    rows = (state.get("identity") or {}).get("rows")
    if not rows:
        return []
    seed = yaml.safe_load((folder / RECIPE).read_text())["run"]["seed"]
    return [PlanSegment(0, seed, rows["global_batch_size"], rows["budget_rows"])]
