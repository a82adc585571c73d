"""Find out from a run's files alone whether it has nothing left to do, so that a resumed chain skips it at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from sftkit.config.load import to_yaml
from sftkit.config.schema import Config
from sftkit.config.yaml_text import RecipeLoader
from sftkit.rundir.lock import at_work
from sftkit.rundir.manifest import verify
from sftkit.rundir.names import RECIPE, SUMMARY, latest_checkpoint, step_name
from sftkit.rundir.provenance import current_provenance, read_provenance, weights_changed
from sftkit.rundir.status import read_status


def finished(cfg: Config) -> str | None:
    """Return a line that says that a run is finished, where train.resume=auto would find it at its last step; None: it
    has to be started.

    The recipe is the one that it was trained by, its newest checkpoint is whole, and the files that it was made
    from are those that it has written down. The line warns of weights that have changed since: no start would
    train from them.
    """
    run_dir = Path(cfg.run.dir)
    if cfg.train.resume != "auto" or read_status(run_dir).get("status") != "finished" or at_work(run_dir):
        return None
    try:
        # From the cheapest question to the dearest: the last one reads every byte of the checkpoint.
        summary, newest = json.loads((run_dir / SUMMARY).read_text()), latest_checkpoint(run_dir)
        step, total_steps = summary["step"], summary["total_steps"]
        if newest is None or newest.name != step_name(total_steps) or step != total_steps or summary["stopped"]:
            return None
        if _recipe(to_yaml(cfg)) != _recipe((newest / RECIPE).read_text()):
            return None
        began, now = read_provenance(run_dir), current_provenance(cfg.model, cfg.data)
        if began is None or began.inputs != now.inputs or verify(newest) is not None:
            return None
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return None  # the start itself says what is wrong
    warning = weights_changed(cfg.model, began, now)
    if warning is not None and "model.path" in cfg.train.resume_changes:
        return None  # the start writes them down
    line = f"finished at step {step} of {total_steps}, nothing left to train: {newest}"
    return line if warning is None else f"{line}\nwarning: {warning}"


def _recipe(text: str) -> dict[str, Any]:
    """Return the settings of a resolved recipe without those that say how a run is resumed."""
    recipe = yaml.load(text, Loader=RecipeLoader)
    return {**recipe, "train": {**recipe["train"], "resume": None, "resume_changes": None}}
