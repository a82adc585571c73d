"""Measures how long single steps take on the device, and how often the host waits for it inside them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import torch

SYNC = "called a synchronizing CUDA operation"
"Part of torch's warning in its sync debug mode (c10/cuda/CUDAFunctions.cpp)."


class StepClock:
    """Marks the end of each step without waiting for it: on a GPU by events in its stream, else by the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[torch.cuda.Event | float] = []
        self._seconds: list[float] = []

    def begin(self) -> None:
        """Let the next step start here: at first, and after whatever was not training."""
        self.so_far()
        self._marks = [self._now()]

    def step_ended(self) -> None:
        """Mark the end of a step that has been launched."""
        self._marks.append(self._now())

    def read(self) -> list[float]:
        """Return the seconds of each step since the last call. The device must have finished them."""
        seconds, self._seconds = self.so_far(), []
        return seconds

    def so_far(self) -> list[float]:
        """Return the same without starting anew. Before a pause this waits for the last step, as the
        pause itself does."""
        for before, after in pairwise(self._marks):
            if isinstance(after, float):
                self._seconds.append(after - before)  # type: ignore[operator]
            else:
                after.synchronize()
                self._seconds.append(before.elapsed_time(after) / 1000)  # type: ignore[union-attr]
        self._marks = self._marks[-1:]
        return list(self._seconds)

    def restore_window(self, seconds: list[float]) -> None:
        """Put the seconds of steps of an earlier start of the run first."""
        self._seconds = [*seconds, *self._seconds]

    def _now(self) -> torch.cuda.Event | float:
        """Return a mark of this moment: an event in the GPU's stream, or the host's clock."""
        if not self._cuda:
            return time.perf_counter()
        # Only an event with timing has an elapsed_time; without the flag it is cheaper and says nothing.
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def percentiles(seconds: list[float]) -> tuple[float | None, float | None]:
    """Return (median, 95th percentile); None each without a step."""
    p50, p95 = np.percentile(seconds, [50, 95]).tolist() if seconds else (None, None)
    return p50, p95


class SyncCounter:
    """Counts how often the host waits for the GPU, from torch's own sync debug mode."""

    def __init__(self, device: torch.device) -> None:
        self.num_syncs: int | None = 0 if device.type == "cuda" else None
        "waits so far; None: there is no GPU to wait for"
        self._shown: set[tuple[str, str, int]] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count waits within the context. Every other warning is passed on, once."""
        if self.num_syncs is None:
            yield
            return
        # A switch of the whole process, put back afterwards. Warnings are recorded here, so others
        # are shown again below.
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as seen:
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            warnings.filterwarnings("always", message=SYNC)
            # A prototype in torch, and not thread-local: waits of other threads count too (pytorch/pytorch#62092).
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)
        for warning in seen:
            known = (str(warning.message), warning.filename, warning.lineno)
            if SYNC in known[0]:
                self.num_syncs += 1
            elif known not in self._shown:
                self._shown.add(known)
                warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)
