"""A trace of three steps: what host and device did when, and how much of the communication took place next to
computing. Loaded by runs with log.trace_at.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from sftkit.rundir.names import TRACE
from sftkit.runtime.start import Runtime

TRACED_STEPS = 3
_COMMUNICATION = ("nccl", "multimem", "one_shot_all", "two_shot_all", "symm_mem", "ptop")
"""Parts of the names of kernels and copies that exchange data with other GPUs: NCCL's, and those of torch's symmetric
memory."""
Interval = tuple[float, float]
"Start and end, in microseconds."


class Trace:
    """The steps from `log.trace_at` on, recorded by torch.profiler: trace/rankN.json.gz, and what follows from it.

    Each rank writes its own. The device finishes its work before the first and after the last traced step, so the time
    is that of these steps alone.
    """

    def __init__(self, first_step: int, run_dir: Path, rt: Runtime) -> None:
        """Keep where to write. `first_step`: the first step that is traced."""
        self._first = first_step
        self._folder = run_dir / TRACE
        self._rt = rt
        self._on_gpu = rt.device.type == "cuda"
        self._profile: profile | None = None
        self._started = 0.0
        self._last = 0

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._profile is None:
            return
        if error is None and self._last >= self._first:
            self._write(self._profile)
        else:  # no step of them came; or an error did, and what it left on the device may be beyond recording
            self._profile.stop()

    def after(self, step: int) -> float:
        """Start or end the recording after a step, if it is time. Return the seconds that this took."""
        if not self._first - 1 <= step < self._first + TRACED_STEPS:
            return 0.0
        self._last = step
        begins = step == self._first - 1
        ends = step == self._first + TRACED_STEPS - 1
        if not begins and not (ends and self._profile):  # without a profile: resumed amid the traced steps
            return 0.0
        self._finish()  # those steps' time is training time: it counts before the pause begins
        began = time.perf_counter()
        if self._profile is None:
            # Kineto's notes of a start and an end would be on the terminal (pytorch/pytorch#83383). It reads the
            # variable when the first profile begins, and has no other switch.
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            self._profile = profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._on_gpu)
            self._profile.start()
            self._started = time.perf_counter()
        else:
            self._write(self._profile)
            self._profile = None
        return time.perf_counter() - began

    def _finish(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._rt.device)

    def _write(self, recorded: profile) -> None:
        """End the recording and write both files. A failure to write them is reported and ends no training."""
        self._finish()
        # Before stop(), which takes seconds to gather the events.
        wall = 1e6 * (time.perf_counter() - self._started)
        recorded.stop()
        name = f"rank{self._rt.rank}"
        steps = self._last - self._first + 1
        summary: dict[str, Any] = {"steps": [self._first, self._last], "seconds": wall / 1e6 / max(steps, 1)}
        if self._on_gpu:
            summary["device"] = busy_shares(_kernels(recorded.events() or ()), wall)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(self._folder / f"{name}.json.gz"))
            (self._folder / f"{name}.json").write_text(json.dumps(summary, indent=1) + "\n")
        except OSError as error:
            self._rt.print(f"log.trace_at: the trace cannot be written: {error}", "warning")
            return
        self._rt.print(trace_line(summary) + f": {self._folder / name}.json.gz, for ui.perfetto.dev")


def trace_line(summary: dict[str, Any]) -> str:
    """Return the summary of a trace in a sentence."""
    first, last = summary["steps"]
    text = f"trace of steps {first} to {last}: {summary['seconds']:.3f} s a step"
    if device := summary.get("device"):
        text += f", the GPU computes {device['computing']:.1%} of it, communicates {device['communicating']:.1%}"
        text += f" ({device['exposed']:.1%} with nothing beside it), idles {device['idle']:.1%}"
    return text


def _kernels(events: Iterable[Any]) -> list[tuple[str, float, float]]:
    """Return (name, start, end) of each kernel and copy of the GPU, in microseconds."""
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in events
        # Annotations of the user are shown on the device too, around the kernels that they name.
        if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]


def busy_shares(kernels: Sequence[tuple[str, float, float]], wall: float) -> dict[str, float]:
    """Return the shares of a stretch of time, 0-1, in which a GPU works.

    A kernel of communication runs until its peers have come too, so waiting for them counts as communicating.

    Args:
        kernels: (name, start, end) of each, on any stream.
        wall: length of the stretch, in the same unit.

    Returns:
        computing: kernels other than communication, copies too; communicating; exposed: communicating with nothing
        beside it; idle: neither. computing + exposed + idle is 1.
    """
    computing: list[Interval] = []
    communicating: list[Interval] = []
    for name, start, end in kernels:
        (communicating if any(part in name.lower() for part in _COMMUNICATION) else computing).append((start, end))
    # Exposed time follows from unions: kernels of two streams overlap, and their sum would exceed the time.
    compute = covered(computing)
    either = covered(computing + communicating)
    return {
        "computing": compute / wall,
        "communicating": covered(communicating) / wall,
        "exposed": (either - compute) / wall,
        "idle": max(0.0, 1 - either / wall),
    }


def covered(spans: Iterable[Interval]) -> float:
    """Return the length of the union of spans."""
    total = 0.0
    reached = float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
