"""The contents of an offline run's file, read by wandb's own reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import preloaded


def inspect(file: Path, *how: str) -> str:
    """What `wandb leet inspect` prints of a run's file."""
    done = preloaded.run(["-m", "wandb", "leet", "inspect", *how, file], timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def records_of(file: Path) -> list[dict[str, Any]]:
    """Every record of a run's file."""
    return [json.loads(line) for line in inspect(file, "--json").split("\n") if line.startswith("{")]


class Offline:
    """The only offline run in a run directory, or in its own folder."""

    def __init__(self, run_dir: Path) -> None:
        (file,) = [*run_dir.glob("wandb/offline-run-*/*.wandb"), *run_dir.glob("*.wandb")]
        self.summed = json.loads(inspect(file, "--summary", "--json"))
        self.records = records_of(file)
        self.history = [record["history"]["item"] for record in self.records if record["type"] == "history"]
        self.tables = file.parent / "files" / "media" / "table"

    @property
    def run(self) -> dict[str, Any]:
        return next(record["run"] for record in self.records if record["type"] == "run")

    def summary_keys(self) -> set[str]:
        """Summary keys including nested values, like wandb's columns."""
        found = set()
        for name, value in self.summed["summary"].items():
            found |= {f"{name}.{key}" for key in value} | {name} if isinstance(value, dict) else {name}
        return found

    def table(self, name: str) -> list[dict[str, Any]]:
        """The newest table of that name."""
        folder = (self.tables / name).parent
        files = folder.glob(f"{Path(name).name}_*.table.json")
        newest = json.loads(max(files, key=lambda path: int(path.name.split("_")[-2])).read_text())
        return [dict(zip(newest["columns"], row, strict=True)) for row in newest["data"]]
