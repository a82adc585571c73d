"""A start before its first step: what it writes beside an earlier run, how it takes that one's place, and how it leaves
nothing where it ends before. No torch."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import psutil

from sftkit.runtime import lock
from sftkit.runtime.files import set_aside
from sftkit.runtime.lock import RunLock
from sftkit.runtime.rundir import ATTEMPT, BEFORE_STEPS, LOCK, OF_STEPS, TOKENIZER, step_dirs
from sftkit.runtime.status import RunStatus, read_status

_LOOK_SECONDS = 3.0
"How long the main rank of a start that failed lets the others read why."


def has_begun(folder: Path) -> bool:
    """Return whether a run in this directory has come to its first step, so that there is something to lose."""
    if step_dirs(folder) or read_status(folder).get("step"):
        return True
    return any(any(folder.glob(name)) for name in OF_STEPS)


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


def go_on(folder: Path) -> None:
    """Put the files of a start over those of the run that it resumes; folders as wholes."""
    for new in list((folder / ATTEMPT).iterdir()):
        if new.is_dir():
            shutil.rmtree(folder / new.name, ignore_errors=True)
        os.replace(new, folder / new.name)
    os.rmdir(folder / ATTEMPT)


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


def leaves_nothing(status: RunStatus, replaced: Path | None, refused: bool) -> bool:
    """Return whether a start that ends now came to no step and is withdrawn.

    Args:
        replaced: the name that `replace` gave an earlier run.
        refused: there is nothing that a requeue script could try again, so that not even the status stays.
    """
    if status.stepped or status.is_withdrawn():
        return False
    try:
        return _is_beside(status) or replaced is not None or (refused and not has_begun(status.run_dir))
    except OSError:
        return False  # what cannot be read is not deleted


def withdraw(status: RunStatus, replaced: Path | None, refused: bool) -> None:
    """Leave the directory as it was before a start that came to no step; an earlier run gets its name back. Main rank. The
    arguments are those of `leaves_nothing`."""
    if not leaves_nothing(status, replaced, refused):
        return
    folder = status.run_dir
    end = time.monotonic() + _LOOK_SECONDS
    others = [pid for rank, pid in status.neighbours.items() if rank != status.rank]
    while any(map(psutil.pid_exists, others)) and time.monotonic() < end:
        time.sleep(0.05)
    if _is_beside(status) or replaced is not None:
        shutil.rmtree(folder, ignore_errors=True)
        if replaced is not None:
            os.rename(replaced, folder)
    else:
        _clear(folder)
        if {path.name for path in folder.iterdir()} <= {LOCK}:
            shutil.rmtree(folder)


def _is_beside(status: RunStatus) -> bool:
    return status.run_dir.name == ATTEMPT


def _clear(folder: Path) -> None:
    for name in BEFORE_STEPS:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
