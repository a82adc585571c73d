"""Measure the launch settings of the short convolution's kernels on this GPU.

PYTHONPATH=src python benchmarks/h200_hybrids/convolution.py OUT.json [--processes 12]

Prints the fastest settings of each direction and the slowest, in ms, for four taps and SiLU over 6,144 columns of
16,384 positions in documents of 400, bf16, with a cold cache, and the time of a copy of the input; writes all.
ops.short_convolution_kernel holds the fastest. First several processes compile all settings into Triton's cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sftkit.ops import short_convolution_kernel as kernel

SIZES = ((128, 1), (256, 1), (256, 2), (512, 2), (512, 4))
"Columns of a program, and its warps."
SETTINGS = [
    {"ROWS": rows, "COLUMNS": columns, "UNROLL": unroll, "num_warps": warps}
    for (columns, warps), rows, unroll in itertools.product(SIZES, (32, 64, 128), (2, 8))
]


def milliseconds(call: Callable[[], Any]) -> float:
    """Return the median of twelve calls after two, each behind a write of 256 MiB."""
    flushed = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(14):
        flushed.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:])


def main() -> None:
    """Compile, measure, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--part", type=int)
    args = parser.parse_args()
    generator = torch.Generator("cuda").manual_seed(0)
    x, grad = (torch.randn(1, 16384, 6144, generator=generator, device="cuda").bfloat16() for _ in range(2))
    weight = torch.randn(6144, 4, generator=generator, device="cuda").bfloat16()
    starts = torch.arange(16384, device="cuda").remainder(400)[None].contiguous()
    directions: dict[str, tuple[dict[str, int], Callable[[], Any]]] = {
        "forward": (kernel._TILES, lambda: kernel.convolve(x, weight, None, starts, silu=True)),
        "backward": (
            kernel._BACKWARD_TILES,
            lambda: kernel.convolve_backward(grad, x, weight, None, starts, silu=True),
        ),
    }
    if args.part is None:
        command = [sys.executable, __file__, str(args.out), "--processes", str(args.processes), "--part"]
        children = [subprocess.Popen([*command, str(part)]) for part in range(args.processes)]
        print(f"compiled, exit codes {sorted({child.wait() for child in children})}")
    found: dict[str, list[tuple[float, dict[str, int]]]] = {}
    for name, (tiles, call) in directions.items():
        for setting in SETTINGS[args.part or 0 :: 1 if args.part is None else args.processes]:
            tiles.update(setting)
            found.setdefault(name, []).append((milliseconds(call), setting))
    if args.part is not None:
        return
    for name, times in found.items():
        times.sort(key=lambda one: one[0])
        print(name, *(f"  {ms:.3f} {setting}" for ms, setting in [*times[:5], times[-1]]), sep="\n")
    copied = torch.empty_like(x)
    print(f"a copy of the input: {milliseconds(lambda: copied.copy_(x)):.3f}")
    args.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
