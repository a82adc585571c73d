"""Time the loss's own kernels at the shapes of a 0.6B step, and what they took the place of.

python benchmarks/h200_step/loss_kernels.py OUT.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from sftkit.config.schema import LossConfig
from sftkit.experiments.bench.machine import copy_tb_per_sec, median_seconds
from sftkit.ops import cross_entropy_kernel as kernel

ROWS, VOCAB, HIDDEN, CHUNKS = 4096, 151_936, 1024, 4
LOSSES = {
    "plain": LossConfig(),
    "token metrics": LossConfig(token_metrics=True),
    "all": LossConfig(token_metrics=True, label_smoothing=0.1, z_loss=1e-4),
}


def cross_entropy() -> dict[str, float]:
    """Return milliseconds of the cross entropy of four chunks of logits, each way of launching it."""
    logits = torch.randn(ROWS, VOCAB, device="cuda").bfloat16()
    targets = torch.randint(0, VOCAB, (ROWS,), device="cuda")
    sums = torch.empty(4, ROWS, device="cuda")
    found = {}
    for name, options in LOSSES.items():
        for block, warps in ((4096, 16), (8192, 32)):
            kernel.BLOCK, kernel.WARPS = kernel.PLAIN_BLOCK, kernel.PLAIN_WARPS = block, warps

            def run(options: LossConfig = options) -> None:
                kernel.cross_entropy_(logits, targets, sums, options, None, gradients=True)

            found[f"cross entropy, {name}, blocks of {block}, {warps} warps"] = CHUNKS * milliseconds(run)
    return found


def scaling() -> dict[str, float]:
    """Return milliseconds of the fp32 gradient of the head times a factor, as bf16."""
    gradient, factor = torch.randn(VOCAB, HIDDEN, device="cuda"), torch.tensor(0.37, device="cuda")
    out = torch.empty_like(gradient, dtype=torch.bfloat16)
    return {
        "scaling, torch.mul": milliseconds(lambda: torch.mul(gradient, factor.view(1, 1), out=out)),
        "scaling, kernel": milliseconds(lambda: kernel.scaled(gradient, factor, torch.bfloat16)),
    }


def milliseconds(work: Callable[[], object]) -> float:
    """Return the median of a call."""
    return 1e3 * median_seconds(work, runs=30)


if __name__ == "__main__":
    torch.manual_seed(0)
    device = torch.device("cuda")
    machine = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_tb_per_sec": copy_tb_per_sec(device),
    }
    Path(sys.argv[1]).write_text(json.dumps({**machine, "milliseconds": cross_entropy() | scaling()}, indent=1) + "\n")
