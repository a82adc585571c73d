"""Run on ranks by graph/test_dispatch.py: tokens come to shared-out experts, and the differences from one process that
has all experts and all tokens; rank 0 writes the largest over the ranks."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from graph_worker import MODELS
from torch import Tensor
from torch import distributed as dist

from sftkit.config.schema import RunConfig, TrainConfig
from sftkit.graph.sharding import added, by_all_gather
from sftkit.runtime import start as runtime
from sftkit.runtime.script import script

TOKENS, EXPERTS, VISITS, WIDTH = 20, 8, 2, 32
"Of a rank, but for the experts."


def choices(ranks: int) -> dict[str, Tensor]:
    """What the routers of all ranks choose, int64 [tokens of all, VISITS], by what it is like."""
    torch.manual_seed(1)
    tokens, own = TOKENS * ranks, EXPERTS // ranks
    any_two = torch.rand(tokens, EXPERTS).topk(VISITS).indices
    mine = torch.arange(tokens) // TOKENS * own
    return {
        "spread": any_two,
        "all to the first rank": any_two % own // 2 * 2 + torch.tensor([0, 1]),
        "all to the last rank": EXPERTS - own + any_two % own // 2 * 2 + torch.tensor([0, 1]),
        "none to another rank": mine[:, None] + torch.tensor([own - 1, 0]),
        "one expert has every token": torch.stack([torch.full((tokens,), 5), torch.arange(tokens) % 4], 1),
    }


def form(experts: Any) -> dict[str, Any]:
    """What products read of experts next to the matrices."""
    return {name: getattr(experts, name) for name in ("_apply_gate", "has_gate", "has_bias", "is_transposed")}


def outputs_and_gradients(experts: Any, forward: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> list[Tensor]:
    """What comes out, and the gradients of hidden states, weights and matrices."""
    leaves = [t.detach().clone().requires_grad_() for t in (hidden, weights, experts.gate_up_proj, experts.down_proj)]
    given = SimpleNamespace(gate_up_proj=leaves[2], down_proj=leaves[3], **form(experts))
    out = forward(given, leaves[0], chosen, leaves[1])
    (out.float() * torch.linspace(-1, 1, WIDTH)).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]


def difference(chosen: Tensor, dtype: torch.dtype) -> float:
    """The largest norm of a difference, relative to that of what it should be, of this rank's part."""
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    model: Any = MODELS["deepseek_v3"]().to(dtype)
    experts = model.model.layers[1].mlp.experts
    torch.manual_seed(2)
    hidden, weights = torch.randn(len(chosen), WIDTH, dtype=dtype), torch.rand(len(chosen), VISITS)
    whole = outputs_and_gradients(experts, partial(added, first_expert=0), hidden, chosen, weights)
    own, share = EXPERTS // ranks, slice(rank * TOKENS, (rank + 1) * TOKENS)
    mine = slice(rank * own, (rank + 1) * own)
    shared = SimpleNamespace(
        gate_up_proj=experts.gate_up_proj[mine], down_proj=experts.down_proj[mine], **form(experts)
    )
    ours = outputs_and_gradients(
        shared, partial(by_all_gather, group=group), hidden[share], chosen[share], weights[share]
    )
    expected = [*(each[share] for each in whole[:3]), *(each[mine] for each in whole[3:])]
    pairs = zip(ours, expected, strict=True)
    return max(float((a - b).float().norm() / b.float().norm().clamp(min=1e-6)) for a, b in pairs)


def main(out: str) -> None:
    rt = runtime.start(RunConfig(dir="."), TrainConfig(max_steps=1))
    results = {}
    for kind, chosen in choices(rt.world_size).items():
        for name, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16}.items():
            worst = torch.tensor(difference(chosen, dtype))
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            results[f"{kind}, {name}"] = worst.item()
    if rt.is_main:
        Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    script(partial(main, *sys.argv[1:]))
