"""Small examples and models for the tests of the core."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import preloaded
import pytest
import torch
import torch._inductor.config
from accelerate import Accelerator
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen3Config

from sftkit.config.load import read_config
from sftkit.config.schema import Config, DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from sftkit.data.batches.collate import IGNORE, Batch, collate
from sftkit.data.batches.loader import Batches, StepBatches
from sftkit.data.batches.pack import BatchShape, Layout, make_layout
from sftkit.data.types import Examples, FlatTokens
from sftkit.errors import ConfigError
from sftkit.models.adapters import adapted, adapted_experts, merged_weight
from sftkit.models.expert_adapters import merged_experts
from sftkit.models.structure import stages_of
from sftkit.objectives.objective import Totals
from sftkit.ops.attention import document_boundaries, use_document_attention
from sftkit.runtime.start import Runtime

VOCAB_SIZE = 64
SCRATCH_RECIPE = """
run: {dir: runs/x}
model: {scratch: {model_type: llama}, tokenizer: t}
data: {train: [{path: "builtin:tasks"}], max_length: 64}
train: {max_steps: 2}
"""
ROOT = preloaded.ROOT
SHARED_DATA = ROOT.parent / "shared" / "data"


@contextmanager
def scalar_kernels() -> Iterator[None]:
    """Make Inductor write scalar CPU kernels within the context, without headers compiled ahead: those and vectors
    take longer to compile than the kernels themselves.
    """
    with torch._inductor.config.patch({"cpp_cache_precompile_headers": False, "cpp.simdlen": 1}):
        yield


def tiny_recipe(folder: Path | str, **sections: Any) -> Config:
    """The recipe of a run of a tiny model on data that the test itself makes: AdamW and the values of `sections`."""
    own = {"model": ModelConfig(path="unused"), "data": DataConfig(train=()), "optim": OptimConfig(name="adamw")}
    return Config(run=RunConfig(dir=str(folder)), **(own | sections))


def scratch_recipe(folder: Path, more: str = "") -> Path:
    """A recipe file of a new model."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(SCRATCH_RECIPE + more)
    return recipe


def problems_of(folder: Path, words: Sequence[str]) -> list[str]:
    """The problems of a recipe with these words of the command line."""
    with pytest.raises(ConfigError) as refused:
        read_config(scratch_recipe(folder), words)
    return str(refused.value).splitlines()


def before_each_step(batches: Batches, do: Callable[[int, StepBatches], object]) -> None:
    """Call a function with the number of each step and its micro-batches when the loop asks for it."""
    steps = batches.steps

    def told(first: int, last: int) -> Iterator[StepBatches]:
        for step, step_batches in enumerate(steps(first, last), start=first + 1):
            do(step, step_batches)
            yield step_batches

    batches.steps = told  # type: ignore[method-assign]


def make_examples(lengths: Sequence[int], seed: int = 0, target_share: float = 0.5) -> Examples:
    """Documents that take `lengths` row positions, of random tokens, with at least one target each."""
    rng = np.random.default_rng(seed)
    sizes = np.asarray(lengths) + 1
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    ids = rng.integers(3, VOCAB_SIZE, int(offsets[-1])).astype(np.int32)
    is_target = rng.random(len(ids)) < target_share
    is_target[offsets[:-1]] = False
    is_target[offsets[1:] - 1] = True
    made = Examples.of(ids, lengths, is_target=is_target)
    return replace(made, num_bytes=np.ones(len(sizes), dtype=np.int64), source_names=("test",))


def flat(examples: Examples) -> FlatTokens:
    """The arrays of documents that are kept in memory."""
    assert isinstance(examples.tokens, FlatTokens)
    return examples.tokens


def relearned(examples: Examples, is_target: np.ndarray) -> Examples:
    """The same documents with other targets."""
    made = Examples.of(flat(examples).ids, examples.lengths, is_target=is_target)
    return replace(examples, tokens=made.tokens, num_targets=made.num_targets)


def of_two_sources(examples: Examples) -> Examples:
    """The same documents as those of two sources, which share rows."""
    source = (np.arange(len(examples)) % 3 == 0).astype(np.int16)
    return replace(examples, source=source, source_names=("often", "seldom"))


def tiny(config: type[PretrainedConfig], seed: int = 0, **fields: Any) -> PreTrainedModel:
    """A model of a config in fp32, with two layers of width 32 unless `fields` changes that."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
    }
    return AutoModelForCausalLM.from_config(config(**(sizes | fields)), dtype=torch.float32)  # type: ignore[no-any-return]


def tiny_llama(seed: int = 0, layers: int = 2, dropout: float = 0.0, head_dim: int = 8, **more: Any) -> PreTrainedModel:
    return tiny(LlamaConfig, seed, num_hidden_layers=layers, attention_dropout=dropout, head_dim=head_dim, **more)


def tiny_qwen3_with_windows(seed: int = 0) -> PreTrainedModel:
    """Alternating full and sliding-window layers (window 5)."""
    windows = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
    return tiny(Qwen3Config, seed, num_hidden_layers=4, **windows)


def make_layout_of(
    kind: str, lengths: Sequence[int], *, row_length: int = 32, batch: int = 8, micro: int = 2, world_size: int = 1
) -> Layout:
    """The layout that a recipe of this kind gives these documents."""
    buckets = (row_length // 2, row_length) if kind == "bucketed" else None
    data = DataConfig(train=(), layout=kind, bucket_lengths=buckets)  # type: ignore[arg-type]
    train = TrainConfig(global_batch_size=batch, micro_batch_size=micro)
    return make_layout(data, train, np.asarray(lengths), row_length, world_size)


def make_batch(examples: Examples, rows: tuple[tuple[int, ...], ...], row_length: int) -> Batch:
    """Documents in rows, with enough slots."""
    slots = sum(map(len, rows)) + len(rows)
    return collate(examples, rows, BatchShape(row_length, max_docs=slots, max_doc_length=row_length))


def token_nll(orig_model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Negative log-likelihood of each target from full logits, 0 at other positions: fp32 [B, T]."""
    use_document_attention(orig_model)
    logits = orig_model(
        **batch.inputs,
        use_cache=False,
        documents=document_boundaries(batch, "reference"),
    ).logits
    flat = F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), ignore_index=IGNORE, reduction="none")
    return flat.view(batch.targets.shape)


def full_parameters(orig_model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter by name, from the rank or shards that hold it; every rank calls it."""
    stages = stages_of(orig_model)
    for name, p in orig_model.named_parameters():
        value = (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        if stages is not None:
            value = torch.empty_like(value, device=stages.mesh.device_type) if p.is_meta else value.clone()
            source = torch.distributed.get_global_rank(stages.group, stages.holders[name][0])
            torch.distributed.broadcast(value, src=source, group=stages.group)
        yield name, value


def over_ranks(rt: Runtime, sums: Totals) -> Totals:
    """The sums of all ranks."""
    return Totals(sums.names, rt.sum(sums.vector))


def cpu_runtime() -> Runtime:
    return Runtime(Accelerator(cpu=True), "fp32")


def torchrun(processes: int, file: str, *args: str, timeout: float = 200, gpus: bool = False) -> None:
    """Run a file of tests/workers/ on some ranks, with gloo or a GPU each, as under torchrun. Ranks that
    deadlock fail.
    """
    # cuBLAS needs this setting to give the same bits, for workers that ask for determinism.
    device = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if gpus else {"ACCELERATE_USE_CPU": "true"}
    env = {**os.environ, "PYTHONPATH": preloaded.PYTHONPATH, "OMP_NUM_THREADS": "1", **device}
    done = preloaded.run([f"tests/workers/{file}", *args], processes, env, timeout, forked=not gpus)
    crashes = re.findall(r"^(?:Fatal Python error|\w+\(\): |terminate called).*", done.stderr, re.MULTILINE)
    assert done.returncode == 0, "\n".join([*crashes, done.stderr[-6000:]])


def merged_weights(orig_model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and whole merged weight of each layer that has an adapter; of a sharded model every rank calls it."""
    for name, layer in adapted(orig_model).items():
        own = {name: p.full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in layer.named_parameters()}
        a, b = own["lora_A.weight"], own["lora_B.weight"]
        lengths = own.get("lora_magnitude_vector")
        yield f"{name}.weight", merged_weight(own["weight"], a, b, layer.lora_scale, lengths)
    for name, experts in adapted_experts(orig_model).items():
        own = {n: p.full_tensor() if isinstance(p, DTensor) else p.detach() for n, p in experts.named_parameters()}
        for weight, pair in (("gate_up_proj", "base_layer.lora"), ("down_proj", "lora")):
            factors = own[f"{pair}_A.weight"], own[f"{pair}_B.weight"]
            yield (
                f"{name}.{weight}",
                merged_experts(own[weight], *factors, experts.lora_scale, transposed=experts.is_transposed),
            )
