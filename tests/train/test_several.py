"""Several adapters in one run: each is trained as if it were alone."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import cpu_runtime, make_examples, tiny_llama, tiny_recipe
from looped import proof_rows
from safetensors.torch import load_file

from sftkit.checkpoint.checkpoint import Checkpoints
from sftkit.checkpoint.resume import find_checkpoint, run_identity
from sftkit.config.schema import (
    AdapterConfig,
    AttentionConfig,
    CheckpointConfig,
    CompileConfig,
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    NamedAdapter,
    NumericsConfig,
    OptimConfig,
    RunConfig,
    SourceConfig,
    TrainConfig,
)
from sftkit.data.types import Examples
from sftkit.models.load import load_model
from sftkit.objectives.next_token import NextToken
from sftkit.runtime.start import Runtime
from sftkit.tracking.tracker import Tracker
from sftkit.train import assemble, several
from sftkit.train.loop import train
from sftkit.train.parts import LoadedModel, Run, TrainServices

DATA = {
    name: make_examples([int(n) for n in torch.randint(4, 33, (count,), generator=torch.Generator().manual_seed(i))], i)
    for i, (name, count) in enumerate({"long": 90, "short": 40}.items())
}
FOUR = (
    NamedAdapter(name="a", rank=4, lr=1e-2, seed=3),
    NamedAdapter(name="b", rank=8, lr=3e-3, alpha=8.0, seed=4),
    # Its data ends after a few steps.
    NamedAdapter(name="c", rank=2, lr=1e-3, seed=3, data=(SourceConfig(path="short"),)),
    NamedAdapter(name="lr-5.0e-3", rank=16, lr=5e-3, seed=5),
)


@pytest.fixture
def base(tmp_path: Path, tokenizer: Any) -> Path:
    folder = tmp_path / "base"
    tiny_llama(vocab_size=len(tokenizer)).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path names the documents themselves."""

    def load(data: DataConfig, *_: Any) -> tuple[Examples, dict[str, Examples]]:
        return DATA[data.train[0].path], {}

    monkeypatch.setattr(several, "load_examples", load)


def recipe(run_dir: Path, base: Path, **sections: Any) -> Config:
    own = {
        "model": ModelConfig(path=str(base)),
        "data": DataConfig(train=(SourceConfig(path="long"),), max_length=32),
        "adapter": AdapterConfig(alpha=16.0),
        "adapters": FOUR,
        "optim": OptimConfig(max_grad_norm=0.05, weight_decay=0.1),
        "train": TrainConfig(epochs=2, max_steps=10, global_batch_size=8, micro_batch_size=8),
        "attention": AttentionConfig(backend="reference"),
        "compile": CompileConfig(enabled=False),
        "log": LogConfig(every=1, wandb="off"),
    }
    return replace(tiny_recipe(run_dir, **(own | sections)), run=RunConfig(dir=str(run_dir), seed=3))


def run(cfg: Config, tokenizer: Any, resume: str | None = None) -> Path:
    """A run through load_model, engine, loop and checkpoints; without `adapters` of the data that the recipe names."""
    rt: Runtime = cpu_runtime()
    run_dir = Path(cfg.run.dir)
    run_dir.mkdir(exist_ok=True)
    found = find_checkpoint(run_dir, resume, rt)
    here = Run(cfg, "sft", rt, run_dir, found)
    from functools import partial

    from sftkit.models.many_adapters import members_of

    many = {"several": partial(members_of, seed=cfg.run.seed, entries=cfg.adapters)} if cfg.adapters else {}
    orig_model = load_model(cfg.model, tokenizer, cfg.run.seed, "fp32", adapter=cfg.adapter, **many)
    loaded = LoadedModel(orig_model, tokenizer, 32)
    objective = NextToken(cfg.loss)
    if cfg.adapters:
        batches, _ = several.load_several(here, loaded, None, objective)  # type: ignore[arg-type]
    else:
        documents = assemble.EncodedDocuments(DATA[cfg.data.train[0].path], 32, tokenizer.pad_token_id or 0)
        batches = assemble.lay_out(cfg, rt, documents, objective, found)
    data = assemble.Data(batches, {}, [], None)
    engine = assemble.build_engine(here, loaded, objective, data)
    with closing(engine):
        identity = run_identity(orig_model, tokenizer, batches.examples, batches.layout)
        state = (orig_model, tokenizer, engine.optimizer)
        checkpoints = Checkpoints(run_dir, cfg.checkpoint, rt, *state, "run: {}\n", identity)
        resumed = checkpoints.resume(found)
        with Tracker(run_dir, cfg.log, rt, {}, step=resumed["step"]) as tracker:
            train(cfg, rt, engine, batches, TrainServices(lambda _: ({}, []), checkpoints, tracker, resumed))
    return run_dir


def alone(cfg: Config, one: NamedAdapter, run_dir: Path) -> Config:
    """The recipe of one of its adapters by itself."""
    assert cfg.adapter is not None
    return replace(
        cfg,
        run=RunConfig(dir=str(run_dir), seed=cfg.run.seed if one.seed is None else one.seed),
        adapter=replace(cfg.adapter, rank=one.rank or cfg.adapter.rank, alpha=one.alpha or cfg.adapter.alpha),
        optim=replace(cfg.optim, lr=one.lr or cfg.optim.lr),
        data=replace(cfg.data, train=one.data or cfg.data.train),
        adapters=None,
    )


def lines(run_dir: Path, *names: str) -> list[list[float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [[row[name] for name in names] for row in rows if row.get(names[0]) is not None]


def last_step(run_dir: Path) -> Path:
    return max(run_dir.glob("step-*"))


def factors_in(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("micro", [8, 2])
def test_each_adapter_is_trained_as_if_alone(tmp_path: Path, tokenizer: Any, base: Path, micro: int) -> None:
    cfg = recipe(tmp_path / "many", base)
    cfg = replace(cfg, train=replace(cfg.train, micro_batch_size=micro))
    together = last_step(run(cfg, tokenizer))
    assert together.name == "step-000010"
    steps = set()
    for one in FOUR:
        own = run(alone(cfg, one, tmp_path / one.name), tokenizer)
        steps.add(last_step(own).name)
        expected, found = factors_in(last_step(own)), factors_in(together / "adapters" / one.name)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert float((found[name] - value).norm() / value.norm()) < 1e-5
        metrics = [f"train/{metric}/{one.name}" for metric in ("loss", "grad_norm", "lr")]
        torch.testing.assert_close(
            torch.tensor(lines(tmp_path / "many", *metrics)),
            torch.tensor(lines(own, "train/loss", "train/grad_norm", "train/lr")),
            rtol=1e-5,
            atol=1e-7,
        )
    assert len(steps) == 2  # the short data has ended before
    red = {row: found for row, found in proof_rows(tmp_path / "many").items() if found["ok"] is False}
    assert {*red} <= {"Answers end with a learned end of turn"}, red
