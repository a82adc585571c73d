"""The state of the loop in a checkpoint, all that a resume needs besides weights, optimizer and random states;
and what it reports about saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from sftkit.config.schema import DataConfig
from sftkit.data.batches.loader import Batches
from sftkit.errors import NumericsError
from sftkit.rundir.status import RunStatus
from sftkit.runtime.signals import save_seconds
from sftkit.runtime.start import Runtime
from sftkit.tracking.progress import PROGRESS, Progress
from sftkit.tracking.tracker import Tracker
from sftkit.tracking.window import WINDOW, Window
from sftkit.train.parts import Saves, TrainServices

DATA_KEYS = ("thinking", "split_turns", "targets", "too_long")
"Keys of the recipe's data section that say what is learned from a document."


@dataclass(frozen=True)
class LoopPosition:
    """The position of the loop when a step is saved."""

    epoch: int
    total_steps: int
    progress: Progress
    window: Window
    "the steps that no line has reported yet"


def checkpoint_state(
    position: LoopPosition, data: DataConfig, batches: Batches, services: TrainServices
) -> dict[str, Any]:
    """Return the state as JSON values, by the names under which Checkpoints.resume returns them."""
    return {
        # Beside weights, optimizer and random states this is all that a resume needs: what it must not count
        # or plan anew.
        "tokens": position.progress.tokens,
        "max_length": batches.layout.max_length,
        PROGRESS: asdict(position.progress),
        "epoch": position.epoch,
        "total_steps": position.total_steps,
        "tracker": services.tracker.run_id,
        # Plan segments, under the name that they have had in all checkpoints.
        "stretches": [segment._asdict() for segment in batches.segments],
        **{name: getattr(data, name) for name in DATA_KEYS},
        "save_seconds": save_seconds(services.checkpoints.last_save),
        WINDOW: position.window,
    }


@contextmanager
def finish_checkpoint_on_error(checkpoints: Saves, report: Callable[[], None]) -> Iterator[None]:
    """Finish the checkpoint that is being written if numerics end training, which they do on all ranks together."""
    try:
        yield
    except NumericsError:
        checkpoints.finish()
        report()
        raise


def report_saves(checkpoints: Saves, tracker: Tracker, status: RunStatus, rt: Runtime) -> None:
    """Make an event of each save that failed since the last call, and note in run_status.json if the newest failed."""
    for saved, failure in checkpoints.ended_saves():
        if failure is not None:
            text = f"checkpoint not written: {failure}. Older ones stay, the next save tries again"
            tracker.event("checkpoint_failed", saved, text)
        if rt.is_main:
            status.save_ended(saved, failure)
