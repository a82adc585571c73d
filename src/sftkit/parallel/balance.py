"""Split the layers over the stages of a pipeline, so that a step, head and loss included, takes least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from sftkit.config.pipeline_split import (
    PartTimes,
    PipelineStep,
    StageTimes,
    bubble,
    fastest_split,
    split_on_paper,
    stages_fit,
    step_seconds,
)
from sftkit.config.schema import TrainConfig
from sftkit.errors import ConfigError
from sftkit.models.structure import attention_windows, count_parameters, decoder_blocks

PIPELINE_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"Architectures whose decoder is an embedding, layers that are alike, and a norm."
WORTH_SAYING = 0.97
"Another split is named if a step takes less than this share of its time with it."


def layers_of_stages(orig_model: PreTrainedModel, train: TrainConfig, pipeline_size: int) -> tuple[int, ...]:
    """Return the layers of each stage: train.pipeline_layers, or by the work of a token that is learned.

    Args:
        pipeline_size: ranks that the rows pass through.

    Raises:
        ConfigError: a model that has no stages, or layers that are not the model's.
    """
    num_layers = len(decoder_blocks(orig_model))
    stages_per_rank = 2 if train.pipeline_schedule == "interleaved" else 1
    configured = train.pipeline_layers
    # Interleaved stages may be more than two for each process, where the recipe lists their layers.
    stages = len(configured) if configured and stages_per_rank > 1 else pipeline_size * stages_per_rank
    _check_model(orig_model, num_layers, stages, pipeline_size)
    if configured is None:
        parameters = count_parameters(orig_model)
        layer = parameters.body / num_layers
        return split_on_paper(num_layers, layer, parameters.head, stages, train.pipeline_schedule)
    if sum(configured) != num_layers or not stages_fit(len(configured), train.pipeline_schedule, pipeline_size):
        several = (
            f"{2 * pipeline_size} (or another multiple of {pipeline_size})" if stages_per_rank > 1 else pipeline_size
        )
        raise ConfigError(
            f"train.pipeline_layers={list(configured)}: must be {several} numbers that add up to the {num_layers} "
            "layers of the model, or null, which measures them"
        )
    return configured


def _check_model(orig_model: PreTrainedModel, num_layers: int, stages: int, pipeline_size: int) -> None:
    config = orig_model.config.get_text_config()
    if config.model_type not in PIPELINE_MODEL_TYPES:
        raise ConfigError(
            f"train.engine=pipeline: {config.model_type} cannot be split into stages here, "
            f"{', '.join(PIPELINE_MODEL_TYPES)} can: take train.engine=blocks with accelerate_configs/fsdp2.yaml"
        )
    if len(attention_windows(orig_model) or ()) != 1:
        raise ConfigError(
            "train.engine=pipeline: some layers of this model have a sliding window and some have none; transformers "
            "finds out which by a layer's index, which differs in a stage: take train.engine=blocks"
        )
    if stages > num_layers:
        most = num_layers * pipeline_size // stages
        fewer = [f"set train.pipeline_stages to {most} or less"] if most > 1 else []
        if pipeline_size <= num_layers:
            fewer.append("take train.pipeline_schedule=1f1b, which has one for each process")
        raise ConfigError(
            f"train.engine=pipeline: {stages} stages for the {num_layers} layers of the model: "
            f"{', or '.join(fewer) or 'take train.engine=blocks'}"
        )


def describe_times(step: PipelineStep, times: Sequence[StageTimes]) -> str:
    """Return a line about what each stage took for a micro-batch, forward and backward, and about a better split if
    there is one."""
    # The head is known only by what the last stage takes longer than its layers would.
    *others, last = times
    count = sum(step.layers[:-1])
    layer = StageTimes(sum(each.forward for each in others) / count, sum(each.backward for each in others) / count)
    parts = PartTimes(layer, last.plus(layer, -step.layers[-1]))
    line = (
        f"stages take {' + '.join(f'{each.both:.3g}' for each in times)} s a micro-batch: with {step.micro_batches} of "
        f"them in a step a process waits {bubble(step, times):.0%} of it"
    )
    better = replace(step, layers=fastest_split(step, parts))
    seconds = step_seconds(better, parts.of_stages(better.layers))
    if better != step and seconds < WORTH_SAYING * step_seconds(step, times):
        line += f"; train.pipeline_layers=[{','.join(map(str, better.layers))}] would be more even"
    return line
