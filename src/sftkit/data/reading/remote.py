"""Files at URLs as a source: list them, and fetch them one by one into a folder whose size has a limit. No torch.

One thread fetches, up to two files ahead of the reader. A copy that is read, or waits for its reader, has a shared
lock, so that other processes with the same folder do not remove it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import IO, Any

from sftkit.config.commands import WILDCARD
from sftkit.config.schema import DataConfig, SourceConfig
from sftkit.data.reading.readers import suffix_of
from sftkit.errors import ConfigError, DataError, config_error
from sftkit.rundir.files import alone, own_name
from sftkit.runtime.hub import hub_answers, unreachable

DIGESTS = ("sha256", "ETag", "etag", "e_tag", "Content-MD5", "content_md5", "md5Hash", "md5", "Digest", "blob_id")
"Names that file systems give a digest of a file, or a mark that changes with its content."
TIMES = ("LastModified", "Last-Modified", "last_modified", "updated", "mtime", "created")
FILES_AHEAD = 2
"Files that are fetched before they are asked for."
TRIES = 3
WHAT_NEXT = "Start again when it can be read (what was fetched stays), or copy the files here and name their folder"
FOLDER = "remote"
"In data.cache_dir."
SIDECARS = {".bin": (".idx",), ".ds": (".ds.index", ".ds.loss", ".ds.metadata")}
"Suffix of a file of tokens -> endings in its place, of files that are read with it."
MAPPED: list[IO[bytes]] = []
"Hold the locks of copies that this process reads as long as it lives."


@dataclass(frozen=True)
class RemoteFile:
    """A file at a URL, as its file system describes it."""

    fs: Any  # fsspec has no types
    path: str
    size: int
    identity: tuple[object, ...]
    "size and digest; without a digest path, size and time"
    mark: tuple[str, str] | None = None
    "name and value of the digest or time"


def list_files(source: SourceConfig) -> tuple[PurePosixPath, dict[PurePosixPath, RemoteFile]]:
    """Return the folder at a URL and its files that the source may mean. A URL of one file is its own folder.

    Raises:
        ConfigError: the URL cannot be read.
    """
    import fsspec

    protocol = source.path.partition("://")[0]
    if protocol == "hf" and not hub_answers():
        raise ConfigError(f"data source {source.path}: {unreachable()}")

    def name(path: str) -> str:
        # In a web address a question mark begins a query.
        return path.partition("?")[0] if protocol.startswith("http") else path

    try:
        fs, path = fsspec.core.url_to_fs(source.path)
        is_pattern = WILDCARD.search(name(path))
        if is_pattern and source.files:
            raise ConfigError(f"data source {source.path}: wildcards are in path or in files, not in both")
        root = path
        if is_pattern:
            root = name(path)[: is_pattern.start()].rpartition("/")[0]
            described = fs.glob(path, detail=True)
        elif source.files:
            described = {}
            for one in source.files:
                described |= (found := fs.glob(f"{path.rstrip('/')}/{one}", detail=True))
                if not found:
                    raise FileNotFoundError(one)
        elif protocol.startswith("http") and path.endswith("/"):
            described = fs.glob(f"{path}*", detail=True)  # the links of the page
        else:
            info = fs.info(path)
            described = {path: info} if info["type"] == "file" else fs.find(path, detail=True)
        if source.tokenizer_of is not None:
            for sibling in {sibling for path in described for sibling in beside(path)} - described.keys():
                with suppress(FileNotFoundError):
                    described[sibling] = fs.info(sibling)
        # A web page lists no sizes or dates of its files; without them a changed file would be read from its old copy.
        bare = [path for path, info in described.items() if info["type"] == "file" and info.get("size") is None]
        described |= {path: fs.info(path) for path in bare}
    except ImportError as error:
        raise config_error("no library of a protocol", path=source.path, protocol=protocol, reason=error) from error
    except ConfigError:
        raise
    except Exception as error:  # every file system raises errors of its own
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split()) or type(cause).__name__
        # For every error status of a web server fsspec raises FileNotFoundError.
        status = getattr(cause, "status", None) or getattr(getattr(cause, "response", None), "status_code", None)
        absent = status == 404 or (isinstance(error, FileNotFoundError) and not error.__cause__)
        why = "no such file or folder" if absent else "not allowed" if status in (401, 403) else "cannot be read"
        raise ConfigError(f"data source {source.path}: {why}: {reason}") from error
    files = {}
    for path, info in described.items():
        size = info.get("size") or 0
        mark = _mark(info)
        is_digest = mark is not None and mark[0] in DIGESTS
        identity = (size, mark[1]) if mark and is_digest else (path, size, mark[1] if mark else "None")
        if info["type"] == "file":
            files[PurePosixPath(name(path))] = RemoteFile(fs, path, size, identity, mark)
    if protocol.startswith("http") and files.keys() == {at := PurePosixPath(name(root))} and suffix_of(at) is None:
        raise config_error("web address of no file", path=source.path)
    if not files:
        raise ConfigError(f"data source {source.path}: no files are there")
    return PurePosixPath(name(root)), files


def _mark(info: dict[str, Any]) -> tuple[str, str] | None:
    """Return the name and the value of what changes with the content of a file, by what its file system says of it."""
    marks = info | (info.get("lfs") or {})  # the hub describes large files in an object of their own
    return next(((key, str(marks[key])) for key in (*DIGESTS, *TIMES) if marks.get(key)), None)


def beside(path: str) -> list[str]:
    """Return the files that may be read with a file of tokens."""
    stem, dot, suffix = path.rpartition(".")
    return [stem + end for end in SIDECARS.get(dot + suffix, ())]


def mapped_copies(groups: Sequence[Sequence[RemoteFile]], data: DataConfig | None) -> list[Path]:
    """Return a local copy of the last file of each group, next to which its others are. They stay while this process
    lives: tokens are read in place. One process of this machine fetches, the others wait.

    Raises:
        ConfigError: they have more bytes than may stay. DataError: a file cannot be fetched, or breaks off.
    """
    data = data or DataConfig(train=())
    folder = Path(data.cache_dir) / FOLDER
    most = int(data.local_gb * 1e9)
    total = sum(one.size for group in groups for one in group)
    if total > most:
        raise config_error("tokens beyond local_gb", total=f"{total / 1e9:.1f}", most=f"{most / 1e9:g}")
    found = []
    with alone(folder / ".mapped.lock"):
        for group in groups:
            together = tuple(one.identity for one in group)
            for one in group:
                path, lock = _fetch(replace(one, identity=together), folder, most, threading.Event())
                MAPPED.append(lock)
            found.append(path)
    return found


def local_copies(files: Sequence[RemoteFile], data: DataConfig | None) -> Iterator[Path]:
    """Yield a local copy of each file, in order; it may be gone when the next one is asked for.

    Args:
        data: says where copies are kept and how many; None: its defaults.

    Raises:
        DataError: a file cannot be fetched, or breaks off.
    """
    data = data or DataConfig(train=())
    folder = Path(data.cache_dir) / FOLDER
    most = int(data.local_gb * 1e9)
    todo = deque(files)
    ahead: deque[tuple[int, Future[tuple[Path, IO[bytes]]]]] = deque()
    stop = threading.Event()
    with ThreadPoolExecutor(1, "fetch") as thread:
        try:
            while todo or ahead:
                # The first of them may be larger than the limit.
                room = most - sum(size for size, _ in ahead)
                if todo and len(ahead) <= FILES_AHEAD and (not ahead or todo[0].size <= room):
                    ahead.append((todo[0].size, thread.submit(_fetch, todo.popleft(), folder, most, stop)))
                    continue
                path, lock = ahead[0][1].result()
                with lock:
                    yield path
                ahead.popleft()
        finally:
            stop.set()
            for _, fetched in ahead:
                if not fetched.cancel() and fetched.exception() is None:
                    fetched.result()[1].close()  # the lock of a copy that nobody reads any more


def _fetch(one: RemoteFile, folder: Path, most: int, stop: threading.Event) -> tuple[Path, IO[bytes]]:
    """Return the path of a file's copy, which is fetched if it is not there, and the file that holds its lock."""
    from fsspec.callbacks import Callback

    class Stopping(Callback):  # type: ignore[misc] # fsspec has no types
        def relative_update(self, inc: int = 1) -> None:
            if stop.is_set():
                raise InterruptedError

    digest = sha256(repr(one.identity).encode()).hexdigest()[:16]
    path = folder / digest / one.path.partition("?")[0].lstrip("/").replace("://", "/")
    failed = 0
    reason = "stopped"
    while (lock := _locked(path)) is None:
        if failed >= TRIES or stop.wait(failed):  # seconds
            raise DataError(f"{one.fs.unstrip_protocol(one.path)}: cannot be fetched: {reason}. {WHAT_NEXT}")
        temporary = own_name(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _make_room(folder, most - one.size)
            one.fs.get_file(one.path, str(temporary), callback=Stopping())
            if one.size not in (0, size := temporary.stat().st_size):
                raise OSError(f"it breaks off: {size:,} of {one.size:,} bytes")
            if changed := _changed(one):
                failed = TRIES
                raise OSError(changed)
            os.replace(temporary, path)
        except Exception as error:  # every file system raises errors of its own
            reason = str(error).strip() or type(error).__name__
            # A file that is missing or forbidden is not requested again.
            failed = TRIES if isinstance(error, FileNotFoundError | PermissionError) else failed + 1
        finally:
            temporary.unlink(missing_ok=True)
    return path, lock


def _changed(one: RemoteFile) -> str:
    """Return how the digest of a file differs from the listed one; empty: not at all, or its file system has none.
    Times count for nothing: listings of some file systems write them otherwise."""
    with suppress(Exception):  # each file system has its own errors, and the file is already here
        one.fs.invalidate_cache()
        name, now = _mark(one.fs.info(one.path)) or ("", "")
        if one.mark is not None and name in DIGESTS and name == one.mark[0] and now != one.mark[1]:
            return f"it changed since it was listed: {name} was {one.mark[1]} and is {now}"
    return ""


def _locked(path: Path) -> IO[bytes] | None:
    """Return an open file that holds the shared lock of a copy; None: the copy is not there."""
    try:
        file = path.open("rb")
        fcntl.flock(file, fcntl.LOCK_SH)
        os.utime(path)  # fails if the copy was removed in between
    except OSError:
        return None
    return file


def _make_room(folder: Path, most: int) -> None:
    """Remove the least recently used copies until the others have at most `most` bytes. Files that are read together
    stay or go together."""
    copies = []
    for group in folder.glob("[!.]*"):
        with suppress(OSError):  # another process removes, too
            files = [path for path in group.rglob("*") if path.is_file() and not path.name.endswith(".tmp")]
            stats = [path.stat() for path in files]
            used = max((one.st_mtime_ns for one in stats), default=None)
            if used is not None:
                copies.append((used, sum(one.st_size for one in stats), group, files))
    total = sum(size for _, size, _, _ in copies)
    for _, size, group, files in sorted(copies):
        if total <= most:
            return
        with suppress(OSError), ExitStack() as held:
            for path in files:  # fails while somebody reads one of them
                fcntl.flock(held.enter_context(path.open("rb")), fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(group)
            total -= size
