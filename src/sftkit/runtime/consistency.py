"""All ranks of a run must be the same run: recipe, versions and data are compared before anything is trained."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

import numpy as np
import torch
import yaml

from sftkit.config.yaml_text import flattened
from sftkit.errors import ConfigError
from sftkit.rundir.lock import pid_scope
from sftkit.runtime.hardware import installed_version

if TYPE_CHECKING:
    from sftkit.runtime.start import Runtime


def assert_same_on_ranks(rt: Runtime, what: dict[str, str]) -> None:
    """Check that named values are the same on all ranks; every rank must call it.

    Args:
        what: name -> this rank's value.

    Raises:
        ConfigError: on every rank, with each name that differs and who has which value.
    """
    if differences := differing_values(rt.gathered(what)):
        text = "the ranks of this run differ; start all of them from the same checkout and recipe:"
        raise ConfigError("\n  ".join((text, *differences)))


def differing_values(values: list[dict[str, str]]) -> list[str]:
    """Return a line for each name whose value is not the same on all ranks.

    Args:
        values: of each rank, name -> value.
    """
    lines = []
    for name in sorted(set().union(*values)):
        ranks: dict[str, list[str]] = {}
        for rank, of_rank in enumerate(values):
            ranks.setdefault(of_rank.get(name, "not there"), []).append(str(rank))
        if len(ranks) > 1:
            who = (f"{value} on rank{'s' * (len(of) > 1)} {', '.join(of)}" for value, of in ranks.items())
            lines.append(f"{name}: {'; '.join(who)}")
    return lines


def neighbours(rt: Runtime) -> dict[int, int]:
    """Return rank -> process id of the ranks on this machine and in this container, which this process can see; every
    rank must call it."""
    scope = pid_scope()
    return {rank: pid for rank, (place, pid) in enumerate(rt.gathered((scope, os.getpid()))) if place == scope}


def recipe_identity(recipe: str) -> dict[str, str]:
    """Return what must be the same on all ranks before data is read: the resolved recipe, by key, and the versions."""
    # The versions too: another torch would compute another loss, and only on some ranks.
    ours = installed_version("sftkit") or "not installed"  # run from its sources
    settings = {key: repr(value) for key, value in flattened(yaml.safe_load(recipe))}
    return {"sftkit": ours, "torch": torch.__version__, **settings}


def data_identity(lengths: np.ndarray) -> dict[str, str]:
    """Return what the plan of every epoch follows from: number and lengths of the training documents.

    Args:
        lengths: int64 [D], positions of each document.
    """
    # Lengths alone, as plans follow from them; all tokens would be gigabytes to read at each start.
    digest = hashlib.sha256(np.ascontiguousarray(lengths).tobytes()).hexdigest()
    return {"training documents": f"{len(lengths):,} (sha256 of their lengths {digest[:16]})"}
