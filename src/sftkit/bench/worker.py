"""One run of a plan in this process: assembled as scripts/chat_sft.py is, on synthetic documents.

python -m sftkit.bench.worker JOB.json
"""

from __future__ import annotations

import io
import sys
import time
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

from sftkit import compile_cache, runtime
from sftkit.attention_choice import choose_backend
from sftkit.bench.jobs import Job, read_job
from sftkit.bench.rows import measured, read_lines, run_job
from sftkit.bench.synthetic import documents, new_model
from sftkit.checkpoint import Checkpoints
from sftkit.compilation import compile_model
from sftkit.data import loader
from sftkit.data.pack import make_layout
from sftkit.fp8 import apply_fp8
from sftkit.memory import make_plan
from sftkit.model import vocab_size
from sftkit.optim import build_optimizer
from sftkit.step import ModelWithLoss
from sftkit.tracker import Tracker
from sftkit.train import train


@dataclass(frozen=True)
class NoCheckpoints:
    """In the place of `Checkpoints`: nothing is saved."""

    run_dir: Path

    def save(self, step: int, state: dict[str, Any]) -> Path:
        return self.run_dir


class FirstStep(Tracker):
    """A tracker that also notes when the first step has run on the device."""

    ended: float | None = None

    def advance(self, step: int) -> None:
        super().advance(step)
        if self.ended is None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.ended = time.perf_counter()


def run(job: Job) -> dict[str, Any]:
    """Train as the job says; its row."""
    cfg = job.config
    rt = runtime.start(cfg.run, cfg.train, cfg.log)
    orig_model = new_model(job.model, cfg.run.seed, rt.precision, rt.device)
    parameters = sum(p.numel() for p in orig_model.parameters())

    examples = documents(job.data, vocab_size(orig_model))
    assert cfg.data.max_length is not None
    layout = make_layout(cfg.data, cfg.data.max_length, cfg.train, rt.world_size, examples.lengths)
    batches = loader.Batches(examples, layout, cfg.run.seed, rt.rank, 0, cfg.data.num_workers)

    started = time.perf_counter()
    apply_fp8(cfg, orig_model, layout, rt)
    compile_cache.restore(cfg, orig_model, layout, rt)
    with redirect_stdout(io.StringIO()) as said:
        backend = choose_backend(cfg, orig_model, layout, rt)
    rt.say(said.getvalue().strip())
    plan = make_plan(cfg, orig_model, layout, rt, backend=backend)
    model = ModelWithLoss(orig_model, backend, cfg.loss)
    compile_model(model, cfg.compile, plan.activation_memory_budget, layout.dynamic)
    wrapped = rt.prepare(model)
    optimizer = build_optimizer(orig_model, plan.optim, cfg.run.seed)

    tracker = FirstStep(job.folder, cfg.log, rt, asdict(cfg))
    with tracker:
        trained = train(
            cfg,
            rt,
            wrapped,
            orig_model,
            optimizer,
            batches,
            plan,
            evaluate=lambda: ({}, []),
            checkpoints=cast(Checkpoints, NoCheckpoints(job.folder)),
            tracker=tracker,
            resumed={"step": 0},
        )
    assert tracker.ended is not None
    cuda = rt.device.type == "cuda"
    return {
        "parameters": parameters,
        "precision": rt.precision,
        "attention": {"backend": backend, "why": said.getvalue().strip().partition(": ")[2]},
        "optimizer": plan.optim.name,
        "memory_plan": plan.line,
        "compiled": trained.compiled,
        "shapes": layout.shapes,
        **measured(read_lines(job.folder / "metrics.jsonl"), job.steps),
        "reserved_memory_gib": torch.cuda.memory_reserved(rt.device) / 2**30 if cuda else None,
        "warm_up_seconds": trained.warm_up_seconds,
        "first_step_seconds": tracker.ended - started,
    }


if __name__ == "__main__":
    run_job(read_job(Path(sys.argv[1])), run)
