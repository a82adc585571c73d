"""Manage step directories on disk: manifest, publishing by rename, pruning, BEST and LATEST, and the background save.

A thread on every rank writes a snapshot; either all of it is published or nothing. The ranks agree over a separate
gloo group, never over training's group: two threads may not share a group, and a full disk has no room for a message
in a file.
"""

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
from sftkit.models.adapter_files import belongs_to
from sftkit.models.towers import bytes_outside
from sftkit.models.trained import adapters_of, members_in
from sftkit.rundir import names as rundir
from sftkit.rundir.files import BASE, archive, flush, replace_text, sha256_of
from sftkit.rundir.status import is_full_disk
from sftkit.runtime.start import Runtime

LOWER_IS_BETTER = re.compile(
    r"(^|_)(perplexity|bits_per_byte|bpb|loss|brier_score|ter|wer|cer|likelihood_diff|bias)(_|$)"
)
"Task metrics that measure an error; lm_eval may append the name of a filter."

Entries = dict[str, dict[str, Any]]
"""File name relative to the step directory -> {"bytes": size, "sha256": hex}."""


def entries(folder: Path, files: Iterable[Path]) -> Entries:
    """Return size and sha256 of files. Each is flushed to the disk first, so that the hash covers what is stored."""
    paths = sorted(files)
    for path in paths:
        flush(path)
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, sha256_of(paths), strict=True)
    }


def write_manifest(folder: Path, step: int | None, files: Entries, base: dict[str, Any] | None = None) -> None:
    """Write manifest.json, which lists every other file. `base`: what `belongs_to` returns; None: a whole model.

    Raises:
        OSError: the folder's files differ from those that the ranks report.
    """
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    if present != set(files):
        raise OSError(f"{folder}: files and manifest differ: {sorted(present ^ set(files))[:5]}")
    content = {"step": step, **({} if base is None else {BASE: base}), "files": dict(sorted(files.items()))}
    (folder / rundir.MANIFEST).write_text(json.dumps(content, indent=1))


def publish(temporary: Path, final: Path) -> None:
    """Rename a flushed directory: readers see a complete checkpoint or none, even after a power failure."""
    flush(temporary / rundir.MANIFEST)
    # Directories hold the names of files: without this flush a power failure could keep the rename and
    # lose the files.
    for path in (*(p for p in temporary.rglob("*") if p.is_dir()), temporary):
        flush(path)
    if final.exists():  # the same step of an earlier start, whose later steps were archived
        archive(final)
    os.rename(temporary, final)
    flush(final.parent)


def remove(folder: Path) -> None:
    """Delete a step directory; it is renamed first, so that no reader finds it half deleted."""
    doomed = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.del")  # matches rundir.UNFINISHED
    os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def sweep(run_dir: Path) -> None:
    """Delete the partial files that a killed process left, half written or half deleted."""
    for pattern in rundir.UNFINISHED:
        for folder in run_dir.glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)


def prune(run_dir: Path, keep: int) -> None:
    """Delete all checkpoints except the newest `keep`, the best, the pinned ones and the one that LATEST names."""
    latest, best = run_dir / rundir.LATEST, read_best(run_dir)
    # LATEST and BEST name directories that must always exist, regardless of their age.
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
    """Return the content of the file BEST (directory name, then metric and value on a second line); None if it cannot
    be read or the directory is gone.
    """
    try:
        folder, line = (run_dir / rundir.BEST).read_text().splitlines()[:2]
        metric, value = line.rsplit(" ", 1)
        # A start that was interrupted while archiving later steps may have left the name of an archived checkpoint.
        return Best(folder, metric, float(value)) if (run_dir / folder).is_dir() else None
    except (OSError, ValueError):
        return None


def higher_is_better(metric: str) -> bool:
    """Return whether a larger value of a metric is better. It is for metrics of tasks (eval/<task>/<metric>), except
    measures of error in lm_eval, such as perplexity. All other metrics are losses.
    """
    return metric.startswith("eval/") and not LOWER_IS_BETTER.search(metric.rpartition("/")[2])


def is_better(new: Best, old: Best | None) -> bool:
    """Return whether a value beats the best so far. NaN is never better, and a value of another metric
    does not count.
    """
    if math.isnan(new.value):
        return False
    if old is None or old.metric != new.metric:
        return True
    return new.value > old.value if higher_is_better(new.metric) else new.value < old.value


log = logging.getLogger(__name__)
T = TypeVar("T")
SLOWEST = timedelta(hours=2)
"Longest time that ranks wait for the slowest writer."


class SaveEnd(NamedTuple):
    """The result of a save."""

    step: int
    failure: str | None
    "why nothing was published; None: the checkpoint was published"


@dataclass
class Snapshot:
    """The contents of a checkpoint in host memory: training may continue while it is written."""

    step: int
    state: str
    "JSON text, because training could still change a list in the values"
    weights: WeightSnapshot
    states: dict[str, HostShard]
    rng: dict[str, Any]
    small_files: dict[str, bytes]
    "name -> content; only on the main rank"
    problem: str | None
    "why a part is missing; None: complete"

    def num_bytes(self) -> int:
        """Return the size of this rank's part.

        Raises:
            OSError: the snapshot is incomplete.
        """
        if self.problem is not None:
            raise OSError(self.problem)
        return self.weights.num_bytes() + sum(shard.tensor.nbytes for shard in self.states.values())


class Writer:
    """Write one snapshot at a time. Every rank has an instance and starts it with the snapshots of the same steps."""

    def __init__(self, run_dir: Path, config: CheckpointConfig, rt: Runtime, orig_model: PreTrainedModel) -> None:
        self.run_dir, self.config, self.rt, self.orig_model = run_dir, config, rt, orig_model
        self.published: int | None = None
        "last step that this run published"
        self.failure: str | None = None
        "why the last write failed; None if it succeeded"
        self.figures: dict[str, float] = {}
        "write_seconds and bytes of the last published checkpoint"
        self.ended: SimpleQueue[SaveEnd] = SimpleQueue()
        "result of each write, for the training thread to report"
        self._thread: threading.Thread | None = None
        self._group: dist.ProcessGroup | None = None
        self._token = ""
        "token of this run in the names of unpublished folders: the same on every rank, different for every run"
        self._lock = threading.Lock()
        self._writing: int | None = None
        self._best_in_writing: Best | None = None

    def start(self, snapshot: Snapshot) -> None:
        """Begin to write; the previous write must be finished."""
        # Created by the main threads, which all arrive here for the same step: new_group is a collective of
        # training's group.
        if self.rt.world_size > 1 and self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=SLOWEST)
        self._token = self._token or self.rt.from_main(lambda: secrets.token_hex(4))
        self._writing, self.failure = snapshot.step, None
        # A daemon: a failing run does not wait for it. It leaves a temporary folder, which sweep deletes.
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for a snapshot that is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def consider(self, best: Best) -> None:
        """Record a checkpoint in BEST if it beats the recorded one and its directory exists or is being written."""
        with self._lock:
            if (self.run_dir / best.folder).is_dir():
                self._record(best)
            # An evaluation may end before the checkpoint of its step is published: BEST must not name a
            # missing directory.
            elif self._writing is not None and best.folder == rundir.step_dir(self.run_dir, self._writing).name:
                self._best_in_writing = best

    def _record(self, best: Best) -> None:
        try:
            if is_better(best, read_best(self.run_dir)):
                replace_text(self.run_dir / rundir.BEST, f"{best.folder}\n{best.metric} {best.value!r}\n")
        except OSError as error:
            log.warning("%s cannot be recorded as the best checkpoint: %s", best.folder, error)

    def _write(self, snapshot: Snapshot) -> None:
        """Write a snapshot in the background thread and append the result to `ended`."""
        began = time.perf_counter()
        temporary = rundir.being_written(rundir.step_dir(self.run_dir, snapshot.step), self._token)
        try:
            with torch.no_grad():
                num_bytes = self._write_all(snapshot, temporary)
            self.published = snapshot.step
            self.figures = {"write_seconds": time.perf_counter() - began, "bytes": float(num_bytes)}
        except BaseException as error:  # torch's CheckpointException does not derive from Exception
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
        """Write a checkpoint, step by step on all ranks together, and return the bytes of its files."""
        # Check the space, write weights and states, hash everything; publish only after all ranks are done.
        total = sum(self._together(snapshot.num_bytes))
        if self.published is None:
            total += bytes_outside(self.orig_model)
        self._on_main(lambda: self._open(temporary, snapshot, total))
        mine = self._together(lambda: self._write_own(snapshot, temporary))[self.rt.rank]
        # A collective of torch over the same group.
        mine += save_states(snapshot.states, temporary / rundir.OPTIMIZER, self._group, self.rt.rank)
        claimed = self._together(lambda: mine)
        if self.rt.is_main:  # the files that no other rank wrote: transformers names its files itself
            others = {path for paths in claimed[1:] for path in paths}
            mine = [path for path in temporary.rglob("*") if path.is_file() and path not in others]
        all_entries = self._together(lambda: entries(temporary, mine))
        files = {name: entry for part in all_entries for name, entry in part.items()}
        self._on_main(lambda: self._publish(snapshot.step, temporary, files))
        return sum(entry["bytes"] for entry in files.values())

    def _together(self, do: Callable[[], T]) -> list[T]:
        """Run `do` on every rank and return the results by rank. A failure on one rank raises on all."""
        try:
            mine: tuple[T | None, str | None] = (do(), None)
        except Exception as error:
            mine = (None, reason(error))
        # A failure is sent like a result: a rank that raised earlier would leave the others waiting for
        # hours (SLOWEST).
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
        """Make the temporary folder once the disk has room for the checkpoint."""
        if self.rt.lock is not None:
            self.rt.lock.check(self.run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        sweep(self.run_dir)
        free = free_bytes(self.run_dir)
        if free < num_bytes:
            raise OSError(f"{self.run_dir} has {in_mb(free)} free, the checkpoint needs {in_mb(num_bytes)}")
        (temporary / rundir.OPTIMIZER).mkdir(parents=True)
        # For an unsharded model, write_weights writes it.
        if snapshot.weights.full is None:
            write_config(self.orig_model, temporary)

    def _write_own(self, snapshot: Snapshot, folder: Path) -> list[Path]:
        """Write this rank's files, except its optimizer states, and return those whose names are known."""
        random_file = rundir.random_state_file(folder, self.rt.rank)
        torch.save(snapshot.rng, random_file)
        earlier = None if self.published is None else rundir.step_dir(self.run_dir, self.published)
        write_weights(snapshot.weights, self.orig_model, folder, earlier)
        if self.rt.is_main:
            (folder / rundir.TRAINING_STATE).write_text(snapshot.state)
            for name, content in snapshot.small_files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
            for member in members_in(self.orig_model):
                own = rundir.adapter_dir(folder, member.name)
                (own / rundir.STATE).mkdir()
                (own / rundir.TRAINING_STATE).write_text(snapshot.state)
                present = [path for path in own.rglob("*") if path.is_file()]
                write_manifest(own, snapshot.step, entries(own, present), belongs_to(member.base, member.digest))
        return [random_file, *(folder / name for name in snapshot.weights.files)]

    def _publish(self, step: int, temporary: Path, files: Entries) -> None:
        """Write the manifest, rename the folder to its final name, and delete older checkpoints."""
        if self.rt.lock is not None:
            self.rt.lock.check(self.run_dir)
        final = rundir.step_dir(self.run_dir, step)
        adapters = adapters_of(self.orig_model)
        base = None if adapters is None else belongs_to(adapters.base, adapters.digest)
        write_manifest(temporary, step, files, base)
        # A run that resumes from the checkpoint has the logged lines of all earlier steps.
        for name in (rundir.METRICS_FILE, rundir.EVALS, rundir.SAMPLES, rundir.EVENTS):
            with suppress(OSError):  # most do not exist yet; a full disk loses lines, not the save
                flush(self.run_dir / name)
        flush(self.run_dir)
        publish(temporary, final)
        replace_text(self.run_dir / rundir.LATEST, final.name + "\n")
        # An evaluation of this step may end at the same moment: record it in BEST before pruning reads the file.
        with self._lock:
            if self._best_in_writing is not None:
                self._record(self._best_in_writing)
            prune(self.run_dir, self.config.keep)


def reason(error: BaseException) -> str:
    """Return one line about an error; for a failure inside torch's writer, the first rank's."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (inner, _) = next(iter(failures.items()))
        return f"rank {rank}: {reason(inner)}" if len(failures) > 1 or rank else reason(inner)
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def free_bytes(folder: Path) -> int:
    """Return the bytes that this user may still write to the disk of `folder`, or of its nearest existing parent."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def in_mb(num_bytes: float) -> str:
    """Format bytes in megabytes (10^6)."""
    return f"{num_bytes / 1e6:,.1f} MB"
