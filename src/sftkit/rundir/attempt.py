"""A start before its first step. It writes into a folder of its own inside the run directory, takes the place of an
earlier run once it has done a step, and leaves nothing behind where it ends before. No torch."""

import os
import shutil
import time
from glob import escape
from pathlib import Path

import psutil

from sftkit.errors import ConfigError, hint
from sftkit.rundir import files, lock, names
from sftkit.rundir.status import RunStatus, read_status

_WATCH_SECONDS = 3.0
"How long the main rank of a start that failed lets the others read why."


def real(run_dir: Path) -> Path:
    """Return the target of a symbolic link, so that a run stays on the disk that was chosen; another path as it is."""
    return Path(os.path.realpath(run_dir)) if run_dir.is_symlink() else run_dir


def has_begun(folder: Path) -> bool:
    """Return whether a run in this directory has done its first step, so that there is something to lose."""
    return bool(names.step_dirs(folder)) or any(any(folder.glob(name)) for name in names.OF_STEPS)


def goes_on(folder: Path, resume: str | None) -> bool:
    """Return whether a start continues the run of this directory. One of another directory's begins a
    new run."""
    if resume == "auto":
        return bool(names.step_dirs(folder) or read_status(folder))
    return resume is not None and Path(resume).resolve().parent == folder.resolve()


def make_attempt_dir(folder: Path, *, resumes: bool) -> Path:
    """Make and return the folder, inside the directory, that a start writes to until it takes its place. The caller
    holds the lock.

    Raises:
        ConfigError: it could not take its place, whatever it does.
    """
    ours = folder / names.ATTEMPT
    shutil.rmtree(ours, ignore_errors=True)  # of a start that was killed
    if not resumes:
        _check_room(folder)
    ours.mkdir()
    # Until the first step all readers of the run directory look here, also for the tokenizer that a base run has
    # trained.
    if resumes and (folder / names.TOKENIZER).is_dir():
        shutil.copytree(folder / names.TOKENIZER, ours / names.TOKENIZER)
    return ours


def _check_room(folder: Path) -> None:
    """Reject a new run that would write over files that no run has written, or could not rename an earlier one.

    Raises:
        ConfigError: with what to do.
    """
    if has_begun(folder):
        if reason := _unmovable(folder):
            raise ConfigError(hint("unmovable run", folder=folder, reason=reason, inside=folder / "NAME"))
    elif found := sorted({path.name for name in names.WRITTEN_OVER for path in folder.glob(name)}):
        raise ConfigError(hint("files of no run", folder=folder, found=", ".join(found)))


def _unmovable(folder: Path) -> str | None:
    """Return why a directory cannot be renamed; None: nothing is known against it."""
    found = Path(os.path.realpath(folder))
    # ismount does not see a bind mount of a folder on the same disk: the table of mounts does.
    if os.path.ismount(found) or any(Path(part.mountpoint) == found for part in psutil.disk_partitions(all=True)):
        return "a mount point cannot be renamed"
    if not os.access(found.parent, os.W_OK | os.X_OK):
        return f"nothing can be renamed in {found.parent}, which this user may not write to"
    return None


def put_back(folder: Path) -> None:
    """Give an earlier run its name back from a start that was killed between the two renames of `replace`.

    Raises:
        ConfigError: that start is still at work.
    """
    # A start that was killed between the renames lies inside the run that it has put aside, with its lock.
    begun = folder.parent.glob(f"{escape(folder.name)}{names.ARCHIVED}*/{names.ATTEMPT}/{names.LOCK}")
    if folder.exists() or not (aside := next((path.parents[1] for path in begun), None)):
        return
    held = lock.take_lock(aside)
    os.rename(aside, folder)
    files.flush(folder.parent)
    held.path = folder / names.LOCK
    held.release()


def begin(folder: Path) -> None:
    """Move the files of a start into a directory without a run.

    Raises:
        ConfigError: somebody has put files there meanwhile that they would write over.
    """
    _check_room(folder)
    _mark(folder)
    move_into_run(folder)


def _mark(folder: Path) -> None:
    """Create the file by which `has_begun` knows a run that has done a step, from here on even if it is killed or the
    power fails."""
    (folder / names.METRICS_FILE).touch()
    files.flush(folder)


def move_into_run(folder: Path) -> None:
    """Move the files of a start over those of the run that it resumes. Folders are replaced as wholes; in EVALUATIONS,
    only those of evaluations that this start has made."""
    ours = folder / names.ATTEMPT
    for name in (names.ERRORS, names.HEARTBEATS):  # of the ranks of an earlier start, which may have been more than now
        shutil.rmtree(folder / name, ignore_errors=True)
    for new in [*ours.glob(f"{names.EVALUATIONS}/*"), *ours.iterdir()]:
        target = folder / new.relative_to(ours)
        # Its folders are moved one by one, and `make_attempt_dir` has copied the tokenizer from the run itself.
        if new == ours / names.EVALUATIONS or (new.name == names.TOKENIZER and target.exists()):
            continue
        if new.is_dir():
            shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(exist_ok=True)
        os.replace(new, target)
    files.flush(folder)
    shutil.rmtree(ours, ignore_errors=True)


def replace(folder: Path, held: lock.RunLock) -> tuple[lock.RunLock, Path]:
    """Rename an earlier run and put the new one in its place, which is locked all the while.

    Returns:
        (the lock of the new directory; the earlier run's new name)
    """
    # The new run is locked and marked before the first rename: killed between the two, it is found by `put_back`.
    new = lock.take_lock(folder / names.ATTEMPT)
    _mark(folder / names.ATTEMPT)
    files.flush(folder)
    aside = files.archive(folder)
    held.path = aside / names.LOCK
    os.rename(aside / names.ATTEMPT, folder)
    files.flush(folder.parent)
    new.path = folder / names.LOCK
    held.release()
    return new, aside


def is_attempt(status: RunStatus) -> bool:
    """Return whether a start still writes into a folder of its own."""
    return status.run_dir.name == names.ATTEMPT


def leaves_nothing(status: RunStatus) -> bool:
    """Return whether a start that ends now has done no step, and its files are still there for `withdraw` to remove."""
    return is_attempt(status) and not status.stepped and not status.is_withdrawn()


def withdraw(status: RunStatus, held: lock.RunLock) -> None:
    """Leave the directory as it was before a start that has done no step. Main rank, which holds its lock."""
    if not leaves_nothing(status):
        return
    # The other ranks of this machine read there why this one has failed; they are given a few seconds to end.
    end = time.monotonic() + _WATCH_SECONDS
    others = [pid for rank, pid in status.neighbours.items() if rank != status.rank]
    while any(map(psutil.pid_exists, others)) and time.monotonic() < end:
        time.sleep(0.05)
    folder = status.run_dir.parent
    shutil.rmtree(status.run_dir, ignore_errors=True)
    if held.made_folder and {path.name for path in folder.iterdir()} <= {names.LOCK}:
        shutil.rmtree(folder)
