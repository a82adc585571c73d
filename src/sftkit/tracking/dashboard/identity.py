"""The name, group, tags and notes by which a run is found on a dashboard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sftkit.config.schema import LogConfig

TAG_CHARACTERS = 64
"wandb takes no longer ones."

ALL_RUNS = "runs"
"The folder of all runs: what lies in it directly is in no chain."


@dataclass(frozen=True)
class Identity:
    """Identity of a run on wandb and trackio, set when it starts."""

    name: str
    group: str | None
    "of the chain: its stages have it in common"
    job_type: str | None
    "the stage"
    tags: tuple[str, ...]
    notes: str
    settings: Mapping[str, Any]
    "the recipe by its sections, `resolved` and `environment` beside them: train/about.py"


def identity(config: LogConfig, run_dir: Path, settings: Mapping[str, Any]) -> Identity:
    """Return the identity of the run in a directory."""
    resolved, environment = settings.get("resolved", {}), settings.get("environment", {})
    found = (environment.get("device"), *(resolved.get(name) for name in ("topology", "attention", "layout")))
    folder = run_dir.parent.name
    tags = dict.fromkeys([*config.tags, *(str(tag)[:TAG_CHARACTERS] for tag in found if tag)])
    return Identity(
        name=run_name(run_dir),
        group=config.group or (folder if folder not in ("", ALL_RUNS) else None),
        job_type=resolved.get("stage"),
        tags=tuple(tags),
        notes=config.notes or sentence(resolved, environment),
        settings=settings,
    )


def run_name(run_dir: Path) -> str:
    """Return what a run is called on a dashboard: the last two folders of its directory."""
    return "-".join(run_dir.parts[-2:])


def sentence(resolved: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    """Return model, data and machine in a sentence; empty where they are not known."""
    if not resolved:
        return ""
    where = f"{environment.get('world_size', 1)} x {environment.get('device', 'unknown device')}"
    return (
        f"{resolved['model_type']} with {resolved['parameters'] / 1e6:,.1f} M parameters on "
        f"{', '.join(resolved['sources'])} ({resolved['documents']:,} documents, {resolved['tokens']:,} tokens), "
        f"{resolved['layout']} rows of up to {resolved['row_length']:,} tokens, {resolved['attention']} attention, "
        f"{resolved['optimizer']}, {where}, commit {environment.get('git') or 'unknown'}"
    )
