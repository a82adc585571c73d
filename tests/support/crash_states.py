"""Every folder that a power failure may leave, derived from the file operations of a program: ALICE's method for
testing databases (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014).

`Recording` records the operations below a folder, `states` derives what may be on the disk after a crash at any
moment, and `unrecovered` passes each of these folders to a check of the recovery.

The recording intercepts Python's calls that flush or change names, and reads the folder before and after each of
them. Between two of these calls no disk guarantees an order, so the content found describes all writes in between,
whether by Python, safetensors, torch or numpy. A flush in native code is not seen, which only adds states.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Literal

import psutil
import pytest
from helpers import cpu_runtime

from sftkit.checkpoint.save import Writer, entries, sweep
from sftkit.config.schema import CheckpointConfig
from sftkit.rundir.names import LOCK, TRAINING_STATE, UNFINISHED, being_written, step_dir
from sftkit.runtime import open as run_opening
from sftkit.runtime.open import claim_run_dir, open_run
from sftkit.runtime.start import Runtime

FileSystem = Literal["journal", "weak"]
"""journal: names change in the order of the calls, any flush makes all earlier names durable, and a file that was not
flushed has lost an end of what was written (ext4 with data=ordered, XFS). weak: POSIX's promise only: a flush keeps
the content of its file, or the names in its folder. Everything else is kept or lost in any order, and a block of a
file may be zeros.
"""

Name = tuple[int, str]
"Number of a folder, and a name in it."
ROOT = 0


@dataclass(frozen=True)
class Named:
    """A file or folder gets a name: made, linked or, with `source`, renamed."""

    name: Name
    node: int
    path: str
    source: Name | None = None


@dataclass(frozen=True)
class Unnamed:
    """A name is removed."""

    name: Name
    node: int
    path: str


@dataclass(frozen=True)
class Written:
    """The content of a file changes."""

    node: int
    before: bytes
    after: bytes
    path: str


@dataclass(frozen=True)
class Flushed:
    """fsync of a file or folder."""

    node: int
    path: str


@dataclass(frozen=True)
class Promised:
    """The program reports that something is durable from here on."""

    what: Any


Operation = Named | Unnamed | Written | Flushed | Promised


@dataclass(frozen=True)
class State:
    """A folder as a crash may leave it."""

    files: dict[str, bytes | None]
    "path -> content; None: a folder"
    promised: tuple[Any, ...]
    "the program's promises up to then"
    how: str
    "when it crashed and what was lost, in words"

    def write(self, folder: Path) -> None:
        """Create this folder, which does not exist yet."""
        folder.mkdir(parents=True)
        for path, content in self.files.items():
            if content is None:
                (folder / path).mkdir()
            else:
                (folder / path).write_bytes(content)


@dataclass
class Recording:
    """The operations below a folder inside the `with`; earlier content is durable."""

    root: Path
    operations: list[Operation] = field(default_factory=list)
    base: dict[Name, int] = field(default_factory=dict)
    contents: dict[int, bytes] = field(default_factory=dict)
    "original content of every file that ever existed; empty for files made later"

    def __post_init__(self) -> None:
        self._numbers = itertools.count(ROOT + 1)
        self._nodes: dict[tuple[int, int], int] = {}
        self._names: dict[Name, int] = {}
        self._now: dict[int, bytes] = {}
        self._lock = threading.RLock()
        self._originals: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> Recording:
        self._look()
        self.operations.clear()
        self.base, self.contents = dict(self._names), dict(self._now)
        for call in ("rename", "replace", "link", "unlink", "remove", "rmdir", "mkdir", "truncate", "ftruncate"):
            self._intercept(call, self._changing)
        for call in ("fsync", "fdatasync"):
            self._intercept(call, self._flushing)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for call, original in self._originals.items():
            setattr(os, call, original)
        self._look()

    def promise(self, what: Any) -> None:
        """Record that the program promises this from here on."""
        with self._lock:
            self._look()
            self.operations.append(Promised(what))

    def files(self) -> dict[str, bytes | None]:
        """Return the current files, as without a crash."""
        return _tree(self._names, self._now)

    def _intercept(self, call: str, by: Callable[..., Any]) -> None:
        original = self._originals[call] = getattr(os, call)
        setattr(os, call, lambda *args, **kwargs: by(original, *args, **kwargs))

    def _changing(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            self._look()
            try:
                return original(*args, **kwargs)
            finally:
                self._look()

    def _flushing(self, original: Callable[..., Any], file: Any) -> Any:
        with self._lock:
            self._look()
            original(file)
            found = os.fstat(file if isinstance(file, int) else file.fileno())
            node = self._nodes.get((found.st_dev, found.st_ino))
            if node is not None:
                self.operations.append(Flushed(node, _paths(self._names)[node]))

    def _look(self) -> None:
        """Record changes since the last look."""
        nodes: dict[tuple[int, int], int] = {}
        names: dict[Name, int] = {}
        now: dict[int, bytes] = {}
        self._walk(self.root, ROOT, nodes, names, now)
        before, after = _paths(self._names), _paths(names)
        gone = {name: node for name, node in self._names.items() if names.get(name) != node}
        for name, node in names.items():
            if self._names.get(name) != node:
                source = next((other for other, n in gone.items() if n == node), None)
                gone.pop(name, None)
                if source is not None:
                    gone.pop(source)
                self.operations.append(Named(name, node, after[node], source))
        # The content of a folder is removed before the folder, which was walked first.
        for name, node in reversed(gone.items()):
            self.operations.append(Unnamed(name, node, before[node]))
        for node, content in now.items():
            earlier = self._now.get(node, self.contents.setdefault(node, b""))
            if earlier is not content:
                self.operations.append(Written(node, earlier, content, after[node]))
        self._nodes, self._names, self._now = nodes, names, now

    def _walk(
        self,
        folder: Path,
        number: int,
        nodes: dict[tuple[int, int], int],
        names: dict[Name, int],
        now: dict[int, bytes],
    ) -> None:
        found = folder.stat()
        nodes[found.st_dev, found.st_ino] = number
        for name in sorted(os.listdir(folder)):
            path = folder / name
            found = path.lstat()
            assert not stat.S_ISLNK(found.st_mode), f"{path}: symbolic links are not modelled"
            inode = (found.st_dev, found.st_ino)
            node = nodes.get(inode) or self._nodes.get(inode) or next(self._numbers)
            names[number, name] = node
            if stat.S_ISDIR(found.st_mode):
                self._walk(path, node, nodes, names, now)
                continue
            nodes[inode] = node
            content, known = path.read_bytes(), self._now.get(node, b"")
            # The same object for the same content, so that it is hashed once.
            now[node] = known if known == content else content


def states(recording: Recording, file_system: FileSystem, limit: int, seed: int = 0) -> Iterator[State]:
    """Yield the possible states after a crash, each folder once with the most that was promised by then.

    Crash moments just before a flush or at the end are enough: a crash at another moment leaves a folder that the
    next such moment can leave too. Each moment yields all combinations of possible losses if they are at most
    `limit`; otherwise everything kept, everything lost, each prefix in time, each single loss and each single
    survivor, pairs of losses, and random ones, up to `limit`.
    """
    moments = [at for at, operation in enumerate(recording.operations) if isinstance(operation, Flushed)]
    seen: set[int] = set()
    chosen = random.Random(seed)
    # Backwards: of moments that leave the same folder, the last promised the most.
    for moment in reversed([*moments, len(recording.operations)]):
        crash = _Crash(recording, moment, file_system)
        for choice in _choices(crash.sizes, limit, chosen):
            files = crash.files(choice)
            key = hash(tuple((path, hash(content)) for path, content in files.items()))
            if key not in seen:
                seen.add(key)
                yield State(files, crash.promised, crash.describe(choice))


def combinations(recording: Recording, file_system: FileSystem) -> int:
    """Return the largest number of combinations of losses at one moment: `states` omits none up to this limit."""
    operations = recording.operations
    moments = [at for at, operation in enumerate(operations) if isinstance(operation, Flushed)]
    return max(math.prod(_Crash(recording, at, file_system).sizes) for at in [*moments, len(operations)])


class _Crash:
    """The possible losses at a moment as axes, newest first: 0 on an axis keeps the program's operation, other
    numbers are losses.
    """

    def __init__(self, recording: Recording, moment: int, file_system: FileSystem) -> None:
        self.recording, self.moment, self.file_system = recording, moment, file_system
        operations = recording.operations[:moment]
        self.promised = tuple(one.what for one in operations if isinstance(one, Promised))
        flushes = {one.node: at for at, one in enumerate(operations) if isinstance(one, Flushed)}
        last_flush = max(flushes.values(), default=-1)
        self.changes = [(at, one) for at, one in enumerate(operations) if isinstance(one, Named | Unnamed)]
        self.pending: list[int] = []
        "indices in `changes` of the operations that may be lost"
        for number, (at, one) in enumerate(self.changes):
            # A rename is durable together with its target folder.
            if at > (last_flush if file_system == "journal" else flushes.get(one.name[0], -1)):
                self.pending.append(number)
        self.contents = dict(recording.contents)
        unflushed: dict[int, list[Written]] = {}
        axes: list[tuple[int, int | Written, int]] = []
        self.possible: dict[int, list[bytes]] = {}
        "possible contents of each file that was not flushed"
        for at, one in enumerate(operations):
            if isinstance(one, Written) and at < flushes.get(one.node, -1):
                self.contents[one.node] = one.after
            elif isinstance(one, Written):
                unflushed.setdefault(one.node, []).append(one)
                self.possible[one.node] = _contents(unflushed[one.node], file_system)
                axes = [axis for axis in axes if not (isinstance(axis[1], Written) and axis[1].node == one.node)]
                axes.append((at, one, len(self.possible[one.node])))
        within = self._within_reach()
        axes = [axis for axis in axes if isinstance(axis[1], Written) and axis[1].node in within]
        if file_system == "journal":
            axes.append((moment, len(self.pending), len(self.pending) + 1))
        else:
            for number in self.pending:
                at, one = self.changes[number]
                folders = {one.name[0], *([one.source[0]] if isinstance(one, Named) and one.source else [])}
                if folders & within:
                    axes.append((at, number, 2))
        axes.sort(key=lambda axis: axis[0], reverse=True)
        self.axes = [what for _, what, _ in axes]
        self.sizes = [size for _, _, size in axes]

    def _within_reach(self) -> set[int]:
        """Return the files and folders that keep a name in some choice: the state of the others is invisible in all."""
        may_be: dict[Name, set[int]] = {name: {node} for name, node in self.recording.base.items()}
        pending = set(self.pending)
        for number, (_, one) in enumerate(self.changes):
            there = may_be.setdefault(one.name, set())
            if isinstance(one, Unnamed):
                there -= {one.node} if number not in pending else set()
                continue
            if number not in pending:
                there.clear()
                if one.source is not None:
                    may_be[one.source].discard(one.node)
            there.add(one.node)
        within, known = {ROOT}, 0
        while known < len(within):
            known = len(within)
            within |= {node for (folder, _), nodes in may_be.items() if folder in within for node in nodes}
        return within

    def _lost_names(self, choice: Sequence[int]) -> set[int]:
        """Return the indices in `changes` that a choice loses."""
        lost: set[int] = set()
        for axis, at in zip(self.axes, choice, strict=True):
            if isinstance(axis, int) and at:
                lost |= set(self.pending[-at:]) if self.file_system == "journal" else {axis}
        return lost

    def files(self, choice: Sequence[int]) -> dict[str, bytes | None]:
        """Return the folder that a choice leaves."""
        lost, names = self._lost_names(choice), dict(self.recording.base)
        for number, (_, one) in enumerate(self.changes):
            if number in lost:
                continue
            if isinstance(one, Unnamed):
                if names.get(one.name) == one.node:
                    del names[one.name]
                continue
            if one.source is not None and names.get(one.source) == one.node:
                del names[one.source]
            names[one.name] = one.node
        contents = dict(self.contents)
        for axis, at in zip(self.axes, choice, strict=True):
            if isinstance(axis, Written):
                contents[axis.node] = self.possible[axis.node][at]
        return _tree(names, contents)

    def describe(self, choice: Sequence[int]) -> str:
        """Describe when this crash happens and what it loses."""
        operations = self.recording.operations
        when = f"before {_words(operations[self.moment])}" if self.moment < len(operations) else "at the end"
        parts = [f"lost: {_words(self.changes[number][1])}" for number in sorted(self._lost_names(choice))]
        for axis, at in zip(self.axes, choice, strict=True):
            if isinstance(axis, Written) and at:
                whole, left = self.possible[axis.node][0], self.possible[axis.node][at]
                parts.append(f"{axis.path}: {len(left)} of {len(whole)} bytes, {left[-20:]!r}")
        return f"{self.file_system}, crash {when} (operation {self.moment}); " + ("; ".join(parts) or "nothing lost")


def _words(operation: Operation) -> str:
    match operation:
        case Named(source=None):
            return f"making {operation.path}"
        case Named():
            return f"renaming to {operation.path}"
        case Unnamed():
            return f"removing {operation.path}"
        case Written():
            return f"writing {operation.path}"
        case Flushed():
            return f"flushing {operation.path}"
        case Promised():
            return f"promising {operation.what}"


def _contents(writes: Sequence[Written], file_system: FileSystem) -> list[bytes]:
    """Return the possible contents of a file written and not flushed since: first all of it, then less."""
    last, found = writes[-1], [writes[-1].after]
    for one in reversed(writes):
        found += _torn(one.before, one.after, file_system)
        found.append(one.before)
    # In this order and each once; the same object as the written content, whose hash is known.
    return list({content: content for content in [last.after, *found]})


def _torn(before: bytes, after: bytes, file_system: FileSystem) -> list[bytes]:
    """Return contents between two: a missing end and, on a weak file system, a part that reads as zeros."""
    kept = before if after.startswith(before) else b""  # otherwise it was truncated and written again
    tail = after[len(kept) :]
    half = len(tail) // 2
    # Also inside a page: a local disk rarely loses power within a sector, but a file on a network can. Also inside a
    # multi-byte character, if there is one.
    in_character = next((at for at, byte in enumerate(tail) if 0x80 <= byte < 0xC0), 1)
    cuts = dict.fromkeys((len(tail) - 1, half, in_character, 1, 0))
    found = [kept + tail[:cut] for cut in cuts if 0 <= cut < len(tail)]
    if file_system == "weak" and tail:
        found += [
            kept + bytes(len(tail)),
            kept + tail[:half] + bytes(len(tail) - half),
            kept + bytes(half) + tail[half:],
        ]
        if not kept and len(before) > 1:  # overwritten in place
            middle = min(half, len(before) // 2)
            found += [after[:middle] + before[middle:], before[:middle] + after[middle:]]
    return found


def _choices(sizes: Sequence[int], limit: int, chosen: random.Random) -> Iterator[tuple[int, ...]]:
    """Yield combinations of losses, at most `limit`: all, if there are so few."""
    if math.prod(sizes) <= limit:
        yield from itertools.product(*map(range, sizes))
        return
    yield from itertools.islice(_ordered_choices(sizes, chosen), limit)


def _ordered_choices(sizes: Sequence[int], chosen: random.Random) -> Iterator[tuple[int, ...]]:
    nothing, everything = (0,) * len(sizes), tuple(size - 1 for size in sizes)
    yield nothing
    yield everything
    for at, size in enumerate(sizes):
        for loss in range(1, size):
            yield (*nothing[:at], loss, *nothing[at + 1 :])
        yield (*everything[:at], 0, *everything[at + 1 :])
    for at in range(1, len(sizes)):
        yield (*nothing[:at], *everything[at:])
        yield (*everything[:at], *nothing[at:])
    while True:
        often = chosen.random()
        yield tuple(chosen.randrange(size) if chosen.random() < often else 0 for size in sizes)


def _paths(names: dict[Name, int]) -> dict[int, str]:
    """Return a path from the root for each node."""
    paths = {ROOT: "."}
    above = {node: name for name, node in names.items()}

    def path(node: int) -> str:
        if node not in paths:
            folder, name = above[node]
            paths[node] = name if folder == ROOT else f"{path(folder)}/{name}"
        return paths[node]

    for node in above:
        path(node)
    return paths


def _tree(names: dict[Name, int], contents: dict[int, bytes]) -> dict[str, bytes | None]:
    """Return path -> content of everything reachable from the root, folders before their contents."""
    inside: dict[int, list[tuple[str, int]]] = {}
    for (folder, name), node in names.items():
        inside.setdefault(folder, []).append((name, node))
    files: dict[str, bytes | None] = {}

    def walk(folder: int, prefix: str, above: frozenset[int]) -> None:
        for name, node in sorted(inside.get(folder, ())):
            path = prefix + name
            if node in above:
                continue  # no file system stores a folder inside itself
            if node in contents:
                files[path] = contents[node]
            else:
                files[path] = None
                walk(node, f"{path}/", above | {node})

    walk(ROOT, "", frozenset({ROOT}))
    return files


def unrecovered(
    recording: Recording,
    check: Callable[[Path, State], None],
    limit: int = 1000,
    file_systems: Sequence[FileSystem] = ("journal", "weak"),
    enough: int = 20,
) -> list[str]:
    """Pass each state to a check, which creates its folder, recovers it and asserts the invariants.

    Args:
        limit: maximum combinations of losses at one moment.
        enough: number of failures after which the search ends.

    Returns:
        failures, with a description of the state.
    """
    found: list[str] = []
    # In memory if possible: thousands of small files take minutes on a disk.
    memory = Path("/dev/shm")
    in_memory = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 2**26
    with tempfile.TemporaryDirectory(dir=memory if in_memory else None) as work, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)  # its output is thrown away
        for file_system in file_systems:
            for number, state in enumerate(states(recording, file_system, limit)):
                folder = Path(work) / f"{file_system}-{number}"
                try:
                    check(folder, state)
                except Exception as error:
                    found.append(f"{state.how}\n    {type(error).__name__}: {str(error).splitlines()[0]}")
                shutil.rmtree(folder)
                if len(found) >= enough:
                    return found
    return found


def after_reboot(folder: Path) -> None:
    """Make the locks in a folder belong to a boot before this one."""
    for path in folder.rglob(LOCK):
        with suppress(ValueError):
            holder = json.loads(path.read_text()) | {"machine": "another boot", "started": psutil.boot_time() - 100}
            path.write_text(json.dumps(holder))


# ---- runs to record and to start again -------------------------------------------------------------------------------

RECIPE = "run: {seed: 0}\n"


@contextmanager
def started(run_dir: Path, resume: str | None = "auto") -> Iterator[Runtime]:
    """A start that has done its first step, without a look at installed packages."""
    with pytest.MonkeyPatch.context() as patch, closing(cpu_runtime()) as rt:
        for name in ("environment", "recipe_identity"):
            patch.setattr(run_opening, name, lambda *_: {})
        open_run(str(run_dir), resume, RECIPE, rt)
        claim_run_dir(rt)
        yield rt


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def save_small(run_dir: Path, step: int, keep: int = 2) -> None:
    """Publish a step directory of one small file, like the writer."""
    sweep(run_dir)
    temporary = being_written(step_dir(run_dir, step), "next")
    (temporary / TRAINING_STATE).parent.mkdir(parents=True)
    (temporary / TRAINING_STATE).write_text(json.dumps({"step": step}))
    files = entries(temporary, [temporary / TRAINING_STATE])
    rt = SimpleNamespace(lock=None)
    Writer(run_dir, CheckpointConfig(every=1, keep=keep), rt, None)._publish(step, temporary, files)  # type: ignore[arg-type]
    left = [path.name for pattern in UNFINISHED for path in run_dir.glob(pattern)]
    assert not left, left
