"""The config of a run on a dashboard: the recipe, the value of each `auto`, and the environment."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from transformers import PreTrainedModel

from sftkit.config.schema import source_label
from sftkit.data.batches.loader import Batches
from sftkit.engine.engine import Setup
from sftkit.models.structure import count_parameters
from sftkit.rundir.files import read_object
from sftkit.rundir.names import ENVIRONMENT
from sftkit.train.parts import Run


def about_run(run: Run, orig_model: PreTrainedModel, batches: Batches, setup: Setup) -> dict[str, Any]:
    """Return the recipe by its sections, with `resolved` and `environment` beside them."""
    rt, layout, parameters = run.rt, batches.layout, count_parameters(orig_model)
    environment = read_object(run.dir / ENVIRONMENT) if rt.is_main else {}
    # What was chosen or counted before the first step.
    resolved = {
        "stage": run.stage,
        "model_type": orig_model.config.model_type,
        "parameters": parameters.total,
        "parameters_at_work": parameters.body + parameters.head,
        "dtype": str(orig_model.dtype).removeprefix("torch."),
        "precision": rt.precision,
        "attention": setup.attention,
        "attention_why": setup.attention_reason,
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
        "sources": [source_label(source) for source in run.cfg.data.train],
        "documents": len(batches.examples),
        "tokens": int(batches.examples.lengths.sum()),
    }
    return {**asdict(run.cfg), "resolved": resolved, "environment": environment}
