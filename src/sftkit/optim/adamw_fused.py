"""torch's fused AdamW, for fp32 weights that are not sharded: one kernel for all of them."""

from __future__ import annotations

import torch

from sftkit.optim.gradients import multiply_gradients
from sftkit.optim.protocol import Group, State, optimizer_kind, parameters_of, set_learning_rate


class FusedAdamW(torch.optim.AdamW):
    """torch.optim.AdamW with fused=True as an optim.protocol.Optimizer."""

    found_inf: torch.Tensor
    """fp32 0-d, 1 for no update. torch's fused update reads it from its optimizer, where only GradScaler sets it; so a
    step is skipped without a host sync."""

    @property
    def kind(self) -> str:
        """Return what decides which states there are: see optim.protocol."""
        return optimizer_kind("AdamW", self.param_groups)

    def warm_up(self, *, compiled: bool) -> None:
        """Do nothing: the kernel comes compiled with torch."""

    def update(self, learning_rate: float, coefficient: torch.Tensor) -> None:
        """Update as optim.protocol says, by torch's fused kernel, which skips a step whose coefficient is NaN."""
        set_learning_rate(self.param_groups, learning_rate)
        multiply_gradients(parameters_of(self.param_groups), coefficient)
        # The way of GradScaler, which sets the attribute for one step only (pytorch/pytorch#88015); public torch
        # has no other.
        self.found_inf = coefficient.isnan().float()
        try:
            self.step()
        finally:
            del self.found_inf

    def new_state(self, param: torch.Tensor, group: Group) -> State:
        """Return the states of a parameter before its first update."""
        step = torch.zeros((), dtype=torch.float32, device=param.device)
        return {"step": step, "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
