"""Timestamps around the forward and backward passes of the stages of a pipeline."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

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

    def timed(name: str, seconds: float) -> Any:
        plain = getattr(PipelineStage, name)

        def one_chunk(stage: Any, micro_batch: int, *args: Any, **kwargs: Any) -> Any:
            start = time.monotonic()
            found = plain(stage, micro_batch, *args, **kwargs)
            time.sleep(max(start + seconds / stages_per_process - time.monotonic(), 0.0))
            what = {"stage": stage.stage_index, "micro_batch": micro_batch, "forward": name.startswith("forward")}
            noted.append(what | {"start": round(start, 4), "end": round(time.monotonic(), 4)})
            return found

        return mock.patch.object(PipelineStage, name, one_chunk)

    # A stage has no hooks around its passes: its methods are replaced on the class, and put back.
    with timed("forward_one_chunk", FORWARD_SECONDS), timed("backward_one_chunk", BACKWARD_SECONDS):
        yield noted
