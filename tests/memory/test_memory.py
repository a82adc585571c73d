"""How memory is planned, estimated against what was measured on an H200, and explained when it runs out."""

from __future__ import annotations

import logging
import re
from contextlib import AbstractContextManager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from labs import fits
from sftkit.config.commands import install
from sftkit.config.schema import (
    AdapterConfig,
    AttentionConfig,
    CompileConfig,
    Config,
    DataConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    SourceConfig,
    TrainConfig,
)
from sftkit.config.tables import OPTIMIZERS
from sftkit.config.topology import Topology
from sftkit.data.batches.pack import Layout
from sftkit.errors import ConfigError
from sftkit.memory import plan as memory
from sftkit.memory import remedies
from sftkit.memory.estimate import GIB, EstimateInputs, estimate, held_bytes, kept_elements
from sftkit.memory.plan import MemoryPlan, against_measured, make_plan, oom_advice, shape_of
from sftkit.models.adapters import Adapters, add_adapters
from sftkit.optim.protocol import build_optimizer

H200 = 140 * GIB
QWEN3 = {  # hidden, heads, inner, blocks; all: 8 key heads of 128, vocabulary 151,936, embedding tied to the head
    "0.6B": (1024, 16, 3072, 28),
    "1.7B": (2048, 16, 6144, 28),
    "4B": (2560, 32, 9728, 36),
    "8B": (4096, 32, 12288, 36),
}


def qwen3(name: str, **changes: Any) -> PreTrainedModel:
    hidden, heads, inner, blocks = QWEN3[name]
    return on_meta(
        "qwen3",
        hidden_size=hidden,
        num_attention_heads=heads,
        intermediate_size=inner,
        num_hidden_layers=blocks,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        tie_word_embeddings=True,
        **changes,
    )


def on_meta(model_type: str, **sizes: Any) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes))


def packed(row_length: int = 16_384, rows: int = 1, accumulation: int = 1, world_size: int = 1) -> Layout:
    total = rows * accumulation * world_size
    return Layout("packed", (row_length,), total, rows, world_size, 2048, max_doc_length=2048)


def runtime(precision: str = "bf16") -> Any:
    """A stand-in for Runtime: a CPU, alone."""
    return SimpleNamespace(
        precision=precision, device=torch.device("cpu"), any_rank=lambda flag: flag, print=print, topology=Topology()
    )


def recipe(**parts: Any) -> Config:
    data = DataConfig(train=(SourceConfig(path="x"),), max_length=2048)
    return Config(run=RunConfig(dir="x"), **{"model": ModelConfig(path="x"), "data": data, **parts})


def setup(name: str, budget: float = 1.0, compiled: bool = True, **changes: Any) -> EstimateInputs:
    shape = shape_of(qwen3(name))
    assert shape is not None
    return replace(
        EstimateInputs(shape, packed(), "adamw_sr", "bf16", 4096, budget, compiled, checkpointing=False), **changes
    )


# KB that a compiled block of the model keeps per token at each activation memory budget, measured on its graph
KEPT = {
    "0.6B": {1.0: 45.7, 0.9: 35.5, 0.5: 23.0, 0.3: 14.8, 0.0: 2.6, "eager": 72.4},
    "1.7B": {1.0: 72.4, 0.9: 51.9, 0.75: 51.9, 0.5: 37.4, 0.3: 23.0, 0.0: 4.6, "eager": 113.3},
    "8B": {1.0: 138.0, 0.9: 97.1, 0.75: 97.1, 0.5: 70.1, 0.3: 45.6, 0.0: 8.7, "eager": 215.8},
}


@pytest.mark.parametrize("name", KEPT)
def test_activations_kept_by_a_block_are_those_measured_or_up_to_9_percent_more(name: str) -> None:
    for budget, measured in KEPT[name].items():
        s = setup(name, compiled=False) if budget == "eager" else setup(name, float(budget))
        assert 0.98 <= 2 * kept_elements(s) / 1000 / measured <= 1.09, budget


def test_where_the_partitioner_jumps_far_below_its_budget_the_estimate_is_the_budget() -> None:
    assert 2 * kept_elements(setup("0.6B", 0.75)) / 1000 == pytest.approx(34.8, abs=0.2)  # measured: 25.2


# GiB at the peak of whole steps of 16,384 tokens on an H200, bf16 weights and states, with FlashAttention-2 and -4
PEAKS = {"0.6B": (27.5, 25.8), "1.7B": (45.9, 44.2), "4B": (93.9, 87.2)}


@pytest.mark.parametrize("name", PEAKS)
def test_estimated_peaks_are_within_15_percent_of_measured_steps(name: str) -> None:
    estimated = estimate(setup(name)).total / GIB
    for measured in PEAKS[name]:
        assert estimated == pytest.approx(measured, rel=0.15)
    assert estimated == pytest.approx(PEAKS[name][1], rel=0.03)  # the kernel that keeps what the formula counts


@pytest.mark.parametrize(("model", "method"), fits.MEASURED)
def test_estimated_peaks_of_adapters_are_within_4_percent_of_measured_steps(model: str, method: str) -> None:
    """One row of 16,384 tokens, a rank of 16; the context is no tensor."""
    estimated = estimate(next(fits.setups(model, method, 16_384, "speed"))).tensors / GIB
    assert estimated == pytest.approx(fits.measured(model, method), rel=0.04)


@pytest.mark.parametrize(
    ("model", "method", "length", "budget", "measured", "most"),
    [
        ("Qwen3 8B", "LoRA", 16_384, 0.1, 28.6, 1.1),
        ("Qwen3 32B", "LoRA", 8192, 0.1, 77.2, 1.1),
        ("Qwen3 32B", "LoRA", 8192, 0.3, 97.4, 1.1),
        # The partitioner kept less than half of what the budget allows, for no known reason.
        ("Llama 3.1 70B", "QLoRA", 8192, 0.1, 55.3, 1.3),
    ],
)
def test_estimated_peaks_of_adapters_with_recomputation_are_upper_bounds(
    model: str, method: str, length: int, budget: float, measured: float, most: float
) -> None:
    """GiB of tensors on an H200 (benchmarks/h200_adapters), and the largest factor of the estimate over them."""
    setup = replace(next(fits.setups(model, method, length, "low")), budget=budget)
    assert measured <= estimate(setup).tensors / GIB <= most * measured


@pytest.mark.parametrize(("model", "reserved"), [("Qwen3 0.6B", 19.2), ("Qwen3 1.7B", 30.9)])
def test_replayed_graphs_hold_more_as_was_measured(model: str, reserved: float) -> None:
    setup = replace(next(fits.setups(model, "LoRA", 16_384, "speed")), cuda_graphs=True)
    assert estimate(setup).tensors / GIB == pytest.approx(reserved, rel=0.02)


def test_a_recipe_with_replayed_graphs_is_planned_with_their_pool() -> None:
    cfg = recipe()
    graphs = replace(cfg, compile=replace(cfg.compile, mode="reduce-overhead"))
    plain, replayed = (make_plan(one, qwen3("0.6B"), packed(), runtime(), total_bytes=H200) for one in (cfg, graphs))
    assert plain.estimate is not None
    assert replayed.estimate is not None
    pool = 2 * 2 * 1024 * 28 * 16_384  # input and gradient of each block, bf16
    assert replayed.estimate.activations - plain.estimate.activations == pool


def test_an_estimate_is_the_sum_of_its_parts_and_they_are_what_they_say() -> None:
    s = setup("0.6B", layout=packed(accumulation=3))
    found = estimate(s)
    n = s.shape.parameters
    assert n == 596_049_920
    assert (found.weights, found.optimizer) == (2 * n, 4 * n)
    assert (found.gradient_sums, found.gradients) == (4 * n, 0)
    assert found.activations == 2 * 16_384 * 28 * kept_elements(s)
    parts = (found.weights, found.optimizer, found.gradients, found.gradient_sums, found.activations, found.transient)
    assert found.total == sum(parts) + found.context == found.tensors + found.context


def test_gradients_count_where_they_stand_beside_activations() -> None:
    s, n = setup("0.6B"), setup("0.6B").shape.parameters

    def beside(layout: Layout, precision: str = "bf16") -> tuple[float, float]:
        found = estimate(replace(s, layout=layout, precision=precision, optimizer="adamw"))
        return found.gradients / n, found.gradient_sums / n

    assert beside(packed()) == (0, 0)
    assert beside(packed(accumulation=2)) == (2, 0)
    assert beside(packed(accumulation=4)) == (0, 4)
    assert beside(packed(accumulation=4), "fp32") == (4, 0)
    assert beside(packed(world_size=2)) == (2, 0)
    assert beside(packed(world_size=2, accumulation=4)) == (2, 4)


def test_with_few_tokens_the_peak_is_at_the_end_when_all_gradients_exist() -> None:
    s = setup("8B", layout=packed(2048))
    found = estimate(s)
    assert found.activations == 0
    assert found.gradients == 2 * s.shape.parameters


def test_muon_states_are_counted_by_kind_of_parameter() -> None:
    s = setup("0.6B", optimizer="muon")
    others = s.shape.parameters - s.shape.matrices
    assert estimate(s).optimizer == 8 * s.shape.matrices + 12 * others
    assert s.shape.vocab * s.shape.hidden < others < 1.001 * s.shape.vocab * s.shape.hidden


@pytest.mark.parametrize(
    ("memory_preset", "kept_share", "name"), [("speed", 0.9, "adamw"), ("balanced", 0.5, "adamw"), ("low", 0.1, None)]
)
def test_presets_set_budget_and_optimizer(
    memory_preset: str, kept_share: float, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = recipe(train=TrainConfig(memory=memory_preset, max_steps=1))  # type: ignore[arg-type]
    for installed in (True, False):
        monkeypatch.setattr(memory, "find_spec", lambda name, there=installed: there or None)
        plan = make_plan(cfg, qwen3("0.6B"), packed(), runtime(), total_bytes=H200)
        assert plan.activation_memory_budget == kept_share
        assert plan.optim.name == (name or ("adamw8bit" if installed else "adamw_sr"))


def llama_70b(adapter: AdapterConfig | None) -> PreTrainedModel:
    sizes = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 28_672}
    model = on_meta("llama", hidden_size=8192, num_hidden_layers=80, vocab_size=128_256, **sizes)
    assert adapter is not None
    add_adapters(model, Adapters(adapter, 0, ModelConfig(path="x"), ""))
    return model


def test_adapters_on_weights_that_are_too_large_in_bf16_are_offered_nf4() -> None:
    cfg = recipe(adapter=AdapterConfig(rank=16), train=TrainConfig(memory="low", max_steps=1))
    model = llama_70b(cfg.adapter)
    with pytest.raises(ConfigError, match=r"any row length. This setting lets it fit, .*: adapter.base=nf4\."):
        make_plan(cfg, model, packed(8192), runtime(), total_bytes=80 * GIB)
    plan = make_plan(cfg, model, packed(8192), runtime(), total_bytes=H200)
    (way,) = [w for w in remedies.remedies(plan, packed(8192), cfg.data, cfg.compile, cfg.optim) if "nf4" in w.text]
    assert way.saved_bytes == pytest.approx((165.5 - 71.3) * GIB, rel=0.01)
    assert way.on_resume == ()


@pytest.mark.parametrize(
    ("preset", "row_length", "peak", "fits"),
    [("low", 8192, 71.3, True), ("low", 16_384, 101.9, True), ("balanced", 4096, 89.3, True),
     ("balanced", 8192, 137.9, False)],
)  # fmt: skip
def test_70b_in_nf4_fits_one_h200_as_far_as_it_is_recomputed(
    preset: Any, row_length: int, peak: float, fits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Llama 3.3 70B with adapters of rank 16. In bf16 the weights alone take 131.8 GiB."""
    cfg = recipe(adapter=AdapterConfig(rank=16, base="nf4"), train=TrainConfig(memory=preset, max_steps=1))
    model = llama_70b(cfg.adapter)
    plan = make_plan(cfg, model, packed(row_length), runtime(), total_bytes=H200)
    assert plan.estimate is not None
    assert plan.estimate.weights == pytest.approx(37.2 * GIB, rel=0.002)
    assert plan.estimate.total == pytest.approx(peak * GIB, rel=0.01)
    assert ("may run out of memory" in caplog.text) is not fits
    assert plan.optim.name == "adamw"
    ways = remedies.remedies(plan, packed(row_length), cfg.data, cfg.compile, cfg.optim)
    assert ways
    assert not any("optim.name" in way.text for way in ways), "other optimizers do not go with adapters"
    low = [way.text for way in ways if way.text.startswith("train.memory=")]
    assert not any("fsdp2" in way.text for way in ways), "matrices in NF4 are not sharded"
    saved = plan.estimate.total - estimate(replace(plan.setup, budget=0.1)).total  # type: ignore[type-var]
    assert low == [] if preset == "low" else low == [f"train.memory=low saves {saved / GIB:.1f} GiB"]


def test_a_pipeline_gets_no_optimizer_that_refuses_a_weight_of_two_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "find_spec", lambda _: True)
    rt = runtime()
    rt.topology = Topology(stages=2)
    cfg = recipe(train=TrainConfig(memory="low", max_steps=1, engine="pipeline"))
    plan = make_plan(cfg, qwen3("0.6B"), packed(), rt, total_bytes=H200)
    assert plan.optim.name == "adamw_sr"
    assert plan.setup is not None
    assert [option for option, _ in remedies.smaller_states(plan.setup)] == []
    wide = replace(plan.setup, optimizer="adamw")
    assert [option for option, _ in remedies.smaller_states(wide)] == ["optim.name=adamw_sr"]


def test_settings_that_are_named_win_over_the_preset() -> None:
    cfg = recipe(
        train=TrainConfig(memory="low", max_steps=1),
        optim=OptimConfig(name="adamw", lr=1.0),
        compile=CompileConfig(activation_memory_budget=0.7),
    )
    plan = make_plan(cfg, qwen3("0.6B"), packed(), runtime(), total_bytes=H200)
    assert (plan.optim, plan.activation_memory_budget) == (OptimConfig(name="adamw", lr=1.0), 0.7)


def test_auto_is_adamw_where_it_fits_else_stochastic_rounding_of_bf16_weights() -> None:
    model = qwen3("4B")
    needed = make_plan(recipe(), model, packed(), runtime()).estimate
    assert needed is not None

    def chosen(total_bytes: int | None, precision: str = "bf16") -> str:
        return make_plan(recipe(), model, packed(), runtime(precision), total_bytes=total_bytes).optim.name

    assert chosen(int(needed.total / 0.92) + 1) == "adamw"
    assert chosen(int(needed.total / 0.92) - GIB) == "adamw_sr"
    assert chosen(None) == "adamw"
    assert chosen(64 * GIB, "fp32") == "adamw"


def test_the_optimizer_is_one_that_fits_on_every_rank() -> None:
    rt = runtime()
    rt.any_rank = lambda flag: True
    assert make_plan(recipe(), qwen3("0.6B"), packed(), rt, total_bytes=H200).optim.name == "adamw_sr"


@pytest.mark.parametrize("compile", [CompileConfig(enabled=False), CompileConfig(backend="eager")])
def test_uncompiled_runs_save_memory_by_gradient_checkpointing(compile: CompileConfig) -> None:
    speed, balanced = qwen3("0.6B"), qwen3("0.6B")
    first = make_plan(recipe(compile=compile), speed, packed(), runtime(), total_bytes=H200)
    train = TrainConfig(memory="balanced", max_steps=1)
    second = make_plan(recipe(compile=compile, train=train), balanced, packed(), runtime(), total_bytes=H200)
    assert (speed.is_gradient_checkpointing, balanced.is_gradient_checkpointing) == (False, True)
    assert first.estimate is not None
    assert second.estimate is not None
    assert second.estimate.activations < first.estimate.activations / 20
    assert "gradient checkpointing" in second.line
    assert second.activation_memory_budget == 1.0


def test_compiled_runs_leave_gradient_checkpointing_alone() -> None:
    model = qwen3("0.6B")
    make_plan(recipe(train=TrainConfig(memory="low", max_steps=1)), model, packed(), runtime(), total_bytes=H200)
    assert not model.is_gradient_checkpointing


def test_an_uncompiled_model_without_gradient_checkpointing_is_refused() -> None:
    model = qwen3("0.6B")
    model.supports_gradient_checkpointing = False
    cfg = recipe(compile=CompileConfig(enabled=False), train=TrainConfig(memory="low", max_steps=1))
    with pytest.raises(ConfigError, match=r"train.memory=low: .* compile.enabled=true or train.memory=speed"):
        make_plan(cfg, model, packed(), runtime(), total_bytes=H200)


def test_the_line_names_preset_optimizer_and_the_parts_of_the_peak() -> None:
    plan = make_plan(recipe(optim=OptimConfig(name="adamw_sr")), qwen3("1.7B"), packed(), runtime(), total_bytes=H200)
    assert plan.line.startswith(
        "memory: speed, optimizer adamw_sr, 0.9 of the activations kept; estimated peak 35.1 GiB of 140.0 GiB"
    )
    assert "(weights 3.2, optimizer 6.4, activations 22.1, transient 2.7, context 0.7)" in plan.line
    assert "GiB" not in make_plan(recipe(), qwen3("0.6B"), packed(), runtime()).line


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4}),
        ("gemma2", {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32}),
        (
            "qwen3_moe",
            {"hidden_size": 64, "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}
            | {"num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 32},
        ),
        ("mamba", {"hidden_size": 64, "num_hidden_layers": 2}),
    ],
)
def test_every_architecture_gets_a_plan(model_type: str, sizes: dict[str, Any]) -> None:
    model = on_meta(model_type, vocab_size=128, **sizes)
    plan = make_plan(recipe(), model, packed(128), runtime(), total_bytes=H200)
    assert plan.optim.name == "adamw"
    if model_type == "mamba":  # no attention heads, so no sizes that the formula knows
        assert (plan.setup, plan.estimate) == (None, None)
        assert plan.line.endswith("peak unknown: the model's config lacks sizes")
        assert against_measured(plan, 3.0) == "memory: peak 3.0 GiB measured in the warm-up"
    else:
        assert plan.estimate is not None
        assert plan.estimate.weights == 2 * sum(p.numel() for p in model.parameters())


def test_sizes_come_from_the_fields_of_each_config() -> None:
    gpt2 = shape_of(on_meta("gpt2", n_embd=64, n_layer=2, n_head=4, vocab_size=128))
    assert gpt2 is not None
    assert (gpt2.inner, gpt2.query, gpt2.key, gpt2.head_dim) == (256, 64, 64, 16)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    moe = on_meta("qwen3_moe", vocab_size=128, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, **sizes)
    assert shape_of(moe) == replace(shape_of(moe) or gpt2, inner=64)


def test_what_cannot_fit_is_one_warning_with_the_settings_that_fit(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        make_plan(recipe(), qwen3("8B"), packed(rows=4), runtime(), total_bytes=80 * GIB)
        make_plan(recipe(), qwen3("0.6B"), packed(), runtime(), total_bytes=H200)
    (warning,) = [r.getMessage() for r in caplog.records]
    assert "of the device's 80.0 GiB and may run out" in warning
    assert re.search(r"These settings together let it fit, at an estimated [67]\d\.\d GiB: train\.micro_batch", warning)


@pytest.mark.parametrize(
    ("world_size", "setting"), [(1, "train.memory=low"), (8, "accelerate_configs/fsdp2.yaml on 8 GPUs")]
)
def test_a_replica_that_cannot_fit_its_gpu_is_told_the_config_that_cuts_it_if_there_are_more(
    world_size: int, setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    rt = runtime()
    rt.topology = Topology(replicas=world_size)
    layout = packed(accumulation=2 if world_size == 1 else 1, world_size=world_size)
    with caplog.at_level(logging.WARNING):
        make_plan(recipe(), qwen3("8B"), layout, rt, total_bytes=80 * GIB)
    (warning,) = [r.getMessage() for r in caplog.records]
    assert "This setting lets it fit, at an estimated " in warning
    assert warning.endswith(f": {setting}")


@pytest.mark.parametrize(
    ("topology", "optimizer", "gpu_gib", "ways"),
    [
        (
            Topology(),
            "adamw",
            80,
            "This setting lets it fit, at an estimated 58.2 GiB: optim.name=adamw_sr. accelerate",
        ),
        (Topology(), "auto", 24, "accelerate_configs/fsdp2.yaml on 3 such GPUs or more"),
        (Topology(replicas=8), "auto", 24, "accelerate_configs/fsdp2.yaml on 3 such GPUs or more"),
        (Topology(shards=2, sharded=True), "auto", 24, "accelerate_configs/fsdp2.yaml on 3 such GPUs or more"),
    ],
    ids=["smaller states", "one GPU", "replicas", "too few shards"],
)
def test_a_model_that_no_rows_make_room_for_is_refused(
    topology: Topology, optimizer: str, gpu_gib: int, ways: str
) -> None:
    rt, cfg = runtime(), recipe(optim=OptimConfig(name=optimizer))
    rt.topology = topology
    layout = packed(row_length=2048, world_size=topology.world_size)
    with pytest.raises(ConfigError, match=rf"parameters take .* on each GPU, which has {gpu_gib}\.0 GiB") as refused:
        make_plan(cfg, qwen3("8B"), layout, rt, total_bytes=gpu_gib * GIB)
    assert ways in str(refused.value)
    make_plan(cfg, qwen3("8B"), layout, rt, total_bytes=H200)  # estimated, and perhaps warned of


def test_what_is_held_at_least_is_less_than_any_step_takes() -> None:
    for optimizer in OPTIMIZERS:
        for topology in (Topology(), Topology(shards=4, sharded=True), Topology(shards=2, tensor=2, sharded=True)):
            s = setup("1.7B", optimizer=optimizer, topology=topology, layout=packed(row_length=64))
            assert held_bytes(s) < estimate(s).tensors, (optimizer, topology)


def oom(
    message: str = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.80 GiB",
) -> Any:
    return torch.OutOfMemoryError(message)


def advice(plan: MemoryPlan, cfg: Config, layout: Layout) -> AbstractContextManager[None]:
    return oom_advice(plan, layout, cfg.data, cfg.compile, cfg.optim)


def explanation(cfg: Config, model: PreTrainedModel, layout: Layout, precision: str = "bf16") -> list[str]:
    plan = make_plan(cfg, model, layout, runtime(precision), total_bytes=H200)
    with pytest.raises(ConfigError) as raised, advice(plan, cfg, layout):
        raise oom()
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)
    return str(raised.value).splitlines()


def test_out_of_memory_says_what_ran_out_and_what_each_setting_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "find_spec", lambda name: None)
    cfg = recipe(optim=OptimConfig(name="adamw"))
    first, *settings = explanation(cfg, qwen3("1.7B"), packed(rows=6))
    assert first.startswith("out of memory: the GPU has 140.0 GiB, ")
    assert "2.50 GiB more did not fit, this run was estimated at 162.3 GiB" in first
    # 98,304 tokens x 28 blocks x 51.8 KB = 132.8 GiB of activations; two GPUs have 3 of the 6 rows each
    assert settings == [
        "  train.memory=balanced saves 32.9 GiB, train.memory=low 99.7 GiB",
        "  accelerate_configs/fsdp2.yaml on 2 GPUs saves 78.3 GiB",
        "  train.micro_batch_size=3 saves 66.1 GiB",
        "The newest checkpoint can be resumed (train.resume=auto) with train.memory=balanced or train.memory=low or "
        "accelerate_configs/fsdp2.yaml on 2 GPUs or train.micro_batch_size=3",
    ]
    first, *settings = explanation(cfg, qwen3("1.7B"), packed(rows=7))  # two GPUs cannot share 7 rows equally
    assert settings[-2:] == [
        f"  optim.name=adamw_sr saves 12.8 GiB, optim.name=adamw8bit ({install('sftkit[fp8]')}) 16.0 GiB",
        "The newest checkpoint can be resumed (train.resume=auto) with train.micro_batch_size=1 or train.memory=balanced "
        "or train.memory=low",
    ]


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (70, "train.micro_batch_size=1"),
        (40, "train.micro_batch_size=1 loss.chunk_tokens=1024 train.memory=low"),
        (24, f"train.micro_batch_size=1 train.memory=low optim.name=adamw8bit ({install('sftkit[fp8]')})"),
        (4, None),
    ],
)
def test_the_settings_that_fit_together_and_change_least_are_found(size: int, expected: str | None, monkeypatch: Any) -> None:  # fmt: skip
    monkeypatch.setattr(memory, "find_spec", lambda name: None)
    cfg = recipe(optim=OptimConfig(name="adamw"))
    plan = make_plan(cfg, qwen3("1.7B"), packed(rows=6), runtime(), total_bytes=None)
    assert plan.setup is not None
    found = remedies.combination(plan.setup, size * GIB, cfg.data, cfg.compile, cfg.optim)
    assert (found and " ".join(found.settings)) == expected
    assert found is None or found.peak_bytes <= 0.92 * size * GIB


def test_a_run_that_does_not_fit_is_told_which_settings_together_do(caplog: pytest.LogCaptureFixture) -> None:
    make_plan(recipe(optim=OptimConfig(name="adamw")), qwen3("1.7B"), packed(rows=6), runtime(), total_bytes=40 * GIB)
    assert "These settings together let it fit, at an estimated 36.6 GiB: train.micro_batch_size=1 " in caplog.text


def test_what_a_resumed_run_keeps_is_not_offered_for_it() -> None:
    cfg = recipe(optim=OptimConfig(name="adamw_sr"))
    *settings, resume = explanation(cfg, qwen3("0.6B"), packed(2048))
    assert any("data.max_length=1024" in setting for setting in settings)
    assert any("optim.name=adamw8bit" in setting for setting in settings)
    assert resume.endswith("can be resumed (train.resume=auto) with train.memory=balanced or train.memory=low")


def test_an_automatic_optimizer_has_to_be_named_on_resume() -> None:
    resume = explanation(recipe(), qwen3("0.6B"), packed(rows=64))[-1]  # it fits with less: auto is adamw then
    assert resume.endswith("together with optim.name=adamw_sr (auto may now mean another)")


def test_settings_in_use_are_not_offered_again() -> None:
    cfg = recipe(
        train=TrainConfig(memory="low", max_steps=1),
        optim=OptimConfig(name="adamw8bit"),
        loss=LossConfig(chunk_tokens=64),
    )
    assert explanation(cfg, qwen3("1.7B"), packed(1024))[-1].endswith(
        "Every setting that saves memory is in use: choose a smaller model or a larger GPU"
    )
    _, *settings, _ = explanation(cfg, qwen3("1.7B"), packed(rows=4))
    assert [setting.split("=")[0].split()[0] for setting in settings] == [
        "accelerate_configs/fsdp2.yaml",
        "train.micro_batch_size",
    ]


def test_a_named_budget_is_lowered_itself() -> None:
    cfg = recipe(compile=CompileConfig(activation_memory_budget=0.6))
    text = "\n".join(explanation(cfg, qwen3("1.7B"), packed()))
    assert "compile.activation_memory_budget=0.5 saves" in text
    assert "compile.activation_memory_budget=0.1 " in text
    assert "train.memory" not in text


@pytest.mark.parametrize(
    ("layout", "setting"),
    [
        (packed(16_384), "data.row_length=8192"),
        (replace(packed(16_384), kind="tree"), "data.row_length=8192"),
        (packed(2048), "data.max_length=1024"),
        (Layout("fixed", (8192,), 1, 1, 1, 8192, 8192), "data.max_length=4096"),
        (Layout("fixed", (8192,), 12, 6, 1, 8192, 8192), "train.micro_batch_size=3"),
        (Layout("bucketed", (512, 2048), 12, 4, 1, 2048, 2048, budget_rows=4), "train.micro_batch_size=2"),
    ],
)
def test_a_smaller_micro_batch_is_one_that_the_layout_can_have(layout: Layout, setting: str) -> None:
    cfg = recipe(optim=OptimConfig(name="adamw_sr"), train=TrainConfig(memory="low", max_steps=1))
    plan = make_plan(cfg, qwen3("0.6B"), layout, runtime(), total_bytes=H200)
    assert plan.setup is not None
    ((text, after),) = remedies._smaller_batch(plan.setup, cfg.data)
    assert text == setting
    assert after.layout.shapes[-1][0] * after.layout.shapes[-1][1] == pytest.approx(
        layout.shapes[-1][0] * layout.shapes[-1][1] / 2
    )


@pytest.mark.parametrize("kind", ["packed", "tree"])
def test_shorter_documents_come_with_shorter_rows_if_the_recipe_sets_these(kind: Any) -> None:
    layout = replace(packed(2048), kind=kind)
    plan = make_plan(recipe(), qwen3("0.6B"), layout, runtime(), total_bytes=H200)
    assert plan.setup is not None
    ((text, _),) = remedies._smaller_batch(plan.setup, replace(recipe().data, row_length=2048))
    assert text == "data.max_length=1024 data.row_length=1024"


def test_fp32_weights_are_offered_bf16_and_unused_checkpointing_is_offered_eagerly() -> None:
    cfg = recipe(compile=CompileConfig(enabled=False), attention=AttentionConfig(backend="reference"))
    text = "\n".join(explanation(cfg, qwen3("1.7B"), packed(), "fp32"))
    assert "train.precision=bf16 saves" in text
    assert "train.memory=balanced saves" in text


def test_an_unknown_model_is_told_the_settings_without_numbers() -> None:
    model = on_meta("mamba", hidden_size=64, num_hidden_layers=2, vocab_size=128)
    text = "\n".join(explanation(recipe(), model, packed(128)))
    assert text.endswith(
        "Lower train.micro_batch_size, with which a checkpoint can be resumed, or start from scratch with train.memory=low or "
        "optim.name=adamw_sr"
    )


def test_other_errors_pass_through() -> None:
    plan = make_plan(recipe(), qwen3("0.6B"), packed(), runtime())
    with pytest.raises(ValueError, match="mine"), advice(plan, recipe(), packed()):
        raise ValueError("mine")


def test_the_comparison_leaves_out_what_the_allocator_does_not_count() -> None:
    plan = make_plan(recipe(optim=OptimConfig(name="adamw_sr")), qwen3("0.6B"), packed(), runtime(), total_bytes=H200)
    assert against_measured(plan, 19.4) == "memory: peak 19.4 GiB measured in the warm-up, 20.4 GiB estimated, +5%"


def small_model(dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("qwen3", vocab_size=64, num_key_value_heads=2, head_dim=8, **sizes)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)


def tensor_bytes(optimizer: torch.optim.Optimizer) -> int:
    values = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return sum(v.numel() * v.element_size() for v in values if v.dim())


@pytest.mark.parametrize("name", ["adamw", "adamw_sr", "muon"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_missing_states_are_exactly_those_that_the_first_update_makes(name: str, dtype: torch.dtype) -> None:
    if name == "adamw_sr" and dtype == torch.float32:
        pytest.skip("rounds bf16 weights only")
    model = small_model(dtype)
    optimizer = build_optimizer(model, OptimConfig(name=name))  # type: ignore[arg-type]
    missing = memory.missing_state_bytes(optimizer, name)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert missing == tensor_bytes(optimizer) > 0
    assert memory.missing_state_bytes(optimizer, name) == 0


@pytest.mark.parametrize(("accumulation", "width"), [(1, 0), (2, 2), (3, 4)])
def test_gradients_of_earlier_micro_batches_are_part_of_the_reserve(accumulation: int, width: int) -> None:
    model = small_model()
    plan = make_plan(recipe(), model, packed(128, accumulation=accumulation), runtime())
    assert plan.earlier_gradient_bytes == width * sum(p.numel() for p in model.parameters())


def test_optimizer_widths_add_up() -> None:
    for spec in OPTIMIZERS.values():
        assert spec.state_width("bf16") == spec.training_width("bf16") - 4
        assert spec.state_width("bf16") > 0


@pytest.mark.gpu
def test_the_reserve_is_held_during_the_warm_up_and_free_after_it() -> None:
    model = small_model(device="cuda")
    optimizer = build_optimizer(model, OptimConfig(name="adamw"))
    plan = make_plan(recipe(), model, packed(128, accumulation=3), runtime())
    before = torch.cuda.memory_allocated()
    expected = memory.missing_state_bytes(optimizer, "adamw") + plan.earlier_gradient_bytes
    with memory.reserve_optimizer_state(optimizer, plan, torch.device("cuda")):
        assert expected <= torch.cuda.memory_allocated() - before <= expected + 512
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
def test_a_real_lack_of_memory_is_explained() -> None:
    model = small_model(device="cuda")
    plan = make_plan(recipe(), model, packed(128), runtime())
    with pytest.raises(ConfigError, match="more did not fit"), advice(plan, recipe(), packed(128)):
        torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
