"""Tokens come to experts that ranks share out, and none is lost, however unevenly a router spreads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import torchrun

ALLOWED = {"fp32": 1e-6, "bf16": 2e-2}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_shared_out_experts_give_what_one_process_with_all_experts_gives(tmp_path: Path, ranks: int) -> None:
    """Results, and the gradients of tokens, of weights of the router and of matrices."""
    torchrun(ranks, "dispatch_worker.py", f"{tmp_path}/found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == 5 * 2
    assert {case: worst for case, worst in found.items() if not worst <= ALLOWED[case[-4:]]} == {}
