"""A run directory: the name of every file in it, and where its newest checkpoint is. No torch."""

from __future__ import annotations

from pathlib import Path

from sftkit.errors import ConfigError

LATEST = "LATEST"
"Text file in a run directory: the name of its newest complete checkpoint."


STATE = "training_state"
"Folder of a step directory with all that plain transformers does not need: optimizer, random states, step."


def resolve(path: str) -> str:
    """A loadable folder or hub id: a run directory stands for its latest checkpoint.

    Raises:
        ConfigError: a local path that does not exist or holds no model.
    """
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        return str(folder)
    if (folder / LATEST).is_file():
        return resolve(str(folder / (folder / LATEST).read_text().strip()))
    if folder.is_dir():
        raise ConfigError(
            f"{path}: no config.json and no {LATEST} in it, so neither a model nor a run with a checkpoint"
        )
    if path.startswith((".", "/", "~", "runs/")) or path.count("/") > 1:
        hint = "; run the stage before this one first (make base, make mid)" if path.startswith("runs/") else ""
        raise ConfigError(f"{path}: no such folder{hint}")
    return path


def newest_run(root: str = "runs") -> str:
    """The run directory under `root` whose checkpoint was written last.

    Raises:
        ConfigError: there is none.
    """
    found = [path for path in Path(root).glob(f"**/{LATEST}") if ".old-" not in str(path)]
    if not found:
        raise ConfigError(f"{root}/: no run with a checkpoint; make one (make smoke, make sft) or name a model")
    return str(max(found, key=lambda path: path.stat().st_mtime).parent)
