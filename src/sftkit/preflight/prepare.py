"""Make what a run would start from, without a GPU and without weights: tokenizer, sizes of the model,
examples, memory plan."""

from __future__ import annotations

import io
import logging
from contextlib import nullcontext, redirect_stdout

import torch
from accelerate import Accelerator, init_empty_weights
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from sftkit.config.schema import Config, DataConfig, ModelConfig, TrainConfig
from sftkit.config.topology import Topology
from sftkit.data.batches import loader
from sftkit.data.batches.pack import Layout
from sftkit.data.batches.shard import check_row_shard, row_shard
from sftkit.data.reading import findings
from sftkit.data.tokens import stages
from sftkit.data.types import Examples
from sftkit.errors import ConfigError
from sftkit.memory.plan import Fixed, MemoryPlan, make_plan
from sftkit.memory.plan import log as plan_log
from sftkit.models.load import load_model, resolve_max_length
from sftkit.models.structure import positions
from sftkit.models.tokenizer import load_tokenizer, new_tokenizer
from sftkit.runtime.start import Runtime, resolve_precision

log = logging.getLogger(__name__)


def tokenizer_of(model: ModelConfig, data: DataConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer that the run would load, or train."""
    training = model.train_tokenizer
    if training is None:
        return load_tokenizer(model)
    # The rows of data.train are tokenized next.
    with findings.without_logging() if training.sources is None else nullcontext():
        return new_tokenizer(model, training, data.train, data.on_bad_row)


def meta_model(model: ModelConfig, tokenizer: PreTrainedTokenizerBase, precision: str) -> PreTrainedModel | None:
    """Return the model on the meta device: parameters have sizes and no memory. None, with a line that says why, if it
    is not here."""
    try:
        # Parameters alone go without memory: buffers are small. Nobody reads what initialisation would compute.
        with init_empty_weights(include_buffers=False), no_init_weights():
            orig_model = load_model(model, tokenizer, 0, precision, empty=True)
    except ConfigError as error:
        log.warning("memory and checkpoint sizes stay unknown: %s", error)
        return None
    orig_model.tie_weights()  # inside, each name was given a parameter of its own
    return orig_model


def gpu_precision(train: TrainConfig) -> str:
    """Return what the run will compute in on a GPU: the recipe's precision, bf16 for auto."""
    return "bf16" if train.precision == "auto" else train.precision


def precision_text(train: TrainConfig) -> str:
    """Return what a run on this machine computes in, beside what sizes are counted in if that is something else."""
    here, counted = resolve_precision(train.precision), gpu_precision(train)
    return (
        here
        if here == counted
        else f"{here} on this machine ({counted} on a GPU, as memory and disk below are counted)"
    )


def memory_plan(
    cfg: Config, orig_model: PreTrainedModel | None, layout: Layout, gpu_gib: float | None, topology: Topology
) -> MemoryPlan | None:
    """Return the plan of a run on GPUs of that size, without touching one; None: the model's sizes are unknown.

    Args:
        gpu_gib: memory of each GPU; None: this machine's, if it has one.
        topology: of the processes that it would run on.

    Raises:
        ConfigError: it cannot run like that: see make_plan, and check_row_shard for rows that ranks share.
    """
    # Needs no model, so it is refused also where the sizes are unknown.
    check_row_shard(layout, row_shard(topology, rank=0))
    if orig_model is None:
        return None
    total = None if gpu_gib is None else int(gpu_gib * 2**30)
    if total is None and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
    plan_log.disabled = True  # what it says and warns of is in the preflight
    try:
        with redirect_stdout(io.StringIO()):
            # make_plan asks a Runtime; with cpu=True Accelerate leaves GPUs alone.
            rt = Runtime(Accelerator(cpu=True), gpu_precision(cfg.train), topology)
            return make_plan(cfg, orig_model, layout, rt, Fixed(total))
    finally:
        plan_log.disabled = False


def max_length_of(
    model: ModelConfig,
    max_length: int | None,
    tokenizer: PreTrainedTokenizerBase,
    orig_model: PreTrainedModel | None,
    precision: str,
) -> tuple[int, str]:
    """Return data.max_length, or that of the run before, and a line about where the run would start."""
    longest = positions(orig_model) if orig_model is not None else None
    return resolve_max_length(model, max_length, tokenizer, precision, longest)


def prepared_examples(
    data: DataConfig, stage: str, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> tuple[Examples, dict[str, Examples]]:
    """Return the training documents and, by source, the validation documents, tokenized as the stage's own script does,
    which then finds them in the cache. What was found in their rows is not logged: `analyse` shows it."""
    _, tokenize_of = stages.DATA_OF_STAGES[stage]
    with findings.without_logging():
        return loader.load_examples(data, tokenize_of(data, tokenizer, max_length), nullcontext())
