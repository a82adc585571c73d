"""The clock and the power of this process's GPU while steps are timed: at its power limit a GPU lowers its clock."""

from __future__ import annotations

import threading
from statistics import median
from types import TracebackType

import torch

SECONDS = 0.5
"Between two samples: NVML itself averages over up to one second."


class ClockSamples:
    """Samples from `start` to the end of the context; none without a GPU or nvidia-ml-py, which torch asks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._samples: list[tuple[float, float]] = []
        "MHz and watts"
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ClockSamples:
        return self

    def start(self) -> None:
        """Begin, in a thread of its own."""
        if self._device.type == "cuda":
            self._thread = threading.Thread(target=self._sample, name="clock samples", daemon=True)
            self._thread.start()

    def _sample(self) -> None:
        while not self._ended.wait(SECONDS):
            try:
                clock, power = torch.cuda.clock_rate(self._device), torch.cuda.power_draw(self._device)
            # The package is missing, or the driver does not say, by an exception of NVML's: a bench goes on without.
            except Exception:
                return
            self._samples.append((float(clock), power / 1e3))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def medians(self) -> dict[str, float | None]:
        """Return the medians of clock and power; None where nothing was sampled."""
        clocks, watts = zip(*self._samples, strict=True) if self._samples else ((), ())
        return {
            "sm_clock_mhz": median(clocks) if clocks else None,
            "power_w": median(watts) if watts else None,
        }
