"""The seam of engines: what the training loop asks of whatever computes an optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedModel

from sftkit.data.loader import StepBatches
from sftkit.data.pack import Layout
from sftkit.objectives.model_with_loss import ModelWithLoss
from sftkit.objectives.objective import Objective
from sftkit.optim.protocol import Optimizer
from sftkit.tracking.checks import Check
from sftkit.tracking.outcome import StepOutcome
from sftkit.tracking.tracker import Kind


@dataclass(frozen=True)
class WarmUp:
    """A step that is ready to run."""

    compiled: bool
    seconds: float
    "what the warm-up took"
    checks: list[Check]
    "what was checked on the way"


class Engine(Protocol):
    """How an optimizer step is computed: all its micro-batches, graphs, gradient sums, communication and the update.

    Every rank has one and calls the same methods: `warm_up` once, then `step` inside `guarded`, and `close` at the end.
    """

    @property
    def orig_model(self) -> PreTrainedModel:
        """The plain model, all that evaluation, generation and checkpoints see."""

    @property
    def model(self) -> ModelWithLoss:
        """orig_model with the objective, for the validation loss; not what the step calls."""

    @property
    def objective(self) -> Objective:
        """What the step minimises."""

    @property
    def optimizer(self) -> Optimizer:
        """Whose states a checkpoint holds."""

    @property
    def layout(self) -> Layout:
        """The shapes of its batches."""

    def warm_up(self, say: Callable[[str], None]) -> WarmUp:
        """Do whatever must not happen in a step: compile for the declared shapes, see that the largest one fits.

        Weights, gradients and random state are afterwards as before.

        Args:
            say: for lines that a person should read.

        Raises:
            ConfigError: the run cannot work like this: what to change.
        """

    def guarded(self) -> AbstractContextManager[None]:
        """Around all steps: what may not happen inside ends training with an error that says why."""

    def step(self, batches: StepBatches, learning_rate: float, *, stop: bool = False) -> StepOutcome:
        """One update from the mean over a global batch; none where a loss or the gradient norm is not finite.

        Args:
            batches: of this rank, with micro-batches on the device.
            stop: this rank asks to end training, which all ranks find in the flags of the outcome.
        """

    def evaluating(self) -> AbstractContextManager[None]:
        """Around an evaluation: what it made the engine do is counted, see `checks`."""

    def metrics(self) -> dict[str, float]:
        """compile/*, so far; see docs/metrics.md."""

    def events(self) -> list[tuple[Kind, list[str]]]:
        """What a person should know, by kind, all since the start."""

    def checks(self, error: BaseException | None) -> list[Check]:
        """What is known of the steps when training ends; `error`: what ended it early."""

    def describe(self) -> dict[str, Any]:
        """How it computes, for records: attention {backend, why}, optimizer, memory_plan."""

    def checkpoint_bytes(self) -> float:
        """Size of one checkpoint of all ranks: weights and optimizer states."""

    def close(self) -> None:
        """Put back what the engine changed in the process."""
