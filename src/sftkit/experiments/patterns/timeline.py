"""When each rank of a pipeline computes and when it waits, from timestamps around the passes of its stages. No torch in
this file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

TimelinePass = dict[str, Any]
"Of a stage with a micro-batch: stage, micro_batch, forward, start and end in seconds."


def bubble(ranks: Sequence[Sequence[TimelinePass]]) -> float:
    """Return the share of the ranks' time in which they wait, from the first pass of any of them to the last."""
    passes = [each for rank in ranks for each in rank]
    span = max(each["end"] for each in passes) - min(each["start"] for each in passes)
    return 1.0 - sum(each["end"] - each["start"] for each in passes) / (span * len(ranks))


def bubble_by_formula(stages: int, micro_batches: int, stages_per_process: int) -> float:
    """Return the share that a process waits where all stages take equally long and sending takes no time."""
    return (stages - 1) / (stages_per_process * micro_batches + stages - 1)


def timeline_picture(ranks: Sequence[Sequence[TimelinePass]], columns: int = 66) -> list[str]:
    """Return a line for each rank: digits where a micro-batch goes forward, its letter where it goes back, points where
    the rank waits."""
    passes = [each for rank in ranks for each in rank]
    first = min(each["start"] for each in passes)
    span = max(each["end"] for each in passes) - first
    lines = []
    for number, rank in enumerate(ranks):
        line = ["."] * columns
        for each in rank:
            begin, end = (round((each[key] - first) / span * columns) for key in ("start", "end"))
            name = str(each["micro_batch"]) if each["forward"] else "abcdefghij"[each["micro_batch"]]
            line[begin:end] = name * (end - begin)
        lines.append(f"rank {number}  {''.join(line)}")
    return lines
