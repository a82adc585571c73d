"""Replicas in bf16 on two gloo ranks. In fp32, and sharded: test_parallel.py."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_worker import large_norms, train
from helpers import cpu_runtime, torchrun


@cache
def two_ranks() -> dict[str, Any]:
    """What the worker found."""
    with tempfile.TemporaryDirectory() as folder:
        torchrun(2, "distributed_worker.py", f"{folder}/two")
        return json.loads(Path(folder, "two").read_text())


def test_two_ranks_in_bf16_stay_equal_to_each_other_and_near_one_rank() -> None:
    """Four micro-batches on one rank, two on each of two: sums are rounded at other places, replicas never differ."""
    one, two = train(cpu_runtime()), two_ranks()
    assert two["apart"] == 0.0
    for a, b in zip(one["rows"], two["rows"], strict=True):
        assert a[0] == pytest.approx(b[0], rel=2e-3)


def test_the_norm_of_a_large_gradient_is_the_same_number_on_one_process_on_replicas_and_on_shards() -> None:
    one = large_norms(cpu_runtime())["replicas"]
    gradient = torch.randn(1 << 11, 1 << 11, generator=torch.Generator().manual_seed(0)) * 1e-3 + 1e-3
    assert one == float(gradient.double().norm().float())
    assert two_ranks()["norms"] == {"replicas": one, "shards": one}


def test_an_error_of_the_main_rank_is_raised_on_every_rank() -> None:
    assert two_ranks()["errors"] == ["found by rank 0, test"] * 2
