"""What a launch can use of this machine: GPUs, memory, cores, and which of them are idle. No torch."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from sftkit.rundir.files import read_text

_WATCH_SECONDS = 0.5
"How long the CPUs are watched for idle ones."


@dataclass(frozen=True)
class Hardware:
    """What a launch can use."""

    gpus: int
    cpu_cores: int
    "Physical cores that this process may run on, at most the container's CPU quota."
    gpu_name: str | None = None
    gpu_memory_bytes: int | None = None
    "of the smallest GPU; None: unknown"
    idle_cores: int | None = None
    "Those of the physical cores that have no busy CPU just now; None: unknown."


def find_hardware(environ: Mapping[str, str] = os.environ) -> Hardware:
    """Return this machine's visible GPUs and usable CPU cores."""
    # By nvidia-smi: torch takes seconds to import, and a context on each GPU.
    listing = nvidia_smi("-L")
    names = [line.split(":", 1)[1].split("(UUID")[0].strip() for line in listing if line.startswith("GPU ")]
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    gpus = count_visible(listing, visible)
    # Only a run on cores needs to know which are idle, and waits half a second for it.
    if not gpus:
        return Hardware(0, cpu_cores(), idle_cores=idle_cores())
    in_parts = "MIG-" in (visible or "")  # the query knows whole GPUs only
    mebibytes = [] if in_parts else nvidia_smi("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    # Where memory is the host's a GPU answers [N/A].
    known = mebibytes and all(line.isdecimal() for line in mebibytes)
    memory = min(map(int, mebibytes)) * 2**20 if known else None
    return Hardware(gpus, cpu_cores(), names[0] if len(set(names)) == 1 else None, memory)


def count_visible(listing: Sequence[str], visible: str | None) -> int:
    """Return how many GPUs CUDA will show. It stops at the first entry of CUDA_VISIBLE_DEVICES that does not exist.

    Args:
        listing: lines of `nvidia-smi -L`.
        visible: CUDA_VISIBLE_DEVICES; None: not set.
    """
    gpus = sum(line.startswith("GPU ") for line in listing)
    if visible is None:
        return gpus

    def exists(entry: str) -> bool:
        by_uuid = entry.startswith(("GPU-", "MIG-")) and any(f"(UUID: {entry}" in line for line in listing)
        return by_uuid or (entry.isdecimal() and int(entry) < gpus)

    return len(list(takewhile(exists, map(str.strip, visible.split(",")))))


def nvidia_smi(*options: str) -> list[str]:
    """Return lines of output; none without the tool, or where it fails."""
    try:
        done = subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines()] if done.returncode == 0 else []


def cpu_cores() -> int:
    """Return the physical cores among the CPUs that this process may use, at most a container's quota, at least 1."""
    cpus = _usable()
    if not cpus:
        return os.cpu_count() or 1
    cores = len({_core_of(cpu) for cpu in cpus})
    quota, _, period = read_text(Path("/sys/fs/cgroup/cpu.max")).strip().partition(" ")
    if quota.isdecimal() and period.isdecimal():
        cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def idle_cores() -> int | None:
    """Return how many of the physical cores that this process may use have been idle for half a second; None: the
    system does not say.

    A core works as much as the busiest of its CPUs: one thread on each of them gets no core of its own.
    """
    before = _idle_ticks()
    time.sleep(_WATCH_SECONDS)
    after = _idle_ticks()
    cores: dict[str, float] = {}
    for cpu, (idle, total) in after.items():
        share = (idle - before[cpu][0]) / (total - before[cpu][1] or 1)
        cores[_core_of(cpu)] = min(share, cores.get(_core_of(cpu), 1.0))
    own = {_core_of(cpu) for cpu in _usable()}
    shares = [share for core, share in cores.items() if core in own]
    return round(sum(shares)) if shares else None


def _idle_ticks() -> dict[int, tuple[int, int]]:
    """Return CPU -> (ticks without work, all ticks) since the machine was started; {} where the system does not say."""
    found = re.findall(r"^cpu(\d+) (.+)$", read_text(Path("/proc/stat")), flags=re.MULTILINE)
    ticks = {int(cpu): [int(number) for number in numbers.split()[:8]] for cpu, numbers in found}
    # Columns of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal; the guests after them are in user
    # already.
    return {cpu: (numbers[3] + numbers[4], sum(numbers)) for cpu, numbers in ticks.items()}


def _usable() -> set[int]:
    """Return the CPUs that this process may run on; none where the system does not say."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _core_of(cpu: int) -> str:
    """Return the name of a CPU's physical core: the list of the CPUs that share it."""
    return read_text(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")) or str(cpu)
