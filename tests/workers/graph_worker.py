"""Run on ranks by the tests of the graph engine: models through several engines in one launch; rank 0 writes what came out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from helpers import VOCAB_SIZE, make_examples, make_layout_of, of_two_sources, over_ranks, tiny, tiny_llama
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DeepseekV3Config, Gemma2Config, LlamaConfig, PreTrainedModel, Qwen3Config

from sftkit.config.schema import (
    AttentionConfig,
    CompileConfig,
    Config,
    DataConfig,
    GraphConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
)
from sftkit.config.topology import Topology
from sftkit.data.batches.epoch import RankRows, row_shard
from sftkit.data.batches.loader import Batches, StepDataset
from sftkit.data.batches.pack import Layout
from sftkit.engine.engine import Engine, Training
from sftkit.engine.step import gradients
from sftkit.graph.engine import GraphEngine
from sftkit.models.load import compute_here
from sftkit.objectives.objective import NextToken, Totals
from sftkit.optim.protocol import parameters_of
from sftkit.runtime import start as runtime
from sftkit.runtime.script import script
from sftkit.train.assemble import make_engine
from sftkit.train.loop import on_device
from sftkit.verify.proof import report_checks, verified_warm_up

STEPS = 3
LENGTHS = [30, 4, 25, 8, 31, 3, 17, 29, 12, 5, 6, 31, 2, 20] * 4


def wide_llama() -> PreTrainedModel:
    """So large a table that its rows are looked up where they lie; one of its tokens is padding, whose gradient is 0."""
    return tiny(LlamaConfig, vocab_size=4099, pad_token_id=3, num_hidden_layers=1)


def bf16(make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    return make().to(torch.bfloat16)


def deepseek_v3(dense_layers: int = 1) -> PreTrainedModel:
    """Dense blocks and one of eight experts, of which a token visits two."""
    layers = {"first_k_dense_replace": dense_layers, "num_hidden_layers": dense_layers + 1}
    experts = {"moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2}
    groups = {"n_group": 2, "topk_group": 1, "n_shared_experts": 1}
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    return tiny(
        DeepseekV3Config, num_key_value_heads=4, tie_word_embeddings=False, **layers, **experts, **groups, **ranks
    )


def lopsided_deepseek_v3() -> PreTrainedModel:
    """Routers send every token to the first half of the experts: those of the first of two ranks."""
    model: Any = deepseek_v3()
    model.model.layers[1].mlp.gate.e_score_correction_bias[:4] += 10.0
    return model  # type: ignore[no-any-return]


MODELS = {
    "llama": partial(tiny_llama, layers=1),
    "deep llama": tiny_llama,
    # norms of heads, embedding and head tied
    "qwen3": partial(tiny, Qwen3Config, num_hidden_layers=1, tie_word_embeddings=True),
    # no even number of channels in its feed-forward layers, nor of tokens
    "uneven llama": partial(tiny, LlamaConfig, vocab_size=VOCAB_SIZE + 1, intermediate_size=65, num_hidden_layers=1),
    "wide llama": wide_llama,
    # one layer with a window and one without, scores capped
    "gemma2": partial(tiny, Gemma2Config, query_pre_attn_scalar=8, sliding_window=6, attn_logit_softcapping=2.0),
    "bf16 llama": partial(bf16, partial(tiny_llama, layers=1)),
    "bf16 deep llama": partial(bf16, tiny_llama),
    "bf16 wide llama": partial(bf16, wide_llama),
    "deepseek_v3": deepseek_v3,
    "experts of deepseek_v3": partial(deepseek_v3, dense_layers=0),
    "lopsided deepseek_v3": lopsided_deepseek_v3,
}


def config(
    engine: str,
    passes: Sequence[str] = (),
    compiled: bool = True,
    precision: str = "fp32",
    attention: str = "reference",
    layout: str = "packed",
) -> Config:
    """A recipe of a tiny model; `engine` eager: the graph engine without a graph."""
    return Config(
        run=RunConfig(dir="."),
        model=ModelConfig(path="unused"),
        data=DataConfig(train=(), layout=layout),  # type: ignore[arg-type]
        optim=OptimConfig(name="adamw", eps=1e-4),
        train=TrainConfig(max_steps=STEPS, engine=engine, precision=precision),  # type: ignore[arg-type]
        graph=GraphConfig(passes=tuple(passes)),
        attention=AttentionConfig(backend=attention),  # type: ignore[arg-type]
        compile=CompileConfig(enabled=compiled and engine == "graph"),
    )


def rows_of(rt: runtime.Runtime, kind: str) -> tuple[Layout, Batches]:
    """Rows of a layout, other documents in each step, the same global batches on any number of ranks."""
    examples = of_two_sources(make_examples(LENGTHS, target_share=0.3))
    micro = 1 if rt.data_world_size == 4 else 2  # two micro-batches a step or more
    layout = make_layout_of(kind, examples.lengths, micro=micro, world_size=rt.data_world_size)
    shard = row_shard(rt.topology, rt.rank)
    return layout, Batches(StepDataset(examples, layout, RankRows(rt.data_rank, shard)), seed=0)


def full(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm}


class StepMeasures(TorchDispatchMode):
    """What a step within it gathers, how much memory it makes, and what it computes beside which exchange."""

    supports_higher_order_operators = True  # FlexAttention is one

    def __init__(self) -> None:
        super().__init__()
        self.gathered = 0
        "tensors that all-gathers were given"
        self.reduced = 0
        "tensors that reduce-scatters were given"
        self.peak = 0
        "bytes of tensors that were there at a time and had been made since the beginning"
        self.products: list[int] = []
        "matrix products before the first reduce-scatter, and after the start of each until the next one's"
        self._since = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._bytes = 0  # of those that were live when it was last looked, and of all made since

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "all_gather_into_tensor" in str(func):
            self.gathered += len(args[0]) if isinstance(args[0], list) else 1
        if "reduce_scatter" in str(func):
            self.reduced += len(args[0]) if isinstance(args[0], list) else 1
            self.products.append(self._since)
            self._since = 0
        self._since += getattr(func, "overloadpacket", None) in PRODUCTS
        result = func(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves(result):
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                storage = value.untyped_storage()
                reference = StorageWeakRef(storage)
                self._bytes += storage.nbytes() - self._live.get(reference.cdata, (None, 0))[1]
                self._live[reference.cdata] = (reference, storage.nbytes())
        if self._bytes > self.peak:
            self._live = {key: (ref, size) for key, (ref, size) in self._live.items() if not ref.expired()}
            self._bytes = sum(size for _, size in self._live.values())
            self.peak = max(self.peak, self._bytes)
        return result


def made(rt: runtime.Runtime, model: str, cfg: Config) -> tuple[Engine, Batches]:
    """An engine of a model, and its rows."""
    layout, batches = rows_of(rt, cfg.data.layout)
    orig_model = MODELS[model]().to(rt.device)
    compute_here(orig_model)
    return make_engine(cfg, rt, Path(), Training(orig_model, NextToken(cfg.loss, num_sources=2), layout)), batches


def train(rt: runtime.Runtime, model: str, cfg: Config) -> dict[str, Any]:
    """Every gradient of the first step, then some steps and the weights that come out."""
    engine, batches = made(rt, model, cfg)
    checks = verified_warm_up(engine, rt, lambda _: None).checks
    orig_model, parameters = engine.model.orig_model, list(parameters_of(engine.optimizer.param_groups))
    first = next(on_device(batches.steps(0, 1), rt.device))
    step_model = engine.captured if isinstance(engine, GraphEngine) else engine.model
    totals = Totals.zeros(engine.model.objective.measured, rt.device)
    gradients(step_model, parameters, first.micro_batches, first.divisor, totals, rt)
    found = {name: full(p.grad).tolist() for name, p in orig_model.named_parameters()}
    orig_model.zero_grad(set_to_none=True)
    losses = []
    with engine.guarded():
        for number, step in enumerate(on_device(batches.steps(0, STEPS), rt.device)):
            measures = StepMeasures()
            with measures if number == STEPS - 1 else nullcontext():
                outcome = engine.step(step, 1e-2)
            sums = over_ranks(rt, outcome.sums)
            losses += [float(sums[name]) / step.num_targets for name in ("nll", "nll/0", "nll/1")]
    report = engine.report()
    stages = engine.captured.stages if isinstance(engine, GraphEngine) else {}
    engine.close()
    return {
        "gradients": found,
        "losses": losses,
        "gathered": measures.gathered,
        "reduced": measures.reduced,
        "peak": measures.peak,
        "products": measures.products,
        "micro_batches": len(step.micro_batches),
        "weights": {name: float(full(p).double().square().sum()) for name, p in orig_model.named_parameters()},
        "names": list(orig_model.state_dict()),
        "local_elements": sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in orig_model.parameters()),
        "checks": {check.name: check.ok for check in [*checks, *report_checks(report)]},
        "metrics": report.metrics,
        "attention": engine.setup.attention,
        "stages": [{**asdict(s), "counts": s.counts._asdict()} for each in stages.values() for s in each],
    }


def main(out: str, *cases: str) -> None:
    """A case: `model; how; passes, separated by commas; tp`, how: eager, graph, flex, which is graph with FlexAttention, or
    `sdpa LAYOUT`, which is graph with SDPA, over rows of one document.
    Tensor parallelism is over two ranks; of four without it two copies have two shards each."""
    rt = runtime.start(RunConfig(dir="."), TrainConfig(max_steps=1))
    if rt.device.type == "cuda":
        # Kernels that give the same bits each time, where there are any. The fast ones of attention add gradients in no
        # fixed order, of which cuDNN's and the memory-efficient ones leave that only where all operators must not.
        torch.use_deterministic_algorithms(True, warn_only=True)
        sdp = torch.backends.cuda
        for enable in (sdp.enable_cudnn_sdp, sdp.enable_flash_sdp, sdp.enable_mem_efficient_sdp):
            enable(False)
    results = {}
    for case in cases:
        model, how, *rest = (word.strip() for word in case.split(";"))
        names = rest[0].split(",") if rest and rest[0] else ()
        precision = "bf16" if model.startswith("bf16") else "fp32"
        tensor = 2 if rest[1:] else 1
        replicas = 2 if rt.world_size == 4 and tensor == 1 else 1
        shards = rt.world_size // (replicas * tensor)
        topology = Topology(replicas=replicas, shards=shards, tensor=tensor, sharded=True)
        rt = replace(rt, precision=precision, topology=topology)
        how, *layouts = how.split()
        attention = how if how in ("flex", "sdpa") else "reference"
        cfg = config("graph", names, how != "eager", precision, attention, *layouts)
        results[case] = train(rt, model, cfg)
    if rt.is_main:
        Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    script(partial(main, *sys.argv[1:]))
