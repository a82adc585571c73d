"""The protocol of engines: the training loop needs nothing else from an object that computes optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from sftkit.config.schema import ModelConfig
from sftkit.data.batches.collate import Batch
from sftkit.data.batches.loader import StepBatches
from sftkit.data.batches.pack import Layout
from sftkit.objectives.objective import ModelWithLoss, Objective, Sums
from sftkit.optim.protocol import Optimizer
from sftkit.tracking import health, names, tracker

if TYPE_CHECKING:
    from sftkit.compile.watch import Records
    from sftkit.engine.members import Members

Losses = dict[tuple[int, int], float]
"(rows, row length) of a declared shape -> the objective per target of its worst-case batch"


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
    members: Members | None = None
    "what each of several adapters has for itself; None: one model is trained"


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
    fp8: bool = False
    "whether products of the blocks are in float8"


@dataclass(frozen=True)
class EngineReport:
    """A report on an engine's steps so far."""

    metrics: dict[str, float]
    "compile/* and what only this engine has; see docs/metrics.md"
    records: Records | None = None
    "what went wrong with compiled code, on all ranks; None: this engine never compiles"
    graphs: int | None = None
    "how many this rank has; None: nothing is compiled"
    evaluations: int = 0
    "how many there were so far"

    def events(self) -> list[tuple[tracker.EventKind, list[str]]]:
        """Return (kind, all messages of that kind since the start, of all ranks, each once)."""
        if (records := self.records) is None:
            return []
        return [
            ("recompile", list(records.recompile_kinds)),
            ("graph_break", list(records.graph_break_reasons)),
            ("cuda_graph", list(records.late_cuda_graphs)),
            ("hook", list(records.hooks)),
        ]


def report_of(counts: dict[str, float], evaluations: int, records: Records, *, compiled: bool) -> EngineReport:
    """Return the report of an engine that may compile.

    Args:
        counts: of CompileWatch, on this rank.
        records: of all ranks.
        compiled: whether the steps are.
    """
    # Graphs and seconds are this rank's, but what should not happen counts on every rank.
    metrics = counts | {"compile/recompiles": records.recompiles}
    return EngineReport(metrics, records, int(counts["compile/graphs"]) if compiled else None, evaluations)


class ForwardPass(Protocol):
    """A forward pass without the compiler, as ModelWithLoss has it."""

    def sums(self, batch: Batch, backend: str) -> Sums:
        """Return the sums of a batch. `backend`: of attention."""

    def hidden_states(self, batch: Batch, backend: str) -> Tensor:
        """Return the hidden states that the head projects, [B, C, H]."""


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

    @property
    def training(self) -> Training:
        """Return the inputs that the engine was made from."""

    @property
    def compiled(self) -> bool:
        """Return whether steps run compiled code or captured graphs; known within and after the warm-up."""

    # The next three are for verify, which compares them with the plain model.

    @property
    def forward(self) -> ForwardPass:
        """Return the forward pass of a step, without the compiler."""

    def gradients(self, batches: Sequence[Batch], divisor: int) -> None:
        """Leave in the parameters the gradients of some micro-batches over the divisor, as a step computes them before
        its update. Shards and stages exchange them; replicas do not."""

    def warm_up(self, print_line: Callable[[str], None]) -> AbstractContextManager[Losses]:
        """Do whatever must not happen in a step: compile for the declared shapes, check that the largest one fits.

        Returns:
            a context with the objective per target of the batch of each shape. Within it graphs are final and may be
            run; when it ends, the engine prints and keeps what it has built. Weights, gradients and random state are
            the same afterwards.

        Args:
            print_line: prints a line on the console.

        Raises:
            ConfigError: the run cannot work with these settings; the message says what to change.
        """

    def guarded(self) -> AbstractContextManager[None]:
        """Return a context for all steps. Within it a recompile, or anything else that must not happen in a step,
        raises an error that gives the reason."""

    def step(
        self, batches: StepBatches, learning_rate: float, *, stop: bool = False, spikes: health.Spikes | None = None
    ) -> names.StepOutcome:
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
        """Return the report on the steps of all ranks since the start; every rank calls it.

        Args:
            error: the error that ended training early. A rank may then call this alone, with the last reports of the
                others.
        """

    def close(self) -> None:
        """Restore the global settings that the engine has changed in this process."""
