"""What ranks hold alike is compared to the bit, in every topology; what only one rank holds is not."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import tiny_llama, torchrun
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from sftkit.config.schema import OptimConfig
from sftkit.models.trained import freeze
from sftkit.optim.protocol import build_optimizer
from sftkit.verify.replicas import CHECKSUM_COLUMNS, Replicas, checksum, holders, kept_buffers, parted


def some(dtype: torch.dtype, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return torch.randn(size, generator=generator).to(dtype)
    return torch.randint(0, 100, (size,), generator=generator).to(dtype)


@pytest.mark.parametrize("size", [1, 1000, CHECKSUM_COLUMNS, 3 * CHECKSUM_COLUMNS + 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
def test_any_one_bit_changes_the_checksum_and_the_same_bits_do_not(dtype: torch.dtype, size: int) -> None:
    tensor, rng = some(dtype, size), random.Random(0)
    before = int(checksum(tensor))
    assert int(checksum(tensor.clone())) == before
    words = tensor.view(torch.uint8)
    for _ in range(20):
        place, bit = rng.randrange(len(words)), 1 << rng.randrange(8)
        words[place] ^= bit
        assert int(checksum(tensor)) != before
        words[place] ^= bit
    assert int(checksum(tensor)) == before


def test_values_that_change_places_or_cancel_out_in_a_sum_are_seen() -> None:
    tensor = torch.arange(1000, dtype=torch.int32)
    before = int(checksum(tensor))
    swapped, cancelled = tensor.clone(), tensor.clone()
    swapped[[3, 700]] = swapped[[700, 3]]
    cancelled[5] += 1
    cancelled[6] -= 1
    assert int(cancelled.sum()) == int(tensor.sum())
    assert before not in (int(checksum(swapped)), int(checksum(cancelled)))


def test_what_is_not_a_number_counts_by_its_bits_and_an_empty_piece_has_a_checksum() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert int(checksum(nan)) == int(checksum(nan.clone()))
    assert int(checksum(torch.tensor([0.0]))) != int(checksum(torch.tensor([-0.0])))
    assert int(checksum(torch.zeros(0))) == 0
    assert int(checksum(torch.tensor(7, dtype=torch.int64))) != 0


def test_buffers_that_follow_what_a_rank_has_seen_are_not_compared() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].register_buffer("kept", torch.ones(2))
    model[0].register_buffer("seen", torch.ones(2), persistent=False)
    model.register_buffer("top", torch.ones(2))
    assert set(kept_buffers(model)) == {"0.kept", "top"}
    assert set(model.state_dict()) == {"0.weight", "0.bias", *kept_buffers(model)}


def test_the_ranks_that_differ_are_told_from_those_that_hold_other_pieces() -> None:
    assert parted([(0, 5), (0, 5), (0, 5)]) == []
    assert parted([(0, 5), (1, 6), (0, 5), (1, 6)]) == []
    assert parted([(0, 5), (0, 7), (0, 5)]) == [[[1], [0, 2]]]
    assert parted([(0, 5), (1, 6), (0, 5), (1, 8)]) == [[[1], [3]]]


@pytest.fixture(params=[(2, 2), (3, 2)])
def shards_and_tensor(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    sizes = request.param
    torch.distributed.init_process_group("fake", rank=0, world_size=math.prod(sizes), store=FakeStore())
    try:
        yield init_device_mesh("cpu", sizes, mesh_dim_names=("shards", "tensor"))
    finally:
        torch.distributed.destroy_process_group()


def test_copies_of_tensor_ranks_are_compared_where_their_gradients_have_one_sum(shards_and_tensor: DeviceMesh) -> None:
    norm = DTensor.from_local(torch.ones(4), shards_and_tensor, [Shard(0), Replicate()], run_check=False)
    everywhere = DTensor.from_local(torch.ones(4), shards_and_tensor, [Replicate(), Replicate()], run_check=False)
    shards, tensor = shards_and_tensor.shape
    assert holders(norm, shards * tensor) == ([0, 1] if shards == 2 else [0])
    assert holders(everywhere, shards * tensor) == ([0, 1, 2, 3] if shards == 2 else [0, 2, 4])


@pytest.mark.slow
def test_each_topology_compares_what_it_holds_more_than_once_and_finds_a_flipped_bit(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    torchrun(4, "replicas_worker.py", str(tmp_path))
    found = json.loads((tmp_path / "found.json").read_text())
    weight = "model.layers.0.input_layernorm.weight"
    assert found["ddp"]["same"] is None
    assert "rank 3 and ranks 0, 1, 2 hold different bits of " + weight in found["ddp"]["flipped"]
    assert "The odd one out is rank 3." in found["ddp"]["flipped"]
    assert found["hsdp"]["same"] is None
    assert "rank 1 and rank 3 hold different bits of " + weight in found["hsdp"]["flipped"]
    assert found["hsdp"]["shared"] == found["ddp"]["shared"]
    assert found["fsdp2 x tensor"]["same"] is None
    assert "rank 2 and rank 3 hold different bits of " + weight in found["fsdp2 x tensor"]["flipped"]
    norms = 2 * 2  # of two layers; embedding, final norm and head are cut over tensor ranks too
    assert found["fsdp2 x tensor"]["weights"] == norms
    assert found["fsdp2 of 4"]["flipped"] is None, "nobody else has that bit"
    assert found["fsdp2 of 4"]["weights"] == 0


def test_frozen_weights_are_compared_once_and_trained_ones_each_time() -> None:
    model, seen = tiny_llama(), list[list[str]]()
    freeze(model, ["model.layers.*"])
    # Two ranks that hold the same.
    rt: Any = SimpleNamespace(
        world_size=2,
        rank=0,
        device=torch.device("cpu"),
        united=lambda names: seen.append(names) or names,
        sum=lambda table: table[:1].repeat(2, 1, 1),
    )
    replicas = Replicas(model, build_optimizer(model, OptimConfig(name="adamw")), rt, every=2)
    for step in range(1, 7):
        replicas.check(step, is_kept=False)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert [frozen & {*names} for names in seen] == [frozen, set(), set()]
    assert {*seen[0]} - frozen == {*seen[1]} == {*seen[2]} > {n for n, p in model.named_parameters() if p.requires_grad}
