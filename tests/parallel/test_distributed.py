"""Replicas in bf16 on two gloo ranks. In fp32, and sharded: test_parallel.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from distributed_worker import train
from helpers import cpu_runtime, torchrun


def test_two_ranks_in_bf16_stay_equal_to_each_other_and_near_one_rank(tmp_path: Path) -> None:
    """Four micro-batches on one rank, two on each of two: sums are rounded at other places, replicas never differ."""
    one = train(cpu_runtime())
    torchrun(2, "distributed_worker.py", str(tmp_path / "two"))
    two = json.loads((tmp_path / "two").read_text())
    assert two["apart"] == 0.0
    for a, b in zip(one["rows"], two["rows"], strict=True):
        assert a[0] == pytest.approx(b[0], rel=2e-3)
