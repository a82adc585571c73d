"""Assemble a run, the same way for all stages. A stage script calls these functions in order and adds the parts of
its stage. Each function takes the result of the previous one and imports the modules that it needs first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sftkit.checkpoint.resume import NO_CHECKPOINT, ResumeCheckpoint, check_fit, find_checkpoint, run_identity
from sftkit.config.load import to_yaml
from sftkit.config.schema import SLOW_ADAPTER_LR, Config, DataConfig, source_label
from sftkit.data.batches import epoch, loader, pack
from sftkit.data.batches.order import mixture_of
from sftkit.data.tokens import chat, sources
from sftkit.data.types import Examples
from sftkit.engine.engine import Engine, Setup, Training
from sftkit.errors import ConfigError, config_error, hint
from sftkit.models import files as model_files
from sftkit.models import kind, load, structure, vocabulary
from sftkit.models.trained import adapters_of, freeze, learning_rate_scales
from sftkit.objectives.objective import NextToken, Objective
from sftkit.rundir import files, names, status
from sftkit.runtime import start as runtime
from sftkit.runtime.open import open_run
from sftkit.runtime.start import Runtime
from sftkit.tracking.tracker import Tracker
from sftkit.train import end, loop
from sftkit.train.parts import Data, EncodedDocuments, Evaluate, LoadedModel, Run, TrainServices

if TYPE_CHECKING:
    from sftkit.checkpoint.checkpoint import Checkpoints
    from sftkit.memory.plan import MemoryPlan


def about_run(run: Run, orig_model: PreTrainedModel, batches: loader.Batches, setup: Setup) -> dict[str, Any]:
    """Return the recipe's sections together with `resolved` and `environment`."""
    rt, layout, parameters = run.rt, batches.layout, structure.count_parameters(orig_model)
    environment = files.read_object(run.dir / names.ENVIRONMENT) if rt.is_main else {}
    # Choices and counts made before the first step.
    resolved = {
        "stage": run.stage,
        "model_type": orig_model.config.model_type,
        "start_format": model_files.stored_format(run.cfg.model),
        "parameters": parameters.total,
        "parameters_at_work": parameters.body + parameters.head,
        "trained_parameters": parameters.trained,
        "dtype": str(orig_model.dtype).removeprefix("torch."),
        "precision": rt.precision,
        "attention": setup.attention,
        "attention_why": setup.attention_reason,
        "compile_mode": setup.compile_mode,
        "optimizer": setup.optimizer,
        "memory_plan": setup.memory_plan,
        "checkpoint_bytes": round(setup.checkpoint_bytes),
        "topology": rt.topology.describe(),
        "processes": rt.world_size,
        "layout": layout.kind,
        "max_length": layout.max_length,
        "row_length": layout.row_lengths[-1],
        "shapes": [f"{rows}x{length}" for rows, length in layout.shapes],
        "accumulation": layout.accumulation,
        "sources": [source_label(source) for source in run.cfg.data.train],
        "documents": len(batches.examples),
        "tokens": int(batches.examples.lengths.sum()),
    }
    return {**asdict(run.cfg), "resolved": resolved, "environment": environment}


@contextmanager
def start_run(cfg: Config, stage: str) -> Iterator[Run]:
    """Start a run: join the process group and open the run directory for the duration of the context.

    On exit, restore the process's changed settings; an error is printed and recorded.

    Raises:
        ConfigError: the launcher's settings do not fit, ranks have different recipes, or the checkpoint to
            resume is damaged.
    """
    set_environment(cfg)
    with runtime.start(cfg.run, cfg.train, end.write_run_page) as rt:
        resume = status.effective_resume(cfg.train.resume, cfg.run.dir)
        folder = open_run(cfg.run.dir, resume, to_yaml(cfg), rt)
        if rt.is_main and (warning := files.write_provenance(folder, cfg, resumes=rt.resumes)):
            rt.print(f"warning: {warning}", "warning")
        yield Run(cfg, stage, rt, folder, find_checkpoint(Path(cfg.run.dir), resume, rt))


def train_stage(
    run: Run,
    tokenizer: PreTrainedTokenizerBase,
    row_tokenizer: Callable[[DataConfig, PreTrainedTokenizerBase, int], sources.RowTokenizer],
    objective: Objective,
) -> None:
    """Train a stage from its start to its last step. Evaluation, samples and checkpoints use orig_model; only a
    training step runs the compiled model.

    Args:
        row_tokenizer: function from data section, tokenizer and max_length to the stage's rule for the targets
            of a row.

    Raises:
        ConfigError, DataError, NumericsError, CheckpointError: as in the functions below.
    """
    loaded = load_orig_model(run, tokenizer)
    data = load_data(run, loaded, row_tokenizer(run.cfg.data, tokenizer, loaded.max_length), objective)
    engine = build_engine(run, loaded, objective, data)
    run_to_end(run, loaded, data, engine)


def set_environment(cfg: Config) -> None:
    """Set the environment variables that graph.passes needs; the user's own values stay. Call it before the process
    group is created, which reads them.
    """
    # NCCL would register the buffers of CUDA graphs, which fails with expandable segments of the allocator.
    if "cuda_graphs" in cfg.graph.passes:
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


def load_orig_model(run: Run, tokenizer: PreTrainedTokenizerBase) -> LoadedModel:
    """Load the recipe's model and determine the maximum length of documents (max_length).

    Raises:
        ConfigError: the model cannot be loaded, or does not fit the tokenizer or data.max_length. A
            compiler option that this torch does not know is reported first.
    """
    from sftkit.compile.contract import check_options
    from sftkit.models.hybrids import check_topology, check_trees
    from sftkit.models.structure import check_rope

    cfg, rt = run.cfg, run.rt
    # Reject errors visible in the recipe before loading weights.
    check_options(cfg.compile)
    if cfg.train.engine == "graph":
        from sftkit.graph.engine import check_device  # experimental, as below

        check_device(cfg.graph.passes, cfg.attention.backend, rt.device)
    # Empty, on the meta device, if the run never holds the whole weights: they are read when the model is put on the
    # device, and sharded or quantized there one by one.
    quantized = cfg.adapter is not None and cfg.adapter.base == "nf4"
    several: dict[str, Any] = {}
    if cfg.adapters:
        from sftkit.models.many_adapters import members_of

        several["several"] = partial(members_of, seed=cfg.run.seed, entries=cfg.adapters)
    orig_model = load.load_model(
        cfg.model,
        tokenizer,
        cfg.run.seed,
        rt.precision,
        empty=rt.topology.partial or quantized,
        adapter=cfg.adapter,
        **several,
    )
    kind.kind_of(orig_model.config).check(orig_model, rt.topology, cfg.train)
    if cfg.train.neftune_alpha is not None and orig_model.config.is_encoder_decoder:
        raise ConfigError(f"train.neftune_alpha: {orig_model.config.model_type} has an encoder: set it to null")
    freeze(orig_model, cfg.train.freeze)
    learning_rate_scales(orig_model, cfg.optim.lr_scale or {})  # a pattern without a parameter ends the run here
    longest = structure.positions(orig_model)
    max_length, resolved = load.resolve_max_length(cfg.model, cfg.data.max_length, tokenizer, rt.precision, longest)
    check_rope(orig_model, rt.topology, max_length)
    check_topology(orig_model, rt.topology)
    if cfg.data.layout == "tree":
        check_trees(orig_model)
    rt.print(resolved)
    added = vocabulary.describe_added_tokens(orig_model, tokenizer)
    for line in filter(None, (added, vocabulary.describe_padding(orig_model))):
        rt.print(line)
    rates = {f"adapter {one.name}, lr={one.lr or cfg.optim.lr:g}": one.lr or cfg.optim.lr for one in cfg.adapters or ()}
    rates = rates or {f"optim.lr={cfg.optim.lr:g}": cfg.optim.lr} if cfg.adapter is not None else {}
    if slow := [name for name, rate in rates.items() if rate < SLOW_ADAPTER_LR]:
        text = f"{'; '.join(slow)} is low for adapters, which learn best at about ten times the learning rate "
        rt.print(f"warning: {text}of full fine-tuning: try 2e-4", "warning")
    if cfg.train.freeze or cfg.adapter is not None:
        from sftkit.models.adapter_files import adapter_words

        what = f"{adapter_words(asdict(cfg.adapter), len(cfg.adapters or ()))}: " if cfg.adapter else ""
        rt.print(f"{what}{structure.count_parameters(orig_model).describe()}")
    if (adapters := adapters_of(orig_model)) is not None and adapters.tokens:
        rows = sum(map(len, adapters.tokens.values()))
        rt.print(hint("rows in an adapter", rows=rows), "warning")
    elif added and not all(p.requires_grad for p in vocabulary.vocabulary_of(orig_model)):
        rt.print(hint("frozen rows of added tokens"), "warning")
    return LoadedModel(orig_model, tokenizer, max_length)


def load_data(run: Run, loaded: LoadedModel, tokenize: sources.RowTokenizer, objective: Objective) -> Data:
    """Load the documents, tokenized now or from the cache, and lay them out in rows.

    Args:
        tokenize: the stage's rule, which turns a row into documents and their loss mask.

    Raises:
        ConfigError, DataError: the sources or the layout are invalid.
    """
    from sftkit.evals import tasks
    from sftkit.evals.suite import sample_rows

    cfg = run.cfg
    recipe = to_yaml(cfg)

    def check_data(examples: Examples, layout: pack.Layout) -> None:
        identity = run_identity(loaded.orig_model, loaded.tokenizer, examples, layout)
        check_fit(run.resume, recipe, cfg.train.resume_changes, identity, examples=examples)

    if cfg.adapters:
        from sftkit.train.several import lay_out_several, load_several

        several, validation = load_several(cfg, tokenize)
        batches = lay_out_several(cfg, several, objective, run.resume, check_data)
    else:
        with run.rt.main_first():  # it may download
            compared = tasks.benchmarks(cfg.data, cfg.eval)
        examples, validation = loader.load_examples(cfg.data, tokenize, run.rt, compared)
        # The main rank fills the cache of an encoder's inputs, which the others then read.
        with run.rt.main_first() if examples.encoder_sources else nullcontext():
            encode = partial(kind.kind_of(loaded.orig_model.config).with_inputs, loaded.orig_model, loaded.tokenizer)
            examples = encode(examples, loaded.max_length, cfg.data)
            validation = {name: encode(one, loaded.max_length, cfg.data) for name, one in validation.items()}
        documents = EncodedDocuments(examples, loaded.max_length, int(loaded.tokenizer.pad_token_id or 0))
        batches = lay_out(cfg, run.rt, documents, objective, run.resume, check_data)
    prompted = chat.check_prompted_targets(tokenize, tokenize.tokenizer, tokenize.learning)
    # for models with an encoder, the evaluation chooses the samples itself
    shown = 0 if batches.examples.encoder_inputs is not None else cfg.eval.samples
    return Data(batches, validation, sample_rows(cfg.data, tokenize, shown), prompted)


def lay_out(
    cfg: Config,
    rt: Runtime,
    documents: EncodedDocuments,
    objective: Objective,
    resume: ResumeCheckpoint = NO_CHECKPOINT,
    check_data: Callable[[Examples, pack.Layout], None] = lambda *_: None,
) -> loader.Batches:
    """Return this rank's batches of the documents in rows of declared shapes. They continue the plan segments of the
    resumed checkpoint, so that no document of the epoch is repeated or lost.

    Args:
        check_data: function that rejects documents and rows which the checkpoint does not fit.
    """
    examples, earlier = documents.examples, resume.segments
    trees = None
    if cfg.data.layout == "tree":
        from sftkit.data.batches.tree import trees_of

        trees = trees_of(examples, cfg.data, cfg.data.row_length or documents.max_length)
        rt.print(trees.describe())
    planned = examples if trees is None else trees
    lengths = planned.lengths, documents.max_length
    layout = pack.make_layout(cfg.data, cfg.train, *lengths, rt.data_world_size, earlier, encoded=examples.encoded)
    check_data(examples, layout)
    share = epoch.RankRows(rt.data_rank, epoch.row_shard(rt.topology, rt.rank))
    noise = None if cfg.train.neftune_alpha is None else (cfg.run.seed, cfg.train.neftune_alpha)
    dataset = loader.StepDataset(examples, layout, share, documents.pad_id, objective.divisors(examples), noise, trees)
    batches = loader.Batches(
        dataset,
        cfg.run.seed,
        num_workers=cfg.data.num_workers,
        earlier=earlier,
        first_step=resume.state["step"],
        known=resume.cursors,
        mixture=mixture_of(cfg.data, cfg.train, planned, layout),
    )
    if batches.mixture.sources and batches.mixture.sources[0].weight is not None:
        steps = batches.num_steps(cfg.train.epochs, cfg.train.max_steps)
        for name, (_, ended) in zip(examples.source_names, batches.order.forecast(steps), strict=True):
            if ended is not None:
                words = f"reaches its max_epochs at about step {ended:,} of {steps:,}: the others take its share"
                rt.print(f"source {name} {words}")
    return batches


def build_engine(run: Run, loaded: LoadedModel, objective: Objective, data: Data) -> Engine:
    """Return the engine that computes the steps of this run; print its choices and warnings before compilation.

    Raises:
        ConfigError: this model, layout or machine does not support the recipe.
    """

    # The engine calls it before anything is moved or compiled, so that a run that fails later has its report.
    def record(plan: MemoryPlan | None) -> None:
        if not run.rt.is_main:
            return
        from sftkit.preflight.analysis import record_preflight

        learned = data.batches, data.validation
        record_preflight(run.cfg, run.rt, run.dir, loaded.tokenizer, *learned, loaded.orig_model, plan)

    members = None
    if run.cfg.adapters:
        from sftkit.engine.members import Members

        members = Members(run.cfg.adapters, run.cfg.optim, run.cfg.numerics, objective, run.rt.device)
        objective = members.objective
    elif isinstance(objective, NextToken) and len(names := data.batches.examples.source_names) > 1:
        objective = replace(objective, num_sources=len(names))
    training = Training(loaded.orig_model, objective, data.batches.layout, run.cfg.model, run.resume.folder, members)
    return make_engine(run.cfg, run.rt, Path(run.cfg.run.dir), training, record)


def make_engine(
    cfg: Config,
    rt: Runtime,
    run_dir: Path,
    training: Training,
    planned: Callable[[MemoryPlan | None], None] = lambda _: None,
) -> Engine:
    """Return the engine of train.engine for a model that was just made or loaded.

    Args:
        planned: function called before the model is moved or compiled, with the memory plan of an engine that
            makes one.
    """
    if cfg.train.engine == "reference":
        from sftkit.engine.reference import Reference

        planned(None)
        return Reference(cfg.optim, cfg.loss, training, rt)
    if cfg.train.engine == "graph":
        from sftkit.models.routing import coefficient

        if coefficient(training.orig_model.config, cfg.loss.router_aux_loss_coef):
            raise config_error("graph with the auxiliary loss")
        from sftkit.graph.engine import GraphEngine  # experimental: nothing else in the core imports it

        return GraphEngine(cfg, training, rt, run_dir, planned)
    from sftkit.engine.blocks import Blocks

    return Blocks(cfg, training, rt, planned)


def run_to_end(run: Run, loaded: LoadedModel, data: Data, engine: Engine) -> None:
    """Make evaluation, checkpoints and tracker; run the loop; write the summary.

    Raises:
        ConfigError: the run cannot work or resume with these settings.
        NumericsError, CheckpointError: as in train.
    """
    from sftkit.evals.suite import Suite
    from sftkit.verify.counts import validation_check
    from sftkit.verify.proof import prompt_check
    from sftkit.verify.round_trip import RoundTrip

    cfg, rt, tokenizer = run.cfg, run.rt, loaded.tokenizer
    run_dir = Path(cfg.run.dir)
    suite = Suite(
        config=cfg.eval,
        orig_model=loaded.orig_model,
        tokenizer=tokenizer,
        rt=rt,
        model=engine.model,
        validation=data.validation,
        layout=data.batches.layout,
        sample_rows=data.samples,
        run_dir=run_dir,
    )
    evaluate: Evaluate = suite.evaluate
    if cfg.adapters:
        from sftkit.train.several import EvaluationOfEach

        evaluate = EvaluationOfEach(suite, [one.name for one in cfg.adapters]).evaluate
    # Weights and optimizer states are loaded into the engine's own tensors, which are sharded by now.
    checkpoints = open_checkpoints(run, loaded, data, engine)
    resumed = checkpoints.resume(run.resume, cfg.train.resume_changes)
    step = resumed["step"]
    last = data.batches.num_steps(cfg.train.epochs, cfg.train.max_steps)
    if run.resume.folder is not None and not rt.resumes and step >= last:
        raise config_error("no steps left", setting=run.resume.setting, step=step, dir=cfg.run.dir, last=last)
    # a new run that starts from another run's checkpoint is a separate run on the dashboard
    run_id = resumed.get("tracker") if rt.resumes else None
    about = about_run(run, loaded.orig_model, data.batches, engine.setup)
    round_trip = RoundTrip(loaded.orig_model, tokenizer, rt, trusted=cfg.model.trust_remote_code)
    with closing(round_trip), Tracker(run_dir, cfg.log, rt, about, step=step, run_id=run_id) as tracker:
        check = partial(validation_check, engine.model, data.validation, data.batches.layout, tokenizer, rt)
        files = rt.from_main(lambda: round_trip.files_check(checkpoints.write_files))
        first = [prompt_check(data.prompted_targets), files]
        services = TrainServices(evaluate, checkpoints, tracker, resumed, first, check, round_trip)
        trained = loop.train(cfg, rt, engine, data.batches, services)
    end.write_summary(run_dir, trained, rt)


def open_checkpoints(run: Run, loaded: LoadedModel, data: Data, engine: Engine) -> Checkpoints:
    """Return the checkpoints of a run. The engine already exists, so that a resume can load into its optimizer.

    Raises:
        ConfigError: the disk cannot hold them, or plain transformers could not load them.
    """
    from sftkit.checkpoint.checkpoint import Checkpoints
    from sftkit.checkpoint.states import check_saved_names

    check_saved_names(loaded.orig_model)
    identity = run_identity(loaded.orig_model, loaded.tokenizer, data.batches.examples, data.batches.layout)
    recipe = to_yaml(run.cfg)
    state = (loaded.orig_model, loaded.tokenizer, engine.optimizer)
    checkpoints = Checkpoints(Path(run.cfg.run.dir), run.cfg.checkpoint, run.rt, *state, recipe, identity)
    checkpoints.check_space(engine.setup.checkpoint_bytes, new_run=not run.rt.resumes)
    return checkpoints
