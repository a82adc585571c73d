"""Checkpoints: a step directory that loads in plain transformers, copied in a moment, written in the background,
verified by a manifest, renamed when complete; and the way back from one into a live run."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sftkit.checkpoint.resume import ResumeCheckpoint, check_identity, check_recipe, find_checkpoint
from sftkit.checkpoint.save import Best, SaveEnd, Snapshot, Writer, free_bytes, in_mb, read_best, reason, sweep
from sftkit.checkpoint.states import copies_done, load_common_states, load_states, snapshot_states, snapshot_weights
from sftkit.config.schema import CheckpointConfig
from sftkit.errors import CheckpointError, ConfigError
from sftkit.models.kind import kind_of
from sftkit.models.structure import stages_of
from sftkit.models.weights import load_checkpoint
from sftkit.optim.protocol import Optimizer, named_states, states_loaded
from sftkit.rundir import names as rundir
from sftkit.rundir.files import archive, replace_text
from sftkit.rundir.status import describe_error
from sftkit.runtime.hardware import environment
from sftkit.runtime.open import random_key, random_state, restore_random_state
from sftkit.runtime.start import Runtime, seed_everything

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Checkpoints:
    """Saves and restores everything that a run needs to continue exactly. Every rank has one and calls
    the same methods."""

    run_dir: Path
    config: CheckpointConfig
    rt: Runtime
    orig_model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    optimizer: Optimizer
    recipe: str
    "resolved, as YAML; checkpoints hold it, and a resume compares it"
    identity: Mapping[str, Any] = field(default_factory=dict)
    """what model, tokenizer and data it trains on, as nested JSON values; a checkpoint of another identity is not
    resumed"""
    resumed_from: Path | None = field(default=None, init=False)
    skipped_checkpoints: Sequence[str] = field(default=(), init=False)
    "why newer checkpoints were not resumed"

    def __post_init__(self) -> None:
        self._writer = Writer(self.run_dir, self.config, self.rt, self.orig_model)
        self._blocked: dict[str, float] = {}
        self._small_files: dict[str, bytes] = {}

    @property
    def last_save(self) -> dict[str, float]:
        """Return block_seconds of the last save, and write_seconds and bytes of the last one that was published."""
        return {**self._blocked, **self._writer.figures}

    def save(self, step: int, state: dict[str, Any], *, wait: bool = False) -> Path:
        """Copy everything to host memory, and write step-NNNNNN/ from there in the background.

        An earlier save that is still being written is waited for. A save that fails (a full disk) is in `ended_saves`:
        what was there stays, training goes on and the next save tries again.

        Args:
            state: JSON values that `resume` gives back.
            wait: return when the checkpoint is published on all ranks.

        Raises:
            CheckpointError: with `wait`, on every rank: it could not be written.
        """
        began = time.perf_counter()
        # One at a time: host memory has room for one snapshot, and the writers of all ranks take part in
        # the same exchanges.
        self._writer.finish()
        folder = rundir.step_dir(self.run_dir, step)
        if step != self._writer.published:  # a published directory is never rewritten
            self._writer.start(self._snapshot(step, state))
        if wait:
            self._writer.finish()
            if self._writer.failure is not None:
                raise CheckpointError(
                    f"{folder} could not be written: {self._writer.failure}. What was saved before is in {self.run_dir}"
                )
        self._blocked = {"block_seconds": time.perf_counter() - began}
        return folder

    def finish(self) -> None:
        """Wait for the save that is being written, if any; how it ended is in `ended_saves`."""
        self._writer.finish()

    def ended_saves(self) -> list[SaveEnd]:
        """Return how saves ended, of those that ended since the last call."""
        return [self._writer.ended.get() for _ in range(self._writer.ended.qsize())]

    def evaluated(self, step: int, values: dict[str, float | None]) -> None:
        """Take the metrics of an evaluation: the checkpoint of that step is kept if it is the best
        so far (checkpoint.best)."""
        metric = self.config.best
        value = values.get(metric) if metric else None
        if metric and values and metric not in values and self.rt.is_main:
            log.warning(
                "checkpoint.best: %s is not a metric of this evaluation, which has %s", metric, ", ".join(values)
            )
        if metric and value is not None and self.rt.is_main:
            self._writer.consider(Best(rundir.step_dir(self.run_dir, step).name, metric, value))

    @torch.no_grad()
    def _snapshot(self, step: int, state: dict[str, Any]) -> Snapshot:
        """Copy what this rank writes to host memory. Shards are gathered here, in the main thread: the background
        thread has no part in training's process group."""
        rank, world_size = self.rt.rank, self.rt.world_size
        # A failure is noted, not raised: the other ranks are on their way into the gathers below and would wait for
        # this one. The writers then fail together.
        problem = None
        if self.rt.is_main and not self._small_files:
            try:
                self._small_files = self._unchanging_files(
                    rundir.being_written(rundir.step_dir(self.run_dir, step), "small")
                )
            except Exception as error:  # a full disk is no OSError in what is written in Rust
                problem = f"the tokenizer's files cannot be written to {self.run_dir}: {reason(error)}"
        # saved with the checkpoint: generate pads batches with it
        generation = self.orig_model.generation_config
        if generation is not None:
            generation.pad_token_id = self.tokenizer.pad_token_id
        # Collectives, in this order on all ranks.
        weights = snapshot_weights(self.orig_model, rank, world_size)
        named, stages = named_states(self.optimizer, self.orig_model), stages_of(self.orig_model)
        among = (rank, world_size)
        # of a pipeline each stage writes its own states, shared among the ranks that hold the same layers
        if stages is not None:
            named = {name: tensor for name, tensor in named.items() if stages.written_here(name)}
            among = stages.replica
        states = snapshot_states(named, *among)
        # the writer's thread reads host memory, so the queued copies must be complete
        copies_done(self.rt.device)
        kept = {
            "step": step,
            "optimizer": self.optimizer.kind,
            "world_size": world_size,
            "topology": self.rt.topology.describe(),
            "identity": self.identity,
            **state,
        }
        return Snapshot(step, json.dumps(kept, indent=1), weights, states, random_state(), self._small_files, problem)

    def _unchanging_files(self, folder: Path) -> dict[str, bytes]:
        """Return the files that are the same in every checkpoint: name -> content. Made once, in the main thread: a
        tokenizer that encodes in one thread cannot be saved in another.

        Args:
            folder: where they lie for a moment, on the disk that checkpoints need anyway; another could be full.
        """
        try:
            # In the main thread: "Already borrowed" (tokenizers #537) where another thread encodes meanwhile.
            self.tokenizer.save_pretrained(folder)
            make_tokenizer_portable(folder / "tokenizer_config.json")
            files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        versions = environment(self.rt.device, self.rt.world_size)
        return {
            **files,
            **kind_of(self.orig_model.config).files(self.orig_model),
            rundir.RECIPE: self.recipe.encode(),
            f"{rundir.STATE}/{rundir.ENVIRONMENT}": json.dumps(versions, indent=1).encode(),
        }

    def check_space(self, estimated_bytes: float, *, new_run: bool = False) -> None:
        """Refuse to start a run whose checkpoints the disk cannot hold; every rank calls it.

        Args:
            estimated_bytes: of one checkpoint: weights and optimizer states.
            new_run: the checkpoints that are in the directory are of an earlier run, which this one will not prune.

        Raises:
            ConfigError: too little free space, with both numbers.
        """
        self.rt.from_main(lambda: self._check_space(estimated_bytes, new_run=new_run))

    def _check_space(self, estimated_bytes: float, *, new_run: bool) -> None:
        if not new_run:
            sweep(self.run_dir)
        # While the newest one is written, those that are kept are still there.
        at_once = self.config.keep + 1 if self.config.every else 1
        there = 0 if new_run else len(rundir.step_dirs(self.run_dir))
        needed = estimated_bytes * max(at_once - there, 1)
        free = free_bytes(self.run_dir)
        if free < needed:
            raise ConfigError(
                f"run.dir={self.run_dir}: {in_mb(free)} free on its disk, and the checkpoints of this run need "
                f"{in_mb(needed)} ({in_mb(estimated_bytes)} each, at most {at_once} at a time). Free some space, "
                "choose a run.dir on another disk, or set checkpoint.every=null for the last one only"
            )

    def resume(self, checkpoint: ResumeCheckpoint | str | None, changes: Sequence[str] = ()) -> dict[str, Any]:
        """Restore weights, optimizer states and this rank's random state. Every rank calls it.

        Args:
            checkpoint: the checkpoint, or a setting (train.resume) by which it is found.
            changes: keys of the recipe that may differ although a resumed run keeps them (train.resume_changes).

        Returns:
            the state given to `save`, with "step"; {"step": 0} for a new start.

        Raises:
            ConfigError: the named directory, or none that is there, verifies, or it belongs to another model, data,
                optimizer or recipe.
            CheckpointError: what is there cannot be read.
        """
        if not isinstance(checkpoint, ResumeCheckpoint):
            checkpoint = find_checkpoint(self.run_dir, checkpoint, self.rt)
        folder, state = checkpoint.folder, checkpoint.state
        if folder is None:
            return state
        self.resumed_from, self.skipped_checkpoints = folder, checkpoint.skipped_checkpoints
        # Before anything is loaded: a checkpoint of another run leaves this one as it was.
        lines = self.rt.from_main(lambda: self._check_fit(checkpoint, folder, changes))
        # Weights, then states, which are named after them; random states last, as what comes before may draw numbers.
        load_checkpoint(self.orig_model, folder)
        tensors = named_states(self.optimizer, self.orig_model)
        stages = stages_of(self.orig_model)
        states = folder / rundir.OPTIMIZER
        if "train.freeze" in changes:
            load_common_states(tensors, states)
        else:
            load_states(tensors, states, *([stages.elsewhere] if stages else []))
        states_loaded(self.optimizer, self.orig_model, tensors, state["step"])
        self.rt.print(f"resumed {folder}: step {state['step']}, {state.get('tokens', 0):,} tokens seen")
        self._restore_random_state(folder, state)
        for line in lines:
            self.rt.print(line)
        return state

    def _check_fit(self, checkpoint: ResumeCheckpoint, folder: Path, changes: Sequence[str]) -> list[str]:
        """Refuse a checkpoint of another run; return lines to print about what was changed."""
        prefix, here = f"train.resume={checkpoint.setting}: {folder}", self.optimizer.kind
        if checkpoint.state["optimizer"] != here:
            raise ConfigError(
                f"{prefix} was written with the optimizer {checkpoint.state['optimizer']}, and this run has {here}: "
                "resume with its optim.name and train.precision, or start from its weights with model.path"
            )
        if not (folder / rundir.OPTIMIZER).is_dir():
            raise ConfigError(
                f"{prefix} has no {rundir.OPTIMIZER}/, so it is of an earlier version: use it as model.path"
            )
        check_identity(checkpoint.state.get("identity"), self.identity, prefix)
        return check_recipe((folder / rundir.RECIPE).read_text(), self.recipe, changes, prefix)

    def _restore_random_state(self, folder: Path, state: dict[str, Any]) -> None:
        """Load this rank's random state if processes and topology are those of the checkpoint; else seed it from
        run.seed, step and rank."""
        # A random state belongs to a rank and to what that rank computed; with other ranks there is none to go on from.
        there = (state["world_size"], state["topology"])
        if there == (self.rt.world_size, self.rt.topology.describe()):
            file = rundir.random_state_file(folder, self.rt.rank)
            try:
                restore_random_state(torch.load(file, map_location="cpu", weights_only=True))
            except Exception as error:  # of torch, of zip files, of states of another form
                raise ConfigError(f"{file}: {describe_error(error)}; resume from another checkpoint") from None
            return
        seed = ((yaml.safe_load(self.recipe) or {}).get("run") or {}).get("seed", 0)
        # 63 bits: a non-negative int64
        seed_everything(random_key(seed, state["step"], self.rt.rank) >> 1)
        self.rt.print(
            f"resumed on {self.rt.world_size} process(es) ({self.rt.topology.describe()}) what {there[0]} ({there[1]}) "
            "wrote: optimizer states are redistributed, random states derived from seed, step and rank"
        )

    def archive_later_steps(self, step: int) -> None:
        """Archive checkpoints of steps after `step`, which this run trains again, so that neither pruning nor
        the next resume sees them."""
        if not self.rt.is_main:
            return
        folder = rundir.step_dir(self.run_dir, step)
        if folder.is_dir():  # first, so that LATEST names a directory that exists at any moment
            replace_text(self.run_dir / rundir.LATEST, f"{folder.name}\n")
        best = read_best(self.run_dir)
        for later in rundir.step_dirs(self.run_dir):
            if rundir.step_number(later) > step:
                log.warning("%s is past the resumed step: it is now %s", later, archive(later))
                if best is not None and best.folder == later.name:
                    (self.run_dir / rundir.BEST).unlink()


def make_tokenizer_portable(config_file: Path) -> None:
    """Rewrite tokenizer_config.json for servers built on transformers 4: version 5 writes a class and a field that
    version 4 refuses (huggingface/transformers#47553), and both read these."""
    config = json.loads(config_file.read_text())
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        config["additional_special_tokens"] = config.pop("extra_special_tokens", [])
        for name in ("backend", "is_local", "local_files_only"):
            config.pop(name, None)
        config_file.write_text(json.dumps(config, indent=2, ensure_ascii=False))
