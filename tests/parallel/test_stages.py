"""How layers are spread over stages, what that takes, and what cannot be spread."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from helpers import make_examples, make_layout_of, tiny, tiny_llama, tiny_qwen3_with_windows
from transformers import LlamaConfig

from sftkit.config.schema import TrainConfig
from sftkit.config.topology import (
    PartTimes,
    PipelineStep,
    StageTimes,
    Topology,
    balanced,
    bubble,
    fastest_split,
    step_seconds,
)
from sftkit.errors import ConfigError
from sftkit.launch.layouts import layers_on_paper
from sftkit.memory.estimate import EstimateInputs, estimate, held_bytes, pipeline_estimates, pipeline_rank_shape
from sftkit.memory.plan import shape_of
from sftkit.parallel.stages import describe_times, layers_of_stages


@pytest.mark.parametrize(
    ("count", "head", "stages", "layers"),
    [
        (8, 0.0, 2, (4, 4)),
        (28, 9.9, 2, (19, 9)),  # Qwen3 0.6B: the head is worth ten layers
        (28, 9.9, 4, (9, 9, 9, 1)),
        (32, 2.4, 4, (9, 9, 8, 6)),
        (4, 100.0, 4, (1, 1, 1, 1)),
    ],
)
def test_the_slowest_stage_takes_least(count: int, head: float, stages: int, layers: tuple[int, ...]) -> None:
    found = balanced(count, 1.0, head, stages)
    assert found == layers
    assert sum(found) == count

    def slowest(split: tuple[int, ...]) -> float:
        return max(*split[:-1], split[-1] + head)

    for i in range(stages):
        for j in range(stages):
            if i != j and found[i] > 1:
                other = tuple(n - (k == i) + (k == j) for k, n in enumerate(found))
                assert slowest(other) >= slowest(found)


def test_the_embedding_is_work_of_the_first_stage() -> None:
    assert balanced(12, 1.0, 4.0, 2, embedding=2.0) == (7, 5)
    assert balanced(12, 1.0, 0.0, 3, embedding=3.0) == (2, 5, 5)


def step(layers: tuple[int, ...], micro_batches: int = 8, schedule: str = "1f1b") -> PipelineStep:
    return PipelineStep(layers, schedule, micro_batches, pipeline_size=len(layers) if schedule == "gpipe" else 2)


def times(*seconds: float) -> list[StageTimes]:
    """What stages take, a third of it forward."""
    return [StageTimes(each / 3, 2 * each / 3) for each in seconds]


def test_measured_seconds_name_a_more_even_split() -> None:
    line = describe_times(step((14, 14)), times(0.14, 0.24))
    assert line.startswith(
        "stages take 0.14 + 0.24 s a micro-batch: with 8 of them in a step a process waits 26% of it"
    )
    assert line.endswith("; train.pipeline_layers=[19,9] would be more even")
    even, by_chance = times(0.19, 0.19), times(0.03, 0.05, 0.02, 0.1)
    assert "more even" not in describe_times(step((19, 9)), even)
    assert "more even" not in describe_times(step((1, 1, 1, 1), micro_batches=1), by_chance)
    assert "waits 11% of it" in describe_times(step((19, 9)), even)  # 1 of 9
    assert bubble(step((19, 9)), even) == pytest.approx(1 / 9)
    # interleaved: half of it
    assert "waits 6% of it" in describe_times(step((7, 7, 7, 7), schedule="interleaved"), times(0.1, 0.1, 0.1, 0.1))


def test_stages_that_take_equally_long_wait_alike_with_gpipe_and_1f1b() -> None:
    even = times(0.3, 0.3)
    assert bubble(step((5, 3), schedule="gpipe"), even) == pytest.approx(bubble(step((5, 3)), even)) == 1 / 9


@pytest.mark.parametrize("micro_batches", [1, 2, 8])
def test_gpipe_waits_for_the_slowest_stage_of_each_phase(micro_batches: int) -> None:
    found = [StageTimes(1.0, 2.0), StageTimes(1.9, 1.1), StageTimes(0.5, 0.7)]
    # One micro-batch after the other through the stages, as late as its own stage before it and the one before on it are.
    ends = [0.0] * len(found)
    for _ in range(micro_batches):
        for stage, each in enumerate(found):
            ends[stage] = max(ends[stage], ends[stage - 1] if stage else 0.0) + each.forward
    for _ in range(micro_batches):
        for stage in reversed(range(len(found))):
            given = ends[stage + 1] if stage + 1 < len(found) else 0.0
            ends[stage] = max(ends[stage], given) + found[stage].backward
    waits = 1 - micro_batches * sum(each.both for each in found) / (len(found) * ends[0])
    assert bubble(PipelineStep((1, 1, 1), "gpipe", micro_batches, 3), found) == pytest.approx(waits)


@pytest.mark.parametrize("micro_batches", [2, 8, 64])
def test_1f1b_fills_and_drains_as_fast_as_the_stages_that_it_passes(micro_batches: int) -> None:
    """And not as the slowest of them; what the terminal said was that it waits longer than gpipe."""
    fast, slow = times(0.0061, 0.0107)
    # The second stage, which is slower, has something to do from the first hidden states to its last gradients.
    ends = fast.forward + micro_batches * slow.both + fast.backward
    found = bubble(step((1, 1), micro_batches), [fast, slow])
    assert found == pytest.approx(1 - micro_batches * (fast.both + slow.both) / (2 * ends))
    assert found < bubble(step((1, 1), micro_batches, "gpipe"), [fast, slow]) + 1e-9


@pytest.mark.parametrize(
    ("ranks", "micro_batches"), [(2, 1), (2, 5), (2, 7), (4, 2), (4, 9), (4, 10), (4, 11), (64, 4097)]
)
def test_any_number_of_micro_batches_fills_even_stages_once(ranks: int, micro_batches: int) -> None:
    even = [StageTimes(1.0, 2.0)] * ranks
    assert step_seconds(PipelineStep((1,) * ranks, "1f1b", micro_batches, ranks), even) == 3.0 * (
        micro_batches + ranks - 1
    )


def test_gpipe_is_split_between_the_evenest_forward_and_the_evenest_backward_passes() -> None:
    parts = PartTimes(StageTimes(1.0, 2.0), StageTimes(12.0, 0.0))

    def seconds(layers: tuple[int, ...]) -> float:
        return step_seconds(step(layers, schedule="gpipe"), parts.of_stages(layers))

    assert fastest_split(step((14, 14)), parts) == (16, 12), "1f1b: both passes together"
    found = fastest_split(step((14, 14), schedule="gpipe"), parts)
    assert found == (14, 14)
    assert seconds(found) == min(seconds((count, 28 - count)) for count in range(1, 28)) < seconds((16, 12))
    line = describe_times(step((20, 8), schedule="gpipe"), parts.of_stages((20, 8)))
    assert line.endswith("; train.pipeline_layers=[14,14] would be more even")
    assert "more even" not in describe_times(step((14, 14), schedule="gpipe"), parts.of_stages((14, 14)))


def test_what_nothing_was_timed_of_is_split_by_schedule_as_on_paper() -> None:
    model = tiny(LlamaConfig, num_hidden_layers=12, vocab_size=1024)
    shape = shape_of(model)
    assert shape is not None
    found = {name: layers_of_stages(model, pipeline(pipeline_schedule=name), 2) for name in ("1f1b", "gpipe")}
    assert found == {name: layers_on_paper(shape, pipeline(pipeline_schedule=name), 2) for name in found}
    assert found["gpipe"][0] < found["1f1b"][0], "the head has no backward pass of its own"


@pytest.mark.parametrize("head", [StageTimes(3.0, 0.0), StageTimes(9.0, 1.0), StageTimes(1.0, 4.0)])
@pytest.mark.parametrize("embedding", [StageTimes(), StageTimes(0.2, 1.5)])
def test_no_split_of_a_gpipe_over_three_stages_is_much_faster(head: StageTimes, embedding: StageTimes) -> None:
    parts, of = PartTimes(StageTimes(1.0, 2.0), head, embedding), partial(step, schedule="gpipe")
    every = [(i, j, 16 - i - j) for i in range(1, 15) for j in range(1, 16 - i)]
    seconds = {layers: step_seconds(of(layers), parts.of_stages(layers)) for layers in every}
    assert seconds[fastest_split(of((6, 5, 5)), parts)] <= 1.02 * min(seconds.values())


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
