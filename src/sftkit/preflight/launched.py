"""Refuse what the engine of a recipe cannot do on the processes of a launch, or with a model of this config, before
anything is loaded. No torch.

What the config leaves to the defaults of transformers, and a model whose config is not there yet, is left to the
engines, which ask the same rules (config.launch_rules).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from sftkit.config.launch_rules import (
    graph_mesh_problems,
    no_experts,
    passes_off_gpu,
    split_problems,
    unshared_experts,
)
from sftkit.config.rule import Get, OfLaunch, Problem, Rule
from sftkit.config.schema import ModelConfig
from sftkit.config.topology import Topology
from sftkit.models.size import GATED, fields_of
from sftkit.preflight.inputs import input_rules
from sftkit.runtime.launcher import may_have_gpu


def start_rules(stage: str) -> list[Rule | OfLaunch]:
    """Return rules for a script that trains a stage: for its inputs, and for the processes that have been started."""
    return [*input_rules(stage), *launch_rules(here=True)]


def launch_rules(*, here: bool = False) -> list[OfLaunch]:
    """Return rules for the processes of a launch.

    Args:
        here: they are on this machine, whose GPU counts where the launcher names no device.
    """
    return [OfLaunch(_pipeline), OfLaunch(partial(_graph, here=here))]


def _pipeline(get: Get, topology: Topology) -> Iterator[Problem]:
    if get("train.engine") != "pipeline" or topology.stages == 1:
        return
    fields = _text_config(get)
    # A model with an encoder is refused for more than its stages, when it is loaded.
    if "model_type" not in fields or fields.get("is_encoder_decoder") or "encoder" in fields:
        return
    layers = fields.get("num_hidden_layers")
    yield from split_problems(
        get("train.pipeline_schedule"),
        get("train.pipeline_layers"),
        topology.stages,
        fields["model_type"],
        layers if isinstance(layers, int) else None,
    )


def _graph(get: Get, topology: Topology, *, here: bool) -> Iterator[Problem]:
    if get("train.engine") != "graph":
        return
    topology = replace(topology, on_cpu=topology.on_cpu or (here and not may_have_gpu()))
    if topology.on_cpu:
        yield from passes_off_gpu(get("graph.passes"), get("attention.backend"), "cpu")
    yield from graph_mesh_problems(topology)
    if get("graph.token_dispatcher") != "alltoall":
        return
    model_type = _text_config(get).get("model_type")
    yield from no_experts(model_type) if model_type in GATED else unshared_experts(topology)


def _text_config(get: Get) -> Mapping[str, Any]:
    """Return the fields of the model's config, those of its text part on top; none where they cannot be read."""
    path, revision, scratch = (get(f"model.{name}") for name in ("path", "revision", "scratch"))
    fields = fields_of(ModelConfig(path=path, revision=revision, scratch=scratch)) or {}
    inner = fields.get("text_config")
    return {**fields, **inner} if isinstance(inner, dict) else fields
