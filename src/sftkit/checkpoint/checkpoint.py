"""Save and restore a run. A checkpoint is a step directory that plain transformers loads: copied in a moment, written
in the background, verified by a manifest, and renamed when complete.
"""

import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sftkit.checkpoint import states
from sftkit.checkpoint.resume import ResumeCheckpoint, check_fit, find_checkpoint
from sftkit.checkpoint.save import Best, SaveEnd, Snapshot, Writer, free_bytes, in_mb, read_best, reason, sweep
from sftkit.config.schema import CheckpointConfig
from sftkit.errors import CheckpointError, ConfigError, config_error, hint
from sftkit.models import kind, structure, towers, trained
from sftkit.models.weights import load_checkpoint
from sftkit.optim.protocol import Optimizer, named_states, states_loaded
from sftkit.rundir import names as rundir
from sftkit.rundir import status
from sftkit.rundir.files import archive, replace_text
from sftkit.runtime.hardware import environment
from sftkit.runtime.open import random_key, random_state, restore_random_state
from sftkit.runtime.start import Runtime, seed_everything

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Checkpoints:
    """Save and restore everything that a run needs to continue exactly. Every rank has an instance and calls
    the same methods.
    """

    run_dir: Path
    config: CheckpointConfig
    rt: Runtime
    orig_model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    optimizer: Optimizer
    recipe: str
    "resolved recipe as YAML; stored in checkpoints and compared when resuming"
    identity: Mapping[str, Any] = field(default_factory=dict)
    """model, tokenizer and data of the run as nested JSON values; a checkpoint of another identity is rejected"""
    resumed_from: Path | None = field(default=None, init=False)
    skipped_checkpoints: Sequence[str] = field(default=(), init=False)
    "why newer checkpoints were not resumed"

    def __post_init__(self) -> None:
        self._writer = Writer(self.run_dir, self.config, self.rt, self.orig_model)
        self._blocked: dict[str, float] = {}
        self._small_files: dict[str, bytes] = {}

    @property
    def last_save(self) -> dict[str, float]:
        """Return block_seconds of the last save, and write_seconds and bytes of the last published save."""
        return {**self._blocked, **self._writer.figures}

    def save(self, step: int, state: dict[str, Any], *, wait: bool = False) -> Path:
        """Copy the state to host memory and write step-NNNNNN/ from there in the background.

        An earlier save in progress is finished first. `ended_saves` reports a failed save (a full disk): older
        checkpoints stay, training continues, and the next save tries again.

        Args:
            state: JSON values that `resume` returns.
            wait: whether to return only when the checkpoint is published on all ranks.

        Raises:
            CheckpointError: on every rank with `wait`, if the checkpoint could not be written.
        """
        began = time.perf_counter()
        # One save at a time: host memory has room for one snapshot, and the writers of all ranks take part in the
        # same collectives.
        self._writer.finish()
        folder = rundir.step_dir(self.run_dir, step)
        if step != self._writer.published:  # a published directory is never rewritten
            self._writer.start(self._snapshot(step, state))
        if wait:
            self._writer.finish()
            if self._writer.failure is not None:
                why = self._writer.failure
                raise CheckpointError(hint("checkpoint not written", folder=folder, why=why, run_dir=self.run_dir))
        self._blocked = {"block_seconds": time.perf_counter() - began}
        return folder

    def finish(self) -> None:
        """Wait for a save in progress; `ended_saves` then reports its result."""
        self._writer.finish()

    def ended_saves(self) -> list[SaveEnd]:
        """Return the results of the saves that ended since the last call."""
        return [self._writer.ended.get() for _ in range(self._writer.ended.qsize())]

    def evaluated(self, step: int, values: dict[str, float | None]) -> None:
        """Record the metrics of an evaluation: the checkpoint of that step is kept if it is the best so
        far (checkpoint.best).
        """
        metric = self.config.best
        value = values.get(metric) if metric else None
        if metric and values and metric not in values and self.rt.is_main:
            log.warning(hint("best by no metric of an evaluation", metric=metric, known=", ".join(values)))
        if metric and value is not None and self.rt.is_main:
            self._writer.consider(Best(rundir.step_dir(self.run_dir, step).name, metric, value))

    @torch.no_grad()
    def _snapshot(self, step: int, state: dict[str, Any]) -> Snapshot:
        """Copy this rank's part to host memory. Shards are gathered here, in the main thread, because the background
        thread may not use training's process group.
        """
        rank, world_size = self.rt.rank, self.rt.world_size
        # Record a failure without raising: the other ranks are about to enter the gathers below and would wait for
        # this rank. The writers then fail together.
        problem = None
        if self.rt.is_main and not self._small_files:
            try:
                self._small_files = self._unchanging_files(
                    rundir.being_written(rundir.step_dir(self.run_dir, step), "small")
                )
            except Exception as error:  # Rust code reports a full disk by another exception than OSError
                problem = f"the tokenizer's files cannot be written to {self.run_dir}: {reason(error)}"
        self._name_padding()
        # Collectives, in this order on all ranks.
        weights = states.snapshot_weights(self.orig_model, rank, world_size)
        named, stages = named_states(self.optimizer, self.orig_model), structure.stages_of(self.orig_model)
        among = (rank, world_size)
        # each stage of a pipeline writes its own states, shared among the ranks that hold the same layers
        if stages is not None:
            named = {name: tensor for name, tensor in named.items() if stages.written_here(name)}
            among = stages.replica
        of_optimizer = states.snapshot_states(named, *among)
        # the writer's thread reads host memory, so the queued copies must be complete
        states.copies_done(self.rt.device)
        kept = {
            "step": step,
            "optimizer": self.optimizer.kind,
            "world_size": world_size,
            "topology": self.rt.topology.describe(),
            "identity": self.identity,
            **state,
        }
        state_text = json.dumps(kept, indent=1)
        return Snapshot(step, state_text, weights, of_optimizer, random_state(), self._small_files, problem)

    def write_files(self, folder: Path) -> Path:
        """Write what loads the weights of a checkpoint: configs and tokenizer, before there are weights.

        Returns:
            where they are: of several adapters the folder of the first.
        """
        self._name_padding()
        self._small_files = self._unchanging_files(folder / "small")
        states.write_config(self.orig_model, folder)
        for name, content in self._small_files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        members = trained.members_in(self.orig_model)
        return rundir.adapter_dir(folder, members[0].name) if members else folder

    def _name_padding(self) -> None:
        """Name the padding in the generation config, which is saved: generate pads batches with it."""
        if (generation := self.orig_model.generation_config) is not None:
            generation.pad_token_id = self.tokenizer.pad_token_id

    def _unchanging_files(self, folder: Path) -> dict[str, bytes]:
        """Return the files that are the same in every checkpoint: name -> content. They are made once in the main
        thread, because a tokenizer that encodes in one thread cannot be saved in another.

        Args:
            folder: temporary location, on the disk that checkpoints use: another disk could be full.
        """
        try:
            # In the main thread: saving raises "Already borrowed" (tokenizers #537) while another thread encodes.
            self.tokenizer.save_pretrained(folder)
            make_tokenizer_portable(folder / "tokenizer_config.json")
            files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        files[rundir.RECIPE] = self.recipe.encode()
        # Each of several adapters is a separate model.
        names = [member.name for member in trained.members_in(self.orig_model)]
        files |= {f"{rundir.ADAPTER_FOLDERS}/{name}/{file}": text for name in names for file, text in [*files.items()]}
        versions = environment(self.rt.device, self.rt.world_size)
        return {
            **files,
            **kind.kind_of(self.orig_model.config).files(self.orig_model),
            f"{rundir.STATE}/{rundir.ENVIRONMENT}": json.dumps(versions, indent=1).encode(),
        }

    def check_space(self, estimated_bytes: float, *, new_run: bool = False) -> None:
        """Reject a run whose checkpoints do not fit on the disk; every rank calls it.

        Args:
            estimated_bytes: size of one checkpoint: weights and optimizer states, without the tensors outside a
                text model.
            new_run: whether checkpoints in the directory belong to an earlier run, which this run will not prune.

        Raises:
            ConfigError: too little free space; names both sizes.
        """

        def check() -> None:
            if not new_run:
                sweep(self.run_dir)
            # The kept checkpoints stay on disk while the newest is written.
            at_once = self.config.keep + 1 if self.config.every else 1
            there = 0 if new_run else len(rundir.step_dirs(self.run_dir))
            needed = estimated_bytes * max(at_once - there, 1)
            outside = 0 if there else towers.bytes_outside(self.orig_model)
            needed += outside
            free = free_bytes(self.run_dir)
            if free < needed:
                once = f", and {in_mb(outside)} once for the tensors outside the text model" if outside else ""
                sizes = {"free": in_mb(free), "needed": in_mb(needed), "each": in_mb(estimated_bytes)}
                words = {"run_dir": self.run_dir, "at_once": at_once, "once": once}
                raise config_error("no room for checkpoints", **sizes, **words)

        self.rt.from_main(check)

    def resume(self, checkpoint: ResumeCheckpoint | str | None, changes: Sequence[str] = ()) -> dict[str, Any]:
        """Restore weights, optimizer states and this rank's random state. Every rank calls it.

        Args:
            checkpoint: the checkpoint, or the setting that finds it (train.resume).
            changes: recipe keys that may differ although a resumed run normally keeps them (train.resume_changes).

        Returns:
            the state given to `save`, with "step"; {"step": 0} for a new start.

        Raises:
            ConfigError: the named directory does not verify, no checkpoint verifies, or it belongs to another model,
                data, optimizer or recipe.
            CheckpointError: the checkpoint cannot be read.
        """
        if not isinstance(checkpoint, ResumeCheckpoint):
            checkpoint = find_checkpoint(self.run_dir, checkpoint, self.rt)
        folder, state = checkpoint.folder, checkpoint.state
        if folder is None:
            return state
        self.resumed_from, self.skipped_checkpoints = folder, checkpoint.skipped_checkpoints
        # Checked before loading: a checkpoint of another run must not change this one.
        optimizer = self.optimizer.kind
        check = partial(check_fit, checkpoint, self.recipe, changes, self.identity, optimizer=optimizer)
        lines = self.rt.from_main(check)
        # Weights, then optimizer states, which are named after them. Random states come last, because earlier steps
        # may draw numbers.
        load_checkpoint(self.orig_model, folder)
        tensors = named_states(self.optimizer, self.orig_model)
        stages = structure.stages_of(self.orig_model)
        place = folder / rundir.OPTIMIZER
        if "train.freeze" in changes:
            states.load_common_states(tensors, place)
        else:
            states.load_states(tensors, place, *([stages.elsewhere] if stages else []))
        states_loaded(self.optimizer, self.orig_model, tensors, state["step"])
        self.rt.print(f"resumed {folder}: step {state['step']}, {state.get('tokens', 0):,} tokens seen")
        self._restore_random_state(folder, state)
        for line in lines:
            self.rt.print(line)
        return state

    def _restore_random_state(self, folder: Path, state: dict[str, Any]) -> None:
        """Load this rank's random state if processes and topology match the checkpoint; otherwise seed it from
        run.seed, step and rank.
        """
        # A random state belongs to a rank and its work; other ranks have no state to continue from.
        there = (state["world_size"], state["topology"])
        if there == (self.rt.world_size, self.rt.topology.describe()):
            file = rundir.random_state_file(folder, self.rt.rank)
            try:
                restore_random_state(torch.load(file, map_location="cpu", weights_only=True))
            except Exception as error:  # errors of torch, of zip files, of states in another form
                raise ConfigError(f"{file}: {status.describe_error(error)}; resume from another checkpoint") from None
            return
        seed = ((yaml.safe_load(self.recipe) or {}).get("run") or {}).get("seed", 0)
        # 63 bits: a non-negative int64
        seed_everything(random_key(seed, state["step"], self.rt.rank) >> 1)
        self.rt.print(
            f"resumed on {self.rt.world_size} process(es) ({self.rt.topology.describe()}) from {there[0]} "
            f"({there[1]}): optimizer states are redistributed, random states derived from seed, step and rank"
        )

    def archive_later_steps(self, step: int) -> None:
        """Archive checkpoints of steps after `step`, which this run trains again, so that neither pruning nor the
        next resume sees them.
        """
        if not self.rt.is_main:
            return
        folder = rundir.step_dir(self.run_dir, step)
        if folder.is_dir():  # first, so that LATEST always names an existing directory
            replace_text(self.run_dir / rundir.LATEST, f"{folder.name}\n")
        best = read_best(self.run_dir)
        for later in rundir.step_dirs(self.run_dir):
            if rundir.step_number(later) > step:
                log.warning("%s is past the resumed step: renamed to %s", later, archive(later))
                if best is not None and best.folder == later.name:
                    (self.run_dir / rundir.BEST).unlink()


def make_tokenizer_portable(config_file: Path) -> None:
    """Rewrite tokenizer_config.json for servers with transformers 4: version 5 writes a class and a field that
    version 4 rejects (huggingface/transformers#47553), and both versions read the rewritten file.
    """
    config = json.loads(config_file.read_text())
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        config["additional_special_tokens"] = config.pop("extra_special_tokens", [])
        for name in ("backend", "is_local", "local_files_only"):
            config.pop(name, None)
        config_file.write_text(json.dumps(config, indent=2, ensure_ascii=False))
