"""A start before its first step: what it writes beside an earlier run, how it takes that one's place when it has done a step,
and how it leaves nothing where it ends before. No torch."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from glob import escape
from pathlib import Path

import psutil

from sftkit.runtime import lock
from sftkit.runtime.files import set_aside
from sftkit.runtime.lock import RunLock
from sftkit.runtime.rundir import (
    ARCHIVED,
    ATTEMPT,
    BEFORE_STEPS,
    EVALUATIONS,
    LOCK,
    OF_STEPS,
    TOKENIZER,
    step_dirs,
)
from sftkit.runtime.status import RunStatus, read_status

_LOOK_SECONDS = 3.0
"How long the main rank of a start that failed lets the others read why."


def has_begun(folder: Path) -> bool:
    """Return whether a run in this directory has done its first step, so that there is something to lose."""
    return bool(step_dirs(folder)) or any(any(folder.glob(name)) for name in OF_STEPS)


def goes_on(folder: Path, resume: str | None) -> bool:
    """Return whether a start goes on with the run of this directory. A checkpoint of another directory begins a new run here."""
    if resume == "auto":
        return bool(step_dirs(folder) or read_status(folder))
    return resume is not None and Path(resume).resolve().parent == folder.resolve()


def place_of(folder: Path, resumes: bool) -> Path:
    """Return where a start writes until it takes its place: a new folder inside the directory of an earlier run, else the
    directory itself, which is emptied of a start that came to no step. The lock is held."""
    shutil.rmtree(folder / ATTEMPT, ignore_errors=True)  # of a start that was killed
    if not has_begun(folder):
        if not resumes:
            _clear(folder)
        return folder
    (folder / ATTEMPT).mkdir()
    if resumes and (folder / TOKENIZER).is_dir():
        shutil.copytree(folder / TOKENIZER, folder / ATTEMPT / TOKENIZER)
    return folder / ATTEMPT


def put_back(folder: Path) -> None:
    """Give an earlier run its name back from a start that was killed between the two renames of `replace`.

    Raises:
        ConfigError: that start is at work: it has not been killed.
    """
    begun = folder.parent.glob(f"{escape(folder.name)}{ARCHIVED}*/{ATTEMPT}/{LOCK}")
    if folder.exists() or not (aside := next((path.parents[1] for path in begun), None)):
        return
    held = lock.take(aside)
    os.rename(aside, folder)
    held.moved(folder)
    held.release()


def go_on(folder: Path) -> None:
    """Put the files of a start over those of the run that it resumes; folders as wholes, of evaluations each."""
    ours = folder / ATTEMPT
    for new in [*ours.glob(f"{EVALUATIONS}/*"), *ours.iterdir()]:
        place = folder / new.relative_to(ours)
        if new == ours / EVALUATIONS or (new.name == TOKENIZER and place.exists()):  # which this one has copied
            continue
        if new.is_dir():
            shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(exist_ok=True)
        os.replace(new, place)
    shutil.rmtree(ours, ignore_errors=True)


def replace(folder: Path, held: RunLock) -> tuple[RunLock, Path]:
    """Rename an earlier run and put the new one in its place, which is locked all the while.

    Returns:
        the lock of the new directory, and the earlier run's new name.
    """
    new = lock.take(folder / ATTEMPT)
    aside = set_aside(folder)
    held.moved(aside)
    os.rename(aside / ATTEMPT, folder)
    new.moved(folder)
    held.release()
    return new, aside


def is_beside(status: RunStatus | None) -> bool:
    """Return whether a start writes into a folder of its own, because an earlier run is in the directory."""
    return status is not None and status.run_dir.name == ATTEMPT


def leaves_nothing(status: RunStatus, refused: bool) -> bool:
    """Return whether a start that ends now has done no step and is withdrawn.

    Args:
        refused: there is nothing that a requeue script could try again, so that not even the status stays.
    """
    if status.stepped or status.is_withdrawn():
        return False
    try:
        return is_beside(status) or (refused and not has_begun(status.run_dir))
    except OSError:
        return False  # what cannot be read is not deleted


def withdraw(status: RunStatus, refused: bool) -> None:
    """Leave the directory as it was before a start that has done no step. Main rank; `refused` as in `leaves_nothing`."""
    if not leaves_nothing(status, refused):
        return
    folder = status.run_dir
    end = time.monotonic() + _LOOK_SECONDS
    others = [pid for rank, pid in status.neighbours.items() if rank != status.rank]
    while any(map(psutil.pid_exists, others)) and time.monotonic() < end:
        time.sleep(0.05)
    if is_beside(status):
        shutil.rmtree(folder, ignore_errors=True)
    else:
        _clear(folder)
        if {path.name for path in folder.iterdir()} <= {LOCK}:
            shutil.rmtree(folder)


def _clear(folder: Path) -> None:
    for path in [path for name in BEFORE_STEPS for path in folder.glob(name)]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    with suppress(OSError):  # not there, or not empty
        (folder / EVALUATIONS).rmdir()
