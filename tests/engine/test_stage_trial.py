"""How the layers of a pipeline are spread by what they take here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import cpu_runtime, make_examples, make_layout_of, tiny, tiny_llama
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config

from sftkit.config.schema import CompileConfig, Config, DataConfig, LossConfig, ModelConfig, RunConfig, TrainConfig
from sftkit.config.topology import Topology
from sftkit.engine import stage_times
from sftkit.engine.engine import Training
from sftkit.objectives.next_token import NextToken
from sftkit.parallel.stages import layers_of_stages

CONFIG = Config(
    run=RunConfig(dir="unused"),
    model=ModelConfig(path="unused"),
    data=DataConfig(train=()),
    train=TrainConfig(max_steps=1, engine="pipeline"),
    compile=CompileConfig(enabled=False),
)


def measured(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel | None = None) -> tuple[int, ...]:
    """Of two stages, in one process that stands for both; a model of 12 layers unless one is given."""
    rt = cpu_runtime()
    rt.topology = replace(Topology(), stages=2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    layout = make_layout_of("packed", make_examples([30, 4, 25]).lengths)
    return stage_times.measured_layers(
        CONFIG.compile,
        CONFIG.train,
        Training(model or tiny_llama(layers=12), NextToken(LossConfig()), layout),
        "reference",
        rt,
    )


def test_what_was_timed_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [3.0, 1.0, 5.0]  # embedding 2, layer 1, head 4
    monkeypatch.setattr(stage_times, "_times", lambda *_, **__: times)
    assert measured(monkeypatch) == (7, 5)


def test_layers_are_spread_by_parameters_where_nothing_can_be_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> list[float]:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(stage_times, "_times", fails)
    assert measured(monkeypatch) == layers_of_stages(tiny_llama(layers=12), CONFIG.train, 2)


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])  # the config of the latter lists a kind for each layer
def test_a_layer_the_embedding_and_the_head_are_timed_and_nothing_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, kind: type[LlamaConfig | Qwen3Config]
) -> None:
    seen: list[list[float]] = []
    timed = stage_times._times
    monkeypatch.setattr(stage_times, "_times", lambda *args, **_: seen.append(timed(*args)) or seen[-1])  # type: ignore[func-returns-value]
    states: list[torch.Tensor] = []
    made = stage_times.layers_of_stages
    monkeypatch.setattr(
        stage_times, "layers_of_stages", lambda *args: states.append(torch.get_rng_state()) or made(*args)
    )  # type: ignore[func-returns-value]
    assert sum(measured(monkeypatch, tiny(kind))) == 2  # a model of fewer layers than are timed
    assert torch.equal(torch.get_rng_state(), states[0])
    assert len(seen[0]) == 3
    assert min(seen[0]) > 0.0
