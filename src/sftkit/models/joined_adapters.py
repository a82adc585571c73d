"""Layers with adapters that read the same input, computed together: fewer passes over activations, the same numbers.

An adapter's products are small and read and write wide activations. Apart from each other, those of a block take more
time in a small model than the frozen weights save. Modules that are known get another class in front of their own.
Without gradients they compute layer by layer, so evaluation gives the bits of the checkpoint in plain transformers.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP

from sftkit.models.adapters import LoraLinear
from sftkit.models.many_adapters import ManyLora, product_of_shares
from sftkit.models.token_rows import in_front
from sftkit.ops.low_rank import gated_mlp

QUERIES_KEYS_VALUES = ("q_proj", "k_proj", "v_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LARGEST_RANK = 64
"Of the kernels: their tiles of factors grow with the rank, and those of larger ones were never run on a GPU."


def join_layers(orig_model: PreTrainedModel) -> None:
    """Have the MLPs and attention modules that are known compute their layers' adapters together."""
    for module in orig_model.modules():
        own: Any = type(module)
        if is_gated_mlp(module) and all(has_plain_adapter(module, name) for name in MLP):
            if getattr(module, MLP[0]).lora_A.weight.shape[0] <= LARGEST_RANK:
                module.__class__ = in_front(JoinedMlp, own)
        elif reads_together(module):
            module.__class__ = in_front(JoinedAttention, own)


def has_plain_adapter(module: torch.nn.Module, name: str) -> bool:
    """Return whether a layer of the module has an adapter of the plain kind, without dropout."""
    layer = getattr(module, name, None)
    return type(layer) is LoraLinear and layer.lora_dropout is None


def reads_together(module: torch.nn.Module) -> bool:
    """Return whether queries, keys and values of an attention module have adapters of one plain kind."""
    many = all(type(getattr(module, name, None)) is ManyLora for name in QUERIES_KEYS_VALUES)
    return many or all(has_plain_adapter(module, name) for name in QUERIES_KEYS_VALUES)


def is_gated_mlp(module: torch.nn.Module) -> bool:
    """Return whether a module computes down(silu(gate(x)) * up(x)) without biases. Every architecture has a class of
    its own for it, so the code of its forward pass is compared with that of Llama's."""
    code = getattr(type(module).forward, "__code__", None)
    known = LlamaMLP.forward.__code__
    return (
        code is not None
        and (code.co_code, code.co_names) == (known.co_code, known.co_names)
        and isinstance(module.act_fn, torch.nn.SiLU | SiLUActivation)
        and all(getattr(module, name).bias is None for name in MLP)
    )


def has_kernel(x: Tensor) -> bool:
    """Return whether the kernels of ops/low_rank.py are for this input."""
    return x.is_cuda and x.dtype == torch.bfloat16


class JoinedMlp(torch.nn.Module):
    """An MLP whose adapters cost no pass over its widest activations (ops/low_rank.py)."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, [..., H]."""
        if not (torch.is_grad_enabled() and has_kernel(x) and all(has_plain_adapter(self, name) for name in MLP)):
            return super().forward(x)
        layers: list[Any] = [getattr(self, name) for name in MLP]
        a = tuple(layer.lora_A.weight.to(x.dtype) for layer in layers)
        b = tuple(layer.lora_B.weight.to(x.dtype) for layer in layers)
        return gated_mlp(x, tuple(layer.frozen for layer in layers), a, b, layers[0].lora_scale)


class JoinedAttention(torch.nn.Module):
    """An attention module that multiplies its input once with A of queries, keys and values, and so do gradients."""

    def forward(self, *args: Any, **named: Any) -> Any:
        """Compute the module's own forward pass."""
        if not (torch.is_grad_enabled() and reads_together(self)):
            return super().forward(*args, **named)
        x = args[0] if args else named["hidden_states"]
        layers: list[Any] = [getattr(self, name) for name in QUERIES_KEYS_VALUES]
        if isinstance(layers[0], ManyLora) and layers[0].in_shares:
            joint = product_of_shares(x, torch.cat([layer.factors_of_shares("A", x.dtype) for layer in layers], 1))
        else:
            joint = linear(x, torch.cat([layer.factor_of_rows for layer in layers]).to(x.dtype))
        for layer, part in zip(layers, joint.chunk(3, -1), strict=True):
            layer.joint = (x, part)
        try:
            return super().forward(*args, **named)
        finally:
            for layer in layers:
                layer.joint = None
