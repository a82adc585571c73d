"""A run of fused.yaml without some of the step's passes: a `worker`, not run by hand.

options: without: names of LEVERS
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from labs.bench.plan import read_job
from labs.bench.run import run_job
from labs.bench.worker import train_job
from sftkit.models import rotary_attention
from sftkit.ops import adamw_kernel


def without_rotary() -> None:
    """Let modules of transformers compute norms and rotary embedding."""
    rotary_attention.use_rotary_operator = lambda _: None


def without_norm() -> None:
    """Let torch compute the norm of the gradients."""
    kernel = adamw_kernel.sum_of_squares

    def by_torch(grads: list[Tensor]) -> Tensor:
        norms = torch._foreach_norm(grads, 2, dtype=torch.float32)
        return torch.stack(norms).square().sum() if norms else kernel(grads)

    adamw_kernel.sum_of_squares = by_torch  # type: ignore[assignment]


LEVERS = {"rotary": without_rotary, "norm": without_norm}

if __name__ == "__main__":
    job = read_job(Path(sys.argv[1]))
    for name in job.options["without"]:
        LEVERS[name]()
    run_job(job, train_job)
