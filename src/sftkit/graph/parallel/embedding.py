"""Embeddings looked up where the rows of the table lie: token ids and hidden states travel, and the table does not.

To gather the table costs its whole size, and its gradient twice that in fp32: at the two ends of a micro-batch, where
nothing computes beside it. Each rank can look up the tokens of all ranks in its own rows instead, and the results add
up, as in Megatron-LM's vocabulary-parallel embedding (arXiv 1909.08053). It pays while the hidden states of all ranks
are smaller than that.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from transformers import PreTrainedModel

from sftkit.graph import compat
from sftkit.graph.parallel.exchange import add_and_scatter
from sftkit.graph.parallel.sharding import own_shard
from sftkit.models.structure import embedding_module, output_projection
from sftkit.ops.dtensor import local_region
from sftkit.runtime.replaced import replaced_in_each

FP32 = 4
"Bytes of an element of a gradient while ranks add it up."


def looked_up_in_shards(orig_model: PreTrainedModel, tokens: int) -> AbstractContextManager[None]:
    """Let the embedding of a sharded model be looked up in shards within the context, if that moves fewer bytes.

    Every rank must look up as many tokens as the others: so it is for what is captured, and not for evaluation.

    Args:
        tokens: that a rank looks up.
    """
    module = embedding_module(orig_model)
    if not _possible(orig_model, module) or not _pays(module, tokens):
        return nullcontext()

    def forward(ids: Tensor) -> Tensor:
        return _looked_up(module, ids)

    return replaced_in_each("forward", {module: forward})


def _possible(orig_model: PreTrainedModel, module: torch.nn.Module) -> bool:
    """Return whether the table is sharded by rows, read by nobody else, and looked up as torch does it."""
    weight = _table(module)
    tied = output_projection(orig_model)._parameters.get("weight") is weight
    sharded = isinstance(weight, DTensor) and weight.placements[-1] == Shard(0)
    # Sharding has put a class of its own before the module's.
    return sharded and not tied and type(module).__bases__ == (torch.nn.Embedding,)


def _table(module: torch.nn.Module) -> Any:
    """Return the weight as it lies; read as an attribute it would be gathered."""
    return module._parameters["weight"]  # private, as in sharding


def _pays(module: torch.nn.Module, tokens: int) -> bool:
    """Return whether hidden states of all ranks, there and their gradients back, are fewer bytes than the table, there
    and its gradient back. Both go through rings, so the share that a rank sends is the same."""
    weight = _table(module)
    ranks = weight.device_mesh.size(weight.device_mesh.ndim - 1)
    return 2 * ranks * tokens * weight.itemsize < len(weight) * (weight.itemsize + FP32)


def _looked_up(module: Any, ids: Tensor) -> Tensor:
    """Return the rows of these tokens, [*ids.shape, H]."""
    weight = _table(module)
    group: ProcessGroup = weight.device_mesh.get_group(weight.device_mesh.ndim - 1)
    (first, rows), *_ = local_region(weight)
    every = compat.all_gather(ids.flatten(), 0, group) - first
    held = (every >= 0) & (every < rows)
    # The gradient of padding stays 0, as the module has it.
    padding = None if module.padding_idx is None else module.padding_idx - first
    own = F.embedding(every.where(held, 0), own_shard(module, "weight"), padding if _inside(padding, rows) else None)
    # Each token is in the rows of one rank: the sum is its row and zeros, exact in any precision.
    found = add_and_scatter(own.where(held[:, None], 0.0), 0, group)
    return found.view(*ids.shape, -1)


def _inside(row: int | None, rows: int) -> bool:
    return row is not None and 0 <= row < rows
