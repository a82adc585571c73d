"""What the loop asks of checkpoints, and what it tells of their saves."""

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
    """What the loop calls; checkpoint.checkpoint.Checkpoints is it where anything is kept."""

    @property
    def run_dir(self) -> Path: ...

    @property
    def resumed_from(self) -> Path | None:
        """The step directory that this start goes on from."""

    @property
    def passed_over(self) -> Sequence[str]:
        """Why newer checkpoints were not resumed."""

    @property
    def last_save(self) -> Mapping[str, float]:
        """Seconds and bytes of the newest one, by the names of metrics after ckpt/."""

    def save(self, step: int, state: dict[str, Any], wait: bool = False) -> Path: ...

    def evaluated(self, step: int, values: dict[str, float | None]) -> None: ...

    def set_later_aside(self, step: int) -> None:
        """Checkpoints after this step are of a stretch that is done again."""

    def finish(self) -> None: ...

    def ended_saves(self) -> Sequence[SaveEnd]:
        """How the saves ended that have ended since this was last asked."""


@contextmanager
def completed(checkpoints: Saves, tell: Callable[[], None]) -> Iterator[None]:
    """Numbers that end all ranks together: the checkpoint that is being written is completed first."""
    try:
        yield
    except NumericsError:
        checkpoints.finish()
        tell()
        raise


def tell_saves(checkpoints: Saves, tracker: Tracker, status: RunStatus, rt: Runtime) -> None:
    """Make an event of each save that has failed meanwhile, and keep in run_status.json whether the newest one has."""
    for saved, failure in checkpoints.ended_saves():
        if failure is not None:
            text = f"checkpoint not written: {failure}. Older ones stay, the next save tries again"
            tracker.event("checkpoint_failed", saved, text)
        if rt.is_main:
            status.save_ended(saved, failure)
