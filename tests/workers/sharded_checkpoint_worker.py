"""Run on ranks by test_sharded_checkpoint.py: every topology saves, resumes its own checkpoints and those of others."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sharded_worker import Job, gather, gathered, start
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

from sftkit.checkpoint import states as weight_files
from sftkit.checkpoint.checkpoint import Checkpoints
from sftkit.checkpoint.states import snapshot_states
from sftkit.config.schema import CheckpointConfig
from sftkit.ops.tensors import local_region
from sftkit.optim.protocol import named_states
from sftkit.runtime.script import script

SAVED = 2
"The step whose checkpoint is resumed."


def checkpoints_of(job: Job, folder: Path) -> Checkpoints:
    tokenizer = AutoTokenizer.from_pretrained(folder.parent / "tokenizer")
    return Checkpoints(folder, CheckpointConfig(), job.rt, job.orig_model, tokenizer, job.optimizer, "run: {}\n")


def everything(job: Job) -> dict[str, torch.Tensor]:
    """Weights and optimizer states, whole."""
    states = named_states(job.optimizer, job.orig_model)
    # Of a replicated DTensor the whole is the live tensor itself, which later steps change.
    whole = {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in states.items()}
    if job.rt.topology.stages > 1:  # those of all stages
        whole = {name: tensor for found in gather(whole) for name, tensor in found.items()}
    return {**gathered(job.orig_model), **whole}


def check_regions(job: Job) -> None:
    """What is written of each state is the block that the update of this rank works on."""
    states = named_states(job.optimizer, job.orig_model)
    written = snapshot_states(states, job.rt.rank, job.rt.world_size)
    for name, tensor in states.items():
        if isinstance(tensor, DTensor) and name in written:
            region, shard = local_region(tensor), written[name]
            assert [start for start, _ in region] == list(shard.offsets), name
            assert [size for _, size in region] == list(shard.tensor.shape), name


def save_and_go_on(job: Job, folder: Path, whole: Path) -> dict[str, Any]:
    """Two steps, a checkpoint, two steps; then the checkpoint again in a new job and the same two steps."""
    checkpoints = checkpoints_of(job, folder)
    job.steps(0, SAVED)
    check_regions(job)
    checkpoints.save(SAVED, {"tokens": 1}, wait=True)
    before = everything(job)
    losses = job.steps(SAVED, SAVED + 2)
    after = everything(job)
    if job.rt.is_main:
        torch.save(before, whole)
    again = job.again()
    checkpoints_of(again, folder).resume("auto")
    restored = everything(again)
    repeated = again.steps(SAVED, SAVED + 2)
    finished = everything(again)
    return {
        "losses": losses,
        "repeated": repeated,
        "restored": differing(before, restored),
        "finished": differing(after, finished),
    }


def differing(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not bitwise the same."""
    same = {name for name in ours.keys() & theirs.keys() if torch.equal(ours[name], theirs[name])}
    return sorted((ours.keys() | theirs.keys()) - same)


def resumed(job: Job, folder: Path) -> dict[str, Any]:
    """What others have saved: which tensors are not theirs, bit for bit, and the losses of the next steps."""
    checkpoints_of(job, folder).resume(str(folder / f"step-{SAVED:06d}"))
    restored = differing(torch.load(f"{folder}.pt"), everything(job))
    return {"restored": restored, "losses": job.steps(SAVED, SAVED + 2)}


def main(folder: str, plan: str) -> None:
    """Args:
    plan: JSON: "save": [[model, topology, precision, optimizer if not adamw], ...]; "resume": [[model, from, to],
        ...], in fp32.
    """
    rt, out = start(), Path(folder)
    weight_files.MAX_FILE_BYTES = 40_000  # so that all ranks write files of weights
    todo = json.loads(plan)
    found: dict[str, Any] = {"saved": {}, "resumed": {}}
    for model, topology, precision, *optim in todo["save"]:
        name = " ".join((model, topology, precision, *optim))
        job = Job(rt, topology, out / model, precision, None, *optim)
        found["saved"][name] = save_and_go_on(job, out / name, out / f"{name}.pt")
    for model, source, target in todo["resume"]:
        job = Job(rt, target, out / model)
        found["resumed"][f"{model} {source} -> {target}"] = resumed(job, out / f"{model} {source} fp32")
    if rt.is_main:
        (out / "out.json").write_text(json.dumps(found))


if __name__ == "__main__":
    script(partial(main, *sys.argv[1:]))
