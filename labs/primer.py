"""Show the collective operations on two processes of this machine's CPU:

.venv/bin/python -m torch.distributed.run --nproc_per_node 2 labs/primer.py

Each step is a call of torch.distributed on a tensor of four numbers, which differ between processes. Rank 0 gathers and
prints what each rank has after the call, and what training uses the call for.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from sftkit.config.terminal import print_text

# torch 2.13 renames both (pytorch/pytorch#186123) and warns of the old names; 2.11 knows those only.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def take(step: str, own: Tensor, rank: int) -> Tensor:
    """Return the tensor of a rank after a step that began with its own tensor."""
    ranks = dist.get_world_size()
    match step:
        case "all_reduce":  # sum over all ranks, in place
            dist.all_reduce(own)
        case "all_gather":  # the shards of all ranks
            whole = torch.zeros(ranks * len(own))
            _gather(whole, own)
            return whole
        case "reduce_scatter":  # sum over all ranks, of which each keeps its shard
            shard = torch.zeros(len(own) // ranks)
            _scatter(shard, own)
            return shard
        case "broadcast":  # the tensor of rank 0 on all ranks, in place
            dist.broadcast(own, src=0)
        case "send, recv" if rank == 0:
            dist.send(own, dst=1)
        case "send, recv" if rank == 1:
            dist.recv(own, src=0)
    return own


STEPS = {
    "all_reduce": "ddp.yaml: gradients of replicas, once a step; any layout: losses and norms",
    "all_gather": "fsdp2.yaml: the weights of a block, before it computes",
    "reduce_scatter": "fsdp2.yaml: gradients, each rank keeping those of its shard",
    "broadcast": "what the main rank decides; the logits of the last stage in an evaluation",
    "send, recv": "pp.yaml: hidden states to the next stage, their gradients back",
}
"Call of torch.distributed -> its use in training."


def initial_values(rank: int) -> Tensor:
    """Return the first tensor of a rank: fp32 [4]."""
    return torch.arange(4.0) + 10 * rank


def main() -> int:
    """Join the group, take the steps, leave it."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ranks = dist.get_world_size()

    def print_line(text: str) -> None:
        if rank == 0:
            print_text(text)

    print_line(f"init_process_group: {ranks} processes, each knows its rank and how many there are")
    print_line(_row("", "", [f"rank {each}" for each in range(ranks)]))
    print_line(_row("before", "", _of_all(initial_values(rank))))
    for name, used in STEPS.items():
        print_line(_row(name, used, _of_all(take(name, initial_values(rank), rank))))
    dist.destroy_process_group()
    return 0


def _of_all(value: Tensor) -> list[str]:
    """Return the tensor of each rank as text, on every rank."""
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, " ".join(f"{number:g}" for number in value.tolist()))
    return found


def _row(name: str, used: str, values: list[str]) -> str:
    return f"{name:<16}{''.join(f'{value:<28}' for value in values)}{used}".rstrip()


if __name__ == "__main__":
    raise SystemExit(main())
