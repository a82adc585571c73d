"""Split the layers over the stages of a pipeline, so that the work, head and loss included, is as even as possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from sftkit.config.schema import TrainConfig
from sftkit.config.topology import balanced, slowest_rank, stages_fit
from sftkit.errors import ConfigError
from sftkit.models.structure import attention_windows, count_parameters, decoder_blocks

PIPELINE_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"Architectures whose decoder is an embedding, layers that are alike, and a norm."
WORTH_SAYING = 0.97
"Another split is named if its slowest stage takes less than this share of the present slowest stage's time."


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
    """Seconds that a stage takes for a micro-batch."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        """Return the seconds of the two together."""
        return self.forward + self.backward


@dataclass(frozen=True)
class PipelineStep:
    """How a step passes through the stages of a pipeline."""

    layers: tuple[int, ...]
    "of each stage"
    schedule: str
    micro_batches: int
    pipeline_size: int
    "ranks that the rows pass through"


def bubble(step: PipelineStep, times: Sequence[StageTimes]) -> float:
    """Return the share of a step in which a process of a pipeline waits, on average, from what each stage took for a
    micro-batch (GPipe, arXiv 1811.06965; with several stages on each rank Megatron-LM, arXiv 2104.04473)."""
    computed = step.micro_batches * sum(each.both for each in times) / step.pipeline_size
    if step.schedule == "gpipe":
        # All forward passes, then all backward passes: each of the two is as slow as its own slowest stage. The head's
        # gradients are computed with the loss, in the forward pass, so that is not the same stage in both.
        phases = ([each.forward for each in times], [each.backward for each in times])
        return 1.0 - computed / sum(sum(phase) + (step.micro_batches - 1) * max(phase) for phase in phases)
    slowest = slowest_rank([each.both for each in times], step.pipeline_size)
    # A pipeline fills and drains once a step, in (ranks - 1) micro-batches of its slowest rank; with several stages on
    # each rank in that fraction of it.
    filling = (step.pipeline_size - 1) * step.pipeline_size / len(step.layers)
    return 1.0 - computed / (slowest * (step.micro_batches + filling))


def describe_times(step: PipelineStep, times: Sequence[StageTimes]) -> str:
    """Return a line about what each stage took for a micro-batch, forward and backward, and about a better split if
    there is one."""
    # The head is known only by what the last stage takes longer than its layers would; below 0 is noise.
    *others, last = seconds = [each.both for each in times]
    layer = sum(others) / sum(step.layers[:-1])
    head = max(last - layer * step.layers[-1], 0.0)
    line = (
        f"stages take {' + '.join(f'{each:.3g}' for each in seconds)} s a micro-batch: with {step.micro_batches} of "
        f"them in a step a process waits {bubble(step, times):.0%} of it"
    )
    better = balanced(sum(step.layers), layer, head, len(step.layers))
    costs = [layer * count + head * (stage == len(step.layers) - 1) for stage, count in enumerate(better)]
    evenest = slowest_rank(costs, step.pipeline_size)
    if better != step.layers and evenest < WORTH_SAYING * slowest_rank(seconds, step.pipeline_size):
        line += f"; train.pipeline_layers=[{','.join(map(str, better))}] would be more even"
    return line
