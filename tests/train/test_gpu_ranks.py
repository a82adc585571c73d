"""Two GPUs, NCCL, the real scripts: sharded runs that are stopped, killed, hung and resumed on another topology.

pytest -m gpu -n 4 tests/train/test_gpu_ranks.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from sftkit.rundir.files import verify
from sftkit.rundir.names import step_dirs
from sftkit.runtime.launcher import signal_env

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
ROOT = Path(__file__).parents[2]
STEPS = 60
SETTINGS = (
    f"train.max_steps={STEPS}",
    "train.global_batch_size=8",
    "train.micro_batch_size=2",
    "data.row_length=512",
    "model.scratch.head_dim=64",
    "compile.scope=block",
    "eval.samples=0",
    "eval.tasks=[]",
    "data.val=[]",
    "log.every=1",
    "log.wandb=off",
    "checkpoint.every=10",
    "optim.lr=3e-4",  # at ten times that, roundings of two topologies grow to 0.02 nats within 40 steps
    "optim.schedule=constant",  # one that does not depend on train.max_steps
    "optim.warmup_ratio=0",
)
LOSS_TOLERANCE = 1e-2
"Nats, of two topologies in bf16."


class Run:
    """base_train on two GPUs under an accelerate config."""

    def __init__(self, dir: Path, config: str, *settings: str) -> None:
        self.dir = dir
        words = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--num_processes", "2"]
        words += ["--config_file", f"accelerate_configs/{config}.yaml", "scripts/base_train.py"]
        words += [
            "recipes/smoke/base.yaml",
            f"run.dir={dir}",
            f"data.cache_dir={dir.parent}/cache",
            *SETTINGS,
            *settings,
        ]
        environment = {**os.environ, **signal_env({}), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60"}
        self.process = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def until_step(self, step: int) -> None:
        metrics, end = self.dir / "metrics.jsonl", time.monotonic() + 120
        while not (metrics.exists() and len(metrics.read_text().splitlines()) >= step):
            assert self.process.poll() is None, self.process.communicate()[0][-4000:]
            assert time.monotonic() < end
            time.sleep(0.02)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank, not one of its data workers."""
        ranks = psutil.Process(self.process.pid).children()
        return next(p for p in ranks if p.environ().get("RANK") == str(number))

    def end(self) -> int:
        """Wait; nothing may be left. Returns the launcher's exit code."""
        started = self.children() if self.process.poll() is None else []
        self.output = self.process.communicate(timeout=180)[0]
        _, alive = psutil.wait_procs(started, timeout=10)
        assert not alive
        print(self.output[-5000:])
        return self.process.returncode

    def status(self) -> dict:
        return json.loads((self.dir / "run_status.json").read_text())

    def losses(self) -> dict[int, float]:
        rows = [json.loads(line) for line in (self.dir / "metrics.jsonl").read_text().splitlines()]
        assert all(row["compile/recompiles"] == 0 for row in rows)
        return {row["step"]: row["train/loss"] for row in rows}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that nothing happens to, sharded."""
    run = Run(tmp_path_factory.mktemp("runs") / "whole", "fsdp2")
    assert run.end() == 0
    assert run.status()["status"] == "finished"
    return run


def test_a_sharded_run_that_is_stopped_and_resumed_is_the_uninterrupted_run_bitwise(whole: Run) -> None:
    run = Run(whole.dir.parent / "stopped", "fsdp2")
    run.until_step(15)
    run.process.send_signal(signal.SIGTERM)
    run.end()
    assert run.status()["status"] == "preempted"
    assert run.status()["step"] < STEPS
    assert all(verify(folder) is None for folder in step_dirs(run.dir))
    resumed = Run(run.dir, "fsdp2", "train.resume=auto")
    assert resumed.end() == 0
    assert resumed.losses() == whole.losses()


def test_a_run_goes_on_under_other_topologies(whole: Run) -> None:
    for config, last in (("ddp", 12), ("fsdp2", 24), ("pp", 36), ("tp", 48), ("ddp", STEPS)):
        engine = "pipeline" if config == "pp" else "blocks"
        words = (f"train.engine={engine}", f"train.max_steps={last}")
        run = Run(whole.dir.parent / "moved", config, "train.resume=auto", *words)
        assert run.end() == 0, config
    losses = run.losses()
    for step, loss in whole.losses().items():
        assert losses[step] == pytest.approx(loss, abs=LOSS_TOLERANCE)


FOUR_LAYERS = ("model.scratch.num_hidden_layers=4", "train.max_steps=12")


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of four layers, sharded."""
    run = Run(tmp_path_factory.mktemp("runs") / "four_layers", "fsdp2", *FOUR_LAYERS)
    assert run.end() == 0
    return run.losses()


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_a_pipeline_has_the_losses_of_shards(four_layers: dict[int, float], tmp_path: Path, schedule: str) -> None:
    words = ("train.engine=pipeline", f"train.pipeline_schedule={schedule}")
    run = Run(tmp_path / schedule, "pp", *words, *FOUR_LAYERS)
    assert run.end() == 0
    assert "s a micro-batch: with 4 of them in a step a process waits" in run.output
    losses = run.losses()
    for step, loss in four_layers.items():
        assert losses[step] == pytest.approx(loss, abs=LOSS_TOLERANCE)
    proof = json.loads((run.dir / "proof.json").read_text())
    assert [row["name"] for row in proof["rows"] if row["ok"] is False] == []


def test_a_killed_rank_is_named_within_seconds(tmp_path: Path) -> None:
    run = Run(tmp_path / "killed", "fsdp2", "train.max_steps=100000")
    run.until_step(12)
    run.rank(1).kill()
    began = time.monotonic()
    assert run.end() != 0
    assert time.monotonic() - began < 60
    assert run.status()["status"] == "failed"
    assert run.status()["first_failing_rank"] == 1


def test_a_hung_rank_is_named_after_the_step_timeout(tmp_path: Path) -> None:
    run = Run(tmp_path / "hung", "fsdp2", "train.max_steps=100000", "run.step_timeout_seconds=15")
    run.until_step(12)
    hung = run.rank(1)
    hung.suspend()
    try:
        began = time.monotonic()
        while run.process.poll() is None and time.monotonic() - began < 90:
            if run.status()["status"] == "failed" and hung.is_running():
                hung.resume()
            time.sleep(0.5)
    finally:
        if hung.is_running():
            hung.kill()
    assert run.end() != 0
    assert run.status()["status"] == "failed"
    assert run.status()["first_failing_rank"] == 1
    assert "rank 1" in run.status()["error"]


def test_a_loss_that_is_not_finite_ends_all_ranks_and_the_weights_stay(tmp_path: Path) -> None:
    run = Run(tmp_path / "nonfinite", "fsdp2", "optim.lr=1e6", "optim.max_grad_norm=null")
    code = run.end()
    if code == 0:
        pytest.skip("this model stays finite at any learning rate")
    assert run.status()["status"] == "failed"
    assert "finite" in run.status()["error"]
    assert list(run.dir.glob("nonfinite-step-*"))
