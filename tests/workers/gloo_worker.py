"""Run on ranks by runtime/test_gloo.py: coalesced all-gathers, several in flight; rank 0 writes what came out."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from sftkit.config.schema import RunConfig, TrainConfig
from sftkit.runtime import start as runtime
from sftkit.runtime.script import script


def main(out: str) -> None:
    rt = runtime.start(RunConfig(dir="."), TrainConfig(max_steps=1))
    groups = [dist.group.WORLD, dist.new_group(backend="gloo")]
    ops, correct = torch.ops._c10d_functional, True
    for number in range(100):
        sent = [[torch.full((2,), float(number + place + rt.rank)) for place in range(3)] for _ in range(8)]
        in_flight = [ops.all_gather_into_tensor_coalesced(each, rt.world_size, groups[0].group_name) for each in sent]
        received = [[ops.wait_tensor(tensor) for tensor in each] for each in in_flight]
        correct &= all(
            float(tensor[2 * rank]) == number + place + rank
            for each in received
            for place, tensor in enumerate(each)
            for rank in range(rt.world_size)
        )
    if rt.is_main:
        workers = [group._get_backend(torch.device("cpu")).options._threads for group in groups]
        Path(out).write_text(json.dumps({"correct": correct, "workers": workers}))


if __name__ == "__main__":
    script(partial(main, *sys.argv[1:]))
