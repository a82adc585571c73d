"""What follows a step: a line, a checkpoint, an evaluation; and what a stop changes of it."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

import pytest
from helpers import tiny_recipe

from sftkit.config.schema import CheckpointConfig, Config, EvalConfig, LogConfig
from sftkit.train.parts import Due, due_after

LAST = 11


def recipe(folder: Path, save: int | None = 4, evaluate: int | None = 5) -> Config:
    return tiny_recipe(
        folder,
        log=LogConfig(every=3, wandb="off"),
        checkpoint=CheckpointConfig(every=save),
        eval=EvalConfig(every=evaluate),
    )


def due_by(cfg: Config, step: int) -> Due:
    return due_after(step, LAST, cfg.log, cfg.checkpoint, cfg.eval)


@pytest.mark.parametrize(
    ("step", "due"),
    [
        (1, Due(log=False, save=False, wait_for_save=False, evaluate=False)),
        (3, Due(log=True, save=False, wait_for_save=False, evaluate=False)),
        (4, Due(log=True, save=True, wait_for_save=False, evaluate=False)),
        (5, Due(log=True, save=False, wait_for_save=False, evaluate=True)),
        (LAST, Due(log=True, save=True, wait_for_save=True, evaluate=True)),
    ],
)
def test_each_follows_its_steps_and_all_the_last_one(tmp_path: Path, step: int, due: Due) -> None:
    assert due_by(recipe(tmp_path), step) == due
    assert due.keeps_weights == (step in (4, 5, LAST))


def test_without_settings_only_the_last_step_is_saved_and_evaluated(tmp_path: Path) -> None:
    cfg = recipe(tmp_path, save=None, evaluate=None)
    assert [step for step in range(1, LAST + 1) if due_by(cfg, step).keeps_weights] == [LAST]


@pytest.mark.parametrize("step", range(1, LAST + 1))
def test_a_stop_logs_and_saves_at_once(tmp_path: Path, step: int) -> None:
    due = due_by(recipe(tmp_path), step).if_stopped()
    assert astuple(due) == (True, True, True, False)
