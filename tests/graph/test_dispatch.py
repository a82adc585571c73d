"""Tokens come to experts that ranks share out, and none is lost, however unevenly a router spreads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import torchrun
from torch import distributed as dist
from torch.library import opcheck

from sftkit.graph.parallel import experts
from sftkit.graph.parallel.experts import DISPATCHERS, exchange_counts, send

ALLOWED = {"fp32": 1e-6, "bf16": 2e-2}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_shared_out_experts_give_what_one_process_with_all_experts_gives(tmp_path: Path, ranks: int) -> None:
    """Results, and the gradients of tokens, of weights of the router and of matrices."""
    torchrun(ranks, "dispatch_worker.py", f"{tmp_path}/found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == 2 * 5 * 2
    assert {case.partition(",")[0] for case in found} == DISPATCHERS.keys()
    assert {case: worst for case, worst in found.items() if not worst <= ALLOWED[case[-4:]]} == {}


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """A group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_rows_that_there_is_no_room_for_are_an_error_and_not_lost(alone: dist.ProcessGroup) -> None:
    rows = torch.randn(4, 3)
    _, sizes = exchange_counts(torch.tensor([[3, 1]]), alone)
    assert torch.equal(send(rows, sizes, 6, alone), torch.cat([rows, torch.zeros(2, 3)]))
    with pytest.raises(RuntimeError, match="Split sizes"):
        send(rows, sizes, 3, alone)


def test_what_a_graph_knows_of_the_exchange_is_what_it_does(alone: dist.ProcessGroup) -> None:
    sent = torch.tensor([[3, 1]])
    _, sizes = exchange_counts(sent, alone)
    given = torch.randn(4, 3), sizes, 6, alone.group_name
    for operator, values in ((experts._all_to_all, (*given, False)), (experts._exchange_counts, (sent, given[3]))):
        found = opcheck(operator, values, test_utils=("test_schema", "test_faketensor"))
        assert set(found.values()) == {"SUCCESS"}
