"""chat_sft on two processes, the layers spread over them: the run of one process, its page and checkpoints, resumed by either."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sftkit.rundir.names import METRICS_FILE, PROOF
from sftkit.verify.round_trip import verify_checkpoint

ENV = {
    **os.environ,
    "ACCELERATE_USE_CPU": "true",
    "PYTHONPATH": preloaded.PYTHONPATH,
    "OMP_NUM_THREADS": "1",
}
STEPS, SAVED = 4, 2
PIPELINE = ("train.engine=pipeline", "train.pipeline_layers=[2,1]")


@pytest.fixture
def recipe(tmp_path: Path, tokenizer) -> Path:
    """Questions with answers of several lengths, four micro-batches a step; a model of three layers."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), num_hidden_layers=3, max_position_embeddings=128, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    words = ("seven", "the sea shore", "Berlin", "one two three four five")
    rows = [[{"role": "user", "content": f"{i} {words[i % 3]}?"}, answer(words[i % 4])] for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    file = tmp_path / "sft.yaml"
    file.write_text(
        f"""
run: {{dir: unused}}
model: {{path: {tmp_path}/model}}
data: {{train: [{{path: {tmp_path}/rows.jsonl}}], val: [{{path: {tmp_path}/rows.jsonl, max_rows: 9}}], max_length: 64}}
train: {{max_steps: {STEPS}, global_batch_size: 4, micro_batch_size: 1}}
optim: {{lr: 3.0e-3, max_grad_norm: 0.5}}
compile: {{backend: eager}}
eval: {{samples: 1, max_new_tokens: 4}}
checkpoint: {{every: {SAVED}}}
log: {{every: 1, wandb: "off"}}
"""
    )
    return file


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def trained(recipe: Path, name: str, *words: str, ranks: int = 1, **env: str) -> Path:
    """The run directory of a run that has ended well; a pipeline's with fresh memory full of NaN."""
    folder = recipe.parent / name
    own = [f"run.dir={folder}", f"data.cache_dir={recipe.parent}/cache", *words]
    planted = ["tests/workers/planted_worker.py", "yes"] if ranks > 1 else []
    done = preloaded.run([*planted, "scripts/chat_sft.py", str(recipe), *own], ranks, ENV | env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    (folder / "log").write_text(done.stdout)
    return folder


def metrics(folder: Path) -> list[tuple[float, float]]:
    rows = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    return [(row["train/loss"], row["train/grad_norm"]) for row in rows]


def evaluation(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "evals.jsonl").read_text().splitlines()[-1])


@pytest.mark.slow
def test_a_pipeline_is_the_run_of_one_process(recipe: Path) -> None:
    alone = trained(recipe, "alone")
    piped = trained(recipe, "piped", *PIPELINE, ranks=2)
    log = (piped / "log").read_text()
    assert "pipeline of 2 stages: schedule 1f1b, layers 2 + 1" in log
    for ours, theirs in zip(metrics(piped), metrics(alone), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert evaluation(piped)["val/loss"] == pytest.approx(evaluation(alone)["val/loss"], rel=1e-5)
    proof = json.loads((piped / PROOF).read_text())
    assert [row["name"] for row in proof["rows"] if row["ok"] is False] == []
    gradients = next(row for row in proof["rows"] if row["name"] == "Same gradients as the plain model")
    assert gradients["ok"] is True
    step = piped / f"step-{STEPS:06d}"
    assert len(list(step.glob("*.safetensors"))) == 2
    assert verify_checkpoint(step, proof["logits"]).ok
    samples = [(folder / "samples.jsonl").read_text() for folder in (piped, alone)]
    assert samples[0] == samples[1]


@pytest.mark.slow
def test_both_ends_round_the_weight_that_they_share_alike_where_their_layers_are_not_as_many(recipe: Path) -> None:
    config = LlamaConfig.from_pretrained(recipe.parent / "model")
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(recipe.parent / "model")
    words = ("train.precision=bf16", "numerics.check_replicas_every=1", "compile.enabled=false", "eval.samples=0")
    alone, piped = trained(recipe, "alone", *words), trained(recipe, "piped", *PIPELINE, *words, ranks=2)
    assert json.loads((piped / "run_status.json").read_text())["status"] == "finished"
    for ours, theirs in zip(metrics(piped), metrics(alone), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-2)


@pytest.mark.slow
def test_a_pipeline_and_one_process_go_on_from_each_other(recipe: Path) -> None:
    alone, piped = trained(recipe, "alone"), trained(recipe, "piped", *PIPELINE, ranks=2)
    for source, name, ranks, words in ((alone, "alone, piped", 2, PIPELINE), (piped, "piped, alone", 1, ())):
        shutil.copytree(source, recipe.parent / name)
        for later in (recipe.parent / name).glob(f"step-{STEPS:06d}"):
            shutil.rmtree(later)
        going_on = trained(recipe, name, "train.resume=auto", *words, ranks=ranks)
        assert f"step {SAVED}," in (going_on / "log").read_text()
        for ours, theirs in zip(metrics(going_on)[-2:], metrics(alone)[SAVED:], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.slow
def test_four_processes_are_two_stages_in_shards(recipe: Path) -> None:
    sharded = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    words = (*PIPELINE, "train.pipeline_stages=2", "train.global_batch_size=8")
    alone = trained(recipe, "alone", "train.global_batch_size=8")
    piped = trained(recipe, "piped", *words, ranks=4, **sharded)
    assert "pipeline of 2 stages x fsdp2, 2 shards" in (piped / "log").read_text()
    for ours, theirs in zip(metrics(piped), metrics(alone), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert evaluation(piped)["val/loss"] == pytest.approx(evaluation(alone)["val/loss"], rel=1e-5)
    proof = json.loads((piped / PROOF).read_text())
    assert [row["name"] for row in proof["rows"] if row["ok"] is False] == []
    assert verify_checkpoint(piped / f"step-{STEPS:06d}", proof["logits"]).ok
