"""Collectives of a bucket that become one are of one kind, one group of ranks and one dtype."""

from __future__ import annotations

import torch
from torch.fx import Graph

from sftkit.graph import compat
from sftkit.graph.graphs import _MARK as BUCKET
from sftkit.graph.passes.order import _mergeable as mergeable

GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
REDUCE = torch.ops._c10d_functional.reduce_scatter_tensor.default


def test_only_collectives_of_one_bucket_kind_group_and_dtype_are_merged() -> None:
    graph = Graph()
    weight = graph.placeholder("weight")

    def add(operator: object, bucket: str | None, dtype: torch.dtype, *args: object) -> str:
        node = graph.call_function(operator, (weight, *args))
        node.meta["val"] = torch.empty(4, dtype=dtype, device="meta")
        if bucket is not None:
            compat.annotate(node, BUCKET, bucket)
        return node.name

    bf16, fp32 = torch.bfloat16, torch.float32
    first = add(GATHER, "block 0", bf16, 2, "shards")
    of_norm = add(GATHER, "block 0", fp32, 2, "shards")
    add(GATHER, "block 1", bf16, 2, "shards")
    add(GATHER, "block 0", bf16, 2, "replicas")
    add(REDUCE, "block 0", bf16, "sum", 2, "shards")
    add(GATHER, None, bf16, 2, "shards")
    second = add(GATHER, "block 0", bf16, 2, "shards")
    other_norm = add(GATHER, "block 0", fp32, 2, "shards")
    found = [[node.name for node in nodes] for nodes in mergeable(graph)]
    assert found == [[first, second], [of_norm, other_norm]]
