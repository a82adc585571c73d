"""Measure the machine without a model: matrix products and copies in a separate process, and the clock and power of
this process's GPU while steps are timed. At its power limit a GPU lowers its clock.

python -m labs.bench.machine OUT.json
"""

from __future__ import annotations

import itertools
import json
import platform
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

import torch

from sftkit.launch.launch import nvidia_smi
from sftkit.runtime.hardware import device_name, git_state, installed_version, num_cores, peak_flops
from sftkit.runtime.start import start_device

SECONDS = 0.5
"Seconds between two samples: NVML itself averages over up to one second."


class ClockSamples:
    """Samples from `start` to the end of the context; none without a GPU or nvidia-ml-py, which torch queries."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._samples: list[tuple[float, float]] = []
        "MHz and watts"
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ClockSamples:
        return self

    def start(self) -> None:
        """Start sampling in a separate thread."""
        if self._device.type == "cuda":
            self._thread = threading.Thread(target=self._sample, name="clock samples", daemon=True)
            self._thread.start()

    def _sample(self) -> None:
        while not self._ended.wait(SECONDS):
            try:
                clock, power = torch.cuda.clock_rate(self._device), torch.cuda.power_draw(self._device)
            # NVML's package is missing, or its driver does not report these values: a bench continues without them.
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
        """Return the medians of clock and power; None without samples."""
        clocks, watts = zip(*self._samples, strict=True) if self._samples else ((), ())
        return {
            "sm_clock_mhz": median(clocks) if clocks else None,
            "power_w": median(watts) if watts else None,
        }


_PACKAGES = ("torch", "triton", "transformers", "accelerate", "flash-attn-4", "nvidia-cutlass-dsl", "torchao", "trl")
_SIDE = 8192
COPY_BYTES = 4 * 2**30
WARM_SECONDS = 0.5
"Long enough for clocks to settle under load."


def _describe(device: torch.device) -> dict[str, Any]:
    """Return device, driver, versions and ceilings; a ceiling is None without a GPU."""
    cuda = device.type == "cuda"
    peak = peak_flops(device)
    return {
        "device": device_name(device),
        "gpus": torch.cuda.device_count(),
        "cpu": cpu_name(),
        "cores": num_cores(),
        "memory_gib": torch.cuda.get_device_properties(device).total_memory / 2**30 if cuda else None,
        "driver": driver() if cuda else None,
        "power_limit_w": power_limit() if cuda else None,
        "cuda": torch.version.cuda,
        "versions": {name: installed_version(name) for name in _PACKAGES},
        "git": git_state(),
        "datasheet_tflops": peak / 1e12 if peak else None,
        "matmul_tflops": matmul_tflops(device) if cuda else None,
        "copy_tb_per_sec": copy_tb_per_sec(device) if cuda else None,
    }


def matmul_tflops(device: torch.device) -> float:
    """Return the median TFLOP/s of bf16 products of two random 8192 x 8192 matrices: constants would need less power
    and run faster.
    """
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(_SIDE, _SIDE, device=device, generator=generator).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return 2.0 * _SIDE**3 / median_seconds(lambda: torch.mm(a, b, out=out)) / 1e12


def copy_tb_per_sec(device: torch.device) -> float:
    """Return the TB/s of a copy of 4 GiB within the device's memory, bytes read plus bytes written."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2.0 * COPY_BYTES / median_seconds(lambda: target.copy_(source)) / 1e12


def median_seconds(work: Callable[[], object], runs: int = 100) -> float:
    """Return the median seconds of one call on the GPU, by CUDA events, after WARM_SECONDS of calls."""
    end = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < end:
        work()
        torch.cuda.synchronize()
    # CUDA events instead of the host's clock: one call lies between two events, without the time of its launch.
    events = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in itertools.pairwise(events)) / 1e3


def cpu_name() -> str:
    """Return the processor's model, which determines how fast a host launches kernels."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def driver() -> str | None:
    """Return the driver's version; None if nvidia-smi does not report it."""
    return next(filter(None, nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")), None)


def power_limit() -> float | None:
    """Return the power limit of the first GPU in watts; None if nvidia-smi does not report it."""
    said = nvidia_smi("--query-gpu=power.limit", "--format=csv,noheader,nounits")
    try:
        return float(said[0])
    except (IndexError, ValueError):  # none, or [N/A]
        return None


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(_describe(start_device()), indent=1))
