"""base_train on two tensor-parallel processes: compiled by Inductor it is the run of one process, and it is resumed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import preloaded
import pytest

from sftkit.rundir.files import verify
from sftkit.rundir.names import METRICS_FILE, PROOF, step_dirs

ENV = {**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": preloaded.PYTHONPATH, "OMP_NUM_THREADS": "1"}
TENSOR = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_TP_SIZE": "2",
}


def trained(folder: Path, name: str, *words: str, ranks: int = 1, **env: str) -> list[float]:
    """The losses of a run that has ended well, each of its checks passed."""
    settings = [f"run.dir={folder}/{name}", f"data.cache_dir={folder}/cache", "log.wandb=off", "log.every=1"]
    settings += ["train.max_steps=5", "train.global_batch_size=4", "train.micro_batch_size=1", "data.val=[]"]
    settings += ["eval.tasks=[]", "eval.samples=0", "train.precision=fp32", 'model.scratch.model_type="qwen3"']
    done = preloaded.run(["scripts/base_train.py", "recipes/smoke/base.yaml", *settings, *words], ranks, ENV | env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    proof = json.loads((folder / name / PROOF).read_text())
    assert [row["name"] for row in proof["rows"] if row["ok"] is False] == []
    rows = [json.loads(line) for line in (folder / name / METRICS_FILE).read_text().splitlines()]
    assert all(row["compile/recompiles"] == 0 for row in rows)
    return [row["train/loss"] for row in rows]


@pytest.mark.slow
def test_two_tensor_parallel_ranks_compiled_by_inductor_have_the_losses_of_one_process(tmp_path: Path) -> None:
    alone = trained(tmp_path, "alone", "compile.enabled=false")
    assert trained(tmp_path, "tensor", "compile.backend=inductor", ranks=2, **TENSOR) == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
def test_two_tensor_parallel_ranks_resume_with_the_losses_of_the_uninterrupted_run(tmp_path: Path) -> None:
    words = ("checkpoint.every=2", "checkpoint.keep=9", "compile.enabled=false")
    whole = trained(tmp_path, "whole", *words, ranks=2, **TENSOR)
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    for later in step_dirs(tmp_path / "resumed")[1:]:  # as if it had been killed behind its checkpoint of step 2
        shutil.rmtree(later)
    metrics = tmp_path / "resumed" / METRICS_FILE
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:2]))
    assert trained(tmp_path, "resumed", "train.resume=auto", *words, ranks=2, **TENSOR) == whole
    assert verify(tmp_path / "resumed" / "step-000005") is None
