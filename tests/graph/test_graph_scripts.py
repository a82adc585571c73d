"""The graph engine through the real scripts: two processes under accelerate's environment, resumed on one, loaded by transformers."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch
from transformers import AutoModelForCausalLM

from sftkit.rundir.names import GRAPHS

pytestmark = pytest.mark.slow
ENV = {
    **os.environ,
    "ACCELERATE_USE_CPU": "true",
    "OMP_NUM_THREADS": "1",
    "HF_ENDPOINT": "http://127.0.0.1:9",
}
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
TENSOR = FSDP2 | {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"}
TINY = (
    "train.max_steps=4",
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
    "log.every=1",
    "log.wandb=off",
    "checkpoint.every=2",
    "eval.tasks=[]",
    "eval.samples=1",
    "eval.max_new_tokens=2",
)
HELD_OUT = ("data.val=[{path: 'builtin:tasks', split: heldout, max_rows: 20}]",)
DOCS, TASKS = "{path: 'builtin:docs', max_rows: 20}", "{path: 'builtin:tasks', max_rows: 200}"
OF_BASE = (
    f"model.train_tokenizer.sources=[{DOCS}, {TASKS}]",
    f"data.train=[{DOCS}]",
    "data.val=[{path: 'builtin:docs', split: heldout, max_rows: 2}]",
    "model.scratch.hidden_size=32",
    "model.scratch.intermediate_size=64",
    "model.scratch.num_hidden_layers=1",
)
OF_MID = (f"data.train=[{DOCS}, {TASKS}]", *HELD_OUT)
OF_SFT = (f"data.train=[{TASKS}]", *HELD_OUT)


def run(
    folder: Path,
    script: str,
    recipe: str,
    name: str,
    *settings: str,
    ranks: int = 1,
    topology: dict[str, str] = FSDP2,
) -> str:
    words = [f"scripts/{script}", f"recipes/graph/{recipe}.yaml", f"run.dir={folder}/{name}"]
    words += [f"data.cache_dir={folder}/cache", *TINY, *settings]
    done = preloaded.run(words, ranks, ENV | (topology if ranks > 1 else {}))
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


def losses(folder: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["train/loss"] for row in rows}


def checks(folder: Path) -> dict[str, Any]:
    return {row["name"]: row["ok"] for row in json.loads((folder / "proof.json").read_text())["rows"]}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Base training on two processes, four steps, graphs written down."""
    folder = tmp_path_factory.mktemp("graph")
    (folder / "base.log").write_text(run(folder, "base_train.py", "base", "base", *OF_BASE, "graph.dump=true", ranks=2))
    return folder


def test_two_processes_train_by_the_graph_and_prove_it(base: Path) -> None:
    text, summary = (base / "base.log").read_text(), json.loads((base / "base" / "summary.json").read_text())
    assert summary["compiled"] is True
    assert summary["metrics"]["compile/graphs"] == 1
    assert summary["metrics"]["compile/recompiles"] == 0
    assert summary["evals"]["val/loss"] > 0
    assert "fsdp2, 2 shards: weights gathered inside the graph" in text
    assert "forward graph, block_bucketing: " in text
    found = checks(base / "base")
    assert found["Same gradients as the plain model"] is found["The step is compiled"] is True
    assert False not in found.values()
    names = [path.name for path in sorted((base / "base" / GRAPHS / "1x128").iterdir())]
    assert names[:3] == ["00-joint-captured.txt", "01-joint-reshard_after_forward.txt", "02-forward-split.txt"]
    assert names[3:] == ["03-forward-block_bucketing.txt", "04-backward-split.txt", "05-backward-block_bucketing.txt"]
    assert "all_gather_into_tensor" in (base / "base" / GRAPHS / "1x128" / names[0]).read_text()


def at_step_2(folder: Path, run_dir: str, copy: str) -> None:
    """Copy a run of four steps as it was after two."""
    shutil.copytree(folder / run_dir, folder / copy)
    shutil.rmtree(folder / copy / "step-000004")
    (folder / copy / "LATEST").write_text("step-000002\n")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of the model that transformers loads from a run's last checkpoint, which has all of it and nothing else."""
    model, info = AutoModelForCausalLM.from_pretrained(folder / "step-000004", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return dict(model.named_parameters())


def ended_alike(folder: Path, *names: str) -> None:
    """Two runs, by what they logged and by the models of their last checkpoints."""
    first, second = (losses(folder / name) for name in names)
    assert first == pytest.approx(second, rel=1e-5)
    ours, theirs = (weights(folder / name) for name in names)
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert torch.allclose(weight, theirs[name], atol=1e-4), name


def test_two_processes_go_on_where_they_stopped_and_end_with_the_same_bits(base: Path) -> None:
    at_step_2(base, "base", "on_two")
    run(base, "base_train.py", "base", "on_two", *OF_BASE, "train.resume=auto", ranks=2)
    assert losses(base / "on_two") == losses(base / "base")
    ours, theirs = weights(base / "on_two"), weights(base / "base")
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name


@pytest.fixture(scope="module")
def of_blocks(base: Path) -> dict[int, float]:
    """Losses of chat SFT with the block engine, eagerly, on one process."""
    plain = ("train.engine=blocks", "graph.passes=[]", "compile.enabled=false")
    run(base, "chat_sft.py", "sft", "blocks", f"model.path={base}/base", *OF_SFT, *plain)
    return losses(base / "blocks")


SFT = {
    "sft_reduce_once": FSDP2,
    "sft_flex_block_regional": TENSOR,
    "sft_full_inductor": TENSOR,
}
"Recipes of a Llama, and over what they are run here. What differs between them stands in the recipe alone: each is run in one stage."


@pytest.mark.parametrize("recipe", SFT)
def test_chat_sft_on_two_processes_learns_what_the_block_engine_does_on_one(
    base: Path, of_blocks: dict[int, float], recipe: str
) -> None:
    settings = (f"model.path={base}/base", *OF_SFT)
    run(base, "chat_sft.py", recipe, recipe, *settings, ranks=2, topology=SFT[recipe])
    assert losses(base / recipe) == pytest.approx(of_blocks, rel=1e-5)
    found = checks(base / recipe)
    assert found["The step is compiled"] is True
    assert False not in found.values()


@pytest.mark.parametrize("recipe", ["base_flex", "base_auto_bucketing"])
def test_base_training_on_two_processes_learns_the_same_by_each_recipe(base: Path, recipe: str) -> None:
    run(base, "base_train.py", recipe, recipe, *OF_BASE, ranks=2, topology=TENSOR)
    assert losses(base / recipe) == pytest.approx(losses(base / "base"), rel=1e-5)
    assert False not in checks(base / recipe).values()


@pytest.fixture(scope="module")
def mid_of_blocks(base: Path) -> dict[int, float]:
    """Losses of mid-training with the block engine, eagerly, on one process."""
    plain = ("train.engine=blocks", "graph.passes=[]", "compile.enabled=false")
    run(base, "mid_train.py", "mid", "mid_blocks", f"model.path={base}/base", *OF_MID, *plain)
    return losses(base / "mid_blocks")


@pytest.mark.parametrize("recipe", ["mid_no_passes", "mid_flex_auto_regional"])
def test_mid_training_on_two_processes_learns_what_the_block_engine_does_on_one(
    base: Path, mid_of_blocks: dict[int, float], recipe: str
) -> None:
    run(base, "mid_train.py", recipe, recipe, f"model.path={base}/base", *OF_MID, ranks=2, topology=TENSOR)
    assert losses(base / recipe) == pytest.approx(mid_of_blocks, rel=1e-5)
    assert False not in checks(base / recipe).values()


OF_DEEPSEEK = (*OF_BASE, "model.scratch.num_hidden_layers=2")


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Base training of a DeepSeek-V3 on two processes that share rows, matrices and experts."""
    folder = tmp_path_factory.mktemp("deepseek")
    run(folder, "base_train.py", "deepseek_v3/base", "base", *OF_DEEPSEEK, ranks=2, topology=TENSOR)
    return folder


def test_two_processes_share_matrices_and_experts_and_prove_it(deepseek: Path) -> None:
    found = checks(deepseek / "base")
    assert found["Same gradients as the plain model"] is found["The step is compiled"] is True
    assert False not in found.values()
    assert json.loads((deepseek / "base" / "summary.json").read_text())["evals"]["val/loss"] > 0


def test_experts_of_two_processes_learn_what_those_of_the_block_engine_do_on_one(deepseek: Path) -> None:
    plain = ("train.engine=blocks", "graph.passes=[]", "compile.enabled=false")
    run(deepseek, "base_train.py", "deepseek_v3/base", "blocks", *OF_DEEPSEEK, *plain)
    assert losses(deepseek / "base") == pytest.approx(losses(deepseek / "blocks"), rel=1e-5)


def test_a_tensor_parallel_run_is_resumed_on_one_process_and_ends_alike(deepseek: Path) -> None:
    at_step_2(deepseek, "base", "again")
    run(deepseek, "base_train.py", "deepseek_v3/base", "again", *OF_DEEPSEEK, "train.resume=auto")
    ended_alike(deepseek, "again", "base")
