"""Small models with adapters, and their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import PreTrainedModel

from sftkit.config.schema import AdapterConfig, ModelConfig
from sftkit.models.adapters import Adapters, add_adapters, peft_config_text
from sftkit.models.trained import factors

IDS = torch.arange(24).reshape(2, 12) * 5 % 61


def move_b(model: PreTrainedModel) -> PreTrainedModel:
    """Give B numbers that are not zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, factor in factors(model).items():
            if ".lora_B." in name:
                factor.normal_(0.0, 0.1, generator=generator)
    return model


def adapted_model(model: PreTrainedModel, base: str = "base", **settings: Any) -> PreTrainedModel:
    """With adapters whose B is not zero."""
    add_adapters(model, Adapters(AdapterConfig(**settings), 7, ModelConfig(path=base), ""))
    return move_b(model)


def write_adapter(model: PreTrainedModel, folder: Path) -> Path:
    """Write the adapter's files, as a checkpoint has them."""
    folder.mkdir(parents=True)
    tensors = {f"base_model.model.{name}": p.detach().clone() for name, p in factors(model).items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(peft_config_text(model))
    return folder


def loss_of(model: Any) -> torch.Tensor:
    """Return the loss of two rows of tokens."""
    logits = model(input_ids=IDS, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
