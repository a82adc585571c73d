"""Muon on the matrices of the decoder blocks, AdamW on everything else, in one optimizer."""

from __future__ import annotations

from typing import Any

import torch

from sftkit.adamw import AdamW, elements, flat, int32, noise16, random_key, stochastic_round

MOMENTUM = 0.95


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """U V^T of the singular value decomposition, nearly: five quintic Newton-Schulz steps in bf16 (K. Jordan 2024).

    Singular values end between 0.5 and 1.5, which is as good here. The same arithmetic as torch.optim.Muon, whose
    functional form is private and has changed between releases.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.bfloat16().T if tall else matrix.bfloat16()
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def update_muon(
    weight: torch.Tensor, grad: torch.Tensor, momentum_buffer: torch.Tensor, lr: float, weight_decay: float
) -> None:
    """In place on fp32 matrices: Nesterov momentum, orthogonalized, scaled to the root mean square of an AdamW update
    (0.2 sqrt(max(rows, columns)), arXiv 2502.16982), so that one learning rate serves both."""
    momentum_buffer.lerp_(grad, 1 - MOMENTUM)
    update = orthogonalized(grad.lerp(momentum_buffer, MOMENTUM))
    weight.mul_(1 - lr * weight_decay)
    weight.add_(update, alpha=-lr * 0.2 * max(weight.shape) ** 0.5)


class Muon(AdamW):
    """Groups with `use_muon` take Muon, the others this package's AdamW.

    States of a matrix: `momentum_buffer` (fp32, flat), `step` (int), and for a bf16 matrix `master` (fp32, flat).
    """

    def _zero_states(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        if not group["use_muon"]:
            return super()._zero_states(param, group)
        return {"step": 0, "momentum_buffer": torch.zeros(param.numel(), device=param.device)}

    def _update(self, param: torch.nn.Parameter, group: dict[str, Any], index: int, clip: torch.Tensor) -> None:
        if not group["use_muon"]:
            return super()._update(param, group, index, clip)
        state = self._next_state(param, group)
        assert param.grad is not None
        weight = state.get("master", flat(param)).view(param.shape)
        momentum_buffer = state["momentum_buffer"].view(param.shape)
        update_muon(weight, param.grad.float() * clip, momentum_buffer, group["lr"], group["weight_decay"])
        if "master" in state:
            key = random_key(self.seed, state["step"], index)
            noise = noise16(elements(state["master"]), int32(key), int32(key >> 32))[0]
            param.copy_(stochastic_round(state["master"], noise).view(param.shape))
        return None
