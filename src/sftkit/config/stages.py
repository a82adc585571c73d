"""The stages of training, by name: which script runs each. No torch."""

from __future__ import annotations

from pathlib import Path

CHAIN = ("base", "mid", "sft")
"The stages that follow one another."
STAGE_SCRIPTS = {"base": "base_train.py", "mid": "mid_train.py", "sft": "chat_sft.py", "caption": "caption_train.py"}
"Name -> file of the script."


def stage_of_script(script: str) -> str | None:
    """Return the stage that a script runs, by its file name; None for a script that is not one of sftkit's."""
    return next((stage for stage, name in STAGE_SCRIPTS.items() if Path(script).name == name), None)


def stage_of_recipe(recipe: str) -> str:
    """Return the stage of a recipe by how its file name begins (base.yaml, mid_long.yaml); sft if it names none."""
    return next((stage for stage in STAGE_SCRIPTS if Path(recipe).name.startswith(stage)), "sft")
