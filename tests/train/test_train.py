"""The loop with a compiled step: evaluation in between, every layout, and what happens when the contract is broken."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import cpu_runtime, make_layout_of
from looped import LENGTHS, NoCheckpoints, proof_rows, run
from transformers import PreTrainedModel

from sftkit.config.schema import CompileConfig, EvalConfig, LossConfig, OptimConfig
from sftkit.engine.step import TrainStep
from sftkit.errors import RecompileError
from sftkit.train.parts import first_evaluation_due
from sftkit.verify import round_trip
from sftkit.verify.counts import plain_rates
from sftkit.verify.replicas import Replicas


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["train/loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "kind", ["packed", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("bucketed", "fixed", "dynamic"))]
)
def test_twenty_varied_steps_with_evaluation_and_generation_compile_nothing_and_equal_eager(
    tmp_path: Path, tokenizer, kind: str
) -> None:
    compile = CompileConfig(backend="aot_eager", fullgraph=True)
    compiled = run(tmp_path / "compiled", kind, compile, tokenizer=tokenizer)
    assert compiled.compiled
    assert compiled.metrics["compile/recompiles"] == 0
    assert compiled.metrics["compile/graph_breaks"] == 0
    shapes = 1 if kind == "dynamic" else len(make_layout_of(kind, LENGTHS).shapes)
    assert compiled.metrics["compile/graphs"] == 2 * shapes  # block and final norm
    assert compiled.evals["val/loss"] is not None
    eager = run(tmp_path / "eager", kind, CompileConfig(enabled=False), tokenizer=tokenizer)
    assert not eager.compiled
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "eager"), rel=1e-5)
    assert compiled.evals["val/loss"] == pytest.approx(eager.evals["val/loss"], rel=1e-5)


def test_an_undeclared_shape_in_a_step_ends_training_with_the_guard_that_failed(tmp_path: Path) -> None:
    with pytest.raises(RecompileError, match=r"(?s)a training step needs a graph.*size mismatch.*on_recompile=warn"):
        run(tmp_path / "run", disturb=True, evaluates=False)


@pytest.fixture(scope="module")
def disturbed_eagerly(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of twelve eager steps, some of an undeclared shape."""
    folder = tmp_path_factory.mktemp("eager") / "run"
    eager = run(folder, compile=CompileConfig(enabled=False), disturb=True, evaluates=False, steps=12)
    assert eager.step == 12
    return losses(folder)


def test_an_undeclared_shape_is_compiled_and_counted_on_demand(tmp_path: Path, disturbed_eagerly: list[float]) -> None:
    compile = CompileConfig(backend="eager", fullgraph=True, on_recompile="warn")
    trained = run(tmp_path / "run", compile=compile, disturb=True, evaluates=False, steps=12)
    assert trained.step == 12
    assert trained.metrics["compile/recompiles"]
    rows = proof_rows(tmp_path / "run")
    assert rows["No recompiles after the warm-up"]["ok"] is False
    assert "size mismatch" in rows["No recompiles after the warm-up"]["found"]
    assert rows["The step is compiled"]["ok"] is True
    assert losses(tmp_path / "run") == pytest.approx(disturbed_eagerly, rel=1e-5)


def test_token_metrics_and_the_objective_are_logged_only_when_asked_for(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", compile=CompileConfig(enabled=False), evaluates=False, steps=5)
    loss = LossConfig(token_metrics=True, z_loss=1e-3, label_smoothing=0.1)
    asked = run(tmp_path / "asked", compile=CompileConfig(enabled=False), loss=loss, evaluates=False, steps=5)
    extra = {"train/objective", "train/token_accuracy", "train/entropy"}
    assert extra <= asked.metrics.keys()
    assert not extra & plain.metrics.keys()
    assert asked.metrics["train/objective"] > asked.metrics["train/loss"]  # type: ignore[operator]
    assert 0 <= asked.metrics["train/token_accuracy"] <= 1  # type: ignore[operator]


@pytest.mark.parametrize(
    ("step", "rows", "first"), [(0, [], True), (4, [2], True), (4, [2, 4], False), (3, [2], False), (5, [4], True)]
)
def test_an_evaluation_that_a_stop_has_cut_short_is_made_up_for(
    tmp_path: Path, step: int, rows: list[int], first: bool
) -> None:
    (tmp_path / "evals.jsonl").write_text("".join(json.dumps({"step": n}) + "\n" for n in rows))
    config = EvalConfig(every=2, at_start=True)
    rt = cpu_runtime()
    rt.resumes = True
    assert first_evaluation_due(config, step, 5, rt, tmp_path) is first


def test_an_evaluation_of_an_earlier_run_is_not_taken_for_that_of_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "evals.jsonl").write_text('{"step": 4}\n')
    assert first_evaluation_due(EvalConfig(every=2), 4, 8, cpu_runtime(), tmp_path)


def test_a_skipped_checkpoint_is_an_event_and_was_printed_when_it_was_found(tmp_path: Path, capsys) -> None:
    run(tmp_path / "run", evaluates=False, steps=1, skipped=["checkpoint skipped: step-000002: damaged"])
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [(one["kind"], one["text"]) for one in events] == [
        ("checkpoint_fallback", "checkpoint skipped: step-000002: damaged")
    ]
    assert "checkpoint skipped" not in capsys.readouterr().out


def test_a_start_that_finds_training_finished_leaves_the_proof_of_it_alone(tmp_path: Path) -> None:
    plain = CompileConfig(enabled=False)
    run(tmp_path / "trained", compile=plain, evaluates=False, steps=5)
    assert (tmp_path / "trained/proof.json").exists()
    run(tmp_path / "done", compile=plain, evaluates=False, from_step=5, steps=5)
    assert not (tmp_path / "done/proof.json").exists()


def test_each_step_is_made_with_its_own_learning_rate(tmp_path: Path, monkeypatch) -> None:
    used = list[float]()
    step_of = TrainStep.step

    def step(self: TrainStep, batches: Any, lr: float, **more: Any) -> Any:
        used.append(lr)
        return step_of(self, batches, lr, **more)

    monkeypatch.setattr(TrainStep, "step", step)
    run(tmp_path / "run", compile=CompileConfig(enabled=False), evaluates=False, steps=20)
    expected = plain_rates(np.arange(1, 21), 20, OptimConfig(name="adamw", lr=1e-2))
    assert used == pytest.approx(expected.tolist(), rel=1e-9)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["train/lr"] for line in lines] == [used[line["step"] - 1] for line in lines]


def test_checks_after_the_last_step_are_no_training_time(tmp_path: Path, monkeypatch) -> None:
    late = [0.0]
    clock, own = time.perf_counter, round_trip.logits_of
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + late[0])

    def slow(orig_model: PreTrainedModel) -> dict[str, Any]:
        late[0] += 100
        return own(orig_model)

    monkeypatch.setattr(round_trip, "logits_of", slow)
    trained = run(tmp_path / "run", compile=CompileConfig(enabled=False), evaluates=False, steps=2)
    assert late == [100]
    assert trained.train_seconds is not None
    assert trained.train_seconds < 100


def test_comparing_replicas_before_a_step_is_kept_is_no_training_time(tmp_path: Path, monkeypatch) -> None:
    """Not of the last line's either: a bench's last window had it."""
    kept = list[int]()
    clock = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 100 * len(kept))  # each comparison takes 100 s

    def check(_: Replicas, step: int, *, is_kept: bool) -> None:
        if is_kept:
            kept.append(step)

    monkeypatch.setattr(Replicas, "check", check)
    states = list[dict[str, Any]]()
    monkeypatch.setattr(NoCheckpoints, "save", lambda self, step, state, wait=False: states.append(state))
    trained = run(tmp_path / "run", compile=CompileConfig(enabled=False), evaluates=False, steps=7)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert (kept, [line["step"] for line in lines]) == ([6, 7], [5, 6, 7])
    assert trained.train_seconds is not None
    assert trained.train_seconds < 100
    assert lines[-1]["perf/step_seconds"] < 100
    # Nor of what is saved with the step, which a resumed run goes on from.
    (saved,) = states
    assert saved["progress"]["seconds"] < 100
