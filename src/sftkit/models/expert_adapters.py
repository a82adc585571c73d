"""Low-rank adapters of the experts of a mixture, whose matrices transformers keeps in one parameter for each layer.

The products of factors are grouped as those of the weights are: a row is multiplied with the factors of its expert
only, and no W + scale * B A is made. Factors have the shapes and names of peft's files.

Letters: E experts, S rows of tokens (one for each expert that a token visits), r rank.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sftkit.models.adapter_files import EXPERT_WEIGHTS, PER_EXPERT
from sftkit.models.adapters import Factor
from sftkit.models.experts import expert_product, weighted_sums
from sftkit.models.token_rows import in_front
from sftkit.ops.grouped import grouped_product
from sftkit.ops.tensors import local, local_region


class ExpertFactors(torch.nn.Module):
    """The factors of one of the matrices of all experts of a layer."""

    lora_A: Factor
    "[E r, in], expert by expert"
    lora_B: Factor
    "[out, r E], the expert is the fastest index"


class LoraExperts(ExpertFactors):
    """Frozen experts with adapters. Their own factors are those of down_proj, as in peft's names."""

    base_layer: ExpertFactors
    "of gate_up_proj"
    lora_scale: float
    down_proj: Tensor
    is_transposed: bool
    has_bias: bool
    _apply_gate: Callable[[Tensor], Tensor]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, [N, H].

        Args:
            hidden_states: [N, H]. top_k_index, top_k_weights: [N, experts of a token].
        """
        return weighted_sums(self, hidden_states, top_k_index, top_k_weights, LoraExperts._product)

    def _product(self, rows: Tensor, name: str, numbers: Tensor, ends: Tensor) -> Tensor:
        """Return the products of rows [S, in] with a matrix of their experts and its factors, [S, out].

        Args:
            numbers: [S], the experts, ascending. ends: [E], where the rows of each end.
        """
        y = expert_product(self, rows, name, numbers, ends)
        a, b = by_expert_factors(pair_of(self, name), len(self.down_proj))
        # Grouped products take rows of a multiple of 16 bytes.
        missing = -a.shape[1] % 8
        a = F.pad(a, (0, 0, 0, missing)).to(rows.dtype)
        b = F.pad(b, (0, missing)).to(rows.dtype).contiguous()
        inner = grouped_product(rows, a, ends)
        return y + self.lora_scale * grouped_product(inner, b, ends)


class PlainExperts(LoraExperts):
    """Experts with adapters one after the other, without our operators: what the others are compared with."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, [N, H]."""
        outputs = hidden_states.new_zeros(*top_k_index.shape, hidden_states.shape[-1])
        for expert in range(len(self.down_proj)):
            token, place = torch.where(top_k_index == expert)
            rows = self._apply_gate(self._product_of(expert, hidden_states[token], "gate_up_proj"))
            outputs[token, place] = self._product_of(expert, rows, "down_proj")
        return (outputs * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)

    def _product_of(self, expert: int, rows: Tensor, name: str) -> Tensor:
        """Return the products of rows with a matrix of an expert, and its factors."""
        weight = getattr(self, name)[expert]
        bias = getattr(self, f"{name}_bias")[expert] if self.has_bias else None
        a, b = (factor[expert].to(rows.dtype) for factor in by_expert_factors(pair_of(self, name), len(self.down_proj)))
        y = F.linear(rows, weight.t() if self.is_transposed else weight, bias)
        return y + self.lora_scale * F.linear(F.linear(rows, a), b)


def can_be_adapted(module: torch.nn.Module) -> bool:
    """Return whether a module is experts that are computed here: two products with an activation between them."""
    weights: list[Any] = [getattr(module, name, None) for name in EXPERT_WEIGHTS]
    return getattr(module, "has_gate", None) is True and all(w is not None and w.ndim == 3 for w in weights)


def sizes(experts: torch.nn.Module, name: str) -> tuple[int, int]:
    """Return the outputs and inputs of a matrix of experts."""
    rows, columns = getattr(experts, name).shape[1:]
    return (columns, rows) if experts.is_transposed else (rows, columns)


def adapt(experts: Any, rank: int, scale: float) -> None:
    """Give experts adapters, with factors of zeros."""
    own: Any = type(experts)
    experts.__class__ = in_front(LoraExperts, own)
    assert isinstance(experts, LoraExperts)
    experts.lora_scale = scale
    experts.base_layer = ExpertFactors()
    for name in EXPERT_WEIGHTS:
        outputs, inputs = sizes(experts, name)
        count, device = len(experts.down_proj), experts.down_proj.device
        pair = pair_of(experts, name)
        pair.lora_A = Factor(count * rank, inputs, device)
        pair.lora_B = Factor(outputs, rank * count, device)


def pair_of(experts: LoraExperts, name: str) -> ExpertFactors:
    """Return the factors of a matrix of experts."""
    return experts.base_layer if name == "gate_up_proj" else experts


def by_expert_factors(pair: Any, experts: int) -> tuple[Tensor, Tensor]:
    """Return A [E, r, in] and B [E, out, r]."""
    a, b = pair.lora_A.weight, pair.lora_B.weight
    return a.view(experts, -1, a.shape[1]), b.view(len(b), -1, experts).permute(2, 0, 1)


def per_expert(tensors: Mapping[str, Tensor], model_type: str, rank: int) -> dict[str, Tensor]:
    """Return the tensors of an adapter's file with a pair of factors for each matrix of each expert, as servers read
    them. The gate and up projection of an expert have the same A, and each its half of the rows of B.

    Args:
        model_type: one of PER_EXPERT.
    """
    block, *gate_up, down = PER_EXPERT[model_type]
    found = {}
    for key, tensor in tensors.items():
        layer, experts, factor = key.rpartition(".mlp.experts.")
        if not experts:
            found[key] = tensor
            continue
        matrices = gate_up if factor.startswith("base_layer.") else [down]
        factor = factor.removeprefix("base_layer.")
        pairs: Iterable[Sequence[Tensor]]
        if factor.startswith("lora_A."):
            pairs = ([a] * len(matrices) for a in tensor.view(-1, rank, tensor.shape[1]))
        else:
            pairs = (b.chunk(len(matrices)) for b in tensor.view(len(tensor), rank, -1).permute(2, 0, 1))
        for expert, values in enumerate(pairs):
            for matrix, value in zip(matrices, values, strict=True):
                name = f"{layer}.{block}.experts.{expert}.{matrix}.{factor}"
                found[name] = value.clone(memory_format=torch.contiguous_format)
    return found


def expert_weights(orig_model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the weights of experts by the names of their factors in the files."""
    return {
        f"{name}{'.base_layer' * (one == 'gate_up_proj')}": getattr(module, one)
        for name, module in orig_model.named_modules()
        if can_be_adapted(module)
        for one in EXPERT_WEIGHTS
    }


def merged_experts(weight: Tensor, a: Tensor, b: Tensor, scale: float, *, transposed: bool) -> Tensor:
    """Return W + scale * B A of the experts that this rank holds, computed as merged_weight does.

    Args:
        weight: [E, out, in], or with the last two exchanged if `transposed`; whole or this rank's shard of experts.
        a, b: [E r, in] and [out, r E].
    """
    (start, size), *_ = local_region(weight)
    experts = weight.shape[0]
    merged = local(weight).to("cpu", torch.float32, copy=True)  # the weight itself stays
    a, b = a.cpu().float().view(experts, -1, a.shape[1]), b.cpu().float().view(len(b), -1, experts)
    for own in range(size):
        added = scale * (b[..., start + own] @ a[start + own])
        merged[own] += added.t() if transposed else added
    return merged.to(weight.device, weight.dtype)
