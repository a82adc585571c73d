"""However a run is spread over ranks, it computes what one process computes."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

import pytest
from helpers import torchrun
from parallel_worker import FOUR_RANKS, TWO_RANKS


@cache
def results(processes: int) -> dict[str, dict]:
    """What parallel_worker found with so many gloo ranks."""
    with tempfile.TemporaryDirectory() as folder:
        torchrun(processes, "parallel_worker.py", f"{folder}/found.json", timeout=400)
        return json.loads(Path(folder, "found.json").read_text())


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
