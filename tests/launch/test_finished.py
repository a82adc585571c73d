"""A run that is resumed and has nothing left to do is not started: it takes a moment, and no torch."""

from __future__ import annotations

import json
import os
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from sftkit.checkpoint.save import entries, write_manifest
from sftkit.config.load import read_config, to_yaml
from sftkit.config.schema import Config
from sftkit.launch import launch
from sftkit.launch.chain import finished, is_evaluated
from sftkit.rundir import lock
from sftkit.rundir.files import digest, write_provenance

RECIPE = (
    "model: {{path: {0}/base, tokenizer: {0}/tokenizer, chat_template: {0}/chat.jinja}}\n"
    "data: {{train: [{{path: {0}/rows}}], max_length: 64}}\ntrain: {{max_steps: 3}}\n"
)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe, its data, and a run that has trained it to the end."""
    path, run_dir = tmp_path / "sft.yaml", tmp_path / "run"
    path.write_text(f"run: {{dir: {run_dir}}}\n{RECIPE.format(tmp_path)}")
    (tmp_path / "rows").mkdir()
    for name in ("a", "b"):
        (tmp_path / "rows" / f"{name}.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text("{}")
    base = tmp_path / "base" / "step-000009"
    base.mkdir(parents=True)
    (base / "config.json").write_text("{}")
    (base / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    (tmp_path / "base" / "LATEST").write_text("step-000009\n")
    checkpoint = run_dir / "step-000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "recipe.yaml").write_text(to_yaml(read_config(path)))
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    (checkpoint / "training_state").mkdir()
    (checkpoint / "training_state" / "state.json").write_text("{}")
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    write_manifest(checkpoint, 3, entries(checkpoint, files))
    (run_dir / "LATEST").write_text("step-000003\n")
    write_provenance(run_dir, read_config(path), resumes=False)
    change(run_dir / "run_status.json", status="finished")
    change(run_dir / "summary.json", step=3, total_steps=3, stopped=False)
    return path


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **values}))


def resumed(recipe: Path, *words: str) -> Config:
    return read_config(recipe, ["train.resume=auto", *words])


def test_a_finished_run_is_not_started_again(recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(launch, "call", lambda *_, **__: pytest.fail("started"))
    monkeypatch.setattr(launch, "find_hardware", lambda: pytest.fail("looked for"))
    assert launch.run_script(__file__, str(recipe), ["train.resume=auto"]) == 0
    newest = recipe.parent / "run" / "step-000003"
    assert capsys.readouterr().out == f"finished at step 3 of 3, nothing left to train: {newest}\n"


UNFINISHED = {
    "anew": lambda run: None,
    "stopped": lambda run: change(run / "summary.json", stopped=True),
    "not at its end": lambda run: change(run / "summary.json", step=2),
    "its end has no checkpoint": lambda run: change(run / "summary.json", step=4, total_steps=4),
    "failed": lambda run: change(run / "run_status.json", status="failed"),
    "another seed": lambda run: None,
    "damaged": lambda run: (run / "step-000003" / "model.safetensors").write_bytes(b"weighty"),
    "no summary": lambda run: (run / "summary.json").unlink(),
    "broken recipe": lambda run: (run / "step-000003" / "recipe.yaml").write_text("[1"),
    "no record": lambda run: (run / "made_from.json").unlink(),
    "damaged record": lambda run: (run / "made_from.json").write_text("[]"),
    "newer data": lambda run: os.utime(run.parent / "rows" / "a.jsonl"),
    "older data": lambda run: os.utime(run.parent / "rows" / "a.jsonl", (1, 1)),
    "more data": lambda run: (run.parent / "rows" / "c.jsonl").write_text("{}\n"),
    "less data": lambda run: (run.parent / "rows" / "b.jsonl").unlink(),
    "another template": lambda run: (run.parent / "chat.jinja").write_text("{{ message }}"),
    "another tokenizer": lambda run: (run.parent / "tokenizer" / "tokenizer_config.json").write_text("{ }"),
    "another model": lambda run: (run.parent / "base" / "step-000009" / "config.json").write_text("{ }"),
    "at work": lock.take_lock,
    "no run": shutil.rmtree,
}
WORDS = {"anew": ("train.resume=null",), "another seed": ("run.seed=5",)}


@pytest.mark.parametrize("case", UNFINISHED)
def test_every_other_run_is_started(recipe: Path, case: str) -> None:
    assert finished(resumed(recipe)) is not None
    UNFINISHED[case](recipe.parent / "run")
    assert finished(resumed(recipe, *WORDS.get(case, ()))) is None


def test_weights_that_have_changed_since_are_told_by_every_start_until_they_are_allowed(recipe: Path) -> None:
    run, base = recipe.parent / "run", recipe.parent / "base"
    os.utime(base / "LATEST")
    assert "warning" not in (finished(resumed(recipe)) or "warning"), "the same checkpoint"
    weights = base / "step-000009" / "model.safetensors"
    os.utime(weights, (1, 1))
    told = f"model.path={base}: its weights have changed since this run began ({weights})"
    for _ in range(2):
        line = finished(resumed(recipe))
        assert line is not None
        assert line.startswith("finished at step 3 of 3")
        assert f"\nwarning: {told}" in line
        assert (write_provenance(run, resumed(recipe), resumes=True) or "").startswith(told)
    allowed = resumed(recipe, "train.resume_changes=[model.path]")
    assert finished(allowed) is None
    assert write_provenance(run, allowed, resumes=True) is None
    assert "warning" not in (finished(resumed(recipe)) or "warning")
    shutil.copytree(base / "step-000009", base / "step-000012")
    (base / "LATEST").write_text("step-000012\n")
    assert "warning" in (finished(resumed(recipe)) or "")


def test_an_evaluation_of_the_newest_checkpoint_is_not_repeated(recipe: Path) -> None:
    cfg, folder = resumed(recipe), recipe.parent / "run" / "evals" / "final"
    assert not is_evaluated(cfg.run, cfg.eval)
    folder.mkdir(parents=True)
    newest = recipe.parent / "run" / "step-000003"
    settings = {"model": str(newest), "manifest": digest(newest), "max_examples": None}
    (folder / "results.json").write_text(json.dumps([{"settings": settings}]))
    assert is_evaluated(cfg.run, cfg.eval)
    assert not is_evaluated(cfg.run, replace(cfg.eval, max_examples=2))
    (newest / "model.safetensors").write_bytes(b"trained again")
    (newest / "manifest.json").unlink()
    assert not is_evaluated(cfg.run, cfg.eval)
    write_manifest(newest, 3, entries(newest, [path for path in newest.rglob("*") if path.is_file()]))
    assert not is_evaluated(cfg.run, cfg.eval), "other bytes of the same name"
    (recipe.parent / "run" / "LATEST").write_text("step-000004\n")
    assert not is_evaluated(cfg.run, cfg.eval)
