"""Timestamps around the forward and backward passes of the stages of a pipeline."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.pipelining import PipelineStage

from sftkit.experiments.patterns.timeline import TimelinePass

FORWARD_SECONDS, BACKWARD_SECONDS = 0.2, 0.4
"""Seconds that a process's share of a micro-batch takes, its computing and a pause together: longer than the processes
of this small model need, which share the cores of one machine. So the schedule alone decides who waits."""


@contextmanager
def timed_passes(stages_per_process: int) -> Iterator[list[TimelinePass]]:
    """Have passes of this process's stages, inside, take equally long, and note them.

    Yields:
        the passes so far, in the order in which they ended.
    """
    noted: list[TimelinePass] = []
    plain = {name: getattr(PipelineStage, name) for name in ("forward_one_chunk", "backward_one_chunk")}

    def around(name: str, seconds: float) -> Any:
        def timed(stage: Any, micro_batch: int, *args: Any, **kwargs: Any) -> Any:
            start = time.monotonic()
            found = plain[name](stage, micro_batch, *args, **kwargs)
            left = start + seconds / stages_per_process - time.monotonic()
            time.sleep(max(left, 0.0))
            noted.append(
                {
                    "stage": stage.stage_index,
                    "micro_batch": micro_batch,
                    "forward": name.startswith("forward"),
                    "start": round(start, 4),
                    "end": round(time.monotonic(), 4),
                }
            )
            return found

        return timed

    # A stage has no hooks around its passes: its methods are replaced on the class, and put back.
    PipelineStage.forward_one_chunk = around("forward_one_chunk", FORWARD_SECONDS)  # type: ignore[method-assign]
    PipelineStage.backward_one_chunk = around("backward_one_chunk", BACKWARD_SECONDS)  # type: ignore[method-assign]
    try:
        yield noted
    finally:
        for name, method in plain.items():
            setattr(PipelineStage, name, method)
