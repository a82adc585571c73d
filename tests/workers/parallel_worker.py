"""Run on ranks by test_parallel.py: one model through several topologies; rank 0 writes what came out."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from helpers import VOCAB_SIZE, full_parameters, make_examples, make_layout_of, of_two_sources, over_ranks, tiny_llama
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    GptOssConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Llama4TextConfig,
    MistralConfig,
    NemotronHConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from sftkit.compile.contract import compile_model, compiler_switches, warm_up
from sftkit.compile.watch import CompileWatch
from sftkit.config.schema import (
    AdapterConfig,
    CompileConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
)
from sftkit.config.topology import Topology
from sftkit.data.batches.epoch import RankRows, row_shard
from sftkit.data.batches.loader import Batches, StepDataset
from sftkit.data.batches.pack import Layout
from sftkit.engine.step import TrainStep, shape_runner
from sftkit.evals.suite import validate
from sftkit.models.adapters import Adapters, add_adapters
from sftkit.models.experts import compute_experts_here
from sftkit.models.joined_adapters import join_layers
from sftkit.models.structure import decoder, use_document_lengths
from sftkit.models.trained import factors, freeze
from sftkit.objectives.objective import ModelWithLoss, NextToken
from sftkit.optim.protocol import build_optimizer
from sftkit.parallel.pipeline import SCHEDULES, stagewise
from sftkit.parallel.wrap import Sharding, distribute, reshard
from sftkit.runtime import start as runtime
from sftkit.runtime.script import script
from sftkit.verify.documents import check_documents
from sftkit.verify.gradients import Sides, check_gradients, limits
from sftkit.verify.update import FirstUpdate


def small(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
EXPERTS = {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 5, "num_experts_per_tok": 2}
SINKS = {"head_dim": 8, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 9}
RECURRENT = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 3,  # no multiple of the ranks
}
MAMBA = {
    "mamba_num_heads": 3,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 1,
    "chunk_size": 16,
    "head_dim": 8,
}
MAMBA |= {
    "n_routed_experts": 5,
    "moe_shared_expert_intermediate_size": 32,
    "layers_block_type": ["linear_attention", "moe"],
}
GRANITE = {
    "layer_types": ["linear_attention", "full_attention"],
    "num_local_experts": 5,
    "shared_intermediate_size": 32,
}
GRANITE |= {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
LLAMA4 = {
    "head_dim": 8,
    "num_local_experts": 5,
    "intermediate_size_mlp": 64,
    "attention_chunk_size": 7,
    "moe_layers": [1],
}
SCAN = {"mamba_d_ssm": 48, "mamba_n_heads": 3, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
STEPS = 4


def mixture(config: PretrainedConfig) -> PreTrainedModel:
    """With experts and positions as in a run."""
    model = small(config)
    compute_experts_here(model)
    use_document_lengths(model)
    return model


def frozen(model: PreTrainedModel, *patterns: str) -> PreTrainedModel:
    freeze(model, patterns)
    return model


def with_adapters(model: PreTrainedModel, *tables: str, **settings: Any) -> PreTrainedModel:
    """B moved, so that A has gradients from the first step on. `tables`: embedding and head, with trained rows."""
    tokens = dict.fromkeys(tables, (3, 9, 40))
    config = AdapterConfig(rank=3, **settings)
    add_adapters(model, Adapters(config, 0, ModelConfig(path="x"), "", tokens=tokens, known=50 if tables else None))
    with torch.no_grad():
        for name, factor in factors(model).items():
            if ".lora_B." in name:
                factor.normal_(0.0, 0.05, generator=torch.Generator().manual_seed(len(name)))
    join_layers(model)  # as models.load does
    return model


MODELS = {
    "llama": tiny_llama,
    "lora": lambda: with_adapters(tiny_llama(), "model.embed_tokens", "lm_head"),
    "tied_lora": lambda: with_adapters(
        small(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True)), "model.embed_tokens"
    ),
    "qlora": lambda: with_adapters(tiny_llama(), base="nf4"),
    "lora_experts": lambda: with_adapters(small(Qwen3MoeConfig(**SIZES, **EXPERTS))),
    "frozen": lambda: frozen(tiny_llama(layers=3), "model.embed_tokens.*", "lm_head.*", "model.layers.1.mlp.*"),
    "prefix": lambda: frozen(tiny_llama(layers=4), "model.embed_tokens.*", "model.layers.[01].*"),
    "deeper": lambda: tiny_llama(layers=9),
    "qwen3": lambda: small(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True)),  # norms of heads
    "tied": lambda: small(Qwen3Config(**{**SIZES, "num_hidden_layers": 5}, head_dim=8, tie_word_embeddings=True)),
    "mistral": lambda: small(MistralConfig(**SIZES, sliding_window=9)),
    "qwen2": lambda: small(Qwen2Config(**SIZES, tie_word_embeddings=False)),  # with biases
    "qwen3_5": lambda: small(Qwen3_5TextConfig(**SIZES, **RECURRENT, head_dim=8)),
    "falcon_h1": lambda: small(FalconH1Config(**SIZES, **SCAN)),
    "lfm2": lambda: small(Lfm2Config(**SIZES, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False)),
    "tied_qwen2": lambda: small(Qwen2Config(**{**SIZES, "num_hidden_layers": 5}, tie_word_embeddings=True)),
    "gpt_oss": lambda: mixture(GptOssConfig(**SIZES, **SINKS)),  # sinks, windows, biases of experts
    "nemotron_h": lambda: mixture(NemotronHConfig(**SIZES, **MAMBA, moe_intermediate_size=16, num_experts_per_tok=2)),
    "granite": lambda: mixture(GraniteMoeHybridConfig(**SIZES, **GRANITE, num_experts_per_tok=2)),
    "qwen3_5_moe": lambda: mixture(
        Qwen3_5MoeTextConfig(**SIZES, **RECURRENT, **EXPERTS, shared_expert_intermediate_size=16)
    ),
    "llama4": lambda: mixture(Llama4TextConfig(**SIZES, **LLAMA4, no_rope_layers=[1, 0])),
}
TWO_KINDS = ("gpt_oss", "lfm2", "qwen3_5", "nemotron_h", "granite", "qwen3_5_moe", "llama4")
GRAPHS = {"frozen": 3, "prefix": 4, **dict.fromkeys(TWO_KINDS, 3)}
"""Of models whose blocks differ in what is trained: with the final norm, one for each kind of block, and of `prefix` one
more for the first trained block, whose input has no gradient."""
LEARNING_RATES = dict.fromkeys(("lora", "tied_lora", "qlora", "lora_experts", "deeper", "tied", "tied_qwen2"), 3e-4)
"Of models where a step of 1e-2 makes a rounding grow: nine layers were 0.8 off in a gradient norm after ten steps."
ONE_RANK = {f"{model} whole": (model, Topology(), Sharding(), "adamw") for model in MODELS}
ONE_RANK |= {f"{model} muon whole": (model, Topology(), Sharding(), "muon") for model in ("llama", "qwen3_5")}
TWO_RANKS = {
    "llama ddp": ("llama", Topology(replicas=2), Sharding(), "adamw"),
    "llama fsdp2": ("llama", Topology(shards=2, sharded=True), Sharding(), "adamw"),
    "llama muon fsdp2": ("llama", Topology(shards=2, sharded=True), Sharding(False, True), "muon"),
    "llama context": ("llama", Topology(context=2, sharded=True), Sharding(), "adamw"),
    "frozen ddp": ("frozen", Topology(replicas=2), Sharding(), "adamw"),
    "frozen fsdp2": ("frozen", Topology(shards=2, sharded=True), Sharding(), "adamw"),
    "frozen tensor": ("frozen", Topology(tensor=2, sharded=True), Sharding(), "adamw"),
    "lora ddp": ("lora", Topology(replicas=2), Sharding(), "adamw"),
    "qlora ddp": ("qlora", Topology(replicas=2), Sharding(), "adamw"),
    "lora fsdp2": ("lora", Topology(shards=2, sharded=True), Sharding(), "adamw"),
    "tied_lora fsdp2": ("tied_lora", Topology(shards=2, sharded=True), Sharding(), "adamw"),
    "lora_experts fsdp2": ("lora_experts", Topology(shards=2, sharded=True), Sharding(), "adamw"),
    "gpt_oss fsdp2": ("gpt_oss", Topology(shards=2, sharded=True), Sharding(), "adamw"),
    "gpt_oss context": ("gpt_oss", Topology(context=2, sharded=True), Sharding(), "adamw"),
    "lora context": ("lora", Topology(context=2, sharded=True), Sharding(), "adamw"),
    "prefix fsdp2, lean": ("prefix", Topology(shards=2, sharded=True), Sharding(False, False), "adamw"),
    "qwen3_5 fsdp2": ("qwen3_5", Topology(shards=2, sharded=True), Sharding(), "adamw"),
    "qwen3_5 muon fsdp2": ("qwen3_5", Topology(shards=2, sharded=True), Sharding(), "muon"),
    "falcon_h1 fsdp2": ("falcon_h1", Topology(shards=2, sharded=True), Sharding(), "adamw"),
    "lfm2 fsdp2": ("lfm2", Topology(shards=2, sharded=True), Sharding(False, False), "adamw"),
    **{
        f"{name} fsdp2": (name, Topology(shards=2, sharded=True), Sharding(), "adamw")
        for name in ("nemotron_h", "granite", "qwen3_5_moe", "llama4")
    },
    "qwen3 tensor": ("qwen3", Topology(tensor=2, sharded=True), Sharding(False, True), "adamw"),
    "llama pipeline": ("llama", Topology(stages=2), Sharding(), "adamw"),
    "llama pipeline, checkpointing": ("llama", Topology(stages=2), Sharding(), "adamw"),  # transformers' own, of layers
}
FOUR_RANKS = {
    "llama hsdp": ("llama", Topology(replicas=2, shards=2, sharded=True), Sharding(), "adamw"),
    "qwen3 fsdp2 x tensor": ("qwen3", Topology(shards=2, tensor=2, sharded=True), Sharding(False, True), "adamw"),
    "qwen2 fsdp2 x tensor": ("qwen2", Topology(shards=2, tensor=2, sharded=True), Sharding(), "adamw"),
    "llama fsdp2 x context": ("llama", Topology(shards=2, context=2, sharded=True), Sharding(False, False), "adamw"),
    "qwen3 pipeline x fsdp2, gpipe": ("qwen3", Topology(stages=2, shards=2, sharded=True), Sharding(), "adamw"),
    "deeper pipeline of 4, interleaved": ("deeper", Topology(stages=4), Sharding(), "adamw"),
    "tied pipeline of 4": ("tied", Topology(stages=4), Sharding(), "adamw"),
    "mistral pipeline x ddp": ("mistral", Topology(stages=2, replicas=2), Sharding(), "adamw"),
    "tied_qwen2 pipeline x fsdp2, interleaved": (
        *("tied_qwen2", Topology(stages=2, shards=2, sharded=True), Sharding(), "adamw"),
    ),
}
EIGHT_RANKS = {
    "llama pipeline x hsdp": ("llama", Topology(stages=2, replicas=2, shards=2, sharded=True), Sharding(), "adamw"),
}
CASES = {2: TWO_RANKS, 4: FOUR_RANKS, 8: EIGHT_RANKS}
GRAPHS_BOTH_WAYS = (
    *("llama fsdp2", "lora_experts fsdp2", "prefix fsdp2, lean", "tied_lora fsdp2"),
    *("qlora ddp", "lora context", "qwen3 fsdp2 x tensor", "llama fsdp2 x context"),
)
"Cases that compile with aot_eager, which takes longer; the others with eager, whose graphs are of the forward pass alone."


def in_memory(orig_model: PreTrainedModel) -> int:
    """Numbers of the model's parameters that this rank has memory for."""
    local = [p.to_local() if isinstance(p, DTensor) else p for p in orig_model.parameters() if not p.is_meta]
    return sum(tensor.numel() for tensor in local if tensor.untyped_storage().nbytes() >= tensor.nbytes)


def some_batches(rt: runtime.Runtime) -> tuple[Layout, Batches]:
    """Packed rows, the same global batches on any number of ranks."""
    examples = of_two_sources(make_examples([30, 4, 25, 8, 31, 3, 17, 29, 12, 5, 6, 31, 2, 20] * 4, target_share=0.3))
    micro = min(2, 8 // (rt.data_world_size * rt.topology.stages))  # at least as many micro-batches as stages
    layout = make_layout_of("packed", examples.lengths, micro=micro, world_size=rt.data_world_size)
    batches = Batches(StepDataset(examples, layout, RankRows(rt.data_rank, row_shard(rt.topology, rt.rank))), seed=0)
    return layout, batches


def train(
    rt: runtime.Runtime,
    model_name: str,
    sharding: Sharding,
    optim: str,
    backend: str = "eager",
    option: str = "",
) -> dict[str, Any]:
    """A few compiled steps and a validation. `option`: the schedule of a pipeline, or checkpointing."""
    torch._dynamo.reset()
    layout, batches = some_batches(rt)
    orig_model, schedule = MODELS[model_name](), option if option in SCHEDULES else "1f1b"
    if option == "checkpointing":
        orig_model.gradient_checkpointing_enable({"use_reentrant": False})
    model = ModelWithLoss(orig_model, "reference", NextToken(LossConfig(), num_sources=2))
    compile = CompileConfig(backend=backend, fullgraph=True)
    modules = compile_model(orig_model, compile, sharded=rt.topology.partial)
    wrapped = distribute(model, None, sharding, rt, TrainConfig(pipeline_schedule=schedule))  # type: ignore[arg-type]
    optimizer = build_optimizer(orig_model, OptimConfig(name=optim, eps=1e-4))  # type: ignore[arg-type]
    check_documents(model, "reference", rt.device)
    rows, flags, evaluated, last = [], [], [0], rt.rank == rt.world_size - 1
    proved: list[Any] = []
    learning_rate = LEARNING_RATES.get(model_name, 1e-2)
    with compiler_switches(compile, graphs=modules * len(layout.shapes)):
        watch = CompileWatch()
        run_shape = shape_runner(rt, wrapped, model, layout, {})
        warm_up(wrapped, run_shape, layout.shapes, compile, rt.any_rank)
        watch.warm_up_done()
        train_step = TrainStep(wrapped, optimizer, model.objective, rt, max_grad_norm=1.0)
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        same = check_gradients(
            Sides(model, train_step.gradients, trained, rt),
            layout,
            "reference",
            limits(torch.float32, 2),
            compiled=True,
        )
        for number, step in enumerate(batches.steps(0, STEPS)):
            alone = SimpleNamespace(members=None)
            engine: Any = SimpleNamespace(
                model=model, optimizer=optimizer, setup=SimpleNamespace(optimizer=optim), training=alone
            )
            update = FirstUpdate(engine, OptimConfig(name=optim, eps=1e-4), rt)  # type: ignore[arg-type]
            with update.watching() if number in (0, 2) else nullcontext():  # a first step, and one with states
                outcome = train_step.step(step, learning_rate, stop=last)
            if number in (0, 2):
                proved += map(asdict, update.checks(float(outcome.grad_norm), learning_rate))
            sums = over_ranks(rt, outcome.sums)
            losses = [float(sums[name]) / step.num_targets for name in ("nll", "nll/0", "nll/1")]
            rows.append([*losses, float(outcome.grad_norm)])
            flags.append(outcome.flags.vector[:2].tolist())
        counts = watch.counts()
    with stagewise(orig_model):
        hook = decoder(orig_model).register_forward_pre_hook(lambda *_: evaluated.append(in_memory(orig_model)))
        values = validate(model, {"val": make_examples([5, 9, 13, 30, 31, 2, 7])}, layout, 0, rt)
        hook.remove()
        reshard(orig_model)
    weights = {name: whole.double().square().sum().item() for name, whole in full_parameters(orig_model)}
    return {
        "rows": rows,
        "flags": flags,
        "val": values,
        "weights": weights,
        "local_elements": in_memory(orig_model),
        "evaluated": max(evaluated),
        "same": asdict(same),
        "proved": proved,
        **counts,
    }


def main(out: str, *names: str) -> None:
    rt = runtime.start(RunConfig(dir="."), TrainConfig(max_steps=1))
    results = {}
    for name in names:
        model, rt.topology, sharding, optim = CASES[rt.world_size][name]
        backend = "aot_eager" if name in GRAPHS_BOTH_WAYS else "eager"
        results[name] = train(
            rt, model, sharding, optim, backend, name.partition(", ")[2] if "pipeline" in name else ""
        )
    if rt.is_main:
        Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    script(partial(main, *sys.argv[1:]))
