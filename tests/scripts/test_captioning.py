"""scripts/caption_train.py as it is typed: a run and its files, two ranks and one, a run that is resumed, and T5."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import preloaded
import pytest
import torch
from helpers import ROOT
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoModelForSeq2SeqLM, AutoTokenizer

from sftkit.data.reading import pictures as store
from sftkit.models.kind import kind_of
from sftkit.rundir.names import step_dirs

ENV = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
PICTURES = "{path: 'builtin:pictures', max_rows: 60}"
SMALL = {
    "data.train": f"[{PICTURES}]",
    "data.val": "[{path: 'builtin:pictures', name: held_out, split: heldout, max_rows: 6}]",
    "model.train_tokenizer.sources": f"[{PICTURES}]",
    "train.max_steps": 4,
    "checkpoint.every": 2,
    "log.every": 1,
    "log.wandb": "off",
    "compile.backend": "eager",
    "eval.max_examples": 3,
    "eval.max_new_tokens": 12,
}


def started(folder: Path, ranks: int = 1, **changed: object) -> tuple[int, str]:
    """A run in that folder; (exit code, what it said)."""
    settings = {**SMALL, "run.dir": folder, "data.cache_dir": folder.parent / "cache"}
    settings |= {name.replace("__", "."): value for name, value in changed.items()}
    words = [f"{key}={value}" for key, value in settings.items()]
    done = preloaded.run(["scripts/caption_train.py", "recipes/captioning/caption_smoke.yaml", *words], ranks, ENV)
    return done.returncode, done.stdout[-2000:] + done.stderr[-3000:]


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.mark.slow
def test_a_run_its_files_two_ranks_and_a_resumed_one(tmp_path: Path) -> None:
    code, told = started(tmp_path / "one")
    assert code == 0, told
    rows = json.loads((tmp_path / "one" / "proof.json").read_text())["rows"]
    assert not [row["name"] for row in rows if row["ok"] is False]
    assert "Documents in a row do not see each other" in [row["name"] for row in rows if row["ok"]]
    logged = lines(tmp_path / "one")
    assert all(line["data/encoded"] > 0 and line["shape/undeclared"] == 0 for line in logged)
    [evaluated] = lines(tmp_path / "one", "evals.jsonl")
    assert {"eval/captions/exact_match", "eval/captions/token_f1", "val/held_out/loss"} <= evaluated.keys()
    [*_, sample] = lines(tmp_path / "one", "samples.jsonl")
    assert sample["prompt"].startswith("builtin:pictures/heldout/")
    loads_in_transformers(step_dirs(tmp_path / "one")[-1])

    code, told = started(tmp_path / "two", ranks=2)
    assert code == 0, told
    for one, two in zip(logged, lines(tmp_path / "two"), strict=True):
        assert two["train/loss"] == pytest.approx(one["train/loss"], rel=1e-5)
        assert two["train/grad_norm"] == pytest.approx(one["train/grad_norm"], rel=1e-4)
        assert (two["data/encoded"], two["train/tokens"]) == (one["data/encoded"], one["train/tokens"])

    half = tmp_path / "one" / "step-000002"
    code, told = started(tmp_path / "resumed", train__resume=half)
    assert code == 0, told
    weights = [load_file(tmp_path / run / "step-000004" / "model.safetensors") for run in ("one", "resumed")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


RECIPE_T5 = """
run: {dir: DIR/run}
model:
  train_tokenizer: {vocab_size: 300, sources: [{path: DIR/rows.jsonl}]}
  scratch: {model_type: t5, d_model: 32, num_layers: 2, num_heads: 2, d_kv: 16, d_ff: 64, dropout_rate: 0.0}
data:
  train: [{path: DIR/rows.jsonl}]
  val: [{path: DIR/rows.jsonl, name: rows, max_rows: 4}]
  cache_dir: DIR/cache
  max_length: 32
train: {global_batch_size: 4, micro_batch_size: 4, precision: fp32, max_steps: 4, epochs: null}
eval: {max_examples: 2, max_new_tokens: 8}
log: {every: 1, wandb: "off"}
compile: {backend: eager}
"""


@pytest.mark.slow
def test_a_text_to_text_model_trains_passes_its_checks_and_is_reported(tmp_path: Path) -> None:
    digits = [" ".join(str(number)) for number in range(100, 140)]
    pairs = [{"prompt": f"reverse {word}", "completion": word[::-1]} for word in digits]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    recipe = tmp_path / "t5.yaml"
    recipe.write_text(RECIPE_T5.replace("DIR", str(tmp_path)))
    done = preloaded.run(["scripts/caption_train.py", str(recipe)], 1, ENV)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    run = tmp_path / "run"
    rows = json.loads((run / "proof.json").read_text())["rows"]
    assert not [row["name"] for row in rows if row["ok"] is False]
    passed = {row["name"] for row in rows if row["ok"]}
    assert {"Same logits as the plain model", "Same gradients as the plain model"} <= passed
    assert [line["step"] for line in lines(run)] == [1, 2, 3, 4]
    [evaluated] = lines(run, "evals.jsonl")
    assert {"eval/captions/exact_match", "val/rows/loss"} <= evaluated.keys()
    again = AutoModelForSeq2SeqLM.from_pretrained(step_dirs(run)[-1])
    assert type(again).__name__ == "T5ForConditionalGeneration"

    (run / "report.html").unlink()
    done = preloaded.run(["-m", "sftkit", "report", str(run)], 1, ENV)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((run / "report.json").read_text())
    [loss] = [row["value"] for row in report["headline"] if row["name"] == "training loss"]
    assert loss == pytest.approx(lines(run)[-1]["train/loss"])
    page = (run / "report.html").read_text()
    assert "eval/captions" in page
    assert "reverse 1" in page  # what the encoder read, beside what was written


def loads_in_transformers(folder: Path) -> None:
    """As the model card says, with pictures prepared by our own reading."""
    orig_model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert orig_model.decoder.lm_head.weight is orig_model.decoder.transformer.wte.weight
    picture = torch.from_numpy(np.ascontiguousarray(store.read_image("builtin:pictures/heldout/0", (3, 48, 48))))[None]
    pixels = kind_of(orig_model.config).plain_inputs(orig_model, {"pixel_values": picture})["pixel_values"]
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    assert processor["size"] == {"height": 48, "width": 48}
    mean, std = (torch.tensor(processor[name])[:, None, None] for name in ("image_mean", "image_std"))
    torch.testing.assert_close(pixels[0], (picture[0] * processor["rescale_factor"] - mean) / std)
    written = orig_model.generate(pixels, max_new_tokens=5)
    assert written[0, 0] == tokenizer.eos_token_id  # this tokenizer has no other token to begin with
    assert len(written[0]) <= 6
    card = (folder / "README.md").read_text()
    assert "pipeline_tag: image-to-text" in card
    assert 'processor(Image.open("picture.png").convert("RGB"), return_tensors="pt").pixel_values' in card
    assert "model.generate(pixels, max_new_tokens=256)" in card  # of transformers' own accord it would end after 20


@pytest.mark.slow
def test_what_is_not_supported_is_refused_before_the_first_step(tmp_path: Path) -> None:
    code, told = started(tmp_path / "a", train__fp8="rowwise", train__precision="bf16", compile__backend="inductor")
    assert code == 2
    assert "train.fp8=rowwise: vision-encoder-decoder has an encoder, which is not trained in float8" in told
    code, told = started(tmp_path / "b", data__train="[{path: 'builtin:tasks', max_rows: 60}]")
    assert code == 2
    assert "neither a picture with captions" in told
    code, told = started(tmp_path / "c", eval__tasks="[families]")
    assert code == 2
    assert "eval.tasks=families is for models that continue a text" in told
