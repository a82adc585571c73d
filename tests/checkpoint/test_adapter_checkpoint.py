"""A run of adapters: its checkpoints hold them alone, it resumes bit for bit, and it checks what it trains and what it
does not."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import in_fork
from helpers import (
    before_each_step,
    cpu_runtime,
    flat,
    make_examples,
    make_layout_of,
    merged_weights,
    tiny,
    tiny_llama,
    tiny_recipe,
)
from looped import proof_rows
from safetensors.torch import load_file
from transformers import GenerationConfig, PreTrainedModel, Qwen3MoeConfig

from sftkit.checkpoint.checkpoint import Checkpoints
from sftkit.checkpoint.resume import find_checkpoint, run_identity
from sftkit.config.schema import (
    AdapterConfig,
    AttentionConfig,
    CheckpointConfig,
    CompileConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from sftkit.data.batches.loader import Batches, StepDataset
from sftkit.engine.engine import Training
from sftkit.errors import ConfigError
from sftkit.models import adapters, expert_adapters
from sftkit.models.adapter_files import base_digest
from sftkit.models.load import load_model, stop_ids
from sftkit.models.tokenizer import load_tokenizer
from sftkit.models.trained import adapters_of
from sftkit.models.vocabulary import add_tokens
from sftkit.objectives.objective import NextToken
from sftkit.ops import linear_cross_entropy
from sftkit.rundir.files import verify
from sftkit.tracking.tracker import Tracker
from sftkit.train.assemble import make_engine
from sftkit.train.loop import train
from sftkit.train.parts import TrainServices
from sftkit.verify.round_trip import verify_checkpoint


@pytest.fixture
def base(tmp_path: Path, tokenizer: Any) -> Path:
    folder = tmp_path / "base"
    tiny_llama(vocab_size=len(tokenizer)).save_pretrained(folder)
    return folder


def run(
    run_dir: Path,
    tokenizer: Any,
    base: Path,
    *,
    adapter: AdapterConfig = AdapterConfig(rank=4, dropout=0.2),  # noqa: B008
    every: int | None = None,
    resume: str | None = None,
    precision: str = "fp32",
    compile: CompileConfig = CompileConfig(enabled=False),  # noqa: B008
    steps: int = 8,
    token: int = 3,
    killed_at: int | None = None,
) -> PreTrainedModel:
    """A run whose adapters have dropout, through load_model, engine, loop and checkpoints. `token` is in its data."""
    rt = cpu_runtime()
    model = ModelConfig(path=str(base))
    cfg = tiny_recipe(
        run_dir,
        model=model,
        adapter=adapter,
        optim=OptimConfig(lr=1e-2),
        train=TrainConfig(max_steps=steps),
        attention=AttentionConfig(backend="reference"),
        compile=compile,
        checkpoint=CheckpointConfig(every=every),
        log=LogConfig(every=1, wandb="off"),
    )
    run_dir.mkdir(exist_ok=True)
    torch.manual_seed(0)
    # As train.assemble loads it: in NF4 the matrices are quantized one by one when they are read.
    empty = adapter.base == "nf4"
    orig_model = load_model(model, tokenizer, 3, precision, empty=empty, adapter=adapter)
    examples = make_examples([int(n) for n in torch.randint(4, 33, (50,))], target_share=0.4)
    flat(examples).ids[5::9] = token
    layout = make_layout_of("packed", examples.lengths, micro=4)
    batches = Batches(StepDataset(examples, layout), seed=0)
    before_each_step(batches, lambda step, _: kill_when_saved(run_dir) if step == killed_at else None)
    found = find_checkpoint(run_dir, resume, rt)
    training = Training(orig_model, NextToken(cfg.loss), layout, model, found.folder)
    engine = make_engine(cfg, rt, run_dir, training)
    with closing(engine):
        identity = run_identity(orig_model, tokenizer, examples, layout)
        state = (orig_model, tokenizer, engine.optimizer)
        checkpoints = Checkpoints(run_dir, cfg.checkpoint, rt, *state, "run: {}\n", identity)
        resumed = checkpoints.resume(found)
        with Tracker(run_dir, cfg.log, rt, {}, step=resumed["step"]) as tracker:
            train(cfg, rt, engine, batches, TrainServices(lambda _: ({}, []), checkpoints, tracker, resumed))
    return orig_model


def cut_off(whole: Path, name: str = "cut") -> Path:
    """A copy of a run that has ended, as if it had been killed before its last checkpoint."""
    copied = whole.with_name(name)
    shutil.copytree(whole, copied)
    shutil.rmtree(max(copied.glob("step-*")))
    return copied


def kill_when_saved(run_dir: Path) -> None:
    """Kill this process once a checkpoint is whole, which another thread writes."""
    while not (run_dir / "LATEST").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_that_is_killed_ends_after_its_resume_with_the_bits_of_the_uninterrupted_one(
    tmp_path: Path, tokenizer: Any, base: Path
) -> None:
    run(tmp_path / "whole", tokenizer, base)
    killed = tmp_path / "killed"
    assert in_fork(lambda: run(killed, tokenizer, base, every=3, killed_at=6)) == -signal.SIGKILL
    assert (killed / "LATEST").read_text() == "step-000003\n"
    assert not (killed / "step-000008").exists()
    run(killed, tokenizer, base, every=3, resume="auto")
    assert proof_rows(killed)["Resumed from a verified checkpoint"]["ok"] is True
    files = [folder / "step-000008" / "adapter_model.safetensors" for folder in (tmp_path / "whole", killed)]
    assert files[0].read_bytes() == files[1].read_bytes()


def losses(run_dir: Path) -> list[tuple[int, float, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["train/loss"], row["train/grad_norm"]) for row in rows]


def test_a_checkpoint_has_the_ends_of_turns_of_its_template(tmp_path: Path, tokenizer: Any, base: Path) -> None:
    orig_model = run(tmp_path / "run", tokenizer, base, steps=1)
    saved = GenerationConfig.from_pretrained(tmp_path / "run" / "step-000001")
    assert saved.eos_token_id == orig_model.generation_config.eos_token_id == stop_ids(orig_model, tokenizer)
    assert GenerationConfig.from_pretrained(base).eos_token_id != saved.eos_token_id


@pytest.mark.parametrize("method", ["lora", pytest.param("dora", marks=pytest.mark.slow)])
def test_a_run_on_a_base_in_nf4_makes_every_check_and_resumes_bitwise(
    tmp_path: Path, tokenizer: Any, base: Path, method: Any
) -> None:
    """Below the rule that rejects such a run on a CPU; feed-forward layers without an adapter are quantized too."""
    adapter = AdapterConfig(rank=4, base="nf4", method=method, targets=("attention",))
    settings: dict[str, Any] = {"adapter": adapter, "precision": "bf16"}
    run(tmp_path / "whole", tokenizer, base, every=5, **settings)
    run(cut_off(tmp_path / "whole"), tokenizer, base, resume="auto", **settings)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    folders = [tmp_path / name / "step-000008" for name in ("whole", "cut")]
    whole, cut = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert whole.keys() == cut.keys()
    proof = json.loads((tmp_path / "whole" / "proof.json").read_text())
    found = {row["name"]: row["ok"] for row in proof["rows"]}
    assert {name for name, ok in found.items() if ok is False} == {"Answers end with a learned end of turn"}
    checked = ("Weights are those of the files", "Same gradients as the plain model", "Frozen weights unchanged")
    assert all(found[name] for name in checked)
    assert found["FLOPs are those that torch counts"] is (True if method == "lora" else None)
    assert verify_checkpoint(folders[0], proof["logits"]).ok
    # On the model that was not quantized the same adapter computes something else.
    dense = {key: value for key, value in proof["logits"].items() if key != "base"}
    assert not verify_checkpoint(folders[0], dense).ok


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_a_resumed_run_equals_the_uninterrupted_run_bitwise_and_the_base_stays(
    tmp_path: Path, tokenizer: Any, base: Path, precision: str
) -> None:
    before, digest = load_file(base / "model.safetensors"), base_digest(base)
    live = run(tmp_path / "whole", tokenizer, base, every=5, precision=precision)
    run(cut_off(tmp_path / "whole"), tokenizer, base, resume="auto", precision=precision)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    folders = [tmp_path / name / "step-000008" for name in ("whole", "cut")]
    whole, cut = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert all(t.dtype == torch.float32 and t.any() for t in whole.values())
    # The checkpoint holds the adapter alone, and says what it belongs to.
    names = {path.name for path in folders[0].iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert not {name for name in names if name.startswith("model") or name == "config.json"}
    assert verify(folders[0]) is None
    assert json.loads((folders[0] / "manifest.json").read_text())["base"] == {
        "path": str(base),
        "revision": None,
        "sha256": digest,
    }
    assert json.loads((folders[0] / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    # The model under it: its file, and what the run held of it.
    assert base_digest(base) == digest
    after = live.state_dict()
    assert all(torch.equal(after[name], value.to(after[name].dtype)) for name, value in before.items())
    for name in ("whole", "cut"):
        red = {row: found for row, found in proof_rows(tmp_path / name).items() if found["ok"] is False}
        assert {*red} <= {"Answers end with a learned end of turn"}
        assert proof_rows(tmp_path / name)["Weights are those of the files"]["ok"] is True
        assert proof_rows(tmp_path / name)["Frozen weights unchanged"]["ok"] is True


def test_resuming_on_other_weights_or_with_other_adapters_is_an_error(
    tmp_path: Path, tokenizer: Any, base: Path
) -> None:
    run(tmp_path / "run", tokenizer, base, every=2, steps=2)
    with pytest.raises(ConfigError, match=r"adapter.rank: 4 in the checkpoint, 2 in this run"):
        run(tmp_path / "run", tokenizer, base, adapter=AdapterConfig(rank=2, alpha=16.0), resume="auto")
    with pytest.raises(ConfigError, match=r"adapter.scale: 8.0 in the checkpoint, 16.0 in this run"):
        run(tmp_path / "run", tokenizer, base, adapter=AdapterConfig(rank=4, alpha=64.0), resume="auto")
    content = bytearray((base / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (base / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"adapter.base.sha256: .* in the checkpoint, .* in this run"):
        run(tmp_path / "run", tokenizer, base, resume="auto", steps=4)


def test_a_run_resumes_after_the_model_under_its_adapter_has_moved(tmp_path: Path, tokenizer: Any, base: Path) -> None:
    run(tmp_path / "whole", tokenizer, base, every=2, steps=4)
    (cut_off(tmp_path / "whole", "run") / "proof.json").unlink()
    moved = base.rename(tmp_path / "moved")
    run(tmp_path / "run", tokenizer, moved, resume="auto", steps=4)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    rows = proof_rows(tmp_path / "run")
    assert rows["Weights are those of the files"]["ok"] is True
    settings = json.loads((tmp_path / "run" / "step-000004" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(moved)


def test_a_wrong_gradient_of_a_turns_the_row_red(
    tmp_path: Path, tokenizer: Any, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B is zero when training starts: without moving it, nothing of A would be compared."""
    right = adapters.low_rank

    def wrong(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
        return right(y, x, a.detach() + 0.5 * (a - a.detach()), b, scale)

    monkeypatch.setattr(adapters, "low_rank", wrong)
    run(tmp_path / "run", tokenizer, base, adapter=AdapterConfig(rank=4), steps=1, precision="bf16")
    row = proof_rows(tmp_path / "run")["Same gradients as the plain model"]
    assert row["ok"] is False
    assert "lora_A.weight" in row["found"]


def test_a_compiled_run_builds_a_graph_for_its_blocks_and_all_rows_are_green(
    tmp_path: Path, tokenizer: Any, base: Path
) -> None:
    torch._dynamo.reset()
    compile = CompileConfig(backend="aot_eager", fullgraph=True)
    live = run(tmp_path / "run", tokenizer, base, adapter=AdapterConfig(rank=4), compile=compile, steps=3)
    rows = proof_rows(tmp_path / "run")
    assert [name for name, row in rows.items() if row["ok"] is False] in (
        [],
        ["Answers end with a learned end of turn"],
    )
    assert rows["The step is compiled"]["found"] == "2 graphs"  # of the blocks, and of the final norm
    assert rows["Same gradients as the plain model"]["ok"] is True
    assert rows["FLOPs are those that torch counts"]["ok"] is True
    recorded = json.loads((tmp_path / "run" / "proof.json").read_text())["logits"]
    found = verify_checkpoint(tmp_path / "run" / "step-000003", recorded)
    assert found.ok is True
    assert f"AutoModelForCausalLM.from_pretrained of {base} with these factors, computed by sftkit" in found.how
    # As a model: what the run has computed with its factors, merged.
    again = load_model(ModelConfig(path=str(tmp_path / "run" / "step-000003")), tokenizer, 0)
    assert adapters_of(again) is None
    assert all(torch.equal(again.get_parameter(name), weight) for name, weight in merged_weights(live))


@pytest.mark.parametrize(
    "tied", [pytest.param(False, marks=pytest.mark.slow, id="untied"), pytest.param(True, id="tied")]
)
def test_rows_of_added_tokens_resume_bitwise_with_green_rows_and_are_merged(
    tied: bool, tmp_path: Path, tokenizer: Any
) -> None:
    torch._dynamo.reset()
    base, tokenizer = tmp_path / "base", copy.deepcopy(tokenizer)
    model = tiny_llama(vocab_size=len(tokenizer), tie_word_embeddings=tied)
    with torch.no_grad():  # the mean of random rows is nearly zero, and a norm makes its rounding large
        model.get_input_embeddings().weight += 0.02
    model.save_pretrained(base)
    add_tokens(tokenizer, ["<|one|>", "<|two|>"])
    digest = base_digest(base)
    same: dict[str, Any] = {
        "adapter": AdapterConfig(rank=4),
        "precision": "bf16",
        "compile": CompileConfig(backend="eager", fullgraph=True),
        "token": len(tokenizer) - 2,
    }
    live = run(tmp_path / "whole", tokenizer, base, every=5, **same)
    torch._dynamo.reset()
    again = run(cut_off(tmp_path / "whole"), tokenizer, base, resume="auto", **same)
    folders = [tmp_path / name / "step-000008" for name in ("whole", "cut")]
    whole, cut = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    # The rows of both tables, or of the one; they grew from their start, and their tables did not change.
    rows = {name: value for name, value in whole.items() if "token_adapter" in name}
    assert len(rows) == 2 - tied
    assert all(not torch.equal(value[0], value[1]) for value in rows.values())
    for model in (live, again):
        assert torch.equal(model.model.embed_tokens.weight[: len(tokenizer) - 2], before_of(base))
    assert base_digest(base) == digest
    for name in ("whole", "cut"):
        red = {row: found for row, found in proof_rows(tmp_path / name).items() if found["ok"] is False}
        assert {*red} <= {"Answers end with a learned end of turn"}
        assert proof_rows(tmp_path / name)["Weights are those of the files"]["ok"] is True
        assert proof_rows(tmp_path / name)["Frozen weights unchanged"]["ok"] is True
    assert proof_rows(tmp_path / "whole")["Same gradients as the plain model"]["ok"] is True
    assert proof_rows(tmp_path / "whole")["FLOPs are those that torch counts"]["ok"] is True
    recorded = json.loads((tmp_path / "whole" / "proof.json").read_text())["logits"]
    assert verify_checkpoint(folders[0], recorded).ok is True
    own = load_tokenizer(ModelConfig(path=str(folders[0])))
    merged = load_model(ModelConfig(path=str(folders[0])), own, 0, "bf16")
    table = merged.get_input_embeddings().weight
    assert torch.equal(table[len(tokenizer) - 2 :], [*rows.values()][-1 if tied else 1].bfloat16())


def before_of(base: Path) -> torch.Tensor:
    """The embedding of a model's files, in the run's precision."""
    return load_file(base / "model.safetensors")["model.embed_tokens.weight"].bfloat16()


def test_a_wrong_gradient_of_trained_rows_turns_the_row_red(
    tmp_path: Path, tokenizer: Any, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    add_tokens(tokenizer, ["<|one|>"])
    right = linear_cross_entropy._add_product_
    monkeypatch.setattr(
        linear_cross_entropy,
        "_add_product_",
        lambda total, left, right_, scale, *, first: right(total, 0.5 * left, right_, scale, first=first),
    )
    run(tmp_path / "run", tokenizer, base, adapter=AdapterConfig(rank=4), steps=1)
    row = proof_rows(tmp_path / "run")["Same gradients as the plain model"]
    assert row["ok"] is False
    assert "lm_head.token_adapter" in row["found"]


@pytest.mark.slow
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_adapters_of_experts_resume_bitwise_and_all_rows_are_green(
    precision: str, tmp_path: Path, tokenizer: Any
) -> None:
    base = tmp_path / "base"
    sizes = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    tiny(Qwen3MoeConfig, vocab_size=len(tokenizer), **sizes).save_pretrained(base)
    settings: dict[str, Any] = {
        "adapter": AdapterConfig(rank=4),
        "precision": precision,
        "compile": CompileConfig(backend="eager", fullgraph=True),
        "steps": 4,
    }
    torch._dynamo.reset()  # else an earlier run's graphs are used, and none are counted
    live = run(tmp_path / "whole", tokenizer, base, every=2, **settings)
    (cut_off(tmp_path / "whole") / "proof.json").unlink()
    torch._dynamo.reset()
    run(tmp_path / "cut", tokenizer, base, resume="auto", **settings)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    whole, cut = (load_file(tmp_path / name / "step-000004" / "adapter_model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert sum("experts.base_layer.lora_B" in name for name in whole if whole[name].any()) == 2
    for name in ("whole", "cut"):
        rows = proof_rows(tmp_path / name)
        assert {row for row, found in rows.items() if found["ok"] is False} <= {
            "Answers end with a learned end of turn"
        }
        for row in ("Same gradients as the plain model", "Weights are those of the files", "Frozen weights unchanged"):
            assert rows[row]["ok"] is True
    recorded = json.loads((tmp_path / "whole" / "proof.json").read_text())["logits"]
    assert verify_checkpoint(tmp_path / "whole" / "step-000004", recorded).ok is True
    again = load_model(ModelConfig(path=str(tmp_path / "whole" / "step-000004")), tokenizer, 0, precision)
    assert all(torch.equal(again.get_parameter(name), weight) for name, weight in merged_weights(live))


def test_a_wrong_gradient_of_experts_turns_the_row_red(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "base"
    sizes = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    tiny(Qwen3MoeConfig, vocab_size=len(tokenizer), **sizes).save_pretrained(base)
    right = expert_adapters.by_expert_factors

    def wrong(pair: Any, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = right(pair, experts)
        plain = isinstance(pair, expert_adapters.PlainExperts)
        return a if plain else a.detach() + 0.5 * (a - a.detach()), b

    monkeypatch.setattr(expert_adapters, "by_expert_factors", wrong)
    run(tmp_path / "run", tokenizer, base, adapter=AdapterConfig(rank=4), steps=1)
    row = proof_rows(tmp_path / "run")["Same gradients as the plain model"]
    assert row["ok"] is False
    assert "experts.lora_A.weight" in row["found"]
