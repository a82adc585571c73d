"""Files that are whole or not there: written under another name, flushed, renamed."""

from __future__ import annotations

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that readers see the old text or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    flush(temporary)
    os.replace(temporary, path)
    flush(path.parent)


def set_aside(folder: Path) -> Path:
    """Rename to the first free NAME.old-1, NAME.old-2, ...: nothing is overwritten."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
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
