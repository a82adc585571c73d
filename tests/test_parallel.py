"""However a run is spread over ranks, it computes what one process computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from parallel_worker import FOUR_RANKS, TWO_RANKS

ROOT = Path(__file__).parents[1]


@cache
def results(processes: int) -> dict[str, dict]:
    """What parallel_worker found with so many gloo ranks."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    out = Path(os.environ.get("PYTEST_TMP", "/tmp")) / f"sftkit-parallel-{os.getpid()}-{processes}.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [*torchrun, "tests/parallel_worker.py", str(out)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(out.read_text())
    out.unlink()
    return found


def check(name: str, processes: int) -> None:
    case, whole = results(processes)[name], results(1)[f"{name.split()[0]}{' muon' * ('muon' in name)} whole"]
    muon = "muon" in name  # orthogonalized in bf16
    for ours, theirs in zip(case["rows"], whole["rows"], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3 if muon else 1e-5)
    assert case["val"] == pytest.approx(whole["val"], rel=2e-3 if muon else 1e-5)
    assert case["weights"] == pytest.approx(whole["weights"], rel=2e-2 if muon else 1e-4)
    assert case["compile/graphs"] == 2  # the block and the final norm
    assert case["compile/recompiles"] == case["compile/graph_breaks"] == 0
    assert case["flags"] == [[1.0, 0.0]] * 6  # one rank wishes to stop, and all know


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks_compute_what_one_does_compiled_and_without_recompiles(name: str) -> None:
    check(name, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR_RANKS)
def test_four_ranks_compute_what_one_does_compiled_and_without_recompiles(name: str) -> None:
    check(name, 4)


def test_a_sharded_rank_holds_its_pieces_only() -> None:
    two, one = results(2), results(1)["llama whole"]["pieces"]
    assert two["llama ddp"]["pieces"] == one
    assert two["llama fsdp2"]["pieces"] == one / 2
    assert two["llama tensor"]["pieces"] < 0.51 * one  # norms of the blocks are whole
