"""Condense the traces of a bench (log.trace_at) into one JSON: what a GPU did in the recorded steps, by kind.

python benchmarks/traces.py runs/bench/NAME OUT.json

Of each run and rank: the shares that trace/rankN.json has, milliseconds and kernels a step by kind, milliseconds of
communication a step by kernel with the part that nothing ran beside, the host's time in the calls that start kernels,
and of rank 0 every kernel of one tenth of a second, as [start, length, stream, name] in microseconds, for a picture.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labs.explain.kinds import COMMUNICATION, kind_of_kernel
from sftkit.tracking.trace import covered

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
EXCERPT_US = 100_000.0


def condensed(folder: Path) -> dict[str, Any]:
    """Return what is to be kept of each run of a bench that recorded a trace."""
    runs = {}
    for trace in sorted(folder.glob("*/trace")):
        runs[trace.parent.name] = [
            {**json.loads(summary.read_text()), **of_rank(summary, excerpt=summary.stem == "rank0")}
            for summary in sorted(trace.glob("rank*.json"))
        ]
    return runs


def of_rank(summary: Path, *, excerpt: bool) -> dict[str, Any]:
    """Return what a rank's trace says, per step."""
    first, last = json.loads(summary.read_text())["steps"]
    steps = last - first + 1
    with gzip.open(summary.with_suffix(".json.gz"), "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    kernels = [event for event in events if event.get("cat") in ON_DEVICE]
    kinds: dict[str, list[float]] = defaultdict(list)
    exchanges: dict[str, list[tuple[float, float]]] = defaultdict(list)
    computing = []
    for event in kernels:
        kind, start, length = kind_of_kernel(event["name"]), event["ts"], event["dur"]
        kinds[kind].append(length)
        if kind == COMMUNICATION:
            exchanges[short(event["name"])].append((start, start + length))
        else:
            computing.append((start, start + length))
    alone = covered(computing)
    return {
        "by_kind": {
            kind: {"ms": sum(each) / 1e3 / steps, "kernels": len(each) / steps} for kind, each in kinds.items()
        },
        "exchanges": {
            name: {
                "ms": sum(end - start for start, end in spans) / 1e3 / steps,
                "exposed_ms": (covered([*computing, *spans]) - alone) / 1e3 / steps,
                "kernels": len(spans) / steps,
            }
            for name, spans in exchanges.items()
        },
        "host": host(events, steps),
        **({"excerpt": list(timeline(kernels))} if excerpt else {}),
    }


def host(events: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Return how long the host is in the runtime's calls, a step, and how many launches those are."""
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    launches = [event for event in calls if "Launch" in event["name"]]
    waits = [event for event in calls if "Synchronize" in event["name"]]
    return {
        "launches": len(launches) / steps,
        "launch_ms": sum(event["dur"] for event in launches) / 1e3 / steps,
        "wait_ms": sum(event["dur"] for event in waits) / 1e3 / steps,
    }


def timeline(kernels: list[dict[str, Any]]) -> Iterator[list[Any]]:
    """Yield the kernels of the excerpt, from a quarter of the trace on."""
    starts = sorted(event["ts"] for event in kernels)
    if not starts:
        return
    begin = starts[0] + (starts[-1] - starts[0]) / 4
    for event in sorted(kernels, key=lambda event: event["ts"]):
        if begin <= event["ts"] < begin + EXCERPT_US:
            stream = event.get("args", {}).get("stream", 0)
            yield [round(event["ts"] - begin, 1), round(event["dur"], 1), stream, short(event["name"])]


def short(name: str) -> str:
    """Return a kernel's name without arguments, templates and numbers of generated code."""
    name = re.sub(r"^void ", "", name)
    name = re.sub(r"ncclDevKernel_(\w+?)(_RING.*|_Sum.*)?\(.*", r"nccl \1", name)
    return re.sub(r"[<(].*", "", name)[:60]


if __name__ == "__main__":
    source, out = map(Path, sys.argv[1:])
    out.write_text(json.dumps(condensed(source)) + "\n")
