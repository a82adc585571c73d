"""List, verify and remove what `data.cache_dir` keeps of tokenized sources: the command `sftkit data`. No torch."""

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sftkit.config.terminal import print_text
from sftkit.data.store.making import STORE_FILE, read_about
from sftkit.data.store.shards import Store
from sftkit.errors import ConfigError
from sftkit.runtime.script import counted

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)B?", re.IGNORECASE)


class Kept(NamedTuple):
    """A store, or a view of stores, in the cache."""

    folder: Path
    source: str
    "path of the source as it was first read; empty: a view"
    num_bytes: int
    used: float
    "when it was last used, Unix time"
    damaged: tuple[str, ...]
    "what is wrong with its files, where that was asked for"
    tokens: int
    documents: int


def kept_in(cache: Path, *, verify: bool = False) -> Iterator[Kept]:
    """Yield the stores and views of a cache, those that were used last first.

    Args:
        verify: read all files of stores, and compare them with their sha256.
    """
    found = []
    for folder in (*cache.glob("stores/[!.]*"), *cache.glob("views/[!.]*")):  # no drafts
        store = Store(folder, 0)
        lines = store.lines().values()
        damaged = tuple(filter(None, (store.damage(line, again=True) for line in lines))) if verify else ()
        marks = [path for path in (folder / STORE_FILE, folder / "about.json") if path.exists()]
        used = max((path.stat().st_mtime for path in (*marks, folder)), default=0.0)
        size = 0
        for path in folder.iterdir():
            with suppress(FileNotFoundError):  # a lock or a draft of a run that fills the store
                size += path.stat().st_size
        totals = (sum(line[name] for line in lines) for name in ("tokens", "documents"))
        found.append(Kept(folder, str(read_about(store).get("source", "")), size, used, damaged, *totals))
    return iter(sorted(found, key=lambda one: -one.used))


def print_kept(cache: Path, *, verify: bool) -> bool:
    """Print a line for each store and view; return whether none is damaged."""
    whole = True
    kept = list(kept_in(cache, verify=verify))
    for one in kept:
        used = time.strftime("%Y-%m-%d", time.localtime(one.used))
        what = f"{one.tokens:,} tokens  {one.documents:,} documents  {one.source}" if one.source else "view"
        print_text(f"{one.folder.name}  {one.num_bytes / 1e6:12,.1f} MB  used {used}  {what}")
        for problem in one.damaged:
            whole = False
            print_text(f"  damaged, made again when it is used: {problem}", error=True, level="error")
    stores = sum(bool(one.source) for one in kept)
    parts = f"{counted(stores, 'store')}, {counted(len(kept) - stores, 'view')}"
    verdict = "; the files of all stores have their sha256" if verify and whole else ""
    print_text(f"{parts} in {cache}: {sum(one.num_bytes for one in kept) / 1e6:,.1f} MB{verdict}")
    return whole


def remove_least_used(cache: Path, keep_size: str) -> int:
    """Remove the stores and views that were not used for the longest time until the others take at most `keep_size`,
    such as 200G. Return the bytes that were freed. Stores that a process of this machine uses (sources.use) stay.

    Raises:
        ConfigError: the size cannot be read.
    """
    match = _SIZE.fullmatch(keep_size)
    if match is None:
        raise ConfigError(f"--keep-size {keep_size}: a number of bytes is expected, such as 200G or 500M")
    left = float(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " ")
    freed = 0
    for one in kept_in(cache):
        left -= one.num_bytes
        if left >= 0:
            continue
        what = f"{one.folder}: {one.num_bytes / 1e6:,.1f} MB  {one.source or 'view'}"
        folder = os.open(one.folder, os.O_RDONLY)
        in_use = False
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held until it is removed
        except OSError as error:  # else a file system without locks
            in_use = isinstance(error, BlockingIOError)
        if not in_use:
            shutil.rmtree(one.folder)
            freed += one.num_bytes
        os.close(folder)
        print_text(f"{'in use' if in_use else 'removed'} {what}")
    return freed
