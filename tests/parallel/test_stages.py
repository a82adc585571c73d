"""How layers are spread over stages, what that takes, and what cannot be spread."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import make_batch, make_examples, make_layout_of, tiny, tiny_llama, tiny_qwen3_with_windows
from transformers import GraniteConfig

from sftkit.config.schema import LossConfig, TrainConfig
from sftkit.config.topology import HEAD_SHARE, Topology, balanced
from sftkit.errors import ConfigError
from sftkit.memory.estimate import EstimateInputs, estimate, held_bytes, pipeline_estimates, pipeline_rank_shape
from sftkit.memory.plan import shape_of
from sftkit.objectives.objective import ModelWithLoss, NextToken
from sftkit.parallel.pipeline import StageModule, layers_of_stages


@pytest.mark.parametrize(
    ("count", "head", "stages", "layers"),
    [
        (8, 0.0, 2, (4, 4)),
        (28, 6.18, 2, (16, 12)),  # Qwen3 1.7B, as it was timed on H200
        (28, 6.18, 4, (8, 8, 8, 4)),
        (36, 3.23, 2, (19, 17)),  # 8B
        (36, 3.23, 4, (10, 10, 9, 7)),
        (4, 100.0, 4, (1, 1, 1, 1)),
    ],
)
def test_the_slowest_stage_takes_least(count: int, head: float, stages: int, layers: tuple[int, ...]) -> None:
    found = balanced(count, 1.0, head, stages)
    assert found == layers
    assert sum(found) == count

    def slowest(split: tuple[int, ...]) -> float:
        return max(*split[:-1], split[-1] + HEAD_SHARE * head)

    for i in range(stages):
        for j in range(stages):
            if i != j and found[i] > 1:
                other = tuple(n - (k == i) + (k == j) for k, n in enumerate(found))
                assert slowest(other) >= slowest(found)


def pipeline(**train: Any) -> TrainConfig:
    return TrainConfig(engine="pipeline", **train)


def test_layers_are_the_recipes_or_follow_from_the_work() -> None:
    deep = tiny_llama(layers=6)
    assert sum(layers_of_stages(deep, pipeline(), 2)) == 6
    assert layers_of_stages(deep, pipeline(pipeline_layers=(4, 2)), 2) == (4, 2)
    assert len(layers_of_stages(deep, pipeline(pipeline_schedule="interleaved"), 2)) == 4
    three_each = pipeline(pipeline_schedule="interleaved", pipeline_layers=(1, 1, 1, 1, 1, 1))
    assert layers_of_stages(deep, three_each, 2) == (1,) * 6


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (pipeline(pipeline_layers=(3, 2)), r"pipeline_layers=\[3, 2\]: must be 2 numbers that add up to the 6 layers"),
        (pipeline(pipeline_layers=(2, 2, 2)), r"must be 2 numbers"),
        (
            pipeline(pipeline_layers=(2, 2, 2), pipeline_schedule="interleaved"),
            r"must be 4 \(or another multiple of 2\) numbers",
        ),
        (pipeline(pipeline_layers=(3, 3), pipeline_schedule="interleaved"), r"\[3, 3\]: must be 4 \(or another"),
    ],
)
def test_layers_that_are_not_the_models_are_refused(train: TrainConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layers_of_stages(tiny_llama(layers=6), train, 2)


def test_models_that_have_no_such_stages_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"4 stages for the 2 layers of the model: set train\.pipeline_stages to 2 or less$"
    ):
        layers_of_stages(tiny_llama(), pipeline(), 4)
    with pytest.raises(
        ConfigError, match=r"4 stages for the 2 layers of the model: take train\.pipeline_schedule=1f1b"
    ):
        layers_of_stages(tiny_llama(), pipeline(pipeline_schedule="interleaved"), 2)
    with pytest.raises(ConfigError, match=r"2 stages for the 1 layers of the model: take train\.engine=blocks$"):
        layers_of_stages(tiny_llama(layers=1), pipeline(), 2)
    with pytest.raises(ConfigError, match="some layers of this model have a sliding window and some have none"):
        layers_of_stages(tiny_qwen3_with_windows(), pipeline(), 2)


def setup(**changes: Any) -> EstimateInputs:
    lengths = make_examples([30, 4, 25, 8, 31, 3, 17, 29] * 8).lengths
    layout = replace(make_layout_of("packed", lengths), global_batch_size=16, micro_batch_size=2)
    shape = shape_of(tiny_llama(layers=6))
    assert shape is not None
    return replace(
        EstimateInputs(
            shape, layout, "adamw", "bf16", 64, 1.0, True, False, topology=Topology(stages=2), stage_layers=(4, 2)
        ),
        **changes,
    )


def test_the_memory_of_a_step_is_that_of_the_process_that_takes_most() -> None:
    s = setup()
    first, last = pipeline_estimates(s)
    assert estimate(s) == max(first, last, key=lambda place: place.total)
    shapes = [pipeline_rank_shape(s, place) for place in (0, 1)]
    assert sum(shape.parameters for shape in shapes) == s.shape.parameters
    assert [shape.blocks for shape in shapes] == [4, 2]
    whole = replace(s, topology=Topology())
    assert max(first.optimizer, last.optimizer) < estimate(whole).optimizer
    assert held_bytes(s) < held_bytes(whole)


def test_gpipe_holds_the_activations_of_all_micro_batches() -> None:
    large = replace(setup().shape, hidden=512, inner=2048, query=512, key=512)
    one = {name: estimate(setup(shape=large, schedule=name)).activations for name in ("1f1b", "gpipe")}
    assert one["gpipe"] > 2 * one["1f1b"]


@pytest.mark.parametrize("scales", [{}, {"embedding_multiplier": 3.0, "logits_scaling": 6.0}], ids=["plain", "Granite"])
def test_the_stages_one_after_the_other_have_the_loss_of_the_whole_model(scales: dict[str, float]) -> None:
    model = ModelWithLoss(tiny(GraniteConfig, **scales), "reference", NextToken(LossConfig()))
    batch = make_batch(make_examples([9, 5]), ((0, 1),), 16)
    whole = model(batch).loss
    found = torch.empty(0)
    for number in range(2):
        stage = StageModule(model, (1, 1), number)
        stage.begin([batch], 1.0)
        found = stage(found)
    assert torch.equal(found, whole[None])
