"""What the loop asks of checkpoints, and what it reports about saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from sftkit.checkpoint.writer import SaveEnd
from sftkit.errors import NumericsError
from sftkit.rundir.status import RunStatus
from sftkit.runtime.start import Runtime
from sftkit.tracking.tracker import Tracker


class Saves(Protocol):
    """What the loop calls: checkpoint.checkpoint.Checkpoints, or in benchmarks and tests one that keeps nothing."""

    @property
    def run_dir(self) -> Path:
        """Return the directory that the step directories are in."""

    @property
    def resumed_from(self) -> Path | None:
        """Return the step directory that this start goes on from; None: it starts anew."""

    @property
    def skipped_checkpoints(self) -> Sequence[str]:
        """Return why newer checkpoints were not resumed."""

    @property
    def last_save(self) -> Mapping[str, float]:
        """Return seconds and bytes of the newest save, by their metric names without ckpt/."""

    def save(self, step: int, state: dict[str, Any], *, wait: bool = False) -> Path:
        """Save a checkpoint in the background, and return its step directory; `wait`: return when it is published."""

    def evaluated(self, step: int, values: dict[str, float | None]) -> None:
        """Take the metrics of an evaluation, by which the best checkpoint is chosen."""

    def archive_later_steps(self, step: int) -> None:
        """Archive checkpoints after this step: their steps are trained again."""

    def finish(self) -> None:
        """Wait for the save that is being written, if any."""

    def ended_saves(self) -> Sequence[SaveEnd]:
        """Return the results of the saves that ended since the last call."""


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
