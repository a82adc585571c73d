"""Replicas in bf16 on two gloo ranks. In fp32, and sharded: test_parallel.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def launch(config: str, out: Path, dtype: str = "float32", lr: float = 1e-2) -> dict:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{config}"]
    done = subprocess.run(
        [*command, "tests/distributed_worker.py", str(out), dtype, str(lr)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def test_two_ranks_in_bf16_stay_equal_to_each_other_and_near_one_rank(tmp_path: Path) -> None:
    """Four micro-batches on one rank, two on each of two: sums are rounded at other places, replicas never differ."""
    one = launch("cpu.yaml", tmp_path / "one", "bfloat16", 1e-3)
    two = launch("cpu_ddp.yaml", tmp_path / "two", "bfloat16", 1e-3)
    assert two["apart"] == 0.0
    for a, b in zip(one["rows"], two["rows"], strict=True):
        assert a[0] == pytest.approx(b[0], rel=2e-3)
