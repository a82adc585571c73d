"""The seam of engines: what the training loop asks of whatever computes an optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedModel

from sftkit.config.schema import ModelConfig
from sftkit.data.loader import StepBatches
from sftkit.data.pack import Layout
from sftkit.objectives.model_with_loss import ModelWithLoss
from sftkit.objectives.objective import Objective
from sftkit.optim.protocol import Optimizer
from sftkit.tracking.checks import Check
from sftkit.tracking.outcome import StepOutcome
from sftkit.tracking.spikes import Spikes
from sftkit.tracking.tracker import EventKind


@dataclass(frozen=True)
class Training:
    """What is trained: all that an engine is built for beside the recipe."""

    orig_model: PreTrainedModel
    "as loaded or made; the engine moves it to the device, and changes it in place"
    objective: Objective
    layout: Layout
    "of the training rows"
    source: ModelConfig | None = None
    "where the weights of a meta model come from (models.load)"


@dataclass(frozen=True)
class WarmUp:
    """The result of a warm-up: the step is ready to run."""

    compiled: bool
    seconds: float
    "duration of the warm-up"
    checks: list[Check]
    "checks that the warm-up made, for proof.json"


@dataclass(frozen=True)
class Setup:
    """The choices that an engine has made before its first step, where the recipe says auto."""

    attention: str
    "name of the backend"
    attention_reason: str
    optimizer: str
    memory_plan: str
    "as a line for people"
    checkpoint_bytes: float
    "size of one checkpoint of all ranks: weights and optimizer states"
    pipeline_layers: tuple[int, ...] | None = None
    "layers of each stage of a pipeline, as measured or as the recipe has them; None: no pipeline"


@dataclass(frozen=True)
class EngineReport:
    """A report on an engine's steps so far."""

    metrics: dict[str, float]
    "compile/*; see docs/metrics.md"
    events: list[tuple[EventKind, list[str]]]
    "kind, and all messages of that kind since the start"
    checks: list[Check]
    "for proof.json"


class Engine(Protocol):
    """Computes optimizer steps: all their micro-batches, graphs, gradient sums, communication and the update.

    Every rank has one and calls the same methods: `warm_up` once, then `step` inside `guarded`, and `close` at the end.
    """

    @property
    def model(self) -> ModelWithLoss:
        """Return orig_model with the objective, not wrapped: for the validation loss.

        Tasks, generation and checkpoints see `model.orig_model` alone.
        """

    @property
    def optimizer(self) -> Optimizer:
        """Return the optimizer, whose states a checkpoint holds."""

    @property
    def setup(self) -> Setup:
        """Return how the engine computes, for records."""

    def warm_up(self, print_line: Callable[[str], None]) -> WarmUp:
        """Do whatever must not happen in a step: compile for the declared shapes, see that the largest one fits.

        Weights, gradients and random state are afterwards as before.

        Args:
            print_line: for lines that a person should read.

        Raises:
            ConfigError: the run cannot work like this: what to change.
        """

    def guarded(self) -> AbstractContextManager[None]:
        """Return a context for all steps, in which what must not happen in a step, such as a recompile, is an error
        that says why."""

    def step(
        self, batches: StepBatches, learning_rate: float, *, stop: bool = False, spikes: Spikes | None = None
    ) -> StepOutcome:
        """Make one update from the mean over a global batch; none where a loss or the gradient norm is not finite, or
        where `spikes` leaves the step out.

        Args:
            batches: those of this rank, with micro-batches on the device.
            learning_rate: of this update.
            stop: this rank asks to end training, which all ranks find in the flags of the outcome.
            spikes: judges the step by those before, on the device; None: it is not judged.
        """

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context for an evaluation; what was compiled within it, which should be nothing, is in the
        report."""

    def report(self, error: BaseException | None = None) -> EngineReport:
        """Return what is known of the steps since the start, of all ranks; every rank calls it.

        Args:
            error: what ended training early: then a rank may call it alone, with what the others reported last.
        """

    def close(self) -> None:
        """Put back the global settings that the engine changed in the process."""
