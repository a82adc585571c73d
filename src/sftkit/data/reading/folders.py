"""Keep arrays on disk: a folder of memory-mapped .npy files with a hash of each. No torch.

A folder is complete or absent. Several processes may write the same folder: the first to rename wins.
"""

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sftkit.rundir.files import compare_hashes, flush_folder, own_name, write_hashes

HASHED = "hashes.json"
"Name -> sha256 of every other file of a folder, and the stamp that the file had when it was last compared."
DEAD_SECONDS = 86_400.0
"Age of its newest file from which a temporary folder counts as left by a process that was killed."

log = logging.getLogger(__name__)
T = TypeVar("T")


def load(folder: Path, names: Iterable[str], build: Callable[[dict[str, Any]], T], *, instead: str) -> T | None:
    """Return what `build` makes of the arrays of a folder; None if there are none, and with a warning if they are
    damaged. Files whose stamp is not known are compared with their hash, once.

    Args:
        names: of the arrays.
        build: raises a ValueError, LookupError, TypeError or AttributeError if they do not fit.
        instead: what happens if they are damaged, for the warning; empty: no warning.
    """
    if not folder.exists():
        return None
    try:
        with suppress(OSError):  # `sftkit data prune` removes what was not used for long
            os.utime(folder)
        compare_hashes(folder / HASHED, [folder / name for name in json.loads((folder / HASHED).read_text())])
        # Memory-mapped, so that ranks of a machine share the pages. Nothing pickled: a cache holds no code.
        return build({name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in names})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError) as error:
        if instead:
            log.warning("%s: damaged cache (%s), %s", folder, error, instead)
        return None


def save(folder: Path, write: Callable[[Path], object], is_whole: Callable[[], bool], *, instead: str) -> None:
    """Have `write` put the files into a folder of another name, then rename that. A full disk is a warning.

    Args:
        is_whole: returns whether the folder that is already there can be loaded; it is replaced otherwise.
        instead: what happens if nothing can be written, for the warning.
    """
    temporary = own_name(folder)
    try:
        temporary.mkdir(parents=True)
        sweep_drafts(folder.parent)
        write(temporary)
        write_hashes(temporary / HASHED, sorted(temporary.iterdir()))
        # Else a power failure could leave the name, and zeros for tokens in files of the right length.
        flush_folder(temporary)
        _rename(temporary, folder, is_whole)
    except OSError as error:
        log.warning("%s: cannot write the cache (%s), %s", folder, error, instead)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _rename(temporary: Path, folder: Path, is_whole: Callable[[], bool]) -> None:
    """Rename to the final name, unless another process was faster."""
    try:
        os.rename(temporary, folder)
    except OSError:
        if not folder.exists():  # no race, but an error of the disk
            raise
        if not is_whole():
            damaged = own_name(folder)
            os.rename(folder, damaged)
            os.rename(temporary, folder)
            shutil.rmtree(damaged, ignore_errors=True)


def sweep_drafts(parent: Path) -> None:
    """Remove the half-written files and folders of killed processes."""
    for path in parent.glob(".*.tmp"):
        with suppress(OSError):  # another process sweeps, too, or it is another user's
            newest = max(each.lstat().st_mtime for each in [path, *path.glob("*")])
            if time.time() - newest > DEAD_SECONDS:
                log.info("%s: left by a process that was killed, removed", path)
                shutil.rmtree(path) if path.is_dir() else path.unlink()
