"""What a run was evaluated on, by its config.yaml. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sftkit.config.schema import EvalConfig, SourceConfig
from sftkit.config.yaml_text import parse
from sftkit.errors import ConfigError
from sftkit.rundir.names import CONFIG, step_of


@dataclass(frozen=True)
class OwnEvaluation:
    """What an evaluation of a run measures if nothing else is named."""

    config: EvalConfig
    validation: tuple[SourceConfig, ...]


def own_evaluation(path: str) -> OwnEvaluation | None:
    """Return what the run that a path names, or has a checkpoint of, was evaluated on; None: it is of no run.

    Programs that a model writes are not run by what a file says, which may come from anybody.

    Raises:
        ConfigError: its recipe evaluates nothing, or cannot be read.
    """
    folder = Path(path)
    file = (folder if step_of(folder.name) is None else folder.parent) / CONFIG
    if not file.is_file():
        return None
    problems: list[str] = []
    # By the parser of recipes, which has limits.
    recipe = parse(file.read_text(encoding="utf-8", errors="replace"), file.name, problems).plain()
    if not problems and not (isinstance(recipe, dict) and {"eval", "data"} <= recipe.keys()):
        return None  # such as the one that wandb writes
    try:
        recipe = _validated(dict[str, Any], recipe)
        config = _validated(EvalConfig, recipe.get("eval"))
        validation = _validated(tuple[SourceConfig, ...], _validated(dict[str, Any], recipe.get("data")).get("val", []))
    except ValidationError:
        raise ConfigError(
            f"{file}: what the run was evaluated on cannot be read ({'; '.join(problems) or 'another version'}): name "
            "tasks, or --val"
        ) from None
    if not config.tasks and not validation:
        raise ConfigError(f"{file}: this run was evaluated on nothing (eval.tasks, data.val): name tasks, or --val")
    unasked = {"every": None, "at_start": False, "samples": 0, "allow_code_execution": False}
    return OwnEvaluation(replace(config, **unasked), validation)


def _validated(kind: Any, value: Any) -> Any:
    return TypeAdapter(kind).validate_json(json.dumps(value), strict=True)
