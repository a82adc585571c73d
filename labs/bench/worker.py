"""Run one job of a plan in this process: assembled like a stage's script, with synthetic documents or those of
a stage.

python -m labs.bench.worker JOB.json
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from labs.bench.machine import ClockSamples
from labs.bench.plan import SYNTHETIC, Conversations, DataPlan, Job, read_job, read_lengths
from labs.bench.run import graphs_of, measured_row, over_ranks, run_job
from sftkit.data.batches.loader import Batches, StepDataset
from sftkit.data.batches.pack import make_layout
from sftkit.data.tokens.sources import stage_rule
from sftkit.data.types import DocumentColumns, Examples
from sftkit.engine.members import Members
from sftkit.errors import ConfigError
from sftkit.models.adapters import Adapters, add_adapters, quantize_layers
from sftkit.models.joined_adapters import join_layers
from sftkit.models.kind import check_causal, kind_of
from sftkit.models.load import DTYPES, compute_here, scratch_config, settle_generation_config
from sftkit.models.many_adapters import members_of
from sftkit.models.structure import count_parameters, decoder_blocks, vocab_size
from sftkit.models.tokenizer import base_tokenizer
from sftkit.models.trained import freeze
from sftkit.models.vocabulary import check_rows, pad_vocabulary
from sftkit.models.weights import make_room
from sftkit.objectives.objective import Caption, NextToken, Objective
from sftkit.ops.attention import plain_implementation
from sftkit.ops.nf4 import fill_layer
from sftkit.rundir.files import read_metric_rows, read_object
from sftkit.rundir.names import METRICS_FILE, PROOF
from sftkit.runtime import start as runtime
from sftkit.runtime.script import script
from sftkit.tracking.tracker import Tracker
from sftkit.train.assemble import Training, lay_out, load_data, make_engine, set_environment
from sftkit.train.loop import train
from sftkit.train.parts import EncodedDocuments, LoadedModel, Run, TrainServices
from sftkit.train.several import lay_out_several


def synthetic_documents(data: DataPlan, vocab_size: int) -> Examples:
    """Return chat-like documents of Zipf tokens. Unless all tokens are targets, each begins with a prompt without
    targets. Lengths are lognormal, or from a file.

    A document that takes n positions has n + 1 tokens. Loss falls from log(vocab_size) towards the tokens' entropy.

    Raises:
        ConfigError: the file of lengths cannot be read.
    """
    rng = np.random.default_rng(data.seed)
    # Draw tokens by inverse transform sampling: look a uniform number up in the cumulative probabilities
    # of the ranks.
    weights = np.arange(1, vocab_size + 1, dtype=np.float64) ** -data.zipf
    token_of_rank = rng.permutation(vocab_size).astype(np.int32)

    def drawn(count: int) -> np.ndarray:
        ids: np.ndarray = token_of_rank[np.searchsorted(np.cumsum(weights / weights.sum())[:-1], rng.random(count))]
        return ids

    if data.conversations is not None:
        (conversations,) = data.conversations.values()
        return _turns(conversations, drawn)
    lengths, targets = _sizes(data, rng)
    offsets = np.concatenate([[0], np.cumsum(lengths + 1)])
    ids = drawn(int(offsets[-1]))
    number_from_end = np.repeat(offsets[1:], lengths + 1) - np.arange(len(ids))  # the last token of a document has 1
    is_target = number_from_end <= np.repeat(targets, lengths + 1)
    return replace(Examples.of(ids, lengths, is_target=is_target), source_names=(SYNTHETIC,))


def _turns(sizes: Conversations, drawn: Callable[[int], np.ndarray]) -> Examples:
    """Return a document of each turn: the turns before it without reasoning, and its own with it, the only target."""
    documents = []
    conversation = []
    for number in range(sizes.count):
        before = np.zeros(0, np.int32)
        for _ in range(sizes.turns):
            question, reasoning, answer = (drawn(n) for n in (sizes.question, sizes.reasoning, sizes.answer))
            documents.append(np.concatenate([before, question, reasoning, answer]))
            conversation.append(number)
            before = np.concatenate([before, question, answer])
    lengths = np.array([len(one) - 1 for one in documents])
    own = sizes.reasoning + sizes.answer
    is_target = np.concatenate([np.arange(len(one)) >= len(one) - own for one in documents])
    head = np.array(conversation, np.uint64)
    row = head.astype(np.int64)
    turns = np.full(len(head), 2 * sizes.turns)
    made = Examples.of(np.concatenate(documents), lengths, is_target=is_target)
    columns = DocumentColumns(lambda: (row, turns, head, head))
    return replace(made, columns=columns, source_names=(SYNTHETIC,))


def _sizes(data: DataPlan, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions and targets of each document, int64 [D] both."""
    if data.documents is None:
        assert data.lengths is not None
        return tuple(  # type: ignore[return-value]
            np.array(sizes, dtype=np.int64) for sizes in read_lengths(Path(data.lengths))
        )
    d = data.documents
    sigma = math.sqrt(2.0 * math.log(d.mean / d.median))  # mean = median * exp(sigma**2 / 2)
    lengths = np.clip(np.rint(rng.lognormal(np.log(d.median), sigma, d.count)), 4, d.cap).astype(np.int64)
    return lengths, np.maximum(np.rint(data.target_share * lengths), 1).astype(np.int64)


@dataclass(frozen=True)
class ModelSpec:
    """A model with random weights."""

    fields: dict[str, Any]
    "fields of a transformers config, with model_type"
    seed: int
    precision: str
    "dtype of the parameters: bf16 or fp32"
    attention: str | None = None
    "transformers' attn_implementation; None: the model's default"
    nf4: bool = False
    "whether the linear layers of the blocks are quantized"


def new_model(
    spec: ModelSpec, device: torch.device, tokenizer: PreTrainedTokenizerBase | None = None
) -> PreTrainedModel:
    """Return a model with random weights, made on the device block by block and rounded to bf16, even in fp32, so that
    all runs start from the same weights.

    Args:
        tokenizer: source of special ids and, if `fields` has none, of the vocabulary; None: tokens are made up.

    Raises:
        ConfigError: the model has an encoder but tokens are made up, or it has too few rows for the tokenizer.
    """
    # Random numbers differ between devices: compared runs are made on one kind.
    torch.manual_seed(spec.seed)
    if tokenizer is None:
        # A copy: a composite config removes the fields of its parts from its argument.
        config = AutoConfig.for_model(**deepcopy(spec.fields))
        check_causal(config, "a bench on made-up texts (data.documents, data.lengths; name data.stage)")
    else:
        config = scratch_config(spec.fields, tokenizer)
    attention = spec.attention or plain_implementation(config)
    # Weights on the meta device; buffers are computed.
    with no_init_weights(), init_empty_weights(include_buffers=False):
        model = kind_of(config).auto_class.from_config(config, dtype=torch.float32, attn_implementation=attention)
    for parameter in model.parameters():  # not buffers: rotary frequencies stay in fp32
        parameter.data = parameter.data.to(DTYPES[spec.precision])
    if spec.nf4:
        quantize_layers(model)
    make_room(model, device)
    _draw(model, device)
    if tokenizer is not None:
        check_rows(model, tokenizer)
        kind_of(config).prepare(model, tokenizer)
        settle_generation_config(model, tokenizer)
    # The fp32 weights of the initialisation do not count in the run's peak.
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    assert isinstance(model, PreTrainedModel)
    return model


@torch.no_grad()
def _draw(orig_model: PreTrainedModel, device: torch.device) -> None:
    """Fill the weights with the numbers that transformers draws for them. Those of one block at a time are in fp32, so
    a model of any size is never whole in fp32, and one in NF4 never dense.
    """
    blocks = decoder_blocks(orig_model)
    in_blocks = {id(p) for block in blocks for p in block.parameters()}

    def fill(module: torch.nn.Module, owner: PreTrainedModel) -> None:
        owner = module if isinstance(module, PreTrainedModel) else owner
        at_once = module is orig_model or any(module is block for block in blocks)
        with _in_fp32(module, in_blocks if module is orig_model else set(), device) if at_once else nullcontext():
            for child in module.children():
                fill(child, owner)
            # Private: transformers' initialisation of a single module. Its public function takes the whole model.
            owner._initialize_weights(module)

    fill(orig_model, orig_model)


@contextmanager
def _in_fp32(part: torch.nn.Module, others: set[int], device: torch.device) -> Iterator[None]:
    """Give the parameters of a part dense memory in fp32 within the context; then round to bf16, and quantize the
    layers in NF4. `others`: ids of parameters that stay."""
    places: list[tuple[Any, str, Any]] = [
        (module, name, p)
        for module in part.modules()
        for name, p in module._parameters.items()
        if p is not None and id(p) not in others
    ]
    dense: dict[int, torch.nn.Parameter] = {}
    for module, name, p in places:
        shape = (module.out_features, module.in_features) if p.dtype == torch.uint8 else p.shape
        if id(p) not in dense:
            dense[id(p)] = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=device))
        # Private: setting the attribute would run the global hooks of register_parameter.
        module._parameters[name] = dense[id(p)]
    yield
    for module, name, p in places:
        module._parameters[name] = p
        rounded = dense[id(p)].to(torch.bfloat16)
        if p.dtype == torch.uint8:
            fill_layer(module, rounded)
        else:
            p.copy_(rounded)
        p._is_hf_initialized = True  # so that a module around this one does not draw it again


OBJECTIVES: dict[str, type[NextToken]] = {"caption": Caption}
"Stage -> its objective, if its script uses another one than NextToken."


@dataclass(frozen=True)
class NoCheckpoints:
    """Stand-in for the checkpoints in train.loop: nothing is saved."""

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
        """Do nothing: no save is in progress."""

    def ended_saves(self) -> tuple[()]:
        """Return nothing: no save has ended."""
        return ()


def rows_in_order(job: Job, examples: Examples) -> list[tuple[int, ...]]:
    """Return the rows that sftkit's loop trains on, all steps of the run, as indices of documents."""
    cfg = job.config
    if cfg.data.layout != "packed" or cfg.data.max_length is None:
        raise ConfigError(f"data.layout: {cfg.data.layout}: the rows of this comparison are packed")
    layout = make_layout(cfg.data, cfg.train, examples.lengths, cfg.data.max_length)
    batches = Batches(StepDataset(examples, layout), seed=cfg.run.seed)
    rows = [row for *_, step in batches.order.batches(0, job.steps.total) for row in step.rows]
    if not all(rows):
        raise ConfigError(
            "data.documents.count: too few for the steps: an epoch ends with empty rows, which TRL has not"
        )
    return rows


class Probe(Tracker):
    """A tracker that also records on every rank when the first steps are done on the device, the peak memory and the
    compiler's counters. It starts sampling the clock when those steps are over.
    """

    noted: tuple[int, ...] = (1,)
    "steps whose end is recorded"
    ended: dict[int, float]
    clock: ClockSamples
    peak_memory_gib: float = 0.0
    compile: dict[str, float | None]

    def advance(self, step: int) -> None:
        """If the end of this step is requested, wait for the device and record the time."""
        super().advance(step)
        if step in self.noted:
            # Without waiting, the time would be that of the launches.
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
    """Return the runtime of this process in the group that the plan requests.

    Raises:
        ConfigError: fewer or more processes have joined.
    """
    set_environment(job.config)
    rt = runtime.start(job.config.run, job.config.train)
    if rt.world_size != job.processes:
        raise ConfigError(
            f"run {job.name}: each process sees {rt.world_size} of the {job.processes} that topology {job.topology} "
            "should start: it needs a GPU for each, or use_cpu: true in its file"
        )
    return rt


def train_job(job: Job) -> dict[str, Any]:
    """Train the job and return its row."""
    with closing(joined(job)) as rt:  # not `with joined(job)`: run_job writes the error of a run into its row
        return measured_run(job, rt)


def batches_of(
    job: Job,
    rt: runtime.Runtime,
    orig_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    objective: Objective,
) -> Batches:
    """Return a job's data as batches: synthetic documents, or those of a stage's script, from the cache if possible."""
    cfg, stage = job.config, job.data.stage
    if stage is None or tokenizer is None:
        assert cfg.data.max_length is not None
        documents = EncodedDocuments(synthetic_documents(job.data, vocab_size(orig_model)), cfg.data.max_length)
        if cfg.adapters:
            return lay_out_several(cfg, [documents] * len(cfg.adapters), objective)
        return lay_out(cfg, rt, documents, objective)
    tokenize = stage_rule(stage.name)(cfg.data, tokenizer, stage.max_length)
    loaded = LoadedModel(orig_model, tokenizer, stage.max_length)
    return load_data(Run(cfg, stage.name, rt, job.folder), loaded, tokenize, objective).batches


def measured_run(job: Job, rt: runtime.Runtime) -> dict[str, Any]:
    """Return the row of a job in a process that has joined its group."""
    cfg, stage = job.config, job.data.stage
    # Make the model as train.assemble does, but with random weights, the same in every run. The first run of a bench
    # trains the tokenizer of data.stage for all; None: tokens are made up.
    tokenizer = base_tokenizer(cfg.model, cfg.data, job.folder.parent, rt) if stage else None
    nf4 = cfg.adapter is not None and cfg.adapter.base == "nf4"
    orig_model = new_model(ModelSpec(job.fields, cfg.run.seed, rt.precision, nf4=nf4), rt.device, tokenizer)
    kind_of(orig_model.config).check(orig_model, rt.topology, cfg.train)
    if cfg.model.pad_vocab_to_multiple_of is not None:
        pad_vocabulary(orig_model, cfg.model.pad_vocab_to_multiple_of)
    compute_here(orig_model)
    freeze(orig_model, cfg.train.freeze)
    if cfg.adapter is not None:
        adapters = Adapters(cfg.adapter, cfg.run.seed, base=cfg.model, digest="")
        if cfg.adapters:
            adapters = members_of(adapters, seed=cfg.run.seed, entries=cfg.adapters)
        add_adapters(orig_model, adapters)
        join_layers(orig_model)
    parameters = count_parameters(orig_model).total

    objective = OBJECTIVES.get(stage.name if stage else "", NextToken)(cfg.loss)
    batches = batches_of(job, rt, orig_model, tokenizer, objective)

    # The seconds of the first steps count from here: they include the engine's warm-up, which compiles.
    started = time.perf_counter()
    members = Members(cfg.adapters, cfg.optim, cfg.numerics, objective, rt.device) if cfg.adapters else None
    used = objective if members is None else members.objective
    training = Training(orig_model, used, batches.layout, members=members)
    engine = make_engine(cfg, rt, job.folder, training)
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
        "checks": {check["name"]: check["found"] for check in read_object(job.folder / PROOF).get("rows", ())},
        **measured_row(read_metric_rows(job.folder / METRICS_FILE), job.steps, rt.world_size, batches.num_documents),
        **over_ranks(rt.gathered(mine)),
        "warm_up_seconds": trained.warm_up_seconds,
        "first_step_seconds": waited[1],
        "first_steps_seconds": waited.get(job.steps.warm_up),
    }


if __name__ == "__main__":
    script(lambda: run_job(read_job(Path(sys.argv[1])), train_job))
