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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import IO, Any

from sftkit.config.commands import WILDCARD
from sftkit.config.schema import DataConfig, SourceConfig
from sftkit.errors import ConfigError, DataError, config_error
from sftkit.rundir.files import own_name
from sftkit.runtime.hub import hub_answers, unreachable
from sftkit.runtime.script import first_of

DIGESTS = ("sha256", "ETag", "etag", "e_tag", "Content-MD5", "content_md5", "md5Hash", "md5", "Digest", "blob_id")
"Names that file systems give a digest of a file, or a mark that changes with its content."
TIMES = ("LastModified", "Last-Modified", "last_modified", "updated", "mtime", "created")
FILES_AHEAD = 2
"Files that are fetched before they are asked for."
TRIES = 3
FOLDER = "remote"
"In data.cache_dir."


@dataclass(frozen=True)
class RemoteFile:
    """A file at a URL, as its file system describes it."""

    fs: Any  # fsspec has no types
    path: str
    size: int
    identity: tuple[object, ...]
    "size and digest; without a digest also the path and the time, if there is one"


def is_url(path: str) -> bool:
    """Return whether a path is a URL."""
    return "://" in path


def list_files(source: SourceConfig) -> tuple[PurePosixPath, dict[PurePosixPath, RemoteFile]]:
    """Return the folder at a URL and its files that the source may mean. A URL of one file is its own folder.

    Raises:
        ConfigError: the URL cannot be read.
    """
    import fsspec

    protocol = source.path.partition("://")[0]
    if protocol == "hf" and not hub_answers():
        raise ConfigError(f"data source {source.path}: {unreachable()}")
    try:
        fs, path = fsspec.core.url_to_fs(source.path)
    except ImportError as error:
        raise config_error("no library of a protocol", path=source.path, protocol=protocol, reason=error) from error
    except ValueError as error:
        known = "hf, s3, gs, az, https, http and the others of fsspec"
        raise ConfigError(f"data source {source.path}: no protocol {protocol}. There are {known}") from error
    try:
        # In a web address a question mark begins a query.
        is_pattern = WILDCARD.search(path.partition("?")[0] if protocol.startswith("http") else path)
        if is_pattern and source.files:
            raise ConfigError(f"data source {source.path}: wildcards are in path or in files, not in both")
        info = None if is_pattern or source.files else fs.info(path)
        if info and info["type"] == "file":
            described = {path: info}
            root = _name(path, protocol)
        else:
            parts = path.split("/")
            first = next((i for i, part in enumerate(parts) if is_pattern and WILDCARD.search(part)), len(parts))
            root = _name("/".join(parts[:first]), protocol)
            patterns = [path] if is_pattern else [f"{path.rstrip('/')}/{one}" for one in source.files or ()]
            found = [fs.glob(pattern, detail=True) for pattern in patterns] or [fs.find(path, detail=True)]
            if missing := [pattern for pattern, one in zip(patterns, found, strict=False) if not one]:
                raise ConfigError(f"data source {source.path}: nothing there matches {first_of(missing)}")
            described = {name: one for part in found for name, one in part.items() if one["type"] == "file"}
    except ConfigError:
        raise
    except Exception as error:  # every file system raises errors of its own
        reason = str(error.__cause__ or error).strip() or type(error).__name__
        missing = "no such file or folder: " if isinstance(error, FileNotFoundError) else "cannot be read: "
        raise ConfigError(f"data source {source.path}: {missing}{reason}") from error
    if not described:
        raise ConfigError(f"data source {source.path}: there are no files")
    return root, {_name(name, protocol): _described(fs, name, one) for name, one in described.items()}


def _name(path: str, protocol: str) -> PurePosixPath:
    """Return a path in a file system as a path of which the last part is the file's name."""
    return PurePosixPath(path.partition("?")[0] if protocol.startswith("http") else path)


def _described(fs: Any, path: str, info: Mapping[str, Any]) -> RemoteFile:
    # The hub describes large files in an object of their own.
    marks = {**info, **(info.get("lfs") or {})}
    size = info.get("size")
    digest = next((marks[name] for name in DIGESTS if marks.get(name)), None)
    time = next((marks[name] for name in TIMES if marks.get(name)), None)
    identity = (size, str(digest)) if digest else (path, size, str(time))
    return RemoteFile(fs, path, size or 0, identity)


def local_copies(files: Sequence[RemoteFile], data: DataConfig | None) -> Iterator[Path]:
    """Yield a local copy of each file, in order; it may be gone when the next one is asked for.

    Args:
        data: says where copies are kept and how many; None: its defaults.

    Raises:
        DataError: a file cannot be fetched, or breaks off.
    """
    fields = DataConfig.__dataclass_fields__
    folder = Path(data.cache_dir if data else fields["cache_dir"].default) / FOLDER
    most = int((data.local_gb if data else fields["local_gb"].default) * 1e9)
    todo = deque(files)
    ahead: deque[tuple[RemoteFile, Future[tuple[Path, IO[bytes]]]]] = deque()
    stop = threading.Event()
    with ThreadPoolExecutor(1, "fetch") as thread:
        try:
            while todo or ahead:
                # A file alone may be larger than the limit.
                while (
                    todo
                    and len(ahead) <= FILES_AHEAD
                    and (not ahead or sum(one.size for one, _ in ahead) + todo[0].size <= most)
                ):
                    one = todo.popleft()
                    ahead.append((one, thread.submit(_fetch, one, folder, most, stop)))
                path, lock = ahead[0][1].result()
                with lock:
                    yield path
                ahead.popleft()
        finally:
            stop.set()
            for _, fetched in ahead:
                # The lock of a file that nobody will read.
                if not fetched.cancel() and fetched.exception() is None:
                    fetched.result()[1].close()


def _fetch(one: RemoteFile, folder: Path, most: int, stop: threading.Event) -> tuple[Path, IO[bytes]]:
    """Return the path of a file's copy, which is fetched if it is not there, and the file that holds its lock."""
    from fsspec.callbacks import Callback

    class Stopping(Callback):  # type: ignore[misc] # fsspec has no types
        def relative_update(self, inc: int = 1) -> None:
            if stop.is_set():
                raise InterruptedError("nobody reads any more")

    digest = sha256(repr(one.identity).encode()).hexdigest()[:16]
    path = folder / digest / one.path.partition("?")[0].lstrip("/").replace("://", "/")
    failed = 0
    reason = "stopped"
    while (lock := _locked(path)) is None:
        if failed >= TRIES or stop.wait(failed):  # seconds
            raise DataError(f"{one.fs.unstrip_protocol(one.path)}: cannot be fetched: {reason}")
        temporary = own_name(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _make_room(folder, most - one.size)
            one.fs.get_file(one.path, str(temporary), callback=Stopping())
            if one.size not in (0, size := temporary.stat().st_size):
                raise OSError(f"it breaks off: {size:,} of {one.size:,} bytes")
            os.replace(temporary, path)
        except Exception as error:  # every file system raises errors of its own
            reason = str(error).strip() or type(error).__name__
            # To ask again for what is not there, or not for us, is of no use.
            failed = TRIES if isinstance(error, FileNotFoundError | PermissionError) else failed + 1
        finally:
            temporary.unlink(missing_ok=True)
    return path, lock


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
    """Remove the copies that were not used for the longest time, until the rest has at most so many bytes."""
    copies = []
    for path in folder.rglob("*"):
        with suppress(OSError):  # another process removes, too
            if path.is_file() and not path.name.endswith(".tmp"):
                copies.append((path.stat().st_mtime_ns, path.stat().st_size, path))
    total = sum(size for _, size, _ in copies)
    for _, size, path in sorted(copies):
        if total <= most:
            return
        with suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while somebody reads the copy
            shutil.rmtree(folder / path.relative_to(folder).parts[0])
            total -= size
