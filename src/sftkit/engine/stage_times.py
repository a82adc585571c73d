"""Time the parts of a model for a pipeline: before it is split, so that stages are even, and when it is warm."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist

from sftkit.compile.contract import compile_model, random_state_kept
from sftkit.compile.modules import compiler_switches
from sftkit.config.schema import CompileConfig, TrainConfig
from sftkit.config.topology import balanced
from sftkit.engine.engine import Training
from sftkit.engine.step import worst_case_batch
from sftkit.memory.plan import activation_budget
from sftkit.objectives.objective import ModelWithLoss
from sftkit.parallel.pipeline import Pipelined, stage_seconds
from sftkit.parallel.stages import StageModule, describe_times, layers_of_stages
from sftkit.runtime.script import working
from sftkit.runtime.start import Runtime

log = logging.getLogger(__name__)
ONE_EACH = (1, 1, 1)
"Layers of each stage of the model that is timed: the first has the embedding, the last the head and the loss."


def measured_layers(
    compile: CompileConfig, train: TrainConfig, training: Training, backend: str, rt: Runtime
) -> tuple[int, ...]:
    """Return the layers of each stage such that a step takes least, by measured times of the model's parts.

    The parts are compiled as in a step and run the largest batch; the slowest rank's times count, so that all
    ranks find the same. Where they cannot be timed, layers are spread by their parameters. Every rank calls it;
    random state is as before.

    Raises:
        ConfigError: a model that has no stages.
    """
    by_parameters = layers_of_stages(training.orig_model, train, rt.topology.stages)
    # A rank that fails must still take part in the exchange below, or the others would wait for it forever.
    error: Exception | None = None
    seconds = torch.zeros(len(ONE_EACH), dtype=torch.float64, device=rt.device)
    try:
        with working("timing a layer, the embedding and the head"):
            seconds += torch.tensor(_times(compile, train, training, backend, rt)).to(seconds)
    except torch.OutOfMemoryError:
        raise
    except Exception as caught:  # the warm-up will report a compiler that does not work
        error = caught
    if rt.any_rank(error is not None):
        log.warning("layers cannot be timed, so stages are balanced by parameters: %s", error or "on another rank")
        return by_parameters
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    # Each stage has a layer, so what the outer ones take beyond that is the embedding's, and the head's with its loss.
    first, layer, last = seconds.tolist()
    embedding = max(first - layer, 0.0)
    head = max(last - layer, 0.0)
    rt.print(f"a layer takes {layer:.3g} s a micro-batch, the embedding {embedding:.3g} s, head and loss {head:.3g} s")
    return balanced(sum(by_parameters), layer, head, len(by_parameters), embedding)


def _times(compile: CompileConfig, train: TrainConfig, training: Training, backend: str, rt: Runtime) -> list[float]:
    """Return the seconds of three stages of one layer: with the embedding, alone, and with norm, head and loss."""
    orig_model = training.orig_model
    objective = training.objective
    layout = training.layout
    config = copy.deepcopy(orig_model.config)
    config.num_hidden_layers = len(ONE_EACH)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1] * len(ONE_EACH)  # all are alike (parallel.balance)
    with random_state_kept(), compiler_switches(compile, activation_budget(compile, train), graphs=2):
        # Private, but it makes the very class of the model: the public from_config exists for auto classes only
        # (huggingface/transformers#29295).
        with torch.device(rt.device):
            small = type(orig_model)._from_config(config, dtype=orig_model.dtype)
        model = ModelWithLoss(small.train(), backend, objective)
        compile_model(small, replace(compile, scope="block"), sharded=True)  # the run itself says that it is block
        batch = worst_case_batch(rt, orig_model, layout, *layout.shapes[-1])
        stages = [StageModule(model, ONE_EACH, number) for number in range(len(ONE_EACH))]
        try:
            return [stage_seconds(stage, model, batch, objective.count(batch)) for stage in stages]
        finally:
            # The warm-up counts its own graphs: forget these. The generated code stays in the compiler's cache.
            torch.compiler.reset()
            del small, model, stages
            if rt.device.type == "cuda":
                torch.cuda.empty_cache()


def bubble_of(wrapped: torch.nn.Module, training: Training, rt: Runtime) -> tuple[float, str]:
    """Time the stages of a pipeline; return the share of a step that they wait, in percent, and a line about them.

    Every rank calls it; random state is as before. `wrapped`: what a step of several stages calls.
    """
    pipelined = cast(Pipelined, wrapped)
    layout = training.layout
    batch = worst_case_batch(rt, training.orig_model, layout, *layout.shapes[-1])
    with random_state_kept():
        times = pipelined.times(batch, pipelined.model.objective.count(batch))
    counts = {"micro_batches": layout.accumulation, "pipeline_size": rt.topology.stages}
    waits, line = describe_times(pipelined.placement.layers, times, **counts)
    return 100.0 * waits, line
