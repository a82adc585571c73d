"""Step directories on disk: writing their manifest, publishing by rename, pruning, the BEST and LATEST files."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from sftkit.rundir.files import archive, flush, replace_text
from sftkit.rundir.manifest import sha256_of
from sftkit.rundir.names import (
    BEST,
    EVALS,
    EVENTS,
    LATEST,
    MANIFEST,
    METRICS_FILE,
    PINNED,
    SAMPLES,
    UNFINISHED,
    being_deleted,
    step_dirs,
    step_number,
)

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


def write_manifest(folder: Path, step: int, files: Entries) -> None:
    """Write manifest.json, which lists every other file.

    Raises:
        OSError: the folder holds other files than those that the ranks say they wrote.
    """
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    if present != set(files):
        raise OSError(f"{folder}: files and manifest differ: {sorted(present ^ set(files))[:5]}")
    (folder / MANIFEST).write_text(json.dumps({"step": step, "files": dict(sorted(files.items()))}, indent=1))


def publish(temporary: Path, final: Path) -> None:
    """Rename a flushed directory: readers see a whole checkpoint or none, also after a power failure."""
    flush(temporary / MANIFEST)
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
    for name in (METRICS_FILE, EVALS, SAMPLES, EVENTS):
        with suppress(OSError):  # most are not there yet; a disk that has no room for lines costs lines, not the save
            flush(run_dir / name)
    flush(run_dir)


def remove(folder: Path) -> None:
    """Delete a step directory; renamed first, so that no half-deleted one is ever found."""
    doomed = being_deleted(folder, secrets.token_hex(4))
    os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def sweep(run_dir: Path) -> None:
    """Delete what a killed process left half-written or half-deleted."""
    for pattern in UNFINISHED:
        for folder in run_dir.glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)


def prune(run_dir: Path, keep: int, pin_every: int | None) -> None:
    """Delete all but the newest `keep` checkpoints, the best one, the pinned ones and the one that LATEST names."""
    latest, best = run_dir / LATEST, read_best(run_dir)
    # LATEST and BEST name directories, which have to be there at any moment, however old they are.
    spared = {latest.read_text().strip() if latest.exists() else None, best and best.folder}
    for folder in step_dirs(run_dir)[:-keep]:
        pinned = (folder / PINNED).exists() or bool(pin_every and step_number(folder) % pin_every == 0)
        if not pinned and folder.name not in spared:
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
        folder, line = (run_dir / BEST).read_text().splitlines()[:2]
        metric, value = line.rsplit(" ", 1)
        # A start that ended while it put later steps aside may have left the name of one.
        return Best(folder, metric, float(value)) if (run_dir / folder).is_dir() else None
    except (OSError, ValueError):
        return None


def write_best(run_dir: Path, best: Best) -> None:
    """Write the file BEST."""
    replace_text(run_dir / BEST, f"{best.folder}\n{best.metric} {best.value!r}\n")


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
