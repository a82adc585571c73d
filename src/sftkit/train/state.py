"""What a checkpoint carries of the loop: all that a resume needs besides weights, optimizer and random states."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sftkit.config.schema import DataConfig
from sftkit.data.loader import Batches
from sftkit.runtime.signals import save_seconds
from sftkit.tracking.progress import PROGRESS, Progress
from sftkit.tracking.window import WINDOW, Window
from sftkit.train.parts import TrainServices

DATA_KEYS = ("thinking", "split_turns", "targets", "too_long")
"Keys of the recipe's data section that say what is learned of a document."


@dataclass(frozen=True)
class LoopPosition:
    """Where the loop is when a step is saved."""

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
