"""Step directories on disk: manifest, publishing by rename, pruning, BEST and LATEST, and the background save.

A thread on every rank writes a snapshot; all of it is published, or nothing. The ranks agree over a gloo group of
their own, never over training's group: two threads may not share one, and on a full disk no file could carry the
message that it is full.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from sftkit.checkpoint.states import HostShard, WeightSnapshot, save_states, write_config, write_weights
from sftkit.config.schema import CheckpointConfig
from sftkit.models.trained import adapters_of
from sftkit.rundir import names as rundir
from sftkit.rundir.files import archive, flush, replace_text
from sftkit.rundir.manifest import BASE, sha256_of
from sftkit.rundir.status import is_full_disk
from sftkit.runtime.start import Runtime

LOWER_IS_BETTER = re.compile(
    r"(^|_)(perplexity|bits_per_byte|bpb|loss|brier_score|ter|wer|cer|likelihood_diff|bias)(_|$)"
)
"Metrics of tasks that measure an error; lm_eval may add the name of a filter to them."

Entries = dict[str, dict[str, Any]]
"""File name relative to the step directory -> {"bytes": size, "sha256": hex}."""


def entries(folder: Path, files: Iterable[Path]) -> Entries:
    """Return size and sha256 of files. Each is flushed to the disk first, so that the hash is of what stays."""
    paths = sorted(files)
    for path in paths:
        flush(path)
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, sha256_of(paths), strict=True)
    }


def write_manifest(folder: Path, step: int, files: Entries, base: str | None = None) -> None:
    """Write manifest.json, which lists every other file. `base`: digest of the weights that an adapter belongs to.

    Raises:
        OSError: the folder holds other files than those that the ranks say they wrote.
    """
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    if present != set(files):
        raise OSError(f"{folder}: files and manifest differ: {sorted(present ^ set(files))[:5]}")
    content = {"step": step, **({} if base is None else {BASE: {"sha256": base}}), "files": dict(sorted(files.items()))}
    (folder / rundir.MANIFEST).write_text(json.dumps(content, indent=1))


def publish(temporary: Path, final: Path) -> None:
    """Rename a flushed directory: readers see a whole checkpoint or none, also after a power failure."""
    flush(temporary / rundir.MANIFEST)
    # Names of files are in their directories: without this a power failure could leave the rename, and not
    # what was renamed.
    for path in (*(p for p in temporary.rglob("*") if p.is_dir()), temporary):
        flush(path)
    if final.exists():  # the same step, of an earlier start whose later steps were given up
        archive(final)
    os.rename(temporary, final)
    flush(final.parent)


def flush_lines(run_dir: Path) -> None:
    """Write what was logged so far to the disk: a run that resumes a checkpoint has the lines of all steps before."""
    for name in (rundir.METRICS_FILE, rundir.EVALS, rundir.SAMPLES, rundir.EVENTS):
        with suppress(OSError):  # most are not there yet; a disk that has no room for lines costs lines, not the save
            flush(run_dir / name)
    flush(run_dir)


def remove(folder: Path) -> None:
    """Delete a step directory; renamed first, so that no half-deleted one is ever found."""
    doomed = rundir.being_deleted(folder, secrets.token_hex(4))
    os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def sweep(run_dir: Path) -> None:
    """Delete what a killed process left half-written or half-deleted."""
    for pattern in rundir.UNFINISHED:
        for folder in run_dir.glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)


def prune(run_dir: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, the best one, the pinned ones and the one that LATEST names."""
    latest, best = run_dir / rundir.LATEST, read_best(run_dir)
    # LATEST and BEST name directories, which have to be there at any moment, however old they are.
    spared = {latest.read_text().strip() if latest.exists() else None, best and best.folder}
    for folder in rundir.step_dirs(run_dir)[:-keep]:
        if not (folder / rundir.PINNED).exists() and folder.name not in spared:
            remove(folder)


class Best(NamedTuple):
    """The best evaluated checkpoint: its directory's name, the metric and its value."""

    folder: str
    metric: str
    value: float


def read_best(run_dir: Path) -> Best | None:
    """Return what the file BEST says (the directory's name, then metric and value on a line of their own);
    None if it cannot be read, or its directory is gone."""
    try:
        folder, line = (run_dir / rundir.BEST).read_text().splitlines()[:2]
        metric, value = line.rsplit(" ", 1)
        # A start that ended while it put later steps aside may have left the name of one.
        return Best(folder, metric, float(value)) if (run_dir / folder).is_dir() else None
    except (OSError, ValueError):
        return None


def write_best(run_dir: Path, best: Best) -> None:
    """Write the file BEST."""
    replace_text(run_dir / rundir.BEST, f"{best.folder}\n{best.metric} {best.value!r}\n")


def higher_is_better(metric: str) -> bool:
    """Return whether a larger value of a metric is better: for metrics of tasks (eval/<task>/<metric>), unless lm_eval
    has it as a measure of error, such as perplexity. All others are losses."""
    return metric.startswith("eval/") and not LOWER_IS_BETTER.search(metric.rpartition("/")[2])


def is_better(new: Best, old: Best | None) -> bool:
    """Return whether a value beats the best one so far. NaN is never better, and a value of
    another metric does not count."""
    if math.isnan(new.value):
        return False
    if old is None or old.metric != new.metric:
        return True
    return new.value > old.value if higher_is_better(new.metric) else new.value < old.value


log = logging.getLogger(__name__)
T = TypeVar("T")
SLOWEST = timedelta(hours=2)
"How long ranks wait for the slowest writer."


class SaveEnd(NamedTuple):
    """How a save ended."""

    step: int
    failure: str | None
    "why nothing was published; None: the checkpoint is there"


@dataclass
class Snapshot:
    """All that a checkpoint says, in host memory: training may go on while it is written."""

    step: int
    state: str
    "JSON text: training could still change a list in the values"
    weights: WeightSnapshot
    states: dict[str, HostShard]
    rng: dict[str, Any]
    small_files: dict[str, bytes]
    "name -> content; on the main rank"
    problem: str | None
    "why a part of it could not be made; None: it is whole"

    def num_bytes(self) -> int:
        """Return the size of this rank's part.

        Raises:
            OSError: it is not whole.
        """
        if self.problem is not None:
            raise OSError(self.problem)
        return self.weights.num_bytes() + sum(shard.tensor.nbytes for shard in self.states.values())


class Writer:
    """Writes one snapshot at a time. Every rank has one, and starts it with the snapshots of the same steps."""

    def __init__(self, run_dir: Path, config: CheckpointConfig, rt: Runtime, orig_model: PreTrainedModel) -> None:
        self.run_dir, self.config, self.rt, self.orig_model = run_dir, config, rt, orig_model
        self.published: int | None = None
        "the last step that this run has published"
        self.failure: str | None = None
        "why the last write failed, None if it did not"
        self.figures: dict[str, float] = {}
        "write_seconds and bytes of the last published checkpoint"
        self.ended: SimpleQueue[SaveEnd] = SimpleQueue()
        "how each write ended, for the training thread to tell"
        self._thread: threading.Thread | None = None
        self._group: dist.ProcessGroup | None = None
        self._token = ""
        "of this run, in the names of what it has not published: the same on every rank, and no other run's"
        self._lock = threading.Lock()
        self._writing: int | None = None
        self._best_in_writing: Best | None = None

    def start(self, snapshot: Snapshot) -> None:
        """Begin to write; the one before has to be finished."""
        # Made by the main threads, which all come here for the same step: new_group is a collective
        # of training's group.
        if self.rt.world_size > 1 and self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=SLOWEST)
        self._token = self._token or self.rt.from_main(lambda: secrets.token_hex(4))
        self._writing, self.failure = snapshot.step, None
        # A daemon: a run that fails does not wait for it. What it leaves is a temporary folder, which is swept.
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the snapshot that is being written, if any."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def consider(self, best: Best) -> None:
        """Record it in BEST if it is better than the one there and its directory exists or is being written."""
        with self._lock:
            if (self.run_dir / best.folder).is_dir():
                self._record(best)
            # An evaluation may end before the checkpoint of its step is published: BEST must not name what
            # is not there.
            elif self._writing is not None and best.folder == rundir.step_dir(self.run_dir, self._writing).name:
                self._best_in_writing = best

    def _record(self, best: Best) -> None:
        try:
            if is_better(best, read_best(self.run_dir)):
                write_best(self.run_dir, best)
        except OSError as error:
            log.warning("%s cannot be noted as the best checkpoint: %s", best.folder, error)

    def _write(self, snapshot: Snapshot) -> None:
        """Write a snapshot in the background thread; how it ended is in `ended`."""
        began = time.perf_counter()
        temporary = rundir.being_written(rundir.step_dir(self.run_dir, snapshot.step), self._token)
        try:
            with torch.no_grad():
                num_bytes = self._write_all(snapshot, temporary)
            self.published = snapshot.step
            self.figures = {"write_seconds": time.perf_counter() - began, "bytes": float(num_bytes)}
        except BaseException as error:  # torch's CheckpointException is not an Exception
            self.failure = reason(error)
            if self.rt.is_main:
                if is_full_disk(error) and self.run_dir.is_dir():
                    self.failure += f" ({in_mb(free_bytes(self.run_dir))} free on its disk)"
                shutil.rmtree(temporary, ignore_errors=True)
        finally:
            self.ended.put(SaveEnd(snapshot.step, self.failure))
            with self._lock:
                self._writing = self._best_in_writing = None

    def _write_all(self, snapshot: Snapshot, temporary: Path) -> int:
        """Write a checkpoint, step by step on all ranks together. Returns the bytes of its files."""
        # Space is checked, weights and states are written, everything is hashed; published only when all ranks have
        # done all of it.
        total = sum(self._together(snapshot.num_bytes))
        self._on_main(lambda: self._open(temporary, snapshot, total))
        mine = self._together(lambda: self._write_own(snapshot, temporary))[self.rt.rank]
        # A collective of torch, over the same group.
        mine += save_states(snapshot.states, temporary / rundir.OPTIMIZER, self._group, self.rt.rank)
        claimed = self._together(lambda: mine)
        if self.rt.is_main:  # all that no other rank wrote: transformers names its files itself
            others = {path for paths in claimed[1:] for path in paths}
            mine = [path for path in temporary.rglob("*") if path.is_file() and path not in others]
        all_entries = self._together(lambda: entries(temporary, mine))
        files = {name: entry for part in all_entries for name, entry in part.items()}
        self._on_main(lambda: self._publish(snapshot.step, temporary, files))
        return sum(entry["bytes"] for entry in files.values())

    def _together(self, do: Callable[[], T]) -> list[T]:
        """Run `do` on every rank, and return the results by rank. What fails on one rank fails on all."""
        try:
            mine: tuple[T | None, str | None] = (do(), None)
        except Exception as error:
            mine = (None, reason(error))
        # A failure travels like a result: a rank that raised before this would leave the others waiting
        # for hours (SLOWEST).
        gathered: list[Any] = [mine]
        if self._group is not None:
            gathered = [None] * self.rt.world_size
            dist.all_gather_object(gathered, mine, group=self._group)
        for rank, (_, problem) in enumerate(gathered):
            if problem is not None:
                raise OSError(problem if len(gathered) == 1 else f"rank {rank}: {problem}")
        return [value for value, _ in gathered]

    def _on_main(self, do: Callable[[], None]) -> None:
        self._together(lambda: do() if self.rt.is_main else None)

    def _open(self, temporary: Path, snapshot: Snapshot, num_bytes: int) -> None:
        """Make the temporary folder, once the disk has room for the checkpoint."""
        if self.rt.lock is not None:
            self.rt.lock.check(self.run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        sweep(self.run_dir)
        free = free_bytes(self.run_dir)
        if free < num_bytes:
            raise OSError(f"{self.run_dir} has {in_mb(free)} free and it takes {in_mb(num_bytes)}")
        (temporary / rundir.OPTIMIZER).mkdir(parents=True)
        # Of a model in one piece write_weights writes it.
        if snapshot.weights.full is None:
            write_config(self.orig_model, temporary)

    def _write_own(self, snapshot: Snapshot, folder: Path) -> list[Path]:
        """Write this rank's files without its optimizer states, and return those that it can name."""
        random_file = rundir.random_state_file(folder, self.rt.rank)
        torch.save(snapshot.rng, random_file)
        write_weights(snapshot.weights, self.orig_model, folder)
        if self.rt.is_main:
            (folder / rundir.TRAINING_STATE).write_text(snapshot.state)
            for name, content in snapshot.small_files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
        return [random_file, *(folder / name for name in snapshot.weights.files)]

    def _publish(self, step: int, temporary: Path, files: Entries) -> None:
        """Write the manifest, rename the folder to its final name, and delete older checkpoints."""
        if self.rt.lock is not None:
            self.rt.lock.check(self.run_dir)
        final = rundir.step_dir(self.run_dir, step)
        adapters = adapters_of(self.orig_model)
        write_manifest(temporary, step, files, None if adapters is None else adapters.digest)
        flush_lines(self.run_dir)
        publish(temporary, final)
        replace_text(self.run_dir / rundir.LATEST, final.name + "\n")
        # An evaluation of this step may end at the same moment: it is recorded in BEST before pruning looks there.
        with self._lock:
            if self._best_in_writing is not None:
                self._record(self._best_in_writing)
            prune(self.run_dir, self.config.keep)


def reason(error: BaseException) -> str:
    """Return one line about what went wrong; for a failure inside torch's writer, that of the first rank."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (inner, _) = next(iter(failures.items()))
        return f"rank {rank}: {reason(inner)}" if len(failures) > 1 or rank else reason(inner)
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def free_bytes(folder: Path) -> int:
    """Return the bytes that this user may still write to the disk of `folder`, or of its nearest parent that exists."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def in_mb(num_bytes: float) -> str:
    """Format bytes in megabytes (10^6)."""
    return f"{num_bytes / 1e6:,.1f} MB"
