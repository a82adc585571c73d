"""Batches on the device before they are needed: copied on a stream of their own, two steps ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from sftkit.data.batches.loader import StepBatches

AHEAD = 2


def on_device(steps: Iterable[StepBatches], device: torch.device) -> Iterator[StepBatches]:
    """Yield the same steps with their micro-batches on the device. Pinned batches are copied
    while earlier steps compute."""
    if device.type != "cuda":
        yield from steps
        return
    # On the compute stream a copy would begin only after the steps that are queued there.
    stream = torch.cuda.Stream(device)
    waiting: deque[tuple[StepBatches, torch.cuda.Event]] = deque()
    for step in steps:
        with torch.cuda.stream(stream):
            moved = replace(step, micro_batches=[batch.to(device) for batch in step.micro_batches])
        waiting.append((moved, stream.record_event()))
        # A step is handed out when the copies of the next ones are launched, so that they run while it computes.
        if len(waiting) > AHEAD:
            yield _arrived(*waiting.popleft())
    while waiting:
        yield _arrived(*waiting.popleft())


def _arrived(step: StepBatches, copied: torch.cuda.Event) -> StepBatches:
    """Let the compute stream, not the host, wait for the copy; its memory is not reused before that stream is done."""
    current = torch.cuda.current_stream()
    current.wait_event(copied)
    for batch in step.micro_batches:
        for tensor in batch.tensors():
            tensor.record_stream(current)
    return step
