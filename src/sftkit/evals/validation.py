"""Validation loss and bits per byte of each source: rows as in training, `orig_model` run uncompiled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from sftkit.data.batches.collate import collate
from sftkit.data.batches.epoch import plan_epoch
from sftkit.data.batches.pack import Layout, validation_layout
from sftkit.data.batches.shard import row_shard
from sftkit.data.types import Examples
from sftkit.models.structure import inference
from sftkit.objectives.model_with_loss import ModelWithLoss
from sftkit.ops.attention_choice import eager_backend
from sftkit.runtime.start import Runtime

IN_A_ROW = 4
"Batches of a pipeline between two checks for a requested stop, in which its stages wait for one another."


def validate(
    model: ModelWithLoss, sources: Mapping[str, Examples], layout: Layout, pad_id: int, rt: Runtime
) -> dict[str, float | None]:
    """Return val/<source>/loss (nats per target) and val/<source>/bpb; val/loss and val/bpb over all sources together.

    Every rank runs the same number of forward passes, those of a pipeline the same ones. Bits per byte: nats of all
    targets / ln 2 / UTF-8 bytes of the decoded targets, special tokens not counted as bytes.
    """
    sums = {name: _sums(model, examples, layout, pad_id, rt) for name, examples in sources.items()}
    values: dict[str, float | None] = {}
    for name, (nll, targets, num_bytes) in [*sums.items(), ("", tuple(map(sum, zip(*sums.values(), strict=True))))]:
        prefix = f"val/{name}/" if name else "val/"
        values[f"{prefix}loss"] = nll / targets
        values[f"{prefix}bpb"] = nll / math.log(2) / num_bytes if num_bytes else None
    return values


def _sums(model: ModelWithLoss, examples: Examples, layout: Layout, pad_id: int, rt: Runtime) -> tuple[float, int, int]:
    """Return (nats, targets, bytes) of one source over all ranks."""
    # By the ranks that evaluate, which may be others than those that the layout was made for.
    layout = validation_layout(replace(layout, world_size=rt.data_world_size), examples.lengths)
    backend = eager_backend(model.backend, model.orig_model)
    in_a_row = 1 if rt.topology.stages == 1 else IN_A_ROW * rt.topology.stages
    # MPS has no float64
    nll = torch.zeros((), dtype=torch.float64 if rt.device.type != "mps" else torch.float32, device=rt.device)
    with inference(model.orig_model):
        for number, batch in enumerate(plan_epoch(examples.lengths, layout, seed=None, epoch=0)):
            # A stop is a collective decision: asked for at the same batch by every rank, or one would wait in a pass.
            if number % in_a_row == 0:
                rt.check_stop()
            for rows in batch.micro_batches(layout, rt.data_rank):
                shape, shard = layout.batch_shape(len(rows), batch.row_length), row_shard(rt.topology, rt.rank)
                collated = collate(examples, rows, shape, pad_id, shard)
                nll += model(collated.to(rt.device), backend).measured[model.objective.monitored]
    return float(rt.sum(nll)), int(examples.num_targets.sum()), int(examples.num_bytes.sum())
