"""Which optimizer, which parameters decay, gradient clipping, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from sftkit.config.schema import OptimConfig
from sftkit.errors import ConfigError
from sftkit.models.structure import decoder_blocks
from sftkit.ops.dtensor import local
from sftkit.optim.adamw import AdamW
from sftkit.optim.muon import Muon


def build_optimizer(
    model: PreTrainedModel, optim: OptimConfig, seed: int = 0, compile: bool = True
) -> torch.optim.Optimizer:
    """The optimizer of the recipe; weight decay on matrices, none on norms, biases and embeddings.

    Args:
        model: in fp32 or bf16; with bf16 the optimizer keeps what the weights lose.
        seed: of stochastic rounding; the same on every rank.
        compile: the update of bf16 weights on CUDA in one kernel per parameter; else eager, slow and with temporaries.

    Raises:
        ConfigError: the optimizer does not fit the model's precision, its blocks are not named, torchao is missing.
    """
    assert optim.name != "auto"
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    sharded = any(isinstance(p, DTensor) for p in model.parameters())
    groups = parameter_groups(model, optim)
    if optim.name == "adamw8bit" and sharded:
        raise ConfigError(
            "optim.name=adamw8bit keeps states in blocks that cannot be cut anew for other numbers of ranks: "
            "take optim.name=adamw_sr with sharded weights, or accelerate_configs/ddp.yaml"
        )
    if optim.name == "adamw8bit":
        return _build_adamw8bit(groups, optim, seed)
    if optim.name == "adamw_sr":
        if torch.bfloat16 not in dtypes:
            raise ConfigError("optim.name=adamw_sr rounds bf16 weights: set train.precision=bf16, or optim.name=adamw")
        return AdamW(groups, optim.lr, optim.betas, optim.eps, stochastic=True, seed=seed, compile=compile)
    if optim.name == "muon":
        return Muon(groups, optim.lr, optim.betas, optim.eps, seed=seed, compile=compile)
    if dtypes == {torch.float32} and not sharded:  # the fused update takes no flag beside sharded tensors
        return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
    return AdamW(groups, optim.lr, optim.betas, optim.eps, seed=seed, compile=compile)


def parameter_groups(model: PreTrainedModel, optim: OptimConfig) -> list[dict[str, Any]]:
    """Trained parameters by weight decay and, for muon, by whether they are matrices of a decoder block."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim >= 2 and id(p) not in embeddings]
    others = [p for p in trained if p.ndim < 2 or id(p) in embeddings]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": optim.weight_decay}]
    if optim.name == "muon":
        inside = {id(p) for block in decoder_blocks(model) for p in block.parameters() if p.ndim == 2}
        by_muon = [p for p in matrices if id(p) in inside]
        if not by_muon:
            raise ConfigError(
                f"optim.name=muon: {type(model).__name__} names no decoder block with matrices (_no_split_modules); "
                "use optim.name=adamw"
            )
        by_adamw = [p for p in matrices if id(p) not in inside]
        groups = [
            {"params": by_muon, "weight_decay": optim.weight_decay, "use_muon": True},
            {"params": by_adamw, "weight_decay": optim.weight_decay, "use_muon": False},
        ]
    groups.append({**groups[-1], "params": others, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def _build_adamw8bit(groups: list[dict[str, Any]], optim: OptimConfig, seed: int) -> torch.optim.Optimizer:
    try:
        from sftkit.optim.adamw8bit import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            f"optim.name=adamw8bit needs torchao ({error}): pip install 'sftkit[fp8]', or optim.name=adamw_sr"
        ) from error
    return AdamW8bit(groups, optim.lr, optim.betas, optim.eps, seed)


def warm_up_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Compile all that `optimizer.step` will run; parameters, states and random numbers stay. Nothing for torch's own."""
    if hasattr(optimizer, "warm_up"):
        optimizer.warm_up()


@torch.no_grad()
def squared_norm(parameters: Iterable[torch.Tensor], world_size: int) -> torch.Tensor:
    """This rank's share of the squared L2 norm of all gradients: the shares of all ranks add up to it.

    What several ranks hold, a replica or an unsharded weight, each counts for one part of that many.

    Returns:
        fp32 0-d on the device, no host sync.
    """
    by_copies: dict[int, list[torch.Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            by_copies.setdefault(_copies(p, world_size), []).append(local(p.grad))
    if not by_copies:
        return torch.zeros(())
    return torch.stack([_sum_of_squares(grads) / copies for copies, grads in by_copies.items()]).sum()


def _sum_of_squares(grads: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32)).square().sum()


def _copies(param: torch.Tensor, world_size: int) -> int:
    """How many ranks hold the same piece of a parameter."""
    if not isinstance(param, DTensor):
        return world_size
    # Not is_shard(): it is false of the strided shards that FSDP makes of tensor-parallel ones.
    pieces = (param.device_mesh.size(i) for i, place in enumerate(param.placements) if not place.is_replicate())
    return world_size // math.prod(pieces)


def clip_coefficient(norm: torch.Tensor, usable: torch.Tensor, max_norm: float | None) -> torch.Tensor:
    """The factor that brings gradients of this norm to `max_norm`: min(1, max_norm / (norm + 1e-6)); nan if not usable.

    Args:
        norm: fp32 0-d. usable: bool 0-d, whether there may be an update.
    """
    factor = torch.ones_like(norm) if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return torch.where(usable, factor, torch.nan)


@torch.no_grad()
def apply_clipping(
    optimizer: torch.optim.Optimizer, coefficient: torch.Tensor, parameters: Iterable[torch.nn.Parameter]
) -> None:
    """Clip: inside the next update where the optimizer can, without a pass over the gradients; else in place.

    A coefficient of nan asks for no update.
    """
    if isinstance(optimizer, AdamW):
        optimizer.clip_coefficient = coefficient
        return
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return
    unusable = coefficient.isnan()
    torch._foreach_mul_(grads, coefficient.nan_to_num(1.0))
    if isinstance(optimizer, torch.optim.AdamW):
        optimizer.found_inf = unusable.float()  # type: ignore[attr-defined]  # what the fused update asks for
        return
    optimizer.unusable = unusable  # type: ignore[attr-defined]  # adamw8bit


def optimizer_bytes(name: str, precision: str) -> float:
    """Bytes per parameter of weight, gradient and optimizer states.

    muon: of a matrix in a block; embeddings and norms take AdamW's. adamw8bit: two bytes of codes and an fp32 scale per
    block of 256 for each moment.
    """
    weight_and_grad = {"bf16": 4.0, "fp32": 8.0}[precision]
    master = 4.0 if precision == "bf16" else 0.0
    states = {"adamw": master + 8.0, "adamw_sr": 4.0, "adamw8bit": 2 * (1 + 4 / 256), "muon": master + 4.0}
    return weight_and_grad + states[name]


def learning_rate(step: int, total_steps: int, optim: OptimConfig) -> float:
    """The learning rate of optimizer step 1..total_steps."""
    warmup = math.ceil(optim.warmup_ratio * total_steps)
    if step <= warmup:
        return optim.lr * step / warmup
    if optim.schedule == "constant":
        return optim.lr
    decay = max(round(optim.decay_ratio * total_steps), 1) if optim.schedule == "wsd" else total_steps - warmup
    progress = min(max((step - 1 - (total_steps - decay)) / decay, 0.0), 1.0)
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if optim.schedule == "cosine" else 1.0 - progress
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * remaining)
