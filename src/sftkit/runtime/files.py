"""Files that are whole or not there: written under another name, flushed, renamed."""

from __future__ import annotations

import os
import time
from pathlib import Path

from sftkit.runtime.rundir import ARCHIVED


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that readers see the old text or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    flush(temporary)
    os.replace(temporary, path)
    flush(path.parent)


def replace_shared(path: Path, text: str) -> None:
    """Write a small file that several processes may write at a time, under a name of each one's own; not flushed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def set_aside(folder: Path) -> Path:
    """Rename to the first free NAME.old-1, NAME.old-2, ...: nothing is overwritten."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}{ARCHIVED}{number}")).exists():
        number += 1
    os.rename(folder, aside)
    return aside


def flush(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
