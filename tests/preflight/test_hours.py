"""How long a run takes on a named card: the committed results, and the estimate made of them."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ROOT
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from sftkit.config.schema import Config, DataConfig, ModelConfig, RunConfig, TrainConfig
from sftkit.config.topology import Topology
from sftkit.data.batches.pack import Layout
from sftkit.errors import texts
from sftkit.preflight.hours import hours_facts, hours_text

SPEEDS: Any = texts("preflight/speeds.yaml")
OTHER_RUNS = ("train.fp8", "attention.backend", "train.freeze", "compile.options")
"""Settings of runs in the same files that are not the usual ones."""


def model(**sizes: int) -> PreTrainedModel:
    shape = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16}
    config = AutoConfig.for_model("qwen3", vocab_size=151_936, head_dim=128, num_key_value_heads=8, **(shape | sizes))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def facts(card: str, world_size: int = 1, rows: int = 16_384, **sizes: int) -> dict[str, Any]:
    cfg = Config(
        run=RunConfig(dir="x"), model=ModelConfig(path="x"), data=DataConfig(train=()), train=TrainConfig(max_steps=1)
    )
    layout = Layout("packed", (rows,), 8, 1, world_size, 2048, 2048)
    topology = Topology(replicas=world_size)
    counts = {"tokens": 10**9, "targets": 10**9}
    return hours_facts(cfg, model(**sizes), layout, np.full(100, 400), **counts, card=card, topology=topology)


@pytest.mark.parametrize(("card", "kind"), [(card, kind) for card in SPEEDS["mfu"] for kind in SPEEDS["mfu"][card]])
def test_the_speeds_are_those_of_the_committed_results(card: str, kind: str) -> None:
    found: dict[float, list[float]] = {}
    limits = list(SPEEDS["mfu"][card][kind])
    for file in SPEEDS["results"][card][kind]:
        results = json.loads((ROOT / file).read_text())
        assert card in results["machine"]["device"]
        for run in results["runs"]:
            settings = run["set"]
            usual = run["by"] == "sftkit" and run.get("compiled") and not settings.keys() & {*OTHER_RUNS}
            is_adapter = any(key.startswith("adapter.") for key in settings) or "LoRA" in run["name"]
            if usual and run.get("world_size", 1) == 1 and run.get("mfu") and (is_adapter or kind == "full"):
                limit = next(limit for limit in limits if run["parameters"] < limit)
                found.setdefault(limit, []).append(run["mfu"]["median"])
    ends = {limit: [math.floor(100 * min(v)) / 100, math.ceil(100 * max(v)) / 100] for limit, v in found.items()}
    assert ends == SPEEDS["mfu"][card][kind]


def test_several_gpus_keep_the_measured_share_of_the_speed_of_one() -> None:
    files = [
        ROOT / "benchmarks" / "h200_multi" / "results" / f"{name}.json" for name in ("plan", "again_0.6b", "again_8b")
    ]
    runs = [run for file in files for run in json.loads(file.read_text())["runs"]]
    kept = [run["scaling"] for run in runs if run.get("scaling") and run["topology"] in ("ddp", "hsdp", "fsdp2")]
    assert SPEEDS["several"] == [math.floor(100 * min(kept)) / 100, math.ceil(100 * max(kept)) / 100]


def test_a_measured_run_lies_within_its_estimate() -> None:
    """1.7B on one H200, 49.7k tokens/s in benchmarks/h200_step: 10^9 tokens take 5.6 h."""
    found = facts("NVIDIA H200")
    assert found["low"] <= 1e9 / 49_700 / 3600 <= found["high"]
    assert found["high"] < 1.2 * found["low"]
    four = facts("NVIDIA H200", world_size=4)
    assert found["low"] / 4 < four["low"] < four["high"] < found["high"] / 4 / 0.9
    text = hours_text(found, "")
    assert "on one NVIDIA H200, an estimate" in text
    assert "as committed benchmarks measured" in text


def test_a_card_without_results_and_what_is_slower_than_them_are_said() -> None:
    text = hours_text(facts("A100"), "")
    assert "as measured on H100, since no result of this card is committed" in text
    short = facts("H200", rows=1024)
    assert short["high"] is None
    said = hours_text(short, "")
    assert said.startswith("at least ")
    assert "on one H200 (a micro-batch of 1,024 positions does not fill the GPU), an estimate" in said
    small = facts("H200", hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    assert "on one H200 (models of fewer than 300 million parameters wait for the host)" in hours_text(small, "")
    assert hours_text(small | {"low": 1e-6}, "").startswith("at least 1.0 s on one H200")


def test_what_no_result_is_like_is_not_estimated() -> None:
    assert hours_text(facts("Riva 128"), "") == "not estimated on Riva 128: the peak of Riva 128 is unknown"
    assert hours_text(None, "--gpu H100") == "not estimated: name the GPU, --gpu H100"
