"""A small training loop around Checkpoints, for this process, for ranks and for processes that are killed."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers import VOCAB_SIZE, tiny_llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from sftkit.checkpoint import states
from sftkit.checkpoint.checkpoint import Checkpoints
from sftkit.config.schema import CheckpointConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from sftkit.config.topology import Topology
from sftkit.errors import CheckpointError
from sftkit.models.load import load_model
from sftkit.optim.protocol import build_optimizer
from sftkit.runtime import start as runtime
from sftkit.runtime.script import script
from sftkit.runtime.start import Runtime

ROWS = 4


def tied() -> PreTrainedModel:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    return Qwen3ForCausalLM(
        Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    )


def experts() -> PreTrainedModel:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**sizes, **heads, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
    )


class Run:
    """A model, its optimizer and its checkpoints. Every step it learns ROWS rows that follow from the step's number."""

    def __init__(
        self,
        run_dir: Path,
        tokenizer: Any,
        rt: Runtime,
        dropout: float = 0.0,
        shard: bool = False,
        model: Any = None,
        config: CheckpointConfig | None = None,
        recipe: str = "run: {}\n",
        identity: dict[str, Any] | None = None,
    ) -> None:
        self.rt = replace(rt, topology=Topology(shards=rt.world_size, sharded=True)) if shard else rt
        self.orig_model = tiny_llama(dropout=dropout) if model is None else model
        if shard:
            mesh = init_device_mesh("cpu", (rt.world_size,), mesh_dim_names=("dp_shard",))
            for layer in self.orig_model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.orig_model, mesh=mesh)
        self.optimizer = build_optimizer(self.orig_model, OptimConfig(name="adamw", lr=1e-2))
        config = config or CheckpointConfig()
        state = (self.orig_model, tokenizer, self.optimizer)
        self.checkpoints = Checkpoints(run_dir, config, self.rt, *state, recipe, identity or {})
        self.orig_model.train()

    def steps(self, start: int, stop: int, every: int | None = None, wait: bool = False) -> list[float]:
        """Train steps start + 1 to stop; the loss of each."""
        losses = []
        for step in range(start + 1, stop + 1):
            rows = torch.randint(0, VOCAB_SIZE, (ROWS, 12), generator=torch.Generator().manual_seed(step))
            mine = rows[self.rt.rank :: self.rt.world_size]
            loss = self.orig_model(input_ids=mine, labels=mine).loss
            loss.backward()
            for param in self.orig_model.parameters():
                if self.rt.world_size > 1 and not isinstance(param, DTensor):
                    dist.all_reduce(param.grad)
                    param.grad /= self.rt.world_size
            self.optimizer.update(1e-2, torch.ones(()))
            self.optimizer.zero_grad()
            total = loss.detach().clone()
            if self.rt.world_size > 1:
                dist.all_reduce(total)
            losses.append(float(total) / self.rt.world_size)
            if every and step % every == 0:
                self.checkpoints.save(step, {"tokens": step * 48}, wait=wait)
        return losses


def main(run_dir: str, of_one: str) -> None:
    """Two ranks: replicas and shards save and resume their own, each other's and one process's checkpoints."""
    rt = runtime.start(RunConfig(dir="."), TrainConfig(max_steps=1))
    folder = Path(run_dir)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    out: dict[str, Any] = {}

    def resumed(name: str, from_: Path, **kwargs: Any) -> Run:
        run = Run(folder / name, tokenizer, rt, **kwargs)
        run.checkpoints.resume(str(from_))
        return run

    ddp = Run(folder / "ddp", tokenizer, rt, dropout=0.2)
    torch.manual_seed(rt.rank)
    ddp.steps(0, 3, every=3)
    out["dropout"] = ddp.steps(3, 6)
    ddp.checkpoints.finish()
    out["dropout resumed"] = resumed("ddp", folder / "ddp" / "step-000003", dropout=0.2).steps(3, 6)

    out["one to ddp"] = resumed("a", Path(of_one)).steps(3, 6)
    plain = Run(folder / "plain", tokenizer, rt)
    plain.steps(0, 3, every=3)
    out["plain"] = plain.steps(3, 6)
    plain.checkpoints.finish()

    out["ddp to fsdp"] = resumed("b", folder / "plain" / "step-000003", shard=True).steps(3, 6)
    states.MAX_FILE_BYTES = 40_000  # so that both ranks write files of weights
    fsdp = Run(folder / "fsdp", tokenizer, rt, shard=True)
    fsdp.steps(0, 3, every=3)
    out["fsdp"] = fsdp.steps(3, 6)
    fsdp.checkpoints.finish()
    out["fsdp resumed"] = resumed("c", folder / "fsdp" / "step-000003", shard=True).steps(3, 6)
    out["fsdp to ddp"] = resumed("d", folder / "fsdp" / "step-000003").steps(3, 6)

    for make in (tied, experts):
        torch.manual_seed(1)
        run = Run(folder / make.__name__, tokenizer, rt, shard=True, model=make())
        run.steps(0, 1, every=1, wait=True)
        values = {name: value.full_tensor() for name, value in run.orig_model.state_dict().items()}
        if rt.is_main:
            torch.save(values, folder / f"{make.__name__}.pt")

    failing = Run(folder / "failing", tokenizer, rt)
    failing.steps(0, 1, every=1, wait=True)
    if not rt.is_main:
        failing.checkpoints._writer._write_own = partial(fail, "no space left")  # type: ignore[method-assign]
    failing.steps(1, 2, every=2)
    try:
        failing.steps(2, 3, every=3, wait=True)
    except CheckpointError as error:
        out["failed"] = str(error)
    found: list[Any] = [None] * rt.world_size
    dist.all_gather_object(found, out)
    if rt.is_main:
        (folder / "out.json").write_text(json.dumps(found))


def whole_model(run_dir: str) -> None:
    """Two ranks: shards of the text model of a model that reads pictures, saved, and resumed from the first step."""
    rt = runtime.start(RunConfig(dir="."), TrainConfig(max_steps=1))
    folder = Path(run_dir)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    for name in ("two", "again"):
        model = load_model(ModelConfig(path=str(folder / "start")), tokenizer, 0)
        run = Run(folder / name, tokenizer, rt, shard=True, model=model)
        if name == "again":
            run.checkpoints.resume(str(folder / "two" / "step-000001"))
        run.steps(int(name == "again"), 2, every=1, wait=True)


def fail(text: str, *_: Any) -> None:
    raise OSError(text)


if __name__ == "__main__":
    script(partial(main if len(sys.argv) > 2 else whole_model, *sys.argv[1:]))
