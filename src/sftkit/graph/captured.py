"""What the step calls: a model with its loss, by its captured graphs, held to the shapes that were captured."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Literal

import torch

from sftkit.data.batches.collate import Batch
from sftkit.errors import RecompileError
from sftkit.graph.capture import Graph, Signature, capture, signature_of
from sftkit.graph.passes.apply import Passes, Stage
from sftkit.graph.passes.gather_once import SharedWeights
from sftkit.graph.passes.reduce_once import WholeGradients
from sftkit.graph.passes.replay import Recorder
from sftkit.objectives.model_with_loss import ModelWithLoss
from sftkit.objectives.sums import Sums
from sftkit.ops.attention_choice import eager_backend
from sftkit.runtime.replaced import replaced

log = logging.getLogger(__name__)

OnRecompile = Literal["error", "warn", "eager"]


class CapturedModel(torch.nn.Module):
    """Sums of a batch by the graph of its shape. A shape without a graph runs eagerly; within `contract`,
    as on_recompile says."""

    def __init__(
        self, model: ModelWithLoss, passes: Sequence[str], micro_batches: int = 1, *, saves_memory: bool = False
    ) -> None:
        """Wrap a model, with no graph captured yet.

        Args:
            passes: names of graph.passes, in order.
            micro_batches: of a step on a rank, at most.
            saves_memory: see Passes.
        """
        super().__init__()
        self.model, self._passes, self._saves_memory = model, passes, saves_memory
        self._recorder: Recorder | None = None
        self._shared = SharedWeights() if "gather_once" in passes else None
        self._sums = WholeGradients(several=micro_batches > 2) if "reduce_once" in passes else None
        self._eager = eager_backend(model.backend, model.orig_model)
        self._graphs: dict[Signature, Graph] = {}
        self._on_other: OnRecompile | None = None
        self.stages: dict[tuple[int, int], list[Stage]] = {}
        "of each captured shape what its graphs were like"
        self.late: list[str] = []
        "shapes that were captured after the warm-up, for a person"
        self.fallbacks: list[str] = []
        "of each call that ran eagerly inside the contract why"

    def capture(self, batch: Batch) -> None:
        """Capture the graph of batches like this one. No collective runs."""
        # One for all shapes, so that their CUDA graphs share a memory pool: only one shape runs at a time.
        if "cuda_graphs" in self._passes and self._recorder is None:
            self._recorder = Recorder()
        passes = Passes(self._passes, self._saves_memory, self._recorder, self._shared, self._sums)
        self._graphs[signature_of(batch)] = capture(self.model, batch, passes)
        self.stages[_shape(batch)] = passes.stages

    def forget(self) -> None:
        """Drop all graphs: every batch runs eagerly from here on."""
        if self._recorder is not None:
            self._recorder.close()
        self._graphs, self.stages, self._recorder = {}, {}, None

    @property
    def num_graphs(self) -> int:
        """Return how many shapes have a graph."""
        return len(self._graphs)

    @property
    def seconds(self) -> float:
        """Return what all captures took."""
        return sum(graph.seconds for graph in self._graphs.values())

    @contextmanager
    def step_of(self, micro_batches: int) -> Iterator[None]:
        """Let so many micro-batches, forward and backward, be a step within the context: what the passes gather_once
        and reduce_once need to know. Weights must not change before the last forward pass."""
        with ExitStack() as stack:
            if self._shared is not None:
                stack.enter_context(self._shared.sharing(micro_batches))
            if self._sums is not None:
                stack.enter_context(self._sums.summing(micro_batches))
            yield

    def contract(self, on_recompile: OnRecompile) -> AbstractContextManager[None]:
        """Hold calls to the captured shapes within the context: another one is an error, or captured now
        (warn), or run eagerly, and told.

        Raises:
            RecompileError: the shape, and those that there are.
        """
        return replaced(self, "_on_other", on_recompile)

    def forward(self, batch: Batch) -> Sums:
        """Return the sums of a batch."""
        graph = self._graphs.get(signature_of(batch))
        if graph is not None:
            return graph(batch, reduces=self._sums is None or self._sums.reduces)
        # Checks and evaluations, outside of the contract, may bring any shape.
        if not self._graphs or self._on_other is None:
            return self.model(batch, self._eager)
        return self._other(batch)

    def _other(self, batch: Batch) -> Sums:
        reason = self._reason(batch)
        if self._on_other == "error":
            raise RecompileError(
                f"a training step needs a graph that the warm-up did not capture: {reason}\n"
                "The warm-up covers the shapes of data.layout (packed and fixed: one; bucketed: one per bucket). If "
                "this step is as it should be, train on with compile.on_recompile=warn (capture it and count) or "
                "compile.on_recompile=eager (run it without a graph)"
            )
        if self._on_other == "eager":
            self.fallbacks.append(reason)
            return self.model(batch, self._eager)
        # Each rank for itself: a capture runs no collective, so ranks that have the graph only wait for this one.
        self.late.append(reason)
        log.warning("capturing a graph inside training: %s", reason)
        self.capture(batch)
        return self(batch)

    def _reason(self, batch: Batch) -> str:
        """Return what of the batch no graph has."""
        rows, length = _shape(batch)
        known = sorted(self.stages)
        declared = ", ".join(f"{r} x {t}" for r, t in known)
        if (rows, length) not in known:
            return f"a micro-batch of {rows} x {length} positions; captured: {declared}"
        # The size is known, so it is another tensor of the batch that is there, or has a shape, as in no captured one.
        signatures = [dict(one) for one in self._graphs if dict(one)["doc_ids"] == (rows, length)]
        differing = [
            f"{name} {list(shape)} (captured: "
            f"{' or '.join(str(list(s[name])) for s in signatures if name in s) or 'none'})"
            for name, shape in signature_of(batch)
            if all(s.get(name) != shape for s in signatures)
        ]
        return f"a micro-batch of {rows} x {length} positions with {', '.join(differing) or 'other inputs'}"


def _shape(batch: Batch) -> tuple[int, int]:
    """Return the rows of a batch, and the positions of each, whole where ranks share them."""
    rows, length = batch.doc_ids.shape
    return rows, length
