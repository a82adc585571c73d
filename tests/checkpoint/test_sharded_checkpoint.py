"""Checkpoints of sharded runs: restored bit for bit in any topology, gone on from with the same bits in their own and with
losses to 1e-6 in others, loaded by plain transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch
from helpers import cpu_runtime, torchrun
from made_models import MODELS, SIZES
from safetensors import safe_open
from sharded_checkpoint_worker import resumed, save_and_go_on
from sharded_worker import Job
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from sftkit.rundir.files import verify

STEP = "step-000002"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def folder(models: Path, tmp_path: Path, tokenizer) -> Path:
    if not (models / "deep").exists():
        tokenizer.save_pretrained(models / "tokenizer")
        for name, make in MODELS.items():
            torch.manual_seed(0)
            make().save_pretrained(models / name)
        chat = LlamaConfig(**{**SIZES, "vocab_size": len(tokenizer) + 1})
        LlamaForCausalLM(chat).save_pretrained(models / "chat")
        deep = Qwen3Config(**{**SIZES, "num_hidden_layers": 5, "tie_word_embeddings": True})
        Qwen3ForCausalLM(deep).save_pretrained(models / "deep")
    return shutil.copytree(models, tmp_path / "models")


Case = tuple[str, ...]


def check(folder: Path, processes: int, save: list[Case], resume: list[Case]) -> dict[str, Any]:
    """Save and resume on so many ranks; `resume` in fp32, what these or others have saved in this folder."""
    torchrun(processes, "sharded_checkpoint_worker.py", str(folder), json.dumps({"save": save, "resume": resume}))
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    for name, result in found["saved"].items():
        assert result["repeated"] == result["losses"], name
        assert result["restored"] == result["finished"] == [], name
        check_export(folder, name)
        keep_losses(folder, name, result["losses"])
    for name, result in found["resumed"].items():
        check_resumed(folder, name, result)
    return found


def check_resumed(folder: Path, name: str, result: dict[str, Any]) -> None:
    assert result["restored"] == [], name
    assert result["losses"] == pytest.approx(kept_losses(folder, name), rel=1e-6), name


def keep_losses(folder: Path, name: str, losses: list[float]) -> None:
    """What a run went on with after its checkpoint, for those that resume it elsewhere."""
    (folder / name / "losses.json").write_text(json.dumps(losses))


def kept_losses(folder: Path, name: str) -> list[float]:
    return json.loads((folder / f"{name.split(' -> ')[0]} fp32" / "losses.json").read_text())


def check_alone(folder: Path, saved: str) -> None:
    """One process goes on with what ranks have saved."""
    check_resumed(
        folder, saved, resumed(Job(cpu_runtime(), "one", folder / saved.split()[0]), folder / f"{saved} fp32")
    )


def check_export(folder: Path, name: str) -> None:
    """The step directory verifies and holds each weight once; plain transformers loads what was trained."""
    step, live = folder / name / STEP, torch.load(folder / f"{name}.pt")
    assert verify(step) is None
    config = json.loads((step / "config.json").read_text())
    original = json.loads((folder / name.split()[0] / "config.json").read_text())
    assert config["architectures"] == original["architectures"]
    stored: list[str] = []
    for file in step.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            stored += opened.keys()
    assert len(stored) == len(set(stored))
    assert ("lm_head.weight" in stored) is not config["tie_word_embeddings"]
    loaded = AutoModelForCausalLM.from_pretrained(step, dtype="auto")
    assert type(loaded).__name__ == original["architectures"][0]
    for key, value in loaded.named_parameters():
        assert value.dtype == live[key].dtype, (name, key)
        assert torch.equal(value, live[key]), (name, key)


def test_two_ranks_resume_bitwise_what_they_saved_and_to_1e_6_what_other_topologies_did(folder: Path) -> None:
    check(folder, 2, [("llama", "fsdp2", "fp32"), ("qwen3", "tensor", "bf16")], [("llama", "fsdp2", "tensor")])
    check_alone(folder, "llama fsdp2")


def test_a_pipeline_resumes_bitwise_what_it_saved_and_others_go_on_from_it(folder: Path) -> None:
    check(folder, 2, [("qwen3", "pipeline", "bf16"), ("llama", "pipeline", "fp32")], [("llama", "pipeline", "ddp")])
    check_alone(folder, "llama pipeline")


@pytest.mark.slow
def test_scripts_take_what_ranks_with_tensor_parallelism_have_saved(folder: Path) -> None:
    check(folder, 2, [("chat", "tensor", "fp32")], [])
    check_alone(folder, "chat tensor")
    run = str(folder / "chat tensor fp32")
    for command in (
        ["scripts/evaluate.py", run, "--max-examples", "1", "--max-new-tokens", "4"],
        ["scripts/chat.py", run, "--prompt", "Hello", "--max-new-tokens", "4"],
    ):
        done = preloaded.run(command)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.strip()


@pytest.mark.slow
def test_two_ranks_resume_in_every_other_way(folder: Path) -> None:
    name = "llama one fp32"
    saved = save_and_go_on(Job(cpu_runtime(), "one", folder / "llama"), folder / name, folder / f"{name}.pt")
    keep_losses(folder, name, saved["losses"])
    check_export(folder, name)
    save: list[Case] = [("llama", topology, "fp32") for topology in ("ddp", "tensor", "context")]
    save += [("qwen3_moe", "fsdp2", "bf16")]
    save += [("qwen3", "tensor", "bf16", optim) for optim in ("adamw_sr", "muon")]
    resume = [("llama", "one", "tensor"), ("llama", "tensor", "context"), ("llama", "context", "ddp")]
    resume += [("llama", "ddp", "tensor"), ("llama", "ddp", "pipeline"), ("llama", "one", "pipeline")]
    check(folder, 2, save, resume)
    check_alone(folder, "llama tensor")


@pytest.mark.slow
def test_four_ranks_resume_bitwise_what_they_saved_and_to_1e_6_what_other_topologies_did(folder: Path) -> None:
    four = ("fsdp2 of 4", "hsdp", "fsdp2 x tensor", "fsdp2 x context", "pipeline x ddp", "pipeline x fsdp2")
    save: list[Case] = [("llama", topology, "fp32") for topology in four]
    save += [("qwen3", "pipeline x fsdp2", "bf16"), ("qwen3", "fsdp2 x tensor", "bf16", "muon")]
    resume = [
        ("llama", "hsdp", "fsdp2 of 4"),
        ("llama", "fsdp2 x tensor", "hsdp"),
        ("llama", "fsdp2 of 4", "fsdp2 x tensor"),
        ("llama", "pipeline x ddp", "fsdp2 of 4"),
        ("llama", "fsdp2 x tensor", "pipeline x fsdp2"),
    ]
    check(folder, 4, save, resume)
    check(folder, 2, [], [("llama", "fsdp2 of 4", "fsdp2"), ("llama", "fsdp2 x tensor", "tensor")])
    check_alone(folder, "llama fsdp2 x tensor")


@pytest.mark.slow
def test_stages_of_any_number_and_order_go_on_from_each_other_and_from_shards(folder: Path) -> None:
    two = ("pipeline", "pipeline, interleaved", "fsdp2")
    check(folder, 2, [("deep", topology, "fp32") for topology in two], [])
    four: list[Case] = [("deep", topology, "fp32") for topology in ("pipeline of 4", "pipeline x fsdp2", "hsdp")]
    check(folder, 4, four, [("deep", source, "pipeline of 4") for source in ("pipeline, interleaved", "fsdp2", "hsdp")])
    resume = [("deep", source, "pipeline, interleaved") for source in ("pipeline of 4", "hsdp")]
    others = [("pipeline, interleaved", "pipeline"), ("pipeline of 4", "fsdp2"), ("pipeline x fsdp2", "tensor")]
    check(folder, 2, [], [*resume, *(("deep", source, target) for source, target in others)])
    check_alone(folder, "deep pipeline, interleaved")


@pytest.mark.slow
def test_three_ranks_save_and_resume_sizes_that_they_do_not_divide(folder: Path) -> None:
    save: list[Case] = [(name, "fsdp2 of 3", "bf16") for name in MODELS]
    save += [(name, "fsdp2 of 3", "fp32") for name in ("llama", "qwen3")]
    check(folder, 3, [*save, ("llama", "fsdp2 of 3", "bf16", "muon")], [])
    check(folder, 2, [], [("qwen3", "fsdp2 of 3", "tensor"), ("llama", "fsdp2 of 3", "fsdp2")])
