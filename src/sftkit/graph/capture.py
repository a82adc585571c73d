"""One graph of a micro-batch's forward and backward pass, loss and sharding included, captured once for a shape.

The model's own Python runs once on fake tensors under AOTAutograd, without Dynamo: its decisions on the host are final,
and its computations are in the graph. Inputs are weights, the tensors of a batch, and the weight of the loss; outputs
are named sums and gradients. A step calls `CapturedModel`: it runs the graph of a batch's shape, and rejects, captures
or runs eagerly a shape without a graph.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from sftkit.data.batches.collate import Batch
from sftkit.errors import RecompileError
from sftkit.graph import compat, graphs, sharding
from sftkit.graph.passes.apply import Passes, Stage
from sftkit.objectives.objective import ModelWithLoss, Sums
from sftkit.ops import attention, flex, linear_cross_entropy
from sftkit.runtime.start import replaced

OWN = ("targets", "doc_ids", "cu_seqlens")
"Tensors of a batch that a graph takes next to the inputs of the model."
Signature = tuple[tuple[str, tuple[int, ...]], ...]
"Name and shape of each tensor that a graph takes."


def tensors_of(batch: Batch) -> dict[str, Tensor]:
    """Return the tensors of a batch that a graph takes. The index of targets is not among them: it would need a graph
    for every number of targets. So the loss is computed at all positions, and those without a target have weight 0."""
    return {**batch.inputs, **{name: getattr(batch, name) for name in OWN}}


def signature_of(batch: Batch) -> Signature:
    """Return the shapes of the tensors of a batch, which decide on its graph."""
    return tuple((name, tuple(tensor.shape)) for name, tensor in tensors_of(batch).items())


@dataclass(frozen=True)
class Graph:
    """A captured forward and backward pass."""

    run: Callable[..., tuple[Tensor, ...]]
    "of parameters, buffers and a batch's tensors, flat; autograd calls the backward half"
    state: list[Tensor]
    "parameters and buffers in the order of the graph"
    reduced_once: set[int]
    "places in `state` of the parameters whose gradients only the last micro-batch of a step gives (reduce_once)"
    measured: list[str]
    "names of the outputs after the loss"
    seconds: float
    "time of capture and compilation"

    def __call__(self, batch: Batch, *, reduces: bool = True) -> Sums:
        """Return the sums of a batch of this graph's signature.

        Args:
            reduces: whether the backward pass to come gives every gradient, or leaves out those of `reduced_once`.
        """
        state = self.state
        if not reduces:
            # The backward pass gives no real gradient here: it goes to another tensor of the same memory.
            state = [p.detach().requires_grad_() if at in self.reduced_once else p for at, p in enumerate(state)]
        loss, *measured = self.run(*state, *tensors_of(batch).values())
        return Sums(loss, dict(zip(self.measured, measured, strict=True)))


class _Traced(torch.nn.Module):
    """A model with its loss as a function of plain tensors, in the order of `tensors_of`."""

    def __init__(self, model: ModelWithLoss, batch: Batch) -> None:
        super().__init__()
        self.model = model
        self.batch = batch
        self.measured: list[str] = []

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(tensors_of(self.batch), tensors, strict=True))
        own: dict[str, Any] = {name: given[name] for name in OWN}
        # The positions of targets in the batch are as many as there are targets: in a graph that would be
        # one more shape.
        everywhere = torch.arange(given["targets"].numel(), device=given["targets"].device)
        inputs = {name: given[name] for name in self.batch.inputs}
        sums = self.model(replace(self.batch, inputs=inputs, target_index=everywhere, **own))
        self.measured = list(sums.measured)
        return (sums.loss, *sums.measured.values())


def capture(model: ModelWithLoss, batch: Batch, passes: Passes) -> Graph:
    """Capture the graph of batches like this one; no collective runs. Gradients and random state stay as they are.

    Args:
        batch: on the device. Its numbers on the host are part of the graph.

    Raises:
        ConfigError: this torch lacks something that it takes.
    """
    started = time.perf_counter()
    traced = _Traced(model, batch)
    # Held until both halves are compiled. Within, loss and attention are one operator each: a trace would unroll the
    # loop over chunks of logits, and torch's own flex_attention would start Dynamo in the middle of it.
    with ExitStack() as stack:
        stack.enter_context(linear_cross_entropy.loss_as_operator())
        stack.enter_context(graphs.blocks_tagged(model.orig_model))
        stack.enter_context(flex.attention_as_operator(compat.flex_operator))
        stack.enter_context(sharding.looked_up_in_shards(model.orig_model, batch.inputs["input_ids"].numel()))
        joint = compat.export_joint(stack, traced, list(tensors_of(batch).values()), for_inductor=passes.for_inductor)
        # While weights and gradients have their names, and before any pass: the marks travel with the nodes
        # into both halves.
        prefix = "model.orig_model."
        first = graphs.first_names(model.orig_model, prefix)
        graphs.mark_buckets(joint.graph_module, graphs.buckets_of(model.orig_model, prefix), first)
        passes.on_joint(joint.graph_module)
        # Known only after the trace, which asks the objective for its sums.
        num_sums = 1 + len(traced.measured)
        split = compat.partition(for_inductor=passes.for_inductor, saves_memory=passes.saves_memory)
        halves = [partial(passes.compile_half, name, num_sums) for name in ("forward", "backward")]
        run = compat.compile_joint(joint, split, *halves)
    # By name, in the captured order: parameters() leaves out the second name of a tied weight.
    named = dict(traced.named_parameters(remove_duplicate=False)) | dict(traced.named_buffers(remove_duplicate=False))
    state = [named[name] for name in (*joint.params_spec, *joint.buffers_spec)]
    once = {at for at, name in enumerate(joint.params_spec) if first.get(name) in passes.reduced_once}
    return Graph(run, state, once, traced.measured, time.perf_counter() - started)


log = logging.getLogger(__name__)

OnRecompile = Literal["error", "warn"]


class CapturedModel(torch.nn.Module):
    """Sums of a batch by the graph of its shape. A shape without a graph runs eagerly; within `contract`,
    as on_recompile says."""

    def __init__(
        self, model: ModelWithLoss, passes: Sequence[str], micro_batches: int = 1, *, saves_memory: bool = False
    ) -> None:
        """Wrap a model, with no graph captured yet.

        Args:
            passes, micro_batches, saves_memory: see Passes.
        """
        super().__init__()
        self.model = model
        self.passes = Passes(passes, micro_batches, saves_memory=saves_memory)
        self._eager = attention.eager_backend(model.backend, model.orig_model)
        self._graphs: dict[Signature, Graph] = {}
        self._on_other: OnRecompile | None = None
        self.step_of = self.passes.step_of
        self.stages: dict[tuple[int, int], list[Stage]] = {}
        "the graphs of each captured shape, by what the passes made of them"
        self.late: list[str] = []
        "shapes that were captured after the warm-up, for a person"

    def capture(self, batch: Batch) -> None:
        """Capture the graph of batches like this one. No collective runs."""
        self.passes.begin()
        self._graphs[signature_of(batch)] = capture(self.model, batch, self.passes)
        rows, length = batch.doc_ids.shape
        self.stages[rows, length] = self.passes.stages

    def forget(self) -> None:
        """Drop all graphs: every batch runs eagerly from here on."""
        self.passes.close()
        self._graphs = {}
        self.stages = {}

    @property
    def num_graphs(self) -> int:
        """Return how many shapes have a graph."""
        return len(self._graphs)

    @property
    def seconds(self) -> float:
        """Return the time of all captures."""
        return sum(graph.seconds for graph in self._graphs.values())

    def contract(self, on_recompile: OnRecompile) -> AbstractContextManager[None]:
        """Restrict calls to the captured shapes within the context: another shape is an error, or is captured (warn).

        Raises:
            RecompileError: the shape, and those that there are.
        """
        return replaced(self, "_on_other", on_recompile)

    def forward(self, batch: Batch) -> Sums:
        """Return the sums of a batch."""
        graph = self._graphs.get(signature_of(batch))
        if graph is not None:
            return graph(batch, reduces=self.passes.reduces)
        # Checks and evaluations, outside of the contract, may bring any shape.
        if not self._graphs or self._on_other is None:
            return self.model(batch, self._eager)
        reason = self._reason(batch)
        if self._on_other == "error":
            raise RecompileError(
                f"a training step needs a graph that the warm-up did not capture: {reason}\n"
                "The warm-up covers the shapes of data.layout (packed and fixed: one; bucketed: one per bucket). If "
                "this step is as it should be, train on with compile.on_recompile=warn (capture it and count)"
            )
        # Each rank for itself: a capture runs no collective, so ranks that have the graph only wait for this one.
        self.late.append(reason)
        log.warning("capturing a graph inside training: %s", reason)
        self.capture(batch)
        return self(batch)

    def _reason(self, batch: Batch) -> str:
        """Return the property of the batch that no graph has."""
        rows, length = batch.doc_ids.shape
        known = sorted(self.stages)
        declared = ", ".join(f"{r} x {t}" for r, t in known)
        if (rows, length) not in known:
            return f"a micro-batch of {rows} x {length} positions; captured: {declared}"
        # The size is known, so another tensor of the batch exists, or has a shape, that no captured graph has.
        signatures = [dict(one) for one in self._graphs if dict(one)["doc_ids"] == (rows, length)]
        differing = [
            f"{name} {list(shape)} (captured: "
            f"{' or '.join(str(list(s[name])) for s in signatures if name in s) or 'none'})"
            for name, shape in signature_of(batch)
            if all(s.get(name) != shape for s in signatures)
        ]
        return f"a micro-batch of {rows} x {length} positions with {', '.join(differing) or 'other inputs'}"
