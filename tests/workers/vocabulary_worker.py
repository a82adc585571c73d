"""Run on ranks by test_vocabulary.py and test_padding.py: ranks load a model whose vocabulary grows, train, save and resume."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch
from sharded_checkpoint_worker import save_and_go_on
from sharded_worker import Job, gathered, start

from sftkit.runtime.script import script


def main(folder: str, plan: str) -> None:
    """Args:
    plan: JSON: name -> [folder of the base model, topology, precision, what the vocabulary is padded to, if anything].
    """
    rt, out = start(), Path(folder)
    found = {}
    for name, (model, topology, precision, *pad) in json.loads(plan).items():
        job = Job(rt, topology, Path(model), precision, chat_template="chatml", pad_vocab=pad[0] if pad else None)
        begun = gathered(job.orig_model)
        if rt.is_main:
            torch.save(begun, out / f"{name}.start.pt")
        found[name] = save_and_go_on(job, out / name, out / f"{name}.pt")
    if rt.is_main:
        (out / "out.json").write_text(json.dumps(found))


if __name__ == "__main__":
    script(partial(main, *sys.argv[1:]))
