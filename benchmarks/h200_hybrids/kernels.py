"""Measure the launch settings of flash-linear-attention's kernels of the gated delta rule on this GPU.

PYTHONPATH=src python benchmarks/h200_hybrids/kernels.py OUT.txt [--processes 12]

Prints, for each kernel, the time of its fastest, median and slowest setting, in ms, over a row of 16,384 positions with
documents of 400, bf16, heads of 128, for 16 and 32 heads; and writes the fastest for both together, which
sftkit.ops.recurrent.MEASURED holds. First several processes compile all settings into Triton's cache.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from fla.ops.common import chunk_o

from sftkit.ops.recurrent import autotuners, gated_delta_rule, normalized

HEADS = (16, 32)
LENGTH = 16384


def run(heads: int) -> None:
    """Run forward and backward once."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (1, LENGTH, heads, 128)
    query, key, value = (torch.randn(shape, generator=generator, device="cuda") for _ in range(3))
    decay, rate = (torch.randn(shape[:3], generator=generator, device="cuda") for _ in range(2))
    given = [normalized(query).bfloat16(), normalized(key).bfloat16(), value.bfloat16()]
    inputs = [x.requires_grad_() for x in (*given, -decay.exp(), rate.sigmoid().bfloat16())]
    starts = torch.arange(0, LENGTH, 400, dtype=torch.int32, device="cuda")
    borders = torch.cat([starts, starts.new_full((1,), LENGTH)])
    out, *_ = gated_delta_rule(*inputs, borders, "fla")
    torch.autograd.grad(out.float().sum(), inputs)
    torch.cuda.synchronize()


def compile_part(part: int, parts: int) -> None:
    """Compile every parts-th setting of each kernel, and the others not at all."""
    for tuner in autotuners().values():
        tuner.configs = tuner.configs[part % len(tuner.configs) :: parts]
    run(HEADS[0])
    run(HEADS[1])


def as_settings(config: Any) -> dict[str, int]:
    """Return a setting as it stands in the table."""
    return {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}


def main() -> None:
    """Compile, measure, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--part", type=int)
    args = parser.parse_args()
    chunk_o.TRITON_ABOVE_3_7_1 = True  # as a run does (sftkit.ops.recurrent.fla_unsupported_reason)
    if args.part is not None:
        return compile_part(args.part, args.processes)
    begin = time.perf_counter()
    command = [sys.executable, __file__, str(args.out), "--processes", str(args.processes), "--part"]
    children = [subprocess.Popen([*command, str(part)]) for part in range(args.processes)]
    codes = [child.wait() for child in children]
    print(f"compiled in {time.perf_counter() - begin:.0f} s, exit codes {sorted(set(codes))}")
    tuners = autotuners()
    times: dict[str, dict[str, list[float]]] = {name: {} for name in tuners}
    for heads in HEADS:
        run(heads)
        for name, tuner in tuners.items():
            for config, found in getattr(tuner, "configs_timings", {}).items():
                ms = found[0] if isinstance(found, (list, tuple)) else found
                times[name].setdefault(yaml.safe_dump(as_settings(config)), []).append(ms)
    best = {}
    for name, found in times.items():
        if not found:
            print(f"{name}: one setting")
            continue
        sums = {setting: sum(ms) for setting, ms in found.items()}
        fastest = min(sums, key=sums.__getitem__)
        best[name] = yaml.safe_load(fastest)
        middle, slowest = statistics.median(sums.values()), max(sums.values())
        print(f"{name}: {len(sums)} settings, {sums[fastest]:.3f} {middle:.3f} {slowest:.3f} {best[name]}")
    args.out.write_text("".join(f"{name!r}: {setting},\n" for name, setting in best.items()))
    print(f"{time.perf_counter() - begin:.0f} s in all")
    return None


if __name__ == "__main__":
    main()
