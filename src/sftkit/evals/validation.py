"""Validation loss and bits per byte of each source, on the eager `orig_model`, document by document."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from sftkit.attention import attention_masks
from sftkit.compilation import run_eagerly
from sftkit.data.collate import collate
from sftkit.data.pack import Layout, plan_epoch
from sftkit.data.types import Examples
from sftkit.loss import token_nll
from sftkit.runtime import Runtime


def validate(
    orig_model: PreTrainedModel, sources: dict[str, Examples], layout: Layout, pad_id: int, rt: Runtime
) -> dict[str, float | None]:
    """val/<source>/loss (nats per target) and val/<source>/bpb; val/loss and val/bpb over all sources together.

    Every rank runs the same number of forward passes. Bits per byte: nats of all targets / ln 2 / UTF-8 bytes of the
    decoded targets, special tokens not counted as bytes.
    """
    sums = {name: _sums(orig_model, examples, layout, pad_id, rt) for name, examples in sources.items()}
    values: dict[str, float | None] = {}
    for name, (nll, targets, num_bytes) in [*sums.items(), ("", tuple(map(sum, zip(*sums.values(), strict=True))))]:
        prefix = f"val/{name}/" if name else "val/"
        values[f"{prefix}loss"] = nll / targets
        values[f"{prefix}bpb"] = nll / math.log(2) / num_bytes if num_bytes else None
    return values


def _sums(
    orig_model: PreTrainedModel, examples: Examples, layout: Layout, pad_id: int, rt: Runtime
) -> tuple[float, int, int]:
    """(nats, targets, bytes) of one source over all ranks."""
    one_micro_batch = replace(layout, kind="packed", row_lengths=(layout.max_length,))
    one_micro_batch = replace(one_micro_batch, global_batch_size=layout.micro_batch_size * layout.world_size)
    nll = torch.zeros((), dtype=torch.float64 if rt.device.type != "mps" else torch.float32, device=rt.device)
    was_training = orig_model.training
    orig_model.eval()
    with torch.no_grad(), run_eagerly(), rt.autocast():
        for global_batch in plan_epoch(examples.lengths, one_micro_batch, seed=0, epoch=0, shuffle=False):
            (rows,) = global_batch.micro_batches(one_micro_batch, rt.rank)
            batch = collate(examples, rows, layout.max_length, pad_id).to(rt.device)
            outputs = orig_model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                attention_mask=attention_masks(orig_model.config, batch.doc_ids),
                use_cache=False,
            )
            nll += token_nll(outputs.logits, batch.targets).sum()
    orig_model.train(was_training)
    return float(rt.sum(nll)), int(examples.num_targets.sum()), int(examples.num_bytes.sum())
