"""The contents of an offline run's file, read by wandb's own reader."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any


class Offline:
    """The only offline run in a run directory, or in its own folder."""

    def __init__(self, run_dir: Path) -> None:
        (file,) = [*run_dir.glob("wandb/offline-run-*/*.wandb"), *run_dir.glob("*.wandb")]
        self.summed = json.loads(self._inspect("--summary", file))
        lines = [line for line in self._inspect("--json", file).split("\n") if line.startswith("{")]
        self.records = [json.loads(line) for line in lines]
        self.history = [record["history"]["item"] for record in self.records if record["type"] == "history"]
        self.tables = file.parent / "files" / "media" / "table"

    @staticmethod
    def _inspect(how: str, file: Path) -> str:
        wandb = shutil.which("wandb", path=str(Path(sys.executable).parent))
        assert wandb is not None
        words = [wandb, "leet", "inspect", *dict.fromkeys((how, "--json")), str(file)]
        return subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout

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
