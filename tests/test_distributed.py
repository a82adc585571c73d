"""Replicas in bf16 on two gloo ranks. In fp32, and sharded: test_parallel.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import torchrun


def found(processes: int, out: Path) -> dict:
    torchrun(processes, "distributed_worker.py", str(out))
    return json.loads(out.read_text())


def test_two_ranks_in_bf16_stay_equal_to_each_other_and_near_one_rank(tmp_path: Path) -> None:
    """Four micro-batches on one rank, two on each of two: sums are rounded at other places, replicas never differ."""
    one = found(1, tmp_path / "one")
    two = found(2, tmp_path / "two")
    assert two["apart"] == 0.0
    for a, b in zip(one["rows"], two["rows"], strict=True):
        assert a[0] == pytest.approx(b[0], rel=2e-3)
