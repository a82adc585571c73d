"""Read what a run left behind: files may be missing, cut short by a kill, or written by another version."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from sftkit.errors import ConfigError
from sftkit.models.size import num_elements
from sftkit.rundir.names import DOES_NOT_APPLY, STEP_DIRS, latest_checkpoint

Rows = list[dict[str, Any]]
Report = dict[str, Any]
"What reports.collect gathers of a run, by section."
_LARGEST_NUMBER = 1e100
"Numbers from here on are not drawn: an axis with them would overflow. NaN is not below it either."


def drawable_number(value: Any) -> float | None:
    """Return a number that can be drawn, None for everything else; true and false are not numbers."""
    # bool is a kind of int in Python, so true and false would pass as 1 and 0.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < _LARGEST_NUMBER else None


def clean(value: Any) -> Any:
    """Return the value as strict JSON: NaN and infinities, which JSON does not have, become null."""
    if isinstance(value, dict):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def dicts(value: Any) -> Rows:
    """Return the dictionaries of a list; empty for anything else."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def mapping(value: Any) -> dict[str, Any]:
    """Return a dictionary as it is; empty for anything else."""
    return value if isinstance(value, dict) else {}


def passed(check: dict[str, Any]) -> bool | None:
    """Return whether a check of proof.json passed; None: it was not made."""
    return check["ok"] if isinstance(check.get("ok"), bool) else None


def applies(check: dict[str, Any]) -> bool:
    """Return whether a check of proof.json has anything to check in its run."""
    return passed(check) is not None or not str(check.get("found")).startswith(DOES_NOT_APPLY)


def read_json(path: Path, notes: list[str], *, optional: bool = False) -> Any:
    """Return a file's JSON, null where it cannot be read; `notes` then says why, unless the file
    is `optional` and missing."""
    try:
        return clean(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        if not optional:
            notes.append(f"{path.name} is not there")
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read ({type(error).__name__}); it may be cut short")
    return None


def read_rows(path: Path, notes: list[str], *, optional: bool = False) -> Rows:
    """Return the JSON objects of a file of lines; lines that are none (a kill cuts the last
    one) are counted in `notes`."""
    try:
        # Not splitlines: a line separator such as U+2028 inside a text ends no row.
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        if not optional:
            notes.append(f"{path.name} is not there")
        return []
    rows: Rows = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            if isinstance(row := json.loads(line), dict):
                rows.append(clean(row))
    if lost := sum(bool(line.strip()) for line in lines) - len(rows):
        notes.append(f"{path.name}: {lost} lines cannot be read and are left out")
    return rows


def checkpoint(run_dir: Path) -> Path | None:
    """Return the step directory that LATEST names; None without one. The name may not lead out of the run."""
    with suppress(OSError, ValueError):
        folder = latest_checkpoint(run_dir)
        if folder and folder.parent == run_dir and fnmatchcase(folder.name, STEP_DIRS) and folder.is_dir():
            return folder
    return None


def stored_parameters(folder: Path) -> int | None:
    """Return the parameters in the safetensors files of a folder, from their headers; None if there
    are none or one is damaged."""
    with suppress(ConfigError, OSError):
        return sum(map(num_elements, folder.glob("*.safetensors"))) or None
    return None


def on_cpu(device: Any) -> bool:
    """Return whether environment.json names no GPU."""
    return str(device or "").startswith("CPU")
