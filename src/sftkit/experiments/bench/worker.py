"""One run of a plan in this process: assembled as scripts/chat_sft.py is, on synthetic documents.

python -m sftkit.experiments.bench.worker JOB.json
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

from sftkit.checkpoint.checkpoint import Checkpoints
from sftkit.compile import cache as compile_cache
from sftkit.compile.contract import compile_model
from sftkit.data import loader
from sftkit.data.collate import part_of
from sftkit.data.pack import make_layout
from sftkit.errors import ConfigError
from sftkit.experiments.bench.jobs import Job, read_job
from sftkit.experiments.bench.rows import measured, over_ranks, read_lines, run_job
from sftkit.experiments.bench.synthetic import documents, new_model
from sftkit.memory.plan import make_plan
from sftkit.models.float8 import apply_fp8
from sftkit.models.structure import vocab_size
from sftkit.objectives.model_with_loss import ModelWithLoss
from sftkit.ops.attention_choice import choose_backend
from sftkit.optim.build import build_optimizer
from sftkit.parallel.wrap import distribute
from sftkit.runtime import start as runtime
from sftkit.runtime.rundir import METRICS
from sftkit.runtime.script import script
from sftkit.tracking.remote import dashboard_name
from sftkit.tracking.tracker import Tracker
from sftkit.train.loop import train


@dataclass(frozen=True)
class NoCheckpoints:
    """In the place of `Checkpoints`: nothing is saved."""

    run_dir: Path
    resumed_from: Path | None = None
    passed_over: tuple[str, ...] = ()

    @property
    def last_save(self) -> dict[str, float]:
        return {}

    def save(self, step: int, state: dict[str, Any], wait: bool = False) -> Path:
        return self.run_dir

    def evaluated(self, step: int, values: dict[str, float | None]) -> None:
        return

    def finish(self) -> None:
        return


class Witness(Tracker):
    """A tracker that also notes, on every rank, when the first step has run on the device, the peak, the compiles."""

    ended: float | None = None
    peak_memory_gib: float | None = None
    compile: dict[str, float | None]

    def advance(self, step: int) -> None:
        super().advance(step)
        if self.ended is None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.ended = time.perf_counter()

    def log_metrics(self, step: int, total_steps: int, values: dict[str, float | None]) -> None:
        super().log_metrics(step, total_steps, values)
        peak = values["mem/peak_gib"]
        if peak is not None:
            self.peak_memory_gib = max(peak, self.peak_memory_gib or 0.0)
        self.compile = {k.removeprefix("compile/"): v for k, v in values.items() if k.startswith("compile/")}


def on_every_rank(witness: Witness) -> list[dict[str, Any]]:
    """What each rank saw, in order of rank; every rank calls it, and then the main rank has written all its lines."""
    cuda = torch.cuda.is_available()
    mine = {
        "peak_memory_gib": witness.peak_memory_gib,
        "reserved_memory_gib": torch.cuda.memory_reserved() / 2**30 if cuda else None,
        "compile": witness.compile,
    }
    if not torch.distributed.is_initialized():
        return [mine]
    seen: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(seen, mine)
    return seen


def joined(job: Job) -> runtime.Runtime:
    """The runtime of this process among those that the plan asks for."""
    rt = runtime.start(job.config.run, job.config.train, dashboard_name(job.config.log))
    if rt.world_size != job.processes.count:
        raise ConfigError(
            f"run {job.name}: each process sees {rt.world_size} of the {job.processes.count} that topology "
            f"{job.processes.topology} was to start: it needs a GPU for each, or use_cpu: true in its file"
        )
    return rt


def run(job: Job) -> dict[str, Any]:
    """Train as the job says; its row."""
    cfg = job.config
    rt = joined(job)
    orig_model = new_model(job.model, cfg.run.seed, rt.precision, rt.device)
    parameters = sum(p.numel() for p in orig_model.parameters())

    examples = documents(job.data, vocab_size(orig_model))
    assert cfg.data.max_length is not None
    layout = make_layout(cfg.data, cfg.data.max_length, cfg.train, rt.data_world_size, examples.lengths)
    part = part_of(rt.topology, rt.rank)
    batches = loader.Batches(examples, layout, cfg.run.seed, rt.data_rank, 0, cfg.data.num_workers, part)

    started = time.perf_counter()
    apply_fp8(cfg, orig_model, layout, rt)
    compile_cache.restore(cfg, orig_model, layout, rt)
    with redirect_stdout(io.StringIO()) as said:
        backend = choose_backend(cfg, orig_model, layout, rt)
    rt.say(said.getvalue().strip())
    plan = make_plan(cfg, orig_model, layout, rt, backend=backend)
    model = ModelWithLoss(orig_model, backend, cfg.loss)
    compile_model(model, cfg.compile, plan.activation_memory_budget, layout.dynamic, rt.topology.sharded)
    wrapped = distribute(model, None, plan.sharding, rt)
    optimizer = build_optimizer(orig_model, plan.optim, cfg.run.seed)

    tracker = Witness(job.folder, cfg.log, rt, asdict(cfg))
    with tracker:
        trained = train(
            cfg,
            rt,
            wrapped,
            orig_model,
            optimizer,
            batches,
            plan,
            evaluate=lambda _: ({}, []),
            checkpoints=cast(Checkpoints, NoCheckpoints(job.folder)),
            tracker=tracker,
            resumed={"step": 0},
        )
    assert tracker.ended is not None
    ranks = on_every_rank(tracker)
    return {
        "parameters": parameters,
        "precision": rt.precision,
        "attention": {"backend": backend, "why": said.getvalue().strip().partition(": ")[2]},
        "optimizer": plan.optim.name,
        "memory_plan": plan.line,
        "compiled": trained.compiled,
        "shapes": layout.shapes,
        **measured(read_lines(job.folder / METRICS), job.steps, rt.world_size),
        **over_ranks(ranks),
        "warm_up_seconds": trained.warm_up_seconds,
        "first_step_seconds": tracker.ended - started,
    }


if __name__ == "__main__":
    script(lambda: run_job(read_job(Path(sys.argv[1])), run))
