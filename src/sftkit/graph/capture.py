"""One graph of a micro-batch's forward and backward pass, loss and sharding included, captured once for a shape.

The model's own Python runs once on fake tensors under AOTAutograd, without Dynamo: what it decides on the host is
decided for good, what it computes is in the graph. Weights, the tensors of a batch, and the weight of the loss go in;
named sums and gradients come out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sftkit.data.batches.collate import Batch
from sftkit.graph import compat
from sftkit.graph.buckets import buckets_of, first_names, mark_buckets
from sftkit.graph.parallel.embedding import looked_up_in_shards
from sftkit.graph.passes.apply import Passes
from sftkit.graph.tags import blocks_tagged
from sftkit.objectives.model_with_loss import ModelWithLoss
from sftkit.objectives.sums import Sums
from sftkit.ops.flex import attention_as_operator
from sftkit.ops.linear_cross_entropy import loss_as_operator

OWN = ("targets", "doc_ids", "cu_seqlens")
"Tensors of a batch that a graph takes beside what the model is given."
Signature = tuple[tuple[str, tuple[int, ...]], ...]
"Name and shape of each tensor that a graph takes."


def tensors_of(batch: Batch) -> dict[str, Tensor]:
    """Return the tensors of a batch that a graph takes. The index of targets is not among them, as there
    would be a graph for every number of targets: the loss is computed at all positions, and those without a
    target weigh nothing."""
    return {**batch.inputs, **{name: getattr(batch, name) for name in OWN}}


def signature_of(batch: Batch) -> Signature:
    """Return what decides which graph a batch needs: the shapes of its tensors."""
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
    "what it took to capture and compile"

    def __call__(self, batch: Batch, *, reduces: bool = True) -> Sums:
        """Return the sums of a batch of this graph's signature.

        Args:
            reduces: whether the backward pass to come gives every gradient, or leaves out those of `reduced_once`.
        """
        state = self.state
        if not reduces:
            # What the backward pass gives in place of a gradient stays with another tensor of the same memory.
            state = [p.detach().requires_grad_() if at in self.reduced_once else p for at, p in enumerate(state)]
        loss, *measured = self.run(*state, *tensors_of(batch).values())
        return Sums(loss, dict(zip(self.measured, measured, strict=True)))


class _Traced(torch.nn.Module):
    """A model with its loss as a function of plain tensors, in the order of `tensors_of`."""

    def __init__(self, model: ModelWithLoss, batch: Batch) -> None:
        super().__init__()
        self.model, self.batch = model, batch
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
    started, traced = time.perf_counter(), _Traced(model, batch)
    # Held until both halves are compiled. Within, loss and attention are one operator each: a trace would unroll the
    # loop over chunks of logits, and torch's own flex_attention would start Dynamo in the middle of it.
    with ExitStack() as stack:
        stack.enter_context(loss_as_operator())
        stack.enter_context(blocks_tagged(model.orig_model))
        stack.enter_context(attention_as_operator(compat.flex_operator))
        stack.enter_context(looked_up_in_shards(model.orig_model, batch.inputs["input_ids"].numel()))
        joint = compat.export_joint(stack, traced, list(tensors_of(batch).values()), for_inductor=passes.for_inductor)
        # While weights and gradients have their names, and before any pass: the marks travel with the nodes
        # into both halves.
        prefix = "model.orig_model."
        first = first_names(model.orig_model, prefix)
        mark_buckets(joint.graph_module, buckets_of(model.orig_model, prefix), first)
        passes.on_joint(joint.graph_module)
        # Known after the trace alone, which is what asks the objective for its sums.
        num_sums = 1 + len(traced.measured)
        split = compat.partition(for_inductor=passes.for_inductor, saves_memory=passes.saves_memory)
        halves = [partial(passes.compile_half, name, num_sums) for name in ("forward", "backward")]
        run = compat.compile_joint(joint, split, *halves)
    # By name, in the captured order: parameters() leaves out the second name of a tied weight.
    named = dict(traced.named_parameters(remove_duplicate=False)) | dict(traced.named_buffers(remove_duplicate=False))
    state = [named[name] for name in (*joint.params_spec, *joint.buffers_spec)]
    once = {at for at, name in enumerate(joint.params_spec) if first.get(name) in passes.reduced_once}
    return Graph(run, state, once, traced.measured, time.perf_counter() - started)
