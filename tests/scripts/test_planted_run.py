"""A whole run of a stage script, with NaN in all memory that nobody has written: the same weights, bit for bit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import preloaded
import pytest
import torch
from safetensors.torch import load_file

TEXTS = "[{path: 'builtin:docs', max_rows: 20}, {path: 'builtin:tasks', max_rows: 200}]"
FEW = "[{path: 'builtin:docs', max_rows: 20}]"
SETTINGS = (
    "train.precision=bf16",
    "train.max_steps=3",
    "train.global_batch_size=4",
    "train.micro_batch_size=2",
    "compile.enabled=false",
    "log.every=1",
    "log.wandb=off",
    "eval.max_examples=1",
    "eval.samples=1",
    "eval.max_new_tokens=4",
)


def run(device: str, fill: str, script: str, recipe: str, folder: Path, *settings: str) -> Path:
    """The last checkpoint of a run with planted memory ("yes") or without ("no")."""
    env = {**os.environ, "PYTHONPATH": preloaded.PYTHONPATH, "OMP_NUM_THREADS": "1"}
    env |= {"ACCELERATE_USE_CPU": "true"} if device == "cpu" else {}
    dir = folder / f"{script}-{fill}"
    settings = (*SETTINGS, *settings, f"run.dir={dir}", f"data.cache_dir={folder}/cache")
    words = ["tests/workers/planted_worker.py", fill, f"scripts/{script}", recipe, *settings]
    done = preloaded.run(words, env=env, timeout=300, forked=device == "cpu")
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-3000:]}"
    return dir / "step-000003"


def check_same(plain: Path, dirty: Path, device: str) -> None:
    """Weights, losses and answers of two runs; on a GPU, whose attention adds up in any order, nearly."""
    logs = [
        [json.loads(line) for line in (step.parent / "metrics.jsonl").read_text().splitlines()]
        for step in (plain, dirty)
    ]
    for line, other in zip(*logs, strict=True):
        for name in ("train/loss", "train/grad_norm"):
            assert other[name] == (line[name] if device == "cpu" else pytest.approx(line[name], rel=1e-2)), name
    weights, others = (load_file(step / "model.safetensors") for step in (plain, dirty))
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert others[name].isfinite().all(), name
        if device == "cpu":
            assert torch.equal(weight, others[name]), name
    if device == "cpu":
        states = [sorted((step / "training_state" / "optimizer").glob("*.distcp")) for step in (plain, dirty)]
        assert [p.read_bytes() for p in states[0]] == [p.read_bytes() for p in states[1]]
        assert len({(step.parent / "samples.jsonl").read_text() for step in (plain, dirty)}) == 1


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_base_training_in_bf16_takes_nothing_from_memory_that_nobody_wrote(device: str, tmp_path: Path) -> None:
    # 1,001 tokens: rows of logits have columns that belong to no token.
    settings = ("model.train_tokenizer.vocab_size=1001", f"model.train_tokenizer.sources={TEXTS}", f"data.train={FEW}")
    plain, dirty = (
        run(device, fill, "base_train.py", "recipes/smoke/base.yaml", tmp_path, *settings) for fill in ("no", "yes")
    )
    assert len(load_file(plain / "model.safetensors")["model.embed_tokens.weight"]) % 64
    check_same(plain, dirty, device)


@pytest.mark.slow
def test_chat_sft_in_buckets_takes_nothing_from_memory_that_nobody_wrote(tmp_path: Path) -> None:
    texts = ("model.train_tokenizer.vocab_size=1001", f"model.train_tokenizer.sources={TEXTS}")
    base = run("cpu", "no", "base_train.py", "recipes/smoke/base.yaml", tmp_path, *texts)
    settings = (f"model.path={base}", "data.layout=bucketed")
    check_same(
        *(run("cpu", fill, "chat_sft.py", "recipes/smoke/sft.yaml", tmp_path, *settings) for fill in ("no", "yes")),
        "cpu",
    )
