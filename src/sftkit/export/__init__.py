"""A run's model in the form in which others load it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from sftkit.config.schema import ModelConfig
from sftkit.errors import ConfigError, config_error
from sftkit.models.adapter_files import PER_EXPERT, AdapterFiles, check_adapter
from sftkit.models.files import adapter_at, fields_of
from sftkit.rundir.files import read_manifest
from sftkit.rundir.names import RECIPE

LARGEST_FILE = "5GB"
"Default of --max-shard."


def check_export(
    path: str,
    out: Path | None,
    *,
    merge: bool,
    dtype: str | None,
    max_shard: str,
    onto: str | None = None,
    per_expert: bool = False,
    push: str | None = None,
    private: bool = False,
    yes: bool = False,
) -> None:
    """Reject options of an export that do not go with the model or each other, before torch is loaded.

    Raises:
        ConfigError: the folder is there already, or an option has no effect.
    """
    if push is None and (private or yes):
        raise ConfigError(f"--{'private' if private else 'yes'}: nothing is pushed without --push ORG/NAME")
    if out is None:
        if push is None or merge or dtype is not None or onto is not None or per_expert or max_shard != LARGEST_FILE:
            raise ConfigError("--out DIR is missing: the new folder. --push alone publishes a folder as it is")
        return
    if out.exists():
        published = f", or publish it as it is: {out} --push {push}" if push else ""
        raise ConfigError(f"--out {out}: it is there already: name another folder, or move it away{published}")
    if not re.fullmatch(r"\d+(\.\d+)?[KMGT]B", max_shard):
        raise ConfigError(f"--max-shard {max_shard}: a number and KB, MB, GB or TB, such as 5GB")
    if (files := adapter_at(ModelConfig(path=path))) is not None:
        check_adapter(files, None)
    if merge and files is None:
        raise ConfigError(f"--merge: {path} is a whole model, so there is nothing to merge: leave --merge out")
    if files is not None and not merge and dtype is not None:
        raise ConfigError(f"--dtype {dtype}: an adapter alone is copied as it is: add --merge, or leave --dtype out")
    if onto is not None and not merge:
        raise ConfigError(f"--onto {onto}: says what an adapter is merged into: add --merge, or leave --onto out")
    if files is not None and onto == "nf4" and trained_on(files).get("base", "nf4") != "nf4":
        raise ConfigError("--onto nf4: the adapter was trained on the full model: leave --onto out")
    if per_expert and (merge or files is None or not files.experts):
        raise config_error("experts alone", path=path)
    if per_expert and files is not None and (kind := model_type(files)) not in PER_EXPERT:
        raise config_error("no matrix for each expert", kind=kind, others=", ".join(PER_EXPERT))


def model_type(files: AdapterFiles) -> str:
    """Return the architecture of an adapter's model."""
    return str((fields_of(files.base) or {}).get("model_type"))


def trained_on(files: AdapterFiles) -> Mapping[str, Any]:
    """Return how a run had the model under an adapter, by its recipe: `base` (full or nf4) and `precision`; empty: it
    is of no run of ours."""
    step = files.folder.parent.parent  # of one of several
    folder = step if isinstance(read_manifest(step), dict) else files.folder
    if not (folder / RECIPE).is_file():
        return {}
    recipe = yaml.safe_load((folder / RECIPE).read_text())
    adapter = recipe.get("adapter") or {}
    return {"base": adapter.get("base", "bf16"), "precision": recipe["train"]["precision"]}
