"""The protocol of engines: what the training loop needs from whatever computes an optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedModel

from sftkit.config.schema import ModelConfig
from sftkit.data.batches.loader import StepBatches
from sftkit.data.batches.pack import Layout
from sftkit.objectives.objective import ModelWithLoss, Objective
from sftkit.optim.protocol import Optimizer
from sftkit.tracking.health import Spikes
from sftkit.tracking.names import Check, StepOutcome
from sftkit.tracking.tracker import EventKind


@dataclass(frozen=True)
class Training:
    """The inputs of an engine besides the recipe."""

    orig_model: PreTrainedModel
    "as loaded or made; the engine moves it to the device and changes it in place"
    objective: Objective
    layout: Layout
    "of the training rows"
    source: ModelConfig | None = None
    "where the weights of a meta model come from (models.load)"
    checkpoint: Path | None = None
    "the step directory whose weights the model will have when it is warmed up; None: those of `source`"


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
    """The choices of an engine before its first step, for example where the recipe says auto."""

    attention: str
    "name of the backend"
    attention_reason: str
    optimizer: str
    memory_plan: str
    "one line for the console"
    checkpoint_bytes: float
    "size of one checkpoint of all ranks: weights and optimizer states"
    pipeline_layers: tuple[int, ...] | None = None
    "layers of each stage of a pipeline, as measured or as the recipe has them; None: no pipeline"


@dataclass(frozen=True)
class EngineReport:
    """A report on an engine's steps so far."""

    metrics: dict[str, float]
    "compile/* and what only this engine has; see docs/metrics.md"
    events: list[tuple[EventKind, list[str]]]
    "(kind, all messages of that kind since the start)"
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
        """Do whatever must not happen in a step: compile for the declared shapes, check that the largest one fits.

        Weights, gradients and random state are the same afterwards.

        Args:
            print_line: prints a line on the console.

        Raises:
            ConfigError: the run cannot work with these settings; the message says what to change.
        """

    def guarded(self) -> AbstractContextManager[None]:
        """Return a context for all steps. Within it a recompile, or anything else that must not happen in a step,
        raises an error that gives the reason."""

    def step(
        self, batches: StepBatches, learning_rate: float, *, stop: bool = False, spikes: Spikes | None = None
    ) -> StepOutcome:
        """Update the weights once, from the mean over a global batch. The update is skipped if a loss or the gradient
        norm is not finite, or if `spikes` rejects the step.

        Args:
            batches: those of this rank, with micro-batches on the device.
            learning_rate: of this update.
            stop: this rank requests a stop; all ranks read that in the flags of the outcome.
            spikes: compares the step with earlier ones, on the device; None: no comparison.
        """

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context for an evaluation. The report counts what was compiled within it, which
        should be nothing."""

    def report(self, error: BaseException | None = None) -> EngineReport:
        """Return what is known about the steps of all ranks since the start; every rank calls it.

        Args:
            error: what ended training early. A rank may then call this alone: it uses what the others last reported.
        """

    def close(self) -> None:
        """Restore the global settings that the engine has changed in this process."""
