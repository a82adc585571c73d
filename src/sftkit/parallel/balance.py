"""Split the layers over the stages of a pipeline, so that the work, head and loss included, is as even as possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from sftkit.config.schema import TrainConfig
from sftkit.config.topology import balanced, slowest_rank, stages_fit
from sftkit.errors import ConfigError
from sftkit.models.structure import attention_windows, count_parameters, decoder_blocks

PIPELINE_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"Architectures whose decoder is an embedding, layers that are alike, and a norm."
WORTH_SAYING = 0.97
"Another split is named if a step takes less than this share of its time with it."
PROPORTIONS = 16
"Steps between the evenest split of the backward passes and that of the forward passes."


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
        return balanced(num_layers, parameters.body / num_layers, parameters.head, stages)
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


@dataclass(frozen=True)
class StageTimes:
    """Seconds that a stage, or a part of one, takes for a micro-batch."""

    forward: float = 0.0
    backward: float = 0.0

    @property
    def both(self) -> float:
        """Return the seconds of the two together."""
        return self.forward + self.backward

    def plus(self, other: StageTimes, times: int = 1) -> StageTimes:
        """Return what this and so many of another take; below 0 is noise."""
        forward, backward = self.forward + times * other.forward, self.backward + times * other.backward
        return StageTimes(max(forward, 0.0), max(backward, 0.0))


@dataclass(frozen=True)
class PartTimes:
    """What the parts of a model take for a micro-batch; the head with its loss."""

    layer: StageTimes
    head: StageTimes
    embedding: StageTimes = StageTimes()

    def of_stages(self, layers: Sequence[int]) -> list[StageTimes]:
        """Return what each of these stages takes."""
        first, *between = [StageTimes().plus(self.layer, count) for count in layers]
        *between, last = [first.plus(self.embedding), *between]
        return [*between, last.plus(self.head)]


@dataclass(frozen=True)
class PipelineStep:
    """How a step passes through the stages of a pipeline."""

    layers: tuple[int, ...]
    "of each stage"
    schedule: str
    micro_batches: int
    pipeline_size: int
    "ranks that the rows pass through"


def step_seconds(step: PipelineStep, times: Sequence[StageTimes]) -> float:
    """Return how long a step takes, from what each stage takes for a micro-batch (GPipe, arXiv 1811.06965; with several
    stages on each rank Megatron-LM, arXiv 2104.04473)."""
    if step.schedule == "gpipe":
        # All forward passes, then all backward passes: each of the two is as slow as its own slowest stage. The head's
        # gradients are computed with the loss, in the forward pass, so that is not the same stage in both.
        phases = ([each.forward for each in times], [each.backward for each in times])
        return sum(sum(phase) + (step.micro_batches - 1) * max(phase) for phase in phases)
    # A pipeline fills and drains once a step, in (ranks - 1) micro-batches of its slowest rank; with several stages on
    # each rank in that fraction of it.
    filling = (step.pipeline_size - 1) * step.pipeline_size / len(step.layers)
    return slowest_rank([each.both for each in times], step.pipeline_size) * (step.micro_batches + filling)


def bubble(step: PipelineStep, times: Sequence[StageTimes]) -> float:
    """Return the share of a step in which a process of a pipeline waits, on average."""
    computed = step.micro_batches * sum(each.both for each in times) / step.pipeline_size
    return 1.0 - computed / step_seconds(step, times)


def fastest_split(step: PipelineStep, parts: PartTimes) -> tuple[int, ...]:
    """Return how the layers of all stages are spread so that a step takes least."""
    num_layers, stages = sum(step.layers), len(step.layers)
    # What gpipe waits for lies between the evenest split of the forward and that of the backward passes.
    proportions = [part / PROPORTIONS for part in range(PROPORTIONS + 1)] if step.schedule == "gpipe" else [0.5]

    def split(proportion: float) -> tuple[int, ...]:
        layer, head, embedding = (
            proportion * part.forward + (1.0 - proportion) * part.backward
            for part in (parts.layer, parts.head, parts.embedding)
        )
        return balanced(num_layers, layer, head, stages, embedding)

    splits = [split(each) for each in proportions]
    return min(splits, key=lambda layers: step_seconds(replace(step, layers=layers), parts.of_stages(layers)))


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
