"""List, verify and remove what `data.cache_dir` keeps: the command `sftkit data`. No torch."""

import fcntl
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from sftkit.config.terminal import print_text
from sftkit.data.reading import folders
from sftkit.data.reading.remote import FOLDER
from sftkit.data.store.making import STORE_FILE, read_about
from sftkit.data.store.shards import Store
from sftkit.errors import config_error
from sftkit.rundir.files import HASHES, own_name
from sftkit.runtime.script import counted

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGTB])B?|0", re.IGNORECASE)


KEPT = {
    "stores/[!.]*": "store",  # no drafts
    "views/[!.]*": "view",
    "images-*": "encoder input",
    "chosen-*.json": "document choice",
    "borders/[!.]*": "border list",
    f"{FOLDER}/[!.]*": "copied file",
    f"{HASHES}/*.json": "hash list",
}
"""Pattern -> what it is: tokens of a source, documents of a run, what an encoder reads, matches of choosing documents,
places of documents in tokens of other programs, copies of files at URLs, sha256 of files."""


class Kept(NamedTuple):
    """A file or folder of the cache."""

    path: Path
    kind: str
    "in KEPT"
    source: str
    "of a store: the path of the source as it was first read"
    num_bytes: int
    used: float
    "when it was last used, Unix time"
    damaged: tuple[str, ...]
    "what is wrong with its files, where that was asked for"
    tokens: int
    documents: int


def kept_in(cache: Path, *, verify: bool = False) -> Iterator[Kept]:
    """Yield what a cache keeps, what was used last first.

    Args:
        verify: read all files of stores, and compare them with their sha256.
    """
    found = []
    for path, kind in [(path, kind) for pattern, kind in KEPT.items() for path in cache.glob(pattern)]:
        store = Store(path, 0)
        lines = store.lines().values()
        damaged = tuple(filter(None, (store.damage(line, again=True) for line in lines))) if verify else ()
        times = [0.0]
        size = 0
        with suppress(FileNotFoundError):  # drafts of a run that fills it, or a process that removes it
            for file in (path, *(path.rglob("*") if path.is_dir() else ())):
                with suppress(FileNotFoundError):
                    stat = file.stat()
                    size += stat.st_size if file.is_file() else 0
                    if file in (path, path / STORE_FILE) or kind == "copied file":
                        times.append(stat.st_mtime)
        totals = (sum(line[name] for line in lines) for name in ("tokens", "documents"))
        found.append(Kept(path, kind, str(read_about(store).get("source", "")), size, max(times), damaged, *totals))
    return iter(sorted(found, key=lambda one: -one.used))


def print_kept(cache: Path, *, verify: bool) -> bool:
    """Print a line for each that is kept; return whether none is damaged."""
    whole = True
    kept = list(kept_in(cache, verify=verify))
    for one in kept:
        used = time.strftime("%Y-%m-%d", time.localtime(one.used))
        what = f"{one.tokens:,} tokens  {one.documents:,} documents  {one.source}" if one.source else one.kind
        print_text(f"{one.path.name}  {one.num_bytes / 1e6:12,.1f} MB  used {used}  {what}")
        for problem in one.damaged:
            whole = False
            print_text(f"  damaged, made again when it is used: {problem}", error=True, level="error")
    parts = ", ".join(counted(number, kind) for kind, number in Counter(one.kind for one in kept).items()) or "nothing"
    verdict = "; the files of all stores have their sha256" if verify and whole else ""
    print_text(f"{parts} in {cache}: {sum(one.num_bytes for one in kept) / 1e6:,.1f} MB{verdict}")
    return whole


def remove_least_used(cache: Path, keep_size: str) -> int:
    """Remove what was not used for the longest time until the rest takes at most `keep_size`, such as 200G. Return the
    bytes that were freed. Stores (sources.use) and copies (remote.py) that a process of this machine uses stay.

    Raises:
        ConfigError: the size cannot be read.
    """
    match = _SIZE.fullmatch(keep_size)
    if match is None:
        raise config_error("size without its unit", size=keep_size)
    left = float(match[1] or 0) * 1000 ** "BKMGT".index((match[2] or "B").upper())
    freed = 0
    for folder in ("stores", "views", "borders", FOLDER):
        folders.sweep_drafts(cache / folder)
    for one in kept_in(cache):
        left -= one.num_bytes
        if left >= 0:
            continue
        what = f"{one.path}: {one.num_bytes / 1e6:,.1f} MB  {one.source or one.kind}"
        in_use = False
        try:
            with ExitStack() as held:  # until it is removed
                for locked in [one.path, *(one.path.rglob("*") if one.kind == "copied file" else ())]:
                    descriptor = os.open(locked, os.O_RDONLY)
                    held.callback(os.close, descriptor)
                    try:
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except OSError as error:  # else a file system without locks
                        in_use |= isinstance(error, BlockingIOError)
                if not in_use:
                    # First another name: a start finds all of it or nothing.
                    gone = own_name(one.path)
                    os.rename(one.path, gone)
                    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
                    freed += one.num_bytes
        except FileNotFoundError:  # another process has removed it
            continue
        print_text(f"{'in use' if in_use else 'removed'} {what}")
    return freed
