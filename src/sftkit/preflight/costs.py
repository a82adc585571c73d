"""Estimate the cost of a run before it starts: positions of each layout, steps, memory, disk."""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from sftkit.config.schema import CheckpointConfig, CompileConfig, DataConfig, OptimConfig, TrainConfig
from sftkit.data.batches.epoch import GlobalBatch, num_positions, plan_epoch
from sftkit.data.batches.pack import PAD_MULTIPLE, Layout, make_layout
from sftkit.memory.estimate import GIB
from sftkit.memory.plan import MemoryPlan, checkpoint_bytes, fits
from sftkit.memory.remedies import remedies

SAMPLE = 20_000
"Documents on which layouts other than the run's own are planned; their positions are scaled up."
# ---- layouts ---------------------------------------------------------------------------------------------------------


def layout_facts(
    data: DataConfig, train: TrainConfig, layout: Layout, epoch: Sequence[GlobalBatch], lengths: np.ndarray
) -> list[dict[str, Any]]:
    """Return shapes, padding, steps and positions of an epoch in each of the four layouts.

    Args:
        layout: the run's own, planned as `epoch`.
        lengths: int [D], positions of the training documents.
    """
    # Other layouts are planned on a sample, whose positions are scaled up by its share of all tokens.
    sample = lengths
    if len(lengths) > SAMPLE:
        sample = lengths[np.random.default_rng(0).permutation(len(lengths))[:SAMPLE]]
    share = float(lengths.sum()) / float(sample.sum())
    found: list[dict[str, Any]] = []
    for kind in ("packed", "bucketed", "fixed", "dynamic"):
        own = kind == layout.kind
        one = layout if own else _other_layout(data, train, layout, kind, sample)
        plan = epoch if own else plan_epoch(sample, one, seed=0, epoch=0)
        # Several adapters may share documents, so that an epoch has them several times.
        scale = float(lengths.sum()) / planned_tokens(epoch, lengths) if own else share
        count = num_positions(plan, one) * scale
        row = {
            "layout": kind,
            "own": own,
            "shapes": shapes_text(one),
            "padding_pct": 100.0 * (1.0 - float(lengths.sum()) / count),
            "steps": len(plan) if one is layout else round(len(plan) * scale),
            "positions": round(count),
        }
        found.append(row)
    return found


def planned_tokens(epoch: Sequence[GlobalBatch], lengths: np.ndarray) -> int:
    """Return the document positions of an epoch. `lengths`: int [D] of the documents."""
    documents = np.fromiter((i for batch in epoch for row in batch.rows for i in row), np.int64)
    return int(lengths[documents].sum())


def _other_layout(data: DataConfig, train: TrainConfig, own: Layout, kind: str, lengths: np.ndarray) -> Layout:
    """Return another layout for the same data and processes; settings that only go with one layout hold for it."""
    # A multiple that fits the run's own layout may not divide max_length in another, which would be rejected.
    asked = data.pad_multiple or PAD_MULTIPLE
    multiple = asked if own.max_length % asked == 0 else 1
    data = replace(data, layout=kind, pad_multiple=multiple)  # type: ignore[arg-type]
    micro = min(own.micro_batch_size, train.global_batch_size)
    train = replace(train, micro_batch_size=micro)  # as lowered for this run, which was logged once
    return make_layout(data, train, lengths, own.max_length, own.world_size, encoded=own.encoded)


def shapes_text(layout: Layout) -> str:
    """Return the shapes that a micro-batch may have, rows x positions."""
    if layout.dynamic:
        step = f", multiples of {layout.pad_multiple}" if layout.pad_multiple > 1 else ""
        return f"{layout.micro_batch_size}x({layout.padded(1)} to {layout.max_length}{step})"
    return ", ".join(f"{rows}x{length}" for rows, length in layout.shapes)


def time_facts(train: TrainConfig, steps_in_epoch: int, tokens_in_epoch: int) -> dict[str, Any]:
    """Return steps, epochs and tokens of the run."""
    wanted = train.epochs * steps_in_epoch if train.epochs else None
    steps = min(n for n in (wanted, train.max_steps) if n is not None)
    epochs = steps / steps_in_epoch
    return {"steps": steps, "epochs": epochs, "tokens": round(tokens_in_epoch * epochs)}


# ---- memory and disk -------------------------------------------------------------------------------------------------


def memory_facts(
    plan: MemoryPlan | None, layout: Layout, data: DataConfig, compile: CompileConfig, optim: OptimConfig
) -> dict[str, Any] | None:
    """Return the estimated peak of a step on one GPU in GiB, by part; None if the model's sizes are unknown."""
    if plan is None or plan.estimate is None or plan.setup is None:
        return None
    return {
        "topology": plan.setup.topology.describe(),
        "processes": plan.setup.topology.world_size,
        "optimizer": plan.optim.name,
        "estimated_gib": plan.estimate.total / GIB,
        "gpu_gib": None if plan.total_bytes is None else plan.total_bytes / GIB,
        "fits": None if plan.total_bytes is None else fits(plan.estimate, plan.total_bytes),
        "parts_gib": {name: size / GIB for name, size in asdict(plan.estimate).items()},
        "remedies": [remedy.text for remedy in remedies(plan, layout, data, compile, optim)[:3]],
    }


def disk_facts(
    run_dir: Path, checkpoint: CheckpointConfig, steps: int, orig_model: PreTrainedModel | None, plan: MemoryPlan | None
) -> dict[str, Any]:
    """Return the free space on the run's disk, and the space of its checkpoints when most of them exist, in GiB.

    Args:
        orig_model: on any device, also meta; None: sizes are unknown.
    """
    # The directory need not be there yet: the disk is that of its nearest parent.
    absolute = run_dir.absolute()
    folder = next(each for each in (absolute, *absolute.parents) if each.exists())
    free = shutil.disk_usage(folder).free
    size = None if orig_model is None or plan is None else checkpoint_bytes(orig_model, plan)
    # On disk together: those kept, the best, and the one being written. One save more than by the interval: a run ends
    # with a checkpoint.
    saves = (steps // checkpoint.every if checkpoint.every else 0) + 1
    count = min(checkpoint.keep + 1 + bool(checkpoint.best), saves)
    return {
        "folder": str(folder),
        "free_gib": free / GIB,
        "checkpoint_gib": None if size is None else size / GIB,
        "checkpoints": count,
        "needed_gib": None if size is None else count * size / GIB,
        "fits": None if size is None else count * size <= free,
    }
