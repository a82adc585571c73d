"""Run on four ranks by test_replicas.py: what each topology compares, before and after a bit of rank 3 is flipped."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sharded_worker import Job, start

from sftkit.errors import ReplicaError
from sftkit.ops.tensors import local
from sftkit.runtime.script import script
from sftkit.verify.replicas import Replicas

WEIGHT = "model.layers.0.input_layernorm.weight"


def compared(job: Job) -> dict[str, Any]:
    """Of a model after some steps."""
    job.steps(0, 3)
    replicas = Replicas(job.orig_model, job.optimizer, job.rt, 100)
    shared = replicas._shared()
    weights = [name for name, _ in job.orig_model.named_parameters() if name in shared]
    found: dict[str, Any] = {"shared": len(shared), "weights": len(weights)}
    for when in ("same", "flipped"):
        if when == "flipped" and job.rt.rank == 3:
            local(job.orig_model.get_parameter(WEIGHT)).data.view(torch.int32)[-1] ^= 1
        replicas.check(7, is_kept=False)  # not due
        try:
            replicas.check(7, is_kept=True)
            found[when] = None
        except ReplicaError as error:
            found[when] = str(error)
    return found


def main(folder: str) -> None:
    rt = start()
    cases = ("ddp", "hsdp", "fsdp2 x tensor", "fsdp2 of 4")
    found = {name: compared(Job(rt, name, Path(folder))) for name in cases}
    if rt.is_main:
        (Path(folder) / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    script(partial(main, *sys.argv[1:]))
