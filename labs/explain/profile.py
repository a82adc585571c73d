"""Where the time of a step goes, and how many operators and kernels it takes."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode  # the only view of every operator (pytorch/pytorch#110073)

from labs.explain.kinds import IDLE, KERNEL_KINDS, kind_of_kernel, kind_of_operator

PROFILED_STEPS = 3
LISTED = 12
"Kernels or operators that are listed."
_BUSY = 1.5
"From this median over quickest on, other work has taken much of the time."

Step = Callable[[], object]
Origins = Mapping[str, Sequence[str]]


class Dispatched(TorchDispatchMode):
    """A mode that counts what reaches the kernels of a backend: each call of an operator, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.views = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators[str(func)] += 1
        self.views += bool(getattr(func, "is_view", False))
        return func(*args, **(kwargs or {}))


def dispatched(step: Step) -> Dispatched:
    """Run an eager step and count its operators."""
    with Dispatched() as counted:
        step()
    return counted


@dataclass(frozen=True)
class Timing:
    """Seconds of calls. The quickest is least disturbed by whatever else a machine does."""

    quickest: float
    median: float

    @property
    def busy(self) -> bool:
        """Return whether other work took much of the time, so that ratios say little."""
        return self.median > _BUSY * self.quickest


def alternately(
    eager: Step, compiled: Step, device: torch.device, calls: int, least_seconds: float = 0.0
) -> list[Timing]:
    """Time two ways of the same in turn, so that what else the machine does disturbs both alike; the first two of each
    do not count.

    Args:
        calls, least_seconds: of each way at least.

    Returns:
        of the eager and of the compiled way.
    """
    found: tuple[list[float], list[float]] = [], []
    while len(found[0]) < calls + 2 or min(map(sum, found)) < least_seconds:
        # One call of each in turn: a machine that slows down by its heat slows both.
        for seconds, step in zip(found, (eager, compiled), strict=True):
            started = time.perf_counter()
            step()
            finish(device)
            seconds.append(time.perf_counter() - started)
    return [Timing(min(seconds[2:]), median(seconds[2:])) for seconds in found]


def finish(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def profiled(step: Step, device: torch.device, origins: Origins) -> dict[str, Any]:
    """Profile some steps of something that was run before.

    Returns:
        shares of a step's time under the profiler by kind, which add up to 1; launches of a step; top: the kernels, or
        operators, that take most.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as traced:
        started = time.perf_counter()
        for _ in range(PROFILED_STEPS):
            step()
        finish(device)
        wall = 1e6 * (time.perf_counter() - started)
    events = list(traced.events() or [])
    work = _on_device(events) if device.type == "cuda" else on_host(events, origins)
    return {"shares": kind_shares(work, wall), "launches": round(len(work) / PROFILED_STEPS), "top": top(work)}


def _on_device(events: Iterable[Any]) -> list[tuple[str, str, float, float]]:
    """Return (name, kind, start, end) of each kernel and copy of a GPU, in microseconds."""
    return [
        (event.name, kind_of_kernel(event.name), event.time_range.start, event.time_range.end)
        for event in events
        # Annotations of the user are shown on the device too, around the kernels that they name.
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]


def on_host(events: Iterable[Any], origins: Origins) -> list[tuple[str, str, float, float]]:
    """Return the same of a CPU: the outermost operators and kernels that compute, with all inside them."""
    return [
        (event.name, kind, event.time_range.start, event.time_range.end)
        for event in events
        if (kind := kind_of_operator(event.name, origins))
        and not any(kind_of_operator(caller.name, origins) for caller in callers(event))
    ]


def callers(event: Any) -> Iterator[Any]:
    """Yield the events on the CPU that an event is inside, the nearest first."""
    while (event := event.cpu_parent) is not None:
        yield event


def kind_shares(work: Sequence[tuple[str, str, float, float]], wall: float) -> dict[str, float]:
    """Return the shares of the wall time by kind, 0-1, in the order of KERNEL_KINDS. What overlaps counts where it
    began first, and what is covered by nothing is idle.

    Args:
        work: (name, kind, start, end) in microseconds.
        wall: microseconds of all steps.
    """
    spent: dict[str, float] = defaultdict(float)
    reached = float("-inf")
    for _, kind, start, end in sorted(work, key=lambda one: one[2]):
        spent[kind] += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    # Events end after the host's clock was read, so their sum may be a little more.
    whole = max(wall, sum(spent.values()))
    spent[IDLE] = whole - sum(spent.values())
    return {kind: spent[kind] / whole for kind in KERNEL_KINDS if spent[kind] > 0}


def top(work: Sequence[tuple[str, str, float, float]]) -> list[dict[str, Any]]:
    """Return name, kind, launches and milliseconds of a step of those that take most."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for name, kind, start, end in work:
        found[name, kind].append(end - start)
    n = PROFILED_STEPS
    return [
        {"name": name, "kind": kind, "launches": round(len(times) / n, 2), "ms": sum(times) / n / 1e3}
        for (name, kind), times in sorted(found.items(), key=lambda item: -sum(item[1]))[:LISTED]
    ]
