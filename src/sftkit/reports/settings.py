"""Reads the settings of a run, compares them with the defaults or another run's, and finds
where its model comes from."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sftkit.config.keys import key_table
from sftkit.config.yaml_text import parse
from sftkit.reports.files import Rows, clean, dicts, mapping
from sftkit.rundir.names import CONFIG, RECIPE

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_DATA_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_DATA_FILE = re.compile(r"\.(jsonl|json|parquet|csv|txt)(\.gz)?$")


def read_settings(path: Path, notes: list[str]) -> dict[str, Any]:
    """Return config.yaml as a nested dictionary; what cannot be read is said in `notes`, never raised."""
    try:
        # By the parser of recipes, which has limits: a config.yaml may come from anybody.
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        notes.append(f"{path.name} is not there")
        return {}
    problems: list[str] = []
    try:
        settings = mapping(clean(parse(text, path.name, problems).plain()))
    except RecursionError:
        settings, problems = {}, ["nested too deeply"]
    notes.extend(f"{path.name}: {problem}" for problem in problems[:3])
    return settings


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and their values.

    A list of plain values is one value; a list of mappings has a number for each.
    """
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _flat(item, f"{key}.{name}" if key else str(name))
    elif dicts(value):
        for index, item in enumerate(value):
            yield from _flat(item, f"{key}.{index}")
    else:
        yield key, value


def changed(settings: dict[str, Any]) -> Rows:
    """Return the settings that differ from their default, as {"key", "value", "default"}; default null
    also where there is none."""
    rows = []
    for key, value in _flat(settings):
        # Lists of mappings are numbered in a recipe; the table of keys has one entry, N, for all of them.
        known = key_table().get(re.sub(r"\.\d+(?=\.|$)", ".N", key))
        default = known.default if known is not None else None
        if known is None or known.required or _text(value) != _text(default):
            rows.append({"key": key, "value": value, "default": default})
    return rows


def differences(settings: dict[str, Any], other: dict[str, Any]) -> Rows:
    """Return the settings of two runs that differ, as {"key", "value", "other"}; run.dir is left out."""
    mine, its = dict(_flat(settings)), dict(_flat(other))
    keys = [key for key in dict.fromkeys([*mine, *its]) if key != "run.dir"]
    return [
        {"key": key, "value": mine.get(key), "other": its.get(key)}
        for key in keys
        if key not in mine or key not in its or _text(mine[key]) != _text(its[key])
    ]


def _text(value: Any) -> str:
    """Return a value as text that is the same for equal values."""
    return json.dumps(value, sort_keys=True, default=str)


def origin(settings: dict[str, Any]) -> str | None:
    """Return the hub model that this run, or the run that it goes on from, started with; None: it was made from scratch
    or from a local folder."""
    # Runs go on from runs: ten back at most, as a folder may name itself.
    for _ in range(10):
        path = mapping(settings.get("model")).get("path")
        if not isinstance(path, str):
            return None
        folder = os.path.expanduser(path)  # os.path, not pathlib: it takes any text, however long or odd
        files = (os.path.join(folder, name) for name in (CONFIG, RECIPE))
        recipe = next((file for file in files if os.path.isfile(file)), None)
        if recipe is None:
            local = os.path.exists(folder) or path.startswith(("runs/", ".", "~", "/"))
            return path if not local and _HUB_ID.fullmatch(path) else None
        settings = read_settings(Path(recipe), [])
    return None


def hub_datasets(settings: dict[str, Any]) -> list[str]:
    """Return the hub ids of the training data."""
    paths = [source.get("path") for source in dicts(mapping(settings.get("data")).get("train"))]
    ids = [path for path in paths if isinstance(path, str) and _DATA_ID.fullmatch(path) and not _DATA_FILE.search(path)]
    return list(dict.fromkeys(path for path in ids if not os.path.exists(path)))
