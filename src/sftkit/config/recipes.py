"""Suggest recipes for a path that is not one. No torch."""

from __future__ import annotations

import difflib
from pathlib import Path

from sftkit.config.commands import ROOT

ALIKE = 0.65
"The least likeness (0 to 1) of two recipe names, or two folder names, at which one is suggested for the other."
SIBLINGS = 0.6
"The least likeness of two files in one folder."
_MAX_NAMES = 8
"The most recipes that a message lists."


def in_folder(folder: Path) -> str:
    """Return what is wrong with a folder in the place of a recipe."""
    found = sorted(folder.glob("*.yaml")) or sorted(folder.glob("*/*.yaml"))
    if not found:
        return f"{_shown(folder)}: a folder without recipes in it; name a recipe, a .yaml file"
    more = f" and {len(found) - _MAX_NAMES} more" if len(found) > _MAX_NAMES else ""
    listed = ", ".join(map(_shown, found[:_MAX_NAMES]))
    return f"{_shown(folder)}: a folder; name one of the recipes in it: {listed}{more}"


def similar_recipes(path: Path) -> str:
    """Return a sentence that names recipes like a missing path; empty if none is like it."""
    score = {recipe: _alike(path, recipe) for recipe in _there(path)}
    best = max(score.values(), default=0.0)
    found = sorted({f'"{_shown(recipe)}"' for recipe, value in score.items() if value == best}) if best else []
    return f". Did you mean {' or '.join(found[:_MAX_NAMES])}?" if found else ""


def _shown(path: Path) -> str:
    """Return a path as it is typed; a file that came with sftkit is recipes/x/sft.yaml wherever it lies."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def _there(path: Path) -> list[Path]:
    """Return the recipes beside a path, else in the folders beside its folder, and those that came with sftkit."""
    beside = path.parent.glob("*.yaml") if path.parent.is_dir() else path.parent.parent.glob("*/*.yaml")
    return [*beside, *Path("recipes").glob("*/*.yaml"), *(ROOT / "recipes").glob("*/*.yaml")]


def _alike(path: Path, recipe: Path) -> float:
    """Return how like a recipe a missing path is, from 0 to 1: it may be a misspelling, or name the recipe's folder."""
    stem, parent = _ratio(path.stem, recipe.stem), _ratio(path.parent.name, recipe.parent.name)
    # Three ways to miss a recipe: another file of the folder, the folder in place of the file, both misspelt.
    sibling = stem if recipe.parent == path.parent and stem >= SIBLINGS else 0.0
    folder = _ratio(path.name.removesuffix(recipe.suffix), recipe.parent.name)
    both = (parent + stem) / 2 if min(parent, stem) >= ALIKE else 0.0
    return max(sibling, folder if folder >= ALIKE else 0.0, both)


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one.lower(), other.lower()).ratio()
