"""The parts of the loop one by one: evaluations, the state of a checkpoint, the request to stop."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers import cpu_runtime, make_examples, make_layout_of, tiny_recipe

from sftkit.config.schema import DataConfig, EvalConfig, TrainConfig
from sftkit.data.batches.loader import Batches, StepDataset
from sftkit.errors import ConfigError, Stopped
from sftkit.rundir.status import RunStatus
from sftkit.runtime.signals import Deadline, Stopping
from sftkit.tracking.meter import RUN_COUNTS
from sftkit.tracking.names import PROGRESS, Progress, progress_of
from sftkit.train import loop
from sftkit.train.parts import Evaluation, LoopPosition, TrainServices, checkpoint_state, evaluate_at, first_evaluation
from sftkit.verify import proof

ENGINE: Any = SimpleNamespace(evaluating=nullcontext)


def services(folder: Path, evaluate: Any, **saves: Any) -> TrainServices:
    checkpoints: Any = SimpleNamespace(run_dir=folder, last_save={}, **saves)
    tracker: Any = SimpleNamespace(run_id="abc")
    return TrainServices(evaluate, checkpoints, tracker, {"step": 0})


def stop(_: int) -> Any:
    raise Stopped


def test_an_evaluation_notes_its_phase_and_finds_nothing_if_it_is_stopped(tmp_path: Path) -> None:
    status = RunStatus(tmp_path, 0, 1)
    found = evaluate_at(4, status, ENGINE, lambda step: ({"val/loss": float(step)}, [{"answer": "x"}]))
    assert found == Evaluation({"val/loss": 4.0}, [{"answer": "x"}])
    assert (status.step, status.phase) == (4, "evaluation")
    assert evaluate_at(5, status, ENGINE, stop) == Evaluation({}, [], stopped=True)


@pytest.mark.parametrize(("at_start", "evaluated"), [(True, [0]), (False, [])])
def test_the_first_evaluation_is_made_only_if_it_is_due(tmp_path: Path, at_start: bool, evaluated: list[int]) -> None:
    steps: list[int] = []
    cfg = tiny_recipe(tmp_path, eval=EvalConfig(at_start=at_start))
    status = RunStatus(tmp_path, 0, 1, total_steps=9)
    found = first_evaluation(
        cfg, status, cpu_runtime(), ENGINE, services(tmp_path, lambda step: (steps.append(step) or {}, []))
    )
    assert (found, steps) == (Evaluation(), evaluated)


@pytest.mark.parametrize("before", [True, False])
def test_a_time_limit_that_is_over_before_the_first_step_is_an_error(tmp_path: Path, before: bool) -> None:
    """Before the evaluation, or in the middle of it."""
    cfg = tiny_recipe(tmp_path, eval=EvalConfig(at_start=True), train=TrainConfig(max_minutes=1.0))
    rt, status = cpu_runtime(), RunStatus(tmp_path, 0, 1, total_steps=9)
    if before:
        rt.stopping.deadline = Deadline(1.0, started=-1e6)
    with pytest.raises(ConfigError, match="the time was up before the first step"):
        first_evaluation(cfg, status, rt, ENGINE, services(tmp_path, stop))


def test_a_time_limit_that_is_over_in_the_warm_up_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = tiny_recipe(tmp_path, train=TrainConfig(max_minutes=1.0))
    parts: Any = replace(services(tmp_path, stop), check_validation=partial(stop, 0))
    monkeypatch.setattr(proof, "verified_warm_up", lambda *_: SimpleNamespace(checks=()))
    with pytest.raises(ConfigError, match="the time was up before the first step"):
        loop.warm_up_engine(cfg, ENGINE, cast(Any, None), parts, RunStatus(tmp_path, 0, 1), cpu_runtime())


def test_a_step_counts_towards_the_time_limit_only_where_there_is_one() -> None:
    stopping = Stopping()
    stopping.add_step(10.0, {})
    assert not stopping.stop_requested()
    stopping.deadline = Deadline(60.0, started=0.0)
    stopping.add_step(10.0, {"block_seconds": 1.0, "write_seconds": 9.0})
    assert stopping.deadline.due(now=3600 - 1.1 * 40 + 1)
    assert not stopping.deadline.due(now=3600 - 1.1 * 40 - 1)


def test_the_state_of_a_checkpoint_has_all_that_a_resume_reads(tmp_path: Path) -> None:
    examples = make_examples([30, 4, 25, 8])
    batches = Batches(StepDataset(examples, make_layout_of("packed", examples.lengths)), seed=3)
    progress = Progress(tokens=5, targets=2, seconds=1.5)
    position = LoopPosition(step=3, epoch=1, total_steps=7, progress=progress, counts={"meter": {"undeclared": 2}})
    saved = services(tmp_path, stop)
    saved.checkpoints.last_save.update(block_seconds=1.0, write_seconds=2.0)  # type: ignore[attr-defined]
    data = DataConfig(train=(), targets="assistant")
    state = json.loads(json.dumps(checkpoint_state(position, data, batches, saved)))
    assert progress_of({"step": 4, **state}) == progress
    assert state[RUN_COUNTS] == {"meter": {"undeclared": 2}}
    assert state["stretches"] == json.loads(json.dumps([segment._asdict() for segment in batches.segments]))
    assert state["order"] == [[0, 0, 0, [0], [0]]]
    assert (state["tokens"], state["epoch"], state["total_steps"]) == (5, 1, 7)
    assert (state["tracker"], state["save_seconds"], state["targets"]) == ("abc", 3.0, "assistant")
    assert {"max_length", "thinking", "split_turns", "too_long", PROGRESS} <= state.keys()
