"""Write files that are whole or not there: under another name, flushed, renamed. Read JSON, of which a torn object or
line counts as absent; and drop the lines that a resumed run will write again."""

import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from sftkit.rundir.names import ARCHIVED, FINAL, RESULTS, step_of

UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError, NotADirectoryError)
"""Errors of reading a text that is no JSON, or JSON of another form; RecursionError if it is nested thousands deep."""


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that readers see the old text or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    # Flushed before the rename, and the directory after it: else a power failure could leave the new name on
    # an empty file.
    flush(temporary)
    os.replace(temporary, path)
    flush(path.parent)


def replace_shared(path: Path, content: str | bytes) -> None:
    """Write a file that several processes may write at a time: each writes under a name of its own, then renames."""
    temporary = own_name(path)
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        flush(temporary)  # else a power failure could leave an empty file where a whole one was
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def append_all_or_nothing(path: Path, text: str) -> None:
    """Append all of a text to a file or, where the disk has no room for it, nothing.

    Raises:
        OSError: nothing was appended.
    """
    with path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        left = text.encode()
        try:
            while left:  # a disk that fills takes a part, and fails at the next try
                left = left[file.write(left) :]
        except OSError:
            with suppress(OSError):
                file.truncate(size)
            raise


def read_text(path: Path) -> str:
    """Return the text of a file; empty where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file holds; empty where there is none that can be read."""
    try:
        value = json.loads(path.read_text())
    except (OSError, *UNREADABLE):
        return {}
    return value if isinstance(value, dict) else {}


def clean(value: Any) -> Any:
    """Return the value as strict JSON: NaN and infinities, which JSON does not have, become null."""
    if isinstance(value, dict):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def own_name(path: Path) -> Path:
    """Return a path next to `path` that no other process uses. A file created there has the mode that the umask gives;
    files of tempfile are closed to all other users, and stay so when they are renamed."""
    return path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}.tmp")


def archive(folder: Path) -> Path:
    """Rename a folder to the first free NAME.old-1, NAME.old-2, ..., and return that path. Nothing is overwritten."""
    # Whoever archives holds the lock of the directory, so nobody takes a number in between.
    number = 1
    while (aside := folder.with_name(f"{folder.name}{ARCHIVED}{number}")).exists():
        number += 1
    os.rename(folder, aside)
    flush(aside.parent)  # before the name is given away: else a power failure could leave the new folder alone
    return aside


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, so that a power failure does not take them with what is
    written in them."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        flush(folder.parent)


def flush_folder(folder: Path) -> None:
    """Wait until a folder, with all files and folders in it, is on the disk; its own name is in the folder above."""
    for path in (*folder.rglob("*"), folder):
        flush(path)


def flush(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


MetricsLine = dict[str, Any]
"A line of metrics.jsonl: names of metrics and their values."


def drop_rows_after(path: Path, step: int) -> None:
    """Drop the rows after a step, which a run that resumes from a checkpoint of that step will write again."""
    if not path.exists():
        return
    text = "".join(line + "\n" for line, row in _rows(path) if float(row["step"]) <= step)
    if text.encode() != path.read_bytes():  # a full disk would have no room for the same again
        replace_text(path, text)


def drop_evals_after(folder: Path, step: int) -> None:
    """Drop the details of evaluations after a step, as their rows are; evals/final too if its model is dropped."""
    for path in folder.glob("*"):
        # The folder `final` has no step in its name; its results name the checkpoint that they are of.
        final = read_results(path / RESULTS) if path.name == Path(FINAL).name else []
        names = [str(result.get("settings", {}).get("model")) for result in final[:1]] or [path.name]
        found = step_of(names[0].rpartition("/")[2])
        if found is not None and found > step:
            shutil.rmtree(path, ignore_errors=True)


def has_row(path: Path, step: int) -> bool:
    """Return whether a file of rows has one of this step."""
    return path.exists() and any(float(row["step"]) == step for _, row in _rows(path))


def _rows(path: Path) -> Iterator[tuple[str, MetricsLine]]:
    """Yield the lines of a file of rows and their rows, without those that a kill, a power failure or a full disk has
    cut short. A line separator inside a text, which `splitlines` would split at, ends none."""
    for line in path.read_text(errors="replace").split("\n"):  # a line cut inside a character is no JSON either
        with suppress(*UNREADABLE):
            row = json.loads(line)
            if math.isfinite(float(row["step"])):
                yield line, row


def read_metric_rows(path: Path) -> list[MetricsLine]:
    """Return the whole rows of a file; none if it cannot be read."""
    with suppress(OSError):
        return [row for _, row in _rows(path)]
    return []


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return what an evaluation wrote of its tasks; nothing where it had none."""
    with suppress(OSError, *UNREADABLE):
        return json.loads(path.read_text())
    return []
