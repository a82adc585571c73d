"""Split the layers over the stages of a pipeline, so that a step, head and loss included, takes least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from sftkit.config.launch_rules import split_problems, stages_of_schedule
from sftkit.config.pipeline_split import (
    PartTimes,
    PipelineStep,
    StageTimes,
    bubble,
    fastest_split,
    split_on_paper,
    step_seconds,
)
from sftkit.config.schema import TrainConfig
from sftkit.errors import ConfigError
from sftkit.models.structure import attention_windows, count_parameters, decoder_blocks

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
    schedule, configured = train.pipeline_schedule, train.pipeline_layers
    model_type = orig_model.config.get_text_config().model_type
    # A launch has asked the same where the model's config was there to be read (preflight.launched).
    for _, text in split_problems(schedule, configured, pipeline_size, model_type, num_layers):
        raise ConfigError(text)
    if len(attention_windows(orig_model) or ()) != 1:
        raise ConfigError(
            "train.engine=pipeline: some layers of this model have a sliding window and some have none; transformers "
            "finds out which by a layer's index, which differs in a stage: take train.engine=blocks"
        )
    if configured is not None:
        return configured
    parameters = count_parameters(orig_model)
    stages = stages_of_schedule(schedule, configured, pipeline_size)
    return split_on_paper(num_layers, parameters.body / num_layers, parameters.head, stages, schedule)


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
