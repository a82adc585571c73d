"""AdamW and the learning-rate schedules, which are pure functions of the step."""

from __future__ import annotations

import math

import torch

from sftkit.config import OptimConfig


def build_optimizer(model: torch.nn.Module, optim: OptimConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019), fused; weight decay on matrices, none on norms, biases and embeddings."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim >= 2 and id(p) not in embeddings]
    others = [p for p in trained if p.ndim < 2 or id(p) in embeddings]
    groups = [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True
    )


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
