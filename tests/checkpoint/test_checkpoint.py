"""Checkpoints: loadable as they are, verified, atomic, pruned; a resumed run is the uninterrupted run."""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import VOCAB_SIZE, cpu_runtime, make_examples, make_layout_of, tiny_llama, tiny_recipe
from looped import proof_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from sftkit.checkpoint.checkpoint import Checkpoints
from sftkit.checkpoint.resume import find_checkpoint
from sftkit.checkpoint.states import SafeReader, load_states
from sftkit.config.schema import (
    AttentionConfig,
    CheckpointConfig,
    CompileConfig,
    Config,
    DataConfig,
    LogConfig,
    OptimConfig,
    SourceConfig,
    TrainConfig,
)
from sftkit.data.batches.loader import Batches, StepDataset
from sftkit.engine.engine import Training
from sftkit.errors import ConfigError
from sftkit.models.trained import freeze, frozen_names
from sftkit.objectives.objective import NextToken
from sftkit.optim.protocol import build_optimizer
from sftkit.rundir.files import verify
from sftkit.rundir.names import LATEST, OPTIMIZER, newest_run, resolve, step_dirs, step_number
from sftkit.runtime.open import random_state, restore_random_state
from sftkit.tracking.tracker import Tracker
from sftkit.train.assemble import make_engine
from sftkit.train.end import Trained, write_summary
from sftkit.train.loop import train
from sftkit.train.parts import TrainServices
from sftkit.verify.replicas import Replicas

FROZEN = ("model.embed_tokens.*", "lm_head.*", "model.layers.0.mlp.*")


def config(run_dir: Path, max_steps: int, every: int | None) -> Config:
    return tiny_recipe(
        run_dir,
        data=DataConfig(train=(SourceConfig(path="builtin:tasks"),)),
        optim=OptimConfig(name="adamw", lr=1e-2),
        train=TrainConfig(max_steps=max_steps),
        attention=AttentionConfig(backend="reference"),
        compile=CompileConfig(enabled=False),
        checkpoint=CheckpointConfig(every=every, keep=100 if every == 2 else 2),
        log=LogConfig(every=1, wandb="off"),
    )


def run(
    run_dir: Path,
    tokenizer,
    max_steps: int = 12,
    every: int | None = None,
    resume: str | None = None,
    kind="packed",
    stop=None,
    dtype: torch.dtype = torch.float32,
    frozen: Sequence[str] = (),
) -> Trained:
    """A run of a dropout model whose 5-step epochs end in the middle."""
    rt = cpu_runtime()
    torch.manual_seed(0)
    cfg = config(run_dir, max_steps, every)
    run_dir.mkdir(exist_ok=True)
    orig_model = tiny_llama(dropout=0.2).to(dtype)
    freeze(orig_model, frozen)
    examples = make_examples([int(n) for n in torch.randint(4, 33, (50,))], target_share=0.4)
    layout = make_layout_of(kind, examples.lengths, micro=4)
    batches = Batches(StepDataset(examples, layout), seed=0)
    engine = make_engine(cfg, rt, run_dir, Training(orig_model, NextToken(cfg.loss), layout))
    checkpoints = Checkpoints(run_dir, cfg.checkpoint, rt, orig_model, tokenizer, engine.optimizer, "run: {}\n")
    resumed = checkpoints.resume(resume)
    with closing(engine), Tracker(run_dir, cfg.log, rt, {}, step=resumed["step"]) as tracker:
        return train(cfg, rt, engine, batches, TrainServices(lambda _: ({}, []), checkpoints, tracker, resumed))


def losses(run_dir: Path) -> list[tuple[int, float, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["train/loss"], row["train/grad_norm"]) for row in rows]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


@pytest.mark.parametrize(
    ("kind", "dtype", "frozen"),
    [
        ("packed", torch.bfloat16, ()),
        ("packed", torch.bfloat16, FROZEN),
        *(pytest.param(kind, torch.float32, (), marks=pytest.mark.slow) for kind in ("bucketed", "dynamic")),
    ],
)
def test_a_resumed_run_equals_the_uninterrupted_run_bitwise(
    tmp_path: Path, tokenizer, kind: str, dtype: torch.dtype, frozen: Sequence[str]
) -> None:
    run(tmp_path / "whole", tokenizer, kind=kind, dtype=dtype, frozen=frozen)
    run(tmp_path / "cut", tokenizer, every=7, kind=kind, dtype=dtype, frozen=frozen)
    shutil.rmtree(tmp_path / "cut" / "step-000012")  # as if killed after step 7
    run(tmp_path / "cut", tokenizer, resume="auto", kind=kind, dtype=dtype, frozen=frozen)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    whole, cut = (tmp_path / name / "step-000012" for name in ("whole", "cut"))
    back = weights(cut)
    for name, value in weights(whole).items():
        assert torch.equal(value, back[name])
    states = [optimizer_states(folder) for folder in (whole, cut)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert dtype == torch.float32 or any(name.startswith("master.") for name in states[0])
    rows = proof_rows(tmp_path / "cut")
    assert ("Frozen weights unchanged" in rows) is bool(frozen)
    if frozen:
        start = tiny_llama(dropout=0.2).to(dtype).state_dict()
        kept = frozen_names(start, frozen)
        assert rows["Frozen weights unchanged"]["ok"]
        assert all(torch.equal(start[name], back[name]) for name in kept)
        assert not all(torch.equal(start[name], back[name]) for name in start.keys() - kept)
        assert not [name for name in states[0] if name.partition(".")[2] in kept]


def test_a_frozen_weight_that_changes_in_a_run_fails_its_row(tmp_path: Path, tokenizer, monkeypatch) -> None:
    def check(replicas: Replicas, step: int, *, is_kept: bool) -> None:
        if step == 5:
            with torch.no_grad():
                replicas._orig_model.lm_head.weight[2, 3] += 1.0

    monkeypatch.setattr(Replicas, "check", check)
    run(tmp_path / "run", tokenizer, every=4, frozen=FROZEN)
    row = proof_rows(tmp_path / "run")["Frozen weights unchanged"]
    assert not row["ok"]
    assert row["found"] == "lm_head.weight (seen at step 8)"


def optimizer_states(folder: Path) -> dict[str, torch.Tensor]:
    """State name -> tensor, as they are on the disk."""
    saved = SafeReader(folder / OPTIMIZER).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in saved.items()}
    load_states(tensors, folder / OPTIMIZER)
    return tensors


def test_a_checkpoint_loads_in_plain_transformers_and_gives_identical_logits(tmp_path: Path, tokenizer) -> None:
    rt = cpu_runtime()
    orig_model = tiny_llama(dropout=0.0)
    optimizer = build_optimizer(orig_model, OptimConfig(name="adamw"))
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), rt, orig_model, tokenizer, optimizer, "x: 1\n")
    orig_model.generation_config.eos_token_id = [5, 6]
    folder = checkpoints.save(3, {"tokens": 10}, wait=True)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.randint(0, VOCAB_SIZE, (2, 9))
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, orig_model.eval()(ids).logits)
    assert loaded.generation_config.eos_token_id == [5, 6]
    assert loaded.config.use_cache is True
    reloaded = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital?"}]
    assert reloaded.apply_chat_template(messages)["input_ids"] == tokenizer.apply_chat_template(messages)["input_ids"]
    assert json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert reloaded.all_special_ids == tokenizer.all_special_ids
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        assert not [key for key in file.keys() if "_orig_mod" in key or "module." in key or "orig_model" in key]  # noqa: SIM118


def test_a_checkpoint_that_is_published_is_not_written_again(tmp_path: Path, tokenizer) -> None:
    orig_model = tiny_llama(dropout=0.0)
    optimizer = build_optimizer(orig_model, OptimConfig(name="adamw"))
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), cpu_runtime(), orig_model, tokenizer, optimizer, "x: 1\n")

    def files(folder: Path) -> dict[str, int]:
        return {path.name: path.stat().st_ino for path in folder.iterdir()}

    written = files(checkpoints.save(3, {}, wait=True))
    assert files(checkpoints.save(3, {}, wait=True)) == written
    assert [end.failure for end in checkpoints.ended_saves()] == [None]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["step-000003"]


def test_the_newest_run_and_a_run_directory_resolve_to_the_latest_checkpoint(tmp_path: Path, tokenizer) -> None:
    run(tmp_path / "a", tokenizer, max_steps=2, every=1)
    assert (tmp_path / "a" / LATEST).read_text() == "step-000002\n"
    assert resolve(str(tmp_path / "a")) == str(tmp_path / "a" / "step-000002")
    assert newest_run(str(tmp_path)) == str(tmp_path / "a")
    with pytest.raises(ConfigError, match="no such folder"):
        resolve(str(tmp_path / "b"))
    with pytest.raises(ConfigError, match="no run with a checkpoint"):
        newest_run(str(tmp_path / "b"))


def test_auto_falls_back_to_the_last_checkpoint_that_verifies_and_names_the_bad_file(
    tmp_path, tokenizer, caplog
) -> None:
    run(tmp_path, tokenizer, max_steps=4, every=2)
    newest = tmp_path / "step-000004" / "model.safetensors"
    content = bytearray(newest.read_bytes())
    content[-3] ^= 1  # one flipped bit: torch and safetensors would load it
    newest.write_bytes(bytes(content))
    assert verify(tmp_path / "step-000002") is None
    rt = cpu_runtime()
    with caplog.at_level(logging.WARNING, logger="sftkit"):
        assert find_checkpoint(tmp_path, "auto", rt).folder == tmp_path / "step-000002"
    assert "model.safetensors" in caplog.text
    with pytest.raises(ConfigError, match="sha256"):
        find_checkpoint(tmp_path, str(tmp_path / "step-000004"), rt)
    assert find_checkpoint(tmp_path, None, rt).folder is None


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path, tokenizer) -> None:
    run(tmp_path, tokenizer, max_steps=5, every=1)
    assert [folder.name for folder in step_dirs(tmp_path)] == ["step-000004", "step-000005"]
    assert not list(tmp_path.glob(".*tmp")) + list(tmp_path.glob(".*del"))


def test_a_stop_saves_and_resuming_goes_on(tmp_path: Path, tokenizer, monkeypatch) -> None:
    run(tmp_path / "whole", tokenizer)
    asked = iter([False] * 5)
    with monkeypatch.context() as patch:
        patch.setattr("sftkit.runtime.signals.Stopping.stop_requested", lambda self: next(asked, True))
        stopped = run(tmp_path / "cut", tokenizer)
    assert stopped.stopped
    assert 0 < stopped.step < 12
    run(tmp_path / "cut", tokenizer, resume="auto")
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_a_run_resumed_twice_equals_the_uninterrupted_run_bitwise(tmp_path: Path, tokenizer) -> None:
    run(tmp_path / "whole", tokenizer)
    run(tmp_path / "cut", tokenizer, every=2)
    for step in (2, 8):  # within the first epoch and within the second
        for folder in step_dirs(tmp_path / "cut"):
            if step_number(folder) > step:
                shutil.rmtree(folder)
        run(tmp_path / "cut", tokenizer, every=2, resume="auto")
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    whole, cut = (tmp_path / name / "step-000012" for name in ("whole", "cut"))
    states = [optimizer_states(folder) for folder in (whole, cut)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert all(torch.equal(value, weights(cut)[name]) for name, value in weights(whole).items())


def test_random_state_round_trips_through_a_weights_only_file(tmp_path: Path) -> None:
    import random

    import numpy as np

    torch.save(random_state(), tmp_path / "rng.pt")
    expected = (random.random(), np.random.rand(), torch.rand(1).item())
    restore_random_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected


def test_training_lowers_the_loss(tmp_path: Path, tokenizer) -> None:
    run(tmp_path, tokenizer, max_steps=60)
    values = losses(tmp_path)
    assert values[-1][1] < 0.8 * values[0][1] < 0.9 * math.log(VOCAB_SIZE) * 1.2


def test_resuming_an_earlier_checkpoint_sets_the_abandoned_later_ones_aside(tmp_path: Path, tokenizer) -> None:
    run(tmp_path, tokenizer, max_steps=9, every=3)
    run(tmp_path, tokenizer, max_steps=7, resume=str(tmp_path / "step-000006"))
    assert [folder.name for folder in step_dirs(tmp_path)] == ["step-000006", "step-000007"]
    assert (tmp_path / LATEST).read_text() == "step-000007\n"
    assert (tmp_path / "step-000009.old-1").is_dir()


def test_resuming_a_finished_run_trains_nothing_and_keeps_its_summary(tmp_path: Path, tokenizer, capsys) -> None:
    trained = run(tmp_path, tokenizer, max_steps=3)
    write_summary(tmp_path, trained, cpu_runtime())
    before = (tmp_path / "summary.json").read_text()
    write_summary(tmp_path, run(tmp_path, tokenizer, max_steps=3, resume="auto"), cpu_runtime())
    assert (tmp_path / "summary.json").read_text() == before
    assert "already finished at step 3" in capsys.readouterr().out


def test_a_stopped_run_says_how_to_go_on_and_a_finished_one_does_not(tmp_path: Path, tokenizer, capsys) -> None:
    trained = run(tmp_path, tokenizer, max_steps=3)
    write_summary(tmp_path, trained, cpu_runtime())
    assert "go on" not in capsys.readouterr().out
    write_summary(tmp_path, replace(trained, stopped=True, step=2), cpu_runtime())
    out = capsys.readouterr().out
    assert "stopped at step 2 of 3" in out
    assert re.search(r"^resume with: .* train\.resume=auto$", out, re.MULTILINE)


def test_resuming_with_another_optimizer_or_precision_is_refused(tmp_path: Path, tokenizer) -> None:
    run(tmp_path / "run", tokenizer, max_steps=2, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"optimizer is AdamW bfloat16 in the checkpoint, AdamW float32 in this run"):
        run(tmp_path / "run", tokenizer, max_steps=4, resume="auto")
