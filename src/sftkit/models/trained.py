"""Which parameters of a model are trained, by `requires_grad`: the one notion that every count asks for.

Names alone decide it where a model is only estimated: no torch in this file, so the launcher reads it too.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from sftkit.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from sftkit.models.adapters import Adapters

ADAPTERS = "sftkit_adapters"
"Attribute of a model that has adapters (models/adapters.py)."
TOKEN_ADAPTER = ".token_adapter."
"In the names of trained rows of a frozen vocabulary (models/token_rows.py)."


def adapters_of(orig_model: torch.nn.Module) -> Adapters | None:
    """Return the adapters of a model; None: it has none."""
    return getattr(orig_model, ADAPTERS, None)


def members_in(orig_model: torch.nn.Module) -> tuple[Adapters, ...]:
    """Return each of several adapters that are trained side by side; (): the model has one, or none."""
    return () if (adapters := adapters_of(orig_model)) is None else adapters.members


def factors(orig_model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of the adapters by name."""
    if adapters_of(orig_model) is None:
        return {}
    named = orig_model.named_parameters()
    return {name: parameter for name, parameter in named if ".lora_" in name or TOKEN_ADAPTER in name}


def logical_elements(parameter: torch.Tensor) -> int:
    """Return the number of elements of a parameter: the bytes of a frozen matrix in NF4 hold two each."""
    return parameter.numel() if parameter.is_floating_point() else 2 * parameter.numel()


def frozen_names(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
    """Return the names of parameters that train.freeze matches."""
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


def unmatched(names: Collection[str], patterns: Iterable[str], what: str = "parameter") -> str | None:
    """Return which pattern matches none of these names, with the nearest ones; None: each matches some."""
    for pattern in patterns:
        if frozen_names(names, [pattern]):
            continue
        # A prefix without its star matches nothing.
        prefix = f"{pattern.rstrip('.')}."
        inside = any(name.startswith(prefix) for name in names)
        near = [f"{prefix}*"] if inside else _respelt(pattern, names)
        near = near or difflib.get_close_matches(pattern, names, 3, 0.5)
        hint = " or ".join(f'"{name}"' for name in near)
        told = f": did you mean {hint}?" if hint else f"; one is {min(names, default='none')}"
        return f'"{pattern}" matches no {what} of the model{told}'
    return None


def _respelt(pattern: str, names: Collection[str]) -> list[str]:
    """Return a pattern with stars, such as "*.mpl.*", with the word that no name has spelt as the nearest one."""
    words = {word for name in names for word in name.split(".")}
    for word in re.findall(r"\w+", pattern):
        if "*" in pattern and word not in words and (near := difflib.get_close_matches(word, words, 1)):
            spelt = re.sub(rf"\b{word}\b", near[0], pattern)
            return [spelt] if frozen_names(names, [spelt]) else []
    return []


def pattern_problem(names: Collection[str], patterns: Sequence[str]) -> str | None:
    """Return what is wrong with train.freeze for a model with parameters of these names; None: nothing.

    Args:
        names: of tied weights all of them.
    """
    if problem := unmatched(names, patterns):
        return problem
    if patterns and len(frozen_names(names, patterns)) == len(names):
        return "freezes every parameter, so nothing is left to train: take a pattern out"
    return None


def freeze(orig_model: PreTrainedModel, patterns: Sequence[str]) -> None:
    """Freeze the parameters that train.freeze matches. A tied weight is one parameter: frozen under one of its names,
    it is frozen under all.

    Args:
        orig_model: with all its rows for tokens, before it is compiled, sharded or given to an optimizer.

    Raises:
        ConfigError: a pattern that matches nothing, with the nearest names; or nothing is left to train.
    """
    if not patterns:
        return
    named = dict(orig_model.named_parameters(remove_duplicate=False))
    if problem := pattern_problem(named, patterns):
        raise ConfigError(f"train.freeze: {problem}")
    for name in frozen_names(named, patterns):
        named[name].requires_grad = False
    if not any(p.requires_grad for p in orig_model.parameters()):
        raise ConfigError("train.freeze: freezes every parameter, so nothing is left to train: take a pattern out")


def learning_rate_scales(orig_model: torch.nn.Module, patterns: Mapping[str, float]) -> dict[int, float]:
    """Return id -> factor of the learning rate, of the trained parameters that optim.lr_scale matches under any name.

    Raises:
        ConfigError: a pattern that matches no trained parameter, with the nearest names.
    """
    named = {name: p for name, p in orig_model.named_parameters(remove_duplicate=False) if p.requires_grad}
    if problem := unmatched(named, patterns, "trained parameter"):
        raise ConfigError(f"optim.lr_scale: {problem}")
    return {id(named[name]): scale for pattern, scale in patterns.items() for name in frozen_names(named, [pattern])}
