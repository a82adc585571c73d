"""AdamW all in bf16: weights and moments are stored by stochastic rounding, exact in expectation."""

from __future__ import annotations

import torch

from sftkit.config.schema import OptimConfig
from sftkit.errors import ConfigError
from sftkit.optim.adamw import AdamW
from sftkit.optim.protocol import Groups, parameters_of


def build(groups: Groups, optim: OptimConfig, *, seed: int) -> AdamW:
    """Build the optimizer of optim.name=adamw_sr.

    Raises:
        ConfigError: no weight is bf16, so that nothing would be rounded.
    """
    if all(p.dtype != torch.bfloat16 for p in parameters_of(groups)):
        raise ConfigError("optim.name=adamw_sr rounds bf16 weights: set train.precision=bf16, or optim.name=adamw")
    return AdamW(groups, optim, seed=seed, stochastic=True)
