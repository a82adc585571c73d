"""What a dashboard shows of a run beside its curves: the recipe, what became of its `auto`s, and where it runs."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from sftkit.config.schema import Config, source_label
from sftkit.data.loader import Batches
from sftkit.engine.engine import Setup
from sftkit.models.structure import count_parameters
from sftkit.rundir.names import ENVIRONMENT
from sftkit.runtime.start import Runtime


def about_run(
    cfg: Config, stage: str, rt: Runtime, run_dir: Path, orig_model: PreTrainedModel, batches: Batches, setup: Setup
) -> dict[str, Any]:
    """Return the recipe by its sections, with `resolved` and `environment` beside them.

    Args:
        run_dir: where this start writes, with environment.json in it.
    """
    return {
        **asdict(cfg),
        "resolved": resolved(cfg, stage, rt, orig_model, batches, setup),
        "environment": _environment(run_dir) if rt.is_main else {},
    }


def resolved(
    cfg: Config, stage: str, rt: Runtime, orig_model: PreTrainedModel, batches: Batches, setup: Setup
) -> dict[str, Any]:
    """Return what was chosen or counted before the first step."""
    layout, parameters = batches.layout, count_parameters(orig_model)
    return {
        "stage": stage,
        "model_type": orig_model.config.model_type,
        "parameters": parameters.total,
        "parameters_at_work": parameters.body + parameters.head,
        "dtype": str(orig_model.dtype).removeprefix("torch."),
        "precision": rt.precision,
        "attention": setup.attention,
        "attention_why": setup.attention_why,
        "optimizer": setup.optimizer,
        "memory_plan": setup.memory_plan,
        "checkpoint_bytes": round(setup.checkpoint_bytes),
        "topology": rt.topology.describe(),
        "processes": rt.world_size,
        "layout": layout.kind,
        "max_length": layout.max_length,
        "row_length": layout.row_lengths[-1],
        "shapes": [f"{rows}x{length}" for rows, length in layout.shapes],
        "accumulation": layout.accumulation,
        "sources": [source_label(source) for source in cfg.data.train],
        "documents": len(batches.examples),
        "tokens": int(batches.examples.lengths.sum()),
    }


def _environment(run_dir: Path) -> dict[str, Any]:
    """Return environment.json; empty where it cannot be read."""
    with suppress(OSError, ValueError):
        return json.loads((run_dir / ENVIRONMENT).read_text())
    return {}
