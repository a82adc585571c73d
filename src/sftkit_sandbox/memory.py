"""Limit the memory of all processes of one program together with a control group, if this user may create one."""

from __future__ import annotations

import contextlib
import logging
import secrets
import subprocess
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

LIMITS = {
    "cgroup2": {"memory.max": "{bytes}", "memory.swap.max": "0", "memory.oom.group": "1", "pids.max": "{processes}"},
    "cgroup": {"memory.limit_in_bytes": "{bytes}", "memory.memsw.limit_in_bytes": "{bytes}"},
}
"""File system -> file -> its content. The first file must exist; the others exist only if swap or
processes are counted.
"""
_PATIENCE_SECONDS = 2.0
"Longest wait for the kernel to release the ended processes of a group."


@contextlib.contextmanager
def group(mib: int, processes: int) -> Iterator[Path | None]:
    """Create a control group with this much memory for the block, and remove it when its processes are gone; None if
    none can be created.
    """
    above = parent()
    folder = above and make(above, mib, processes)
    try:
        yield folder
    finally:
        if folder:
            _remove(folder)


@cache
def parent() -> Path | None:
    """Return the control group in which this process can create and join groups that limit memory; None if
    there is none.
    """
    return next((folder for folder in candidates() if works(folder)), None)


def candidates() -> Iterator[Path]:
    """Yield the control group of this process, or the nearest one above it that divides its memory. Version 2 needs
    the second: a group with processes in it cannot divide.
    """
    # The location of this process (cgroup), and the mount points of those hierarchies (mountinfo): in a container the
    # two differ by a prefix.
    groups = [line.split(":", 2)[1:] for line in _text_of(Path("/proc/self/cgroup")).splitlines()]
    for line in _text_of(Path("/proc/self/mountinfo")).splitlines():
        root, mounted = line.split(" ")[3:5]
        kind, _, options = line.partition(" - ")[2].split(" ")[:3]
        for controllers, path in groups:
            # Version 1: any group may have children with limits.
            if kind == "cgroup" and "memory" in options.split(",") and "memory" in controllers.split(","):
                yield Path(mounted) / path.removeprefix(root).lstrip("/")
            if kind == "cgroup2" and not controllers:
                own = Path(mounted) / path.removeprefix(root).lstrip("/")
                yield from [one for one in (own, *own.parents) if divides_memory(one)][:1]


def divides_memory(folder: Path) -> bool:
    """Return whether groups below this one have limits on memory (version 2)."""
    return "memory" in _text_of(folder / "cgroup.subtree_control").split()


def works(above: Path) -> bool:
    """Try to limit a process that joins; return whether that worked."""
    try:
        folder = make(above, 64, 8)
    except OSError:
        return False
    try:
        # With a process that ends at once: this one must not leave its group.
        join = ["/bin/sh", "-c", 'echo 0 > "$0/cgroup.procs"', str(folder)]
        return subprocess.run(join, stderr=subprocess.DEVNULL).returncode == 0
    finally:
        _remove(folder)


def make(above: Path, mib: int, processes: int) -> Path:
    """Create a control group with limits on memory and processes. OSError: this user may not."""
    folder = above / f"sftkit-sandbox-{secrets.token_hex(8)}"
    folder.mkdir()
    try:
        # Decided by the files that the kernel created in it, because a mount may have both versions.
        limits = LIMITS["cgroup2" if (folder / "memory.max").exists() else "cgroup"]
        for name, value in limits.items():
            if name == next(iter(limits)) or (folder / name).exists():
                (folder / name).write_text(value.format(bytes=mib * 2**20, processes=processes))
    except OSError:
        _remove(folder)
        raise
    return folder


def _remove(folder: Path) -> None:
    """Remove a control group whose processes have ended; warn if it is still in use."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return folder.rmdir()
        except OSError as error:
            if time.monotonic() > deadline:
                return log.warning("a control group is left behind: %s", error)
            time.sleep(0.01)


def _text_of(path: Path) -> str:
    """Return the text of a file; "" if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
