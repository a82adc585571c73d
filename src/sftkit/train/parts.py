"""The parts of a run, in the order of its assembly: what each later step needs of the earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sftkit.checkpoint.resume import NO_CHECKPOINT, ResumeCheckpoint
from sftkit.checkpoint.writer import SaveEnd
from sftkit.config.schema import Config
from sftkit.data.loader import Batches
from sftkit.data.prompts import PromptedTargets
from sftkit.data.types import Examples, Row
from sftkit.runtime.start import Runtime
from sftkit.tracking.checks import Check
from sftkit.tracking.tracker import Tracker

Evaluate = Callable[[int], tuple[dict[str, float | None], list[dict[str, Any]]]]
"step -> (metrics, sample answers)"


@dataclass(frozen=True)
class Run:
    """A recipe on this process: what every later step of the assembly needs."""

    cfg: Config
    stage: str
    "name by which a run is found among others: base, mid, sft or caption"
    rt: Runtime
    dir: Path
    "where it writes before it has done a step: run.dir, or a folder in it beside an earlier run"
    resume: ResumeCheckpoint = NO_CHECKPOINT
    "the checkpoint that it resumes: found as train.resume says, or as auto where the launcher has restarted the run"


@dataclass(frozen=True)
class LoadedModel:
    """What training starts from."""

    orig_model: PreTrainedModel
    "what evaluation, samples and checkpoints see; only a training step runs it compiled"
    tokenizer: PreTrainedTokenizerBase
    max_length: int
    "maximum row positions of a document: from the recipe, or from the run that the model comes from"


@dataclass(frozen=True)
class Data:
    """What is learned from and what is only measured."""

    batches: Batches
    validation: dict[str, Examples]
    samples: list[Row]
    "rows of the validation data whose answers are shown as samples"
    prompted_targets: PromptedTargets | None
    "small conversations whose targets are compared with what a server samples; None: every token is learned"


@dataclass(frozen=True)
class EncodedDocuments:
    """Encoded documents that are to be laid out."""

    examples: Examples
    max_length: int
    "maximum row positions of a document"
    pad_id: int = 0


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


@dataclass(frozen=True)
class TrainServices:
    """What the loop evaluates, saves and logs with, beside the engine and the batches of its steps."""

    evaluate: Evaluate
    "evaluates orig_model at a step; every rank calls it"
    checkpoints: Saves
    tracker: Tracker
    resumed: Mapping[str, Any]
    "what Checkpoints.resume returned"
    data_checks: Sequence[Check] = ()
    "what was checked of the data before, for proof.json"
