"""A run of fused.yaml with passes that a step does not have by default: a `worker`, not run by hand.

options: with: names of PASSES
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from labs.bench.plan import read_job
from labs.bench.run import run_job
from labs.bench.worker import train_job
from labs.fused.rotary_attention import use_rotary_operator
from sftkit.objectives.objective import ModelWithLoss
from sftkit.optim import protocol


def with_rotary() -> None:
    """Let attention modules compute norms and rotary embedding with attention, as one operator."""
    make = ModelWithLoss.__init__

    def made(self: ModelWithLoss, orig_model: Any, *given: Any, **named: Any) -> None:
        make(self, orig_model, *given, **named)
        use_rotary_operator(orig_model)

    ModelWithLoss.__init__ = made  # type: ignore[method-assign]


def with_norm() -> None:
    """Let one launch compute the squared norm of all gradients."""
    from labs.fused.squares_kernel import sum_of_squares  # Triton is not installed on CPU machines

    protocol._sum_of_squares = sum_of_squares


PASSES = {"rotary": with_rotary, "norm": with_norm}

if __name__ == "__main__":
    job = read_job(Path(sys.argv[1]))
    for name in job.options["with"]:
        PASSES[name]()
    run_job(job, train_job)
