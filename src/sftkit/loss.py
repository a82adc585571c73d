"""The loss: a sum over target tokens. Division by their global number happens in step.py, once."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from sftkit.data.collate import IGNORE


def token_nll(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of each target in nats, 0 where there is none; fp32 softmax.

    Args:
        logits: [B, T, V]; targets: int64 [B, T], already shifted.

    Returns:
        fp32 [B, T]
    """
    flat = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction="none")
    return flat.view(targets.shape)


def sum_nll(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum of `token_nll`: fp32, 0-d. 0 and not NaN for a batch without targets."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum")
