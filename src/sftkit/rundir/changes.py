"""The differences between a checkpoint and the recipe that resumes it, and which of them are allowed. No torch."""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import yaml

from sftkit.config.keys import hints, key_table
from sftkit.config.yaml import RecipeLoader, flattened
from sftkit.errors import ConfigError

_NO_KEY = object()
"Placeholder for the value of a key that only one side has."
_FIXED = (
    *("train.global_batch_size", "run.seed", "loss.z_loss", "loss.label_smoothing", "loss.dft"),
    *("loss.router_aux_loss_coef", "model.path", "model.revision", "train.freeze", "train.neftune_alpha"),
    *("adapters", "adapter.base", "adapter.lr_ratio_b", "adapter.dropout"),
)
"Keys that a resumed run keeps, besides optim.*: with another value it would be another run."
OPTIM_FREE = ("optim.name", "optim.implementation", "optim.static_gradients")
"""Keys of optim that are not compared: the states show whether optim.name fits; the others only choose how it
is computed.
"""
LENGTH = ("train.max_steps", "train.epochs", "data.tokens")
_OF_ORDER = re.compile(r"(data\.train)\.\d+\.(?:weight|max_epochs|repeat|order)|(data\.stages|data\.shuffle)")
"Keys that decide which documents come next; group: the key that allows the change."


def _shortened(value: Any) -> str:
    """Format a value for a message, leaving out the middle of a long one."""
    if value is _NO_KEY:
        return "(none)"
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return text if len(text) <= 60 else f"{text[:40]}...{text[-15:]}"


def key_differences(there: Any, here: Any) -> dict[str, tuple[Any, Any]]:
    """Map the dotted key of every leaf that differs to (value in the checkpoint, value in this run)."""
    old, new = dict(flattened(there)), dict(flattened(json.loads(json.dumps(here))))
    pairs = {key: (old.get(key, _NO_KEY), new.get(key, _NO_KEY)) for key in {**old, **new}}
    return {key: (a, b) for key, (a, b) in pairs.items() if a != b}


def compare_recipes(there: str, here: str, allowed: Sequence[str]) -> tuple[dict[str, tuple[Any, Any]], list[str]]:
    """Compare the resolved recipes of a checkpoint and of the run that resumes it.

    Args:
        there, here: resolved recipes as YAML. allowed: dotted keys that may differ although a resumed run normally
            keeps them (train.resume_changes).

    Returns:
        (keys that a resumed run keeps, differ and are not allowed to -> both values; lines about the other changes)

    Raises:
        ConfigError: `allowed` has a key that no recipe has.
    """
    for key in allowed:
        if key not in key_table():
            close = difflib.get_close_matches(key, key_table(), n=1)
            meant = f" Did you mean {close[0]}?" if close else ""
            raise ConfigError(f"train.resume_changes: {key} is not a key of a recipe.{meant}")
    old, new = (_settings(text) for text in (there, here))
    # A key that only one side has came or went with a version of sftkit: the recipe did not change.
    changed = {key: (old[key], new[key]) for key in old.keys() & new.keys() if old[key] != new[key]}
    optim = {key for key in changed if key.startswith("optim.") and key not in OPTIM_FREE}
    fixed = {key for key in changed if key in _FIXED or _OF_ORDER.fullmatch(key)}
    kept = {key: values for key, values in sorted(changed.items()) if key in optim | fixed}
    rejected = {key: values for key, values in kept.items() if _allowing(key) not in allowed}
    # The length may change without permission, but it is reported because the learning rate follows it.
    kept |= {key: changed[key] for key in LENGTH if key in changed}
    effects = hints()["changed"]
    return rejected, [
        f"{key} is now {_shortened(b)} (was {_shortened(a)})"
        + (f": {effects[by]}" if (by := _allowing(key)) in effects else "")
        for key, (a, b) in kept.items()
        if key not in rejected
    ]


def rejection(
    prefix: str,
    settings: Mapping[str, tuple[Any, Any]],
    allowed: Sequence[str],
    *,
    grown: Sequence[str] = (),
    fixed: Sequence[str] = (),
) -> ConfigError | None:
    """Return one error with all differences of a checkpoint and a run; None: there are none.

    Args:
        prefix: setting and folder of the checkpoint. settings: as compare_recipes rejects them.
        grown: lines about sources with more documents. fixed: lines about what no setting allows to differ.
    """
    effects = hints()["changed"]
    text = f"{prefix}: "
    settings = dict(settings)
    if several := settings.pop("adapters", None):
        fixed = [*fixed, *difference_lines(_of_entries(*several))]
    if settings or grown:
        names = dict.fromkeys([*allowed, *map(_allowing, settings), *(["data.train"] if grown else [])])
        lines = [*difference_lines(settings), *grown]
        lines += [f"({key}: {effects[by]})" for key in settings if (by := _allowing(key)) in effects]
        text += "the recipe differs from that of the checkpoint:\n" + "".join(f"  {line}\n" for line in lines)
        text += f"Set them back, or allow the change with train.resume_changes=[{','.join(names)}]"
        text += "\nNo setting allows what differs besides: " if fixed else ""
    if fixed:
        text += "the checkpoint belongs to another model, tokenizer, optimizer or data:\n"
        text += "".join(f"  {line}\n" for line in fixed)
        text += "Resume with the original ones, or start a new run from its weights with model.path"
    return ConfigError(text) if settings or grown or fixed else None


def _of_entries(there: Any, here: Any) -> dict[str, tuple[Any, Any]]:
    """Return what key_differences does of the entries of `adapters`, and those that only one side has."""
    found: dict[str, tuple[Any, Any]] = {}
    a: Any
    b: Any
    for i, (a, b) in enumerate(zip_longest(there or [], here or [], fillvalue=_NO_KEY)):
        if a is _NO_KEY or b is _NO_KEY:
            name, other = (one if one is _NO_KEY else one["name"] for one in (a, b))
            found[f"adapters.{i}.name"] = name, other
        else:
            found |= {f"adapters.{i}.{key}": values for key, values in key_differences(a, b).items()}
    return found


def _allowing(key: str) -> str:
    """Return the key of train.resume_changes that allows another value of a key."""
    match = _OF_ORDER.fullmatch(key)
    return key if match is None else match[1] or match[2]


def _settings(text: str) -> dict[str, Any]:
    """Return dotted key -> value of a resolved recipe. The keys of optim.lr_scale are patterns, so it is one value."""
    recipe = yaml.load(text, Loader=RecipeLoader) or {}
    if scales := (recipe.get("optim") or {}).get("lr_scale"):
        recipe["optim"]["lr_scale"] = [[*pair] for pair in scales.items()]
    if (stages := (recipe.get("data") or {}).get("stages")) is not None:
        recipe["data"]["stages"] = json.dumps(stages)
    return dict(flattened(recipe))


def difference_lines(different: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Return a line for each key that differs. `different`: key -> (value in the checkpoint, value in this run)."""
    return [
        f"{key}: {_shortened(a)} in the checkpoint, {_shortened(b)} in this run" for key, (a, b) in different.items()
    ]
