"""Find out who ended a process that was killed, from the signal and from what the kernel shows of its OOM
killer. No torch."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sftkit.rundir.files import read_text

_BY_SIGNAL = {
    signal.SIGSEGV: "a crash in compiled code, of a library or a kernel",
    signal.SIGABRT: "a library gave up: its message stands above",
    signal.SIGBUS: "a file or shared memory that it had mapped had no room: see df -h of /dev/shm and of the data",
    signal.SIGILL: "an instruction that this processor does not have",
    signal.SIGFPE: "a division by zero in compiled code",
}


@dataclass(frozen=True)
class OomKills:
    """Processes that the kernel's OOM killer has ended so far; None: cannot be read."""

    own: int | None
    "in the control group of this process"
    machine: int | None
    "on the whole machine"
    time: float
    "when they were counted, time.monotonic(): on Linux seconds since the boot, as the kernel's log has them"


def oom_kills(root: Path = Path("/")) -> OomKills:
    """Count the processes that the kernel's OOM killer has ended so far, for `likely_cause`.

    Args:
        root: of the file system.
    """
    machine = _counter(root / "proc/vmstat")
    own = next((count for file in _group_files(root) if (count := _counter(file)) is not None), None)
    return OomKills(own, machine, time.monotonic())


def likely_cause(number: int, before: OomKills, root: Path = Path("/"), log: Path = Path("/dev/kmsg")) -> str:
    """Return what has likely sent a signal that nobody here has sent, in words that promise no more than is known.

    Args:
        number: of the signal.
        before: the counts when the process that was killed was started.
        root: of the file system.
        log: the kernel's.
    """
    if number != signal.SIGKILL:
        return _BY_SIGNAL.get(signal.Signals(number), "sent by somebody, or by the system that runs this")
    # This control group first: a container is mostly killed at its own limit, and on the machine other containers'
    # processes are counted too.
    now = oom_kills(root)
    said = last_kill(log, before.time)
    told = f" The kernel's log: {said}." if said else ""
    if grown := _grown(before.own, now.own):
        return f"likely the kernel's OOM killer, which has ended {grown} in this control group since the start.{told}"
    if grown := _grown(before.machine, now.machine):
        return f"perhaps the kernel's OOM killer, which has ended {grown} on this machine since the start.{told}"
    if now.own is None and now.machine is None:
        return "not known: no count of the kernel's OOM killer can be read here"
    return (
        "likely somebody, or a queue or container at its limit: the kernel's OOM killer, as far as can be read here, "
        "has ended nothing since the start"
    )


def last_kill(log: Path, since: float) -> str | None:
    """Return the kernel log's last line about a process that was killed for memory; None: there is none, or the log
    cannot be read.

    Args:
        since: lines before this time.monotonic() do not count.
    """
    found = None
    # An error is the end of what is there, or of what may be read.
    with suppress(OSError, ValueError), open(os.open(log, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as records:
        while record := records.read(8192):
            for line in record.decode(errors="replace").splitlines():
                # A record reads "priority,number,microseconds since the boot,...;text".
                head, _, text = line.partition(";")
                fields = head.split(",")
                if "Killed process" in text and len(fields) > 2 and int(fields[2]) / 1e6 >= since - 1.0:
                    found = text
    return found


def _group_files(root: Path) -> Iterable[Path]:
    """Yield the files that may count the kills of this process's control group: of version 2, else of version 1. In a
    container the path that the kernel gives may be the host's, and the group's files lie at the top."""
    mount = root / "sys/fs/cgroup"
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from (mount / path.lstrip("/") / "memory.events", mount / "memory.events")
        elif "memory" in controllers.split(","):
            yield from (mount / "memory" / path.lstrip("/") / "memory.oom_control", mount / "memory/memory.oom_control")


def _counter(file: Path) -> int | None:
    counts = [line.split()[1] for line in read_text(file).splitlines() if line.startswith("oom_kill ")]
    return int(counts[0]) if counts else None


def _grown(before: int | None, now: int | None) -> str:
    """Return how many more there are, in words; empty where there are none or it is not known."""
    count = (now or 0) - (before or 0) if before is not None else 0
    return f"{count} process{'es' * (count > 1)}" if count > 0 else ""
