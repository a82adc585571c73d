"""The batches that a warm-up runs: the worst case of every declared shape."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from transformers import PreTrainedModel

from sftkit.data.batches.collate import Batch, warm_up_batch
from sftkit.data.batches.pack import Layout
from sftkit.data.batches.shard import row_shard
from sftkit.engine.step import forward_backward
from sftkit.models.kinds import kind_of
from sftkit.models.structure import encoder, vocab_size
from sftkit.objectives.model_with_loss import ModelWithLoss
from sftkit.objectives.sums import LOSS, Totals
from sftkit.ops.attention_choice import DROPOUTS
from sftkit.parallel.pipeline import Pipelined
from sftkit.parallel.wrap import gradient_sync
from sftkit.runtime.start import Runtime


def has_dropout(orig_model: PreTrainedModel) -> bool:
    """Return whether two training passes of the same batch differ."""
    layers = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in orig_model.modules())
    parts = [orig_model.config.get_text_config(), getattr(encoder(orig_model), "config", None)]
    return layers or any(getattr(config, name, 0.0) for config in parts for name in DROPOUTS)


def worst_case_batch(rt: Runtime, orig_model: PreTrainedModel, layout: Layout, rows: int, row_length: int) -> Batch:
    """Build this rank's part of the worst-case batch of a shape, [rows, row_length], on the device."""
    shape, shard = layout.batch_shape(rows, row_length), row_shard(rt.topology, rt.rank)
    made_up = partial(kind_of(orig_model.config).made_up_inputs, orig_model, length=layout.max_length)
    return warm_up_batch(rows, shape, vocab_size(orig_model), shard, made_up).to(rt.device)


def shape_runner(
    rt: Runtime, wrapped: torch.nn.Module, model: ModelWithLoss, layout: Layout, losses: dict[tuple[int, int], float]
) -> Callable[[int, int], None]:
    """Return a function that runs the worst-case batch of a shape, forward and backward.

    Replicas run it without communication; a sharded model as in a step of several micro-batches, if the run's steps
    have several; pipeline stages as in a step.

    Args:
        wrapped: what the step calls: `model`, compiled and distributed.
        losses: filled with the objective per target of each shape, (rows, row_length) -> nats.
    """

    orig_model, objective = model.orig_model, model.objective

    def run_shape(rows: int, row_length: int) -> None:
        batch = worst_case_batch(rt, orig_model, layout, rows, row_length)
        if isinstance(wrapped, Pipelined):
            totals = Totals.zeros(objective.measured, rt.device, torch.promote_types(orig_model.dtype, torch.float32))
            # A schedule needs all its micro-batches: one alone would fill no pipeline, and no stage would
            # reach its peak.
            count = max(layout.accumulation * objective.count(batch), 1)
            wrapped.gradients([batch] * layout.accumulation, count, totals)
            losses[rows, row_length] = float(rt.sum(totals[LOSS])) / rt.data_world_size / count
            return
        # Shards may keep gradients and weights until the last micro-batch of a step, so both kinds of micro-batch are
        # run: each has its own communication and peak of memory.
        syncs = [False] * (layout.accumulation > 1) + [True] if rt.topology.sharded else [False]
        for sync in syncs:
            with gradient_sync(wrapped, rt, sync=sync):
                total = float(forward_backward(wrapped, batch, objective.count(batch), rt)[LOSS])
                losses[rows, row_length] = total / max(objective.count(batch), 1)

    return run_shape
