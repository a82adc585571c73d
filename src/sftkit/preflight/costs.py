"""Estimate the cost of a run before it starts: positions of each layout, memory, disk, and hours if an earlier run
measured a speed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml
from transformers import PreTrainedModel

from sftkit.config.schema import CheckpointConfig, CompileConfig, Config, DataConfig, OptimConfig, TrainConfig
from sftkit.data.batches.epoch import GlobalBatch, causal_pairs, num_positions, plan_epoch
from sftkit.data.batches.pack import PAD_MULTIPLE, Layout, make_layout
from sftkit.memory.estimate import GIB, EstimateInputs, pipeline_estimates
from sftkit.memory.plan import MemoryPlan, checkpoint_bytes, fits
from sftkit.memory.remedies import remedies
from sftkit.models.structure import Work, attention_windows, stage_flops
from sftkit.rundir.files import read_metric_rows, read_object
from sftkit.rundir.names import ARCHIVED, CONFIG, ENVIRONMENT, METRICS_FILE

SAMPLE = 20_000
"Documents on which layouts other than the run's own are planned; their positions are scaled up."
_SAME = (
    *("model.path", "model.scratch", "data.max_length", "train.micro_batch_size", "train.precision", "train.fp8"),
    *("train.memory", "attention.backend", "compile.enabled", "compile.mode", "compile.options"),
)
"Settings that an earlier run must share for its speed to be expected of this one."


# ---- layouts ---------------------------------------------------------------------------------------------------------


def layout_facts(
    data: DataConfig, train: TrainConfig, layout: Layout, epoch: Sequence[GlobalBatch], lengths: np.ndarray
) -> list[dict[str, Any]]:
    """Return shapes, padding, steps and positions of an epoch in each of the four layouts.

    `x_dynamic` is positions over those of the dynamic layout. `break_even` is positions over those of an eager loop
    that pads each micro-batch to its own longest document: the compiled step must be that many times faster per
    position to win. Both are of the text. `taken_pct` is the share of the places for encoder inputs that are not empty
    (None: no encoder).

    Args:
        layout: the run's own, planned as `epoch`.
        lengths: int [D], positions of the training documents.
    """
    # Other layouts are planned on a sample, whose positions are scaled up by its share of all tokens.
    sample = lengths
    if len(lengths) > SAMPLE:
        sample = lengths[np.random.default_rng(0).permutation(len(lengths))[:SAMPLE]]
    share = float(lengths.sum()) / float(sample.sum())
    plans: list[tuple[Layout, Sequence[GlobalBatch], float]] = []
    for kind in ("packed", "bucketed", "fixed", "dynamic"):
        if kind == layout.kind:
            plans.append((layout, epoch, 1.0))
        else:
            other = _other_layout(data, train, layout, kind, sample)
            plans.append((other, plan_epoch(sample, other, seed=0, epoch=0), share))
    positions = [num_positions(plan, one) * scale for one, plan, scale in plans]
    # An eager loop pads each micro-batch to its longest document. Part of an epoch stands for all: it is shuffled.
    dynamic, plan, _ = plans[-1]
    part = plan[: SAMPLE // layout.global_batch_size + 1]
    numbered = lengths if dynamic is layout else sample
    eager = 0
    for batch in part:
        for rank in range(dynamic.world_size):
            for rows in batch.micro_batches(dynamic, rank):
                documents = [int(numbered[i]) for row in rows for i in row]
                eager += dynamic.padded(max(documents)) * len(documents) if documents else 0
    eager_positions = positions[-1] * eager / num_positions(part, dynamic)
    found: list[dict[str, Any]] = []
    for (one, plan, scale), count in zip(plans, positions, strict=True):
        # Empty rows have places for encoder inputs too.
        places = sum(one.positions(batch.row_length) // batch.row_length for batch in plan) * one.docs_per_row
        taken = sum(len(row) for batch in plan for row in batch.rows)
        row = {
            "layout": one.kind,
            "own": one is layout,
            "shapes": shapes_text(one),
            "padding_pct": 100.0 * (1.0 - float(lengths.sum()) / count),
            "steps": round(len(plan) * scale),
            "positions": round(count),
            "x_dynamic": count / positions[-1],
            "break_even": count / eager_positions,
            "taken_pct": 100.0 * taken / places if one.encoded else None,
        }
        found.append(row)
    return found


def _other_layout(data: DataConfig, train: TrainConfig, own: Layout, kind: str, lengths: np.ndarray) -> Layout:
    """Return another layout for the same data and processes; settings that only go with one layout hold for it."""
    # A multiple that fits the run's own layout may not divide max_length in another, which would be rejected.
    asked = data.pad_multiple or PAD_MULTIPLE
    multiple = asked if own.max_length % asked == 0 else 1
    data = replace(data, layout=kind, pad_multiple=multiple)  # type: ignore[arg-type]
    train = replace(train, micro_batch_size=own.micro_batch_size)  # as lowered for this run, which was logged once
    return make_layout(data, train, lengths, own.max_length, own.world_size, encoded=own.encoded)


def shapes_text(layout: Layout) -> str:
    """Return the shapes that a micro-batch may have, rows x positions."""
    if layout.dynamic:
        step = f", multiples of {layout.pad_multiple}" if layout.pad_multiple > 1 else ""
        return f"{layout.micro_batch_size}x({layout.padded(1)} to {layout.max_length}{step})"
    return ", ".join(f"{rows}x{length}" for rows, length in layout.shapes)


# ---- speed and time --------------------------------------------------------------------------------------------------


def measured_speeds(cfg: Config, here: tuple[str, int] | None) -> dict[str, dict[str, Any]]:
    """Return, by layout, what the newest earlier run of this recipe's run.dir (or of its .old-N copies) measured:
    tok_per_sec (useful tokens, median of the second half of its logged lines), measured_in and measured_on.

    Args:
        here: (device name, processes); runs on others are skipped. None: any, because the speed names its machine.
    """
    run_dir = Path(cfg.run.dir)
    folders = [run_dir, *run_dir.parent.glob(f"{run_dir.name}{ARCHIVED}*")]
    files = [file for folder in folders if (file := folder / METRICS_FILE).is_file()]
    speeds: dict[str, dict[str, Any]] = {}
    for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True):
        rates = [rate for line in read_metric_rows(file) if (rate := line.get("perf/tok_per_sec"))]
        kind = _comparable(file.with_name(CONFIG), cfg)
        environment = read_object(file.with_name(ENVIRONMENT))
        device, processes = environment.get("device"), environment.get("world_size")
        if rates and kind and here in (None, (device, processes)):
            speed = {
                "tok_per_sec": median(rates[len(rates) // 2 :]),
                "measured_in": str(file.parent),
                "measured_on": f"{processes or '?'} x {device or 'unknown device'}",
            }
            speeds.setdefault(kind, speed)
    return speeds


def _comparable(config: Path, cfg: Config) -> str | None:
    """Return the layout of an earlier run whose speed says something about this recipe; None: it does not."""
    try:
        earlier = yaml.safe_load(config.read_text())
    except (OSError, yaml.YAMLError):
        return None

    def get(tree: Any, key: str) -> Any:
        for part in key.split("."):
            tree = tree.get(part) if isinstance(tree, dict) else None
        return tree

    mine = json.loads(json.dumps(asdict(cfg)))  # tuples become lists
    kind = get(earlier, "data.layout")
    # Only packed rows have a length of their own.
    keys = (*_SAME, "data.row_length") if kind == cfg.data.layout == "packed" else _SAME
    return kind if all(get(earlier, key) == get(mine, key) for key in keys) else None


def time_facts(
    train: TrainConfig, steps_in_epoch: int, tokens_in_epoch: int, speed: dict[str, Any] | None
) -> dict[str, Any]:
    """Return steps, epochs and tokens of the run, and its hours if an earlier run measured a speed."""
    wanted = train.epochs * steps_in_epoch if train.epochs else None
    steps = min(n for n in (wanted, train.max_steps) if n is not None)
    tokens = tokens_in_epoch * steps / steps_in_epoch
    return {
        "steps": steps,
        "epochs": steps / steps_in_epoch,
        "tokens": round(tokens),
        "hours": tokens / speed["tok_per_sec"] / 3600 if speed else None,
        **(speed or dict.fromkeys(("tok_per_sec", "measured_in", "measured_on"))),
    }


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


def stage_facts(
    setup: EstimateInputs, orig_model: PreTrainedModel, lengths: np.ndarray, targets: int, steps: int
) -> list[dict[str, Any]]:
    """Return for each process of a pipeline its layers, the model FLOPs of its stages in a mean step (those of all
    copies of a stage) and their share, and its peak in GiB; empty without a pipeline.

    Args:
        lengths: int [D], positions of the documents of an epoch.
        targets, steps: of the epoch.
    """
    pipeline_size = setup.topology.stages
    if pipeline_size == 1:
        return []
    kinds = (attention_windows(orig_model) or {}).items()
    pairs = sum(n * int(causal_pairs(lengths, window, chunked=chunked).sum()) for (window, chunked), n in kinds)
    work = Work(int(lengths.sum()) // steps, targets // steps, pairs // steps)
    layers = [sum(setup.stage_layers[rank::pipeline_size]) for rank in range(pipeline_size)]
    flops = stage_flops(orig_model, work, layers)
    peaks = [estimate.total / GIB for estimate in pipeline_estimates(setup)]
    return [
        {"layers": layers[rank], "flops": flops[rank], "flops_share": flops[rank] / sum(flops), "estimated_gib": peak}
        for rank, peak in enumerate(peaks)
    ]


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
