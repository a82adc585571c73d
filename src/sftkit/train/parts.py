"""The parts of a run, in the order in which train/assemble.py makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sftkit.checkpoint.resume import NO_CHECKPOINT, ResumeCheckpoint
from sftkit.config.schema import Config
from sftkit.data.batches.loader import Batches
from sftkit.data.tokens.chat import PromptedTargets
from sftkit.data.types import Examples, Row
from sftkit.runtime.start import Runtime
from sftkit.tracking.names import Check
from sftkit.tracking.tracker import Tracker

if TYPE_CHECKING:
    from sftkit.checkpoint.save import SaveEnd
    from sftkit.verify.round_trip import RoundTrip

Evaluate = Callable[[int], tuple[dict[str, float | None], list[dict[str, Any]]]]
"step -> (metrics, sample answers)"


@dataclass(frozen=True)
class Run:
    """A run on this process: recipe, ranks and directory, which every later step of the assembly needs."""

    cfg: Config
    stage: str
    "base, mid, sft or caption; also the run's name on a dashboard"
    rt: Runtime
    dir: Path
    "directory written before the first step is done: run.dir, or a folder in it if run.dir holds an earlier run"
    resume: ResumeCheckpoint = NO_CHECKPOINT
    "checkpoint to resume, by train.resume, or by auto if the launcher restarted the run"


@dataclass(frozen=True)
class LoadedModel:
    """The model and tokenizer that training starts from."""

    orig_model: PreTrainedModel
    "model for evaluation, samples and checkpoints; only a training step runs it compiled"
    tokenizer: PreTrainedTokenizerBase
    max_length: int
    "maximum row positions of a document: from the recipe, or from the run that the model comes from"


@dataclass(frozen=True)
class Data:
    """The data of a run: for training, validation and samples."""

    batches: Batches
    validation: dict[str, Examples]
    samples: list[Row]
    "validation rows that the model answers as samples"
    prompted_targets: PromptedTargets | None
    "comparison of targets with a server's prompts, on small conversations; None: every token is a target"


@dataclass(frozen=True)
class EncodedDocuments:
    """Tokenized documents, before they are laid out in rows."""

    examples: Examples
    max_length: int
    "maximum row positions of a document"
    pad_id: int = 0


class Saves(Protocol):
    """The checkpoints of the loop: checkpoint.checkpoint.Checkpoints, or a stand-in for benchmarks and tests."""

    @property
    def run_dir(self) -> Path:
        """Return the parent of the step directories."""

    @property
    def resumed_from(self) -> Path | None:
        """Return the step directory that this start resumes from; None: it starts at step 0."""

    @property
    def skipped_checkpoints(self) -> Sequence[str]:
        """Return the reasons why newer checkpoints were skipped."""

    @property
    def last_save(self) -> Mapping[str, float]:
        """Return seconds and bytes of the newest save, by their metric names without ckpt/."""

    def save(self, step: int, state: dict[str, Any], *, wait: bool = False) -> Path:
        """Save a checkpoint in the background and return its step directory; `wait`: return after it is published."""

    def evaluated(self, step: int, values: dict[str, float | None]) -> None:
        """Choose the best checkpoint by the metrics of an evaluation."""

    def archive_later_steps(self, step: int) -> None:
        """Rename checkpoints of later steps, which will be trained again."""

    def finish(self) -> None:
        """Wait for a save in progress."""

    def ended_saves(self) -> Sequence[SaveEnd]:
        """Return the results of the saves that ended since the last call."""


@dataclass(frozen=True)
class TrainServices:
    """The functions with which the loop evaluates, saves and logs."""

    evaluate: Evaluate
    "evaluates orig_model at a step; every rank calls it"
    checkpoints: Saves
    tracker: Tracker
    resumed: Mapping[str, Any]
    "result of Checkpoints.resume"
    data_checks: Sequence[Check] = ()
    "earlier checks of the data, for proof.json"
    check_validation: Callable[[], list[Check]] = list
    "compares validation losses with an independent computation after the warm-up; every rank calls it"
    round_trip: RoundTrip | None = None
    "opens the first checkpoint as others do; None: nothing is opened"
