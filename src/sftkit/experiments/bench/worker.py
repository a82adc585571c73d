"""One run of a plan in this process: assembled as the scripts of stages are, on synthetic documents or those
of a stage.

python -m sftkit.experiments.bench.worker JOB.json
"""

from __future__ import annotations

import sys
import time
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sftkit.data.batches.loader import Batches
from sftkit.data.tokens.sources import stage_rule
from sftkit.errors import ConfigError
from sftkit.experiments.bench.clock import ClockSamples
from sftkit.experiments.bench.jobs import Job, read_job
from sftkit.experiments.bench.rows import graphs_of, measured_row, over_ranks, run_job
from sftkit.experiments.bench.synthetic import ModelSpec, new_model, synthetic_documents
from sftkit.models.kinds import kind_of
from sftkit.models.structure import count_parameters, vocab_size
from sftkit.models.tokenizer import base_tokenizer
from sftkit.models.vocabulary import pad_vocabulary
from sftkit.objectives.next_token import Caption, NextToken
from sftkit.objectives.objective import Objective
from sftkit.rundir.files import read_metric_rows
from sftkit.rundir.names import METRICS_FILE
from sftkit.runtime import start as runtime
from sftkit.runtime.script import script
from sftkit.tracking.dashboard.remote import dashboard_name
from sftkit.tracking.tracker import Tracker
from sftkit.train.assemble import Training, lay_out, load_data, make_engine, set_environment
from sftkit.train.loop import train
from sftkit.train.parts import EncodedDocuments, LoadedModel, Run, TrainServices

OBJECTIVES: dict[str, type[NextToken]] = {"caption": Caption}
"Stage -> its objective, where its script names another one than NextToken."


@dataclass(frozen=True)
class NoCheckpoints:
    """The checkpoints that train.loop asks for, where nothing is saved."""

    run_dir: Path
    resumed_from: Path | None = None
    skipped_checkpoints: tuple[str, ...] = ()
    last_save: dict[str, float] = field(default_factory=dict)

    def save(self, step: int, state: dict[str, Any], *, wait: bool = False) -> Path:
        """Save nothing; return the folder of the run."""
        return self.run_dir

    def evaluated(self, step: int, values: dict[str, float | None]) -> None:
        """Ignore the values of an evaluation."""

    def archive_later_steps(self, step: int) -> None:
        """Do nothing: there are no later checkpoints."""

    def finish(self) -> None:
        """Do nothing: no save is under way."""

    def ended_saves(self) -> tuple[()]:
        """Return nothing: no save has ended."""
        return ()


class Probe(Tracker):
    """A tracker that also notes, on every rank, when the first steps have run on the device, the peak memory and the
    compiler's counters, and has the clock sampled when those steps are over."""

    noted: tuple[int, ...] = (1,)
    "steps whose end is noted"
    ended: dict[int, float]
    clock: ClockSamples
    peak_memory_gib: float = 0.0
    compile: dict[str, float | None]

    def advance(self, step: int) -> None:
        """Note the time, with nothing left to do on the device, where the end of this step is asked for."""
        super().advance(step)
        if step in self.noted:
            # Without this the time would be that of the launches.
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.ended[step] = time.perf_counter()
        if step == self.noted[-1]:
            self.clock.start()

    def log_metrics(self, step: int, total_steps: int, values: dict[str, float | None]) -> None:
        """Keep the largest peak and the newest counters of the compiler."""
        super().log_metrics(step, total_steps, values)
        self.peak_memory_gib = max(values["mem/peak_gib"] or 0.0, self.peak_memory_gib)
        self.compile = {k.removeprefix("compile/"): v for k, v in values.items() if k.startswith("compile/")}


def joined(job: Job) -> runtime.Runtime:
    """Return the runtime of this process among those that the plan asks for.

    Raises:
        ConfigError: fewer or more processes have joined.
    """
    set_environment(job.config)
    rt = runtime.start(job.config.run, job.config.train, dashboard_name(job.config.log))
    if rt.world_size != job.processes.count:
        raise ConfigError(
            f"run {job.name}: each process sees {rt.world_size} of the {job.processes.count} that topology "
            f"{job.processes.topology} was to start: it needs a GPU for each, or use_cpu: true in its file"
        )
    return rt


def train_job(job: Job) -> dict[str, Any]:
    """Train as the job says, and return its row."""
    with closing(joined(job)) as rt:  # not `with joined(job)`: run_job writes the error of a run into its row
        return measured_run(job, rt)


def batches_of(
    job: Job,
    rt: runtime.Runtime,
    orig_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    objective: Objective,
) -> Batches:
    """Return what a job trains on, laid out: synthetic documents, or what a stage's script would read, from the cache
    if it is there."""
    cfg, stage = job.config, job.data.stage
    if stage is None or tokenizer is None:
        assert cfg.data.max_length is not None
        documents = EncodedDocuments(synthetic_documents(job.data, vocab_size(orig_model)), cfg.data.max_length)
        return lay_out(cfg, rt, documents, objective)
    tokenize = stage_rule(stage.name)(cfg.data, tokenizer, stage.max_length)
    loaded = LoadedModel(orig_model, tokenizer, stage.max_length)
    return load_data(Run(cfg, stage.name, rt, job.folder), loaded, tokenize, objective).batches


def measured_run(job: Job, rt: runtime.Runtime) -> dict[str, Any]:
    """Return the row of a job in a process that has joined its group."""
    cfg, stage = job.config, job.data.stage
    # As train.assemble makes a model, but with random weights and the same ones in every run.
    # The tokenizer of data.stage is trained by the first run of a bench for all of them; None: tokens are made up.
    learned_from = cfg.model, cfg.data.train, cfg.data.on_bad_row
    tokenizer = base_tokenizer(*learned_from, job.folder.parent, rt) if stage else None
    orig_model = new_model(ModelSpec(job.model, cfg.run.seed, rt.precision), rt.device, tokenizer)
    kind_of(orig_model.config).check(orig_model, rt.topology, cfg.train)
    if cfg.model.pad_vocab_to_multiple_of is not None:
        pad_vocabulary(orig_model, cfg.model.pad_vocab_to_multiple_of)
    parameters = count_parameters(orig_model).total

    objective = OBJECTIVES.get(stage.name if stage else "", NextToken)(cfg.loss)
    batches = batches_of(job, rt, orig_model, tokenizer, objective)

    # The seconds of the first steps count from here: the engine's warm-up, which compiles, is in them.
    started = time.perf_counter()
    engine = make_engine(cfg, rt, job.folder, Training(orig_model, objective, batches.layout))
    probe = Probe(job.folder, cfg.log, rt, asdict(cfg))
    probe.noted, probe.ended, probe.clock = (1, job.steps.warm_up), {}, ClockSamples(rt.device)
    with probe, probe.clock:
        services = TrainServices(lambda _: ({}, []), NoCheckpoints(job.folder), probe, resumed={"step": 0})
        trained = train(cfg, rt, engine, batches, services)
    reserved = torch.cuda.memory_reserved() / 2**30 if torch.cuda.is_available() else None
    sizes = {"peak_memory_gib": probe.peak_memory_gib, "reserved_memory_gib": reserved}
    mine = {**sizes, **probe.clock.medians(), "compile": probe.compile}
    waited = {step: ended - started for step, ended in probe.ended.items()}
    return {
        "parameters": parameters,
        "precision": rt.precision,
        "attention": {"backend": engine.setup.attention, "why": engine.setup.attention_reason},
        "optimizer": engine.setup.optimizer,
        "memory_plan": engine.setup.memory_plan,
        "pipeline_layers": engine.setup.pipeline_layers,
        "compiled": trained.compiled,
        "shapes": batches.layout.shapes,
        "graphs": graphs_of(job.folder),
        **measured_row(read_metric_rows(job.folder / METRICS_FILE), job.steps, rt.world_size, batches.num_documents),
        **over_ranks(rt.gathered(mine)),
        "warm_up_seconds": trained.warm_up_seconds,
        "first_step_seconds": waited[1],
        "first_steps_seconds": waited.get(job.steps.warm_up),
    }


if __name__ == "__main__":
    script(lambda: run_job(read_job(Path(sys.argv[1])), train_job))
