"""Replaying the halves of a graph as CUDA graphs: no launch costs the host anything, collectives included.

A half runs once as it is, which lets libraries and communicators allocate what they keep; the second call records it,
and the others replay the record. It reads its inputs where they were when it was recorded: weights, and what the
forward half left in the graphs' memory, lie there anyway; a batch is copied there. What is handed out is copied too, as
the next replay writes over it; only what the forward half keeps for the backward half is not, so a backward pass must
come before the next forward pass, of another shape too, as records of all shapes share a memory pool. A step of several
micro-batches keeps this order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sftkit.graph import compat

RecordGraph = Callable[[Callable[[], Sequence[Any]]], tuple[Callable[[], None], Sequence[Any]]]
"""Runs a function once, and returns what repeats its work, and what it returned, whose memory each repetition fills
anew."""


class Replayed:
    """A half of a graph that is recorded and replayed."""

    _boxed_call = True  # AOTAutograd's mark of the calling convention

    def __init__(
        self, run: compat.Boxed, in_place: Sequence[bool], handed_out: int | None, record: RecordGraph
    ) -> None:
        """Take a half that nothing is recorded of yet.

        Args:
            run: the half.
            in_place: of each input whether it is where it was in every call.
            handed_out: how many of the first outputs others get; None: all.
        """
        self._run, self._in_place, self._handed_out, self._record = run, in_place, handed_out, record
        self._calls = 0
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._replay: Callable[[], None] | None = None

    def __call__(self, args: list[Any]) -> list[Any]:
        """Return the outputs: computed at first, then by replaying what was recorded."""
        self._calls += 1
        if self._calls == 1:
            return self._run(args)
        if self._replay is None:
            self._first(args)
        else:
            for mine, given in zip(self._inputs, args, strict=True):
                if isinstance(given, Tensor) and given.data_ptr() != mine.data_ptr():
                    mine.copy_(given)
        # The boxed convention: the caller has given its inputs away, and here nobody needs them any more.
        args.clear()
        assert self._replay is not None
        self._replay()
        count = len(self._outputs) if self._handed_out is None else self._handed_out
        given_out = [out.clone() if isinstance(out, Tensor) else out for out in self._outputs[:count]]
        return [*given_out, *self._outputs[count:]]

    def _first(self, args: Sequence[Any]) -> None:
        """Take the places of the inputs, and record."""
        self._inputs = [
            arg if stays or not isinstance(arg, Tensor) else arg.clone()
            for arg, stays in zip(args, self._in_place, strict=True)
        ]
        self._replay, outputs = self._record(lambda: self._run(list(self._inputs)))
        self._outputs = list(outputs)


class Recorder:
    """CUDA graphs that share one memory pool: of all halves of all shapes of an engine."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def __call__(self, work: Callable[[], Sequence[Any]]) -> tuple[Callable[[], None], Sequence[Any]]:
        """Record a function's work and return it, see RecordGraph. Recording runs nothing on the device."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog (pytorch/pytorch#104555) and the loader call CUDA from threads of their own,
        # which in the default mode would invalidate the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = work()
        self._graphs.append(graph)
        return graph.replay, outputs

    def close(self) -> None:
        """Destroy the graphs: none can be replayed any more. NCCL waits for those with collectives of a
        communicator before it ends that, and dropping who replays them is not enough: the classes that AOTAutograd
        makes are in reference cycles."""
        # pytorch/pytorch#115388: destroy_process_group hangs while such a graph is there.
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
