"""Experts of a mixture: rows sorted by expert, two grouped products, and gradients that are gathered or multiplied.

transformers finds the function of experts by a name in the config; ours is registered there. Its own ones gather rows,
biases or whole matrices by number, so the gradients are additions into one place by many threads: slow, and in
another order each time. Here no gradient adds by number, and a run that is repeated or resumed has the same bits.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from sftkit.models.token_rows import in_front
from sftkit.ops.grouped import by_expert, grouped_product, rows_in_order, rows_of_experts

EXPERTS_IMPLEMENTATION = "sftkit"
"Name of our function among those of transformers."


def compute_experts_here(orig_model: PreTrainedModel) -> None:
    """Let the experts of a model be computed here, in every precision."""
    # Private: transformers' own check for switchable experts (huggingface/transformers#42697).
    if orig_model._can_set_experts_implementation():
        ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, weighted_sums)
        orig_model.set_experts_implementation(EXPERTS_IMPLEMENTATION)
    for module in orig_model.modules():
        if type(module).__name__ == "Llama4TextMoe":
            own: Any = type(module)
            module.__class__ = in_front(ChosenExperts, own)


def expert_product(experts: Any, rows: Tensor, name: str, numbers: Tensor, ends: Tensor) -> Tensor:
    """Return the products of rows [S, in] with a matrix of their experts, and its bias: [S, out].

    Args:
        numbers: int64 [S], the experts, ascending. ends: int32 [E], where the rows of each end.
    """
    weight = getattr(experts, name)
    y = grouped_product(rows, weight.transpose(1, 2) if experts.is_transposed else weight, ends)
    return y + rows_of_experts(getattr(experts, f"{name}_bias"), numbers, ends) if experts.has_bias else y


def weighted_sums(
    experts: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    multiplied: Callable[[Any, Tensor, str, Tensor, Tensor], Tensor] = expert_product,
) -> Tensor:
    """Return the weighted sum of each token's experts, [N, H].

    Args:
        experts: module with the matrices of all experts of a layer.
        hidden_states: [N, H]. top_k_index, top_k_weights: [N, experts of a token].
        multiplied: what multiplies rows with a matrix of their experts.
    """
    visits = top_k_index.shape[-1]
    numbers, order, back, ends = by_expert(top_k_index.flatten(), len(experts.down_proj))
    # Some routers choose no expert, by a number above theirs: its rows are never written by the products.
    own = (numbers < len(experts.down_proj))[:, None]
    rows = rows_in_order(hidden_states, order, back, visits).where(own, 0.0)
    # Private: what transformers calls between the two products of its own experts (huggingface/transformers#42697), for
    # which each architecture has its activation.
    if experts.has_gate:
        rows = experts._apply_gate(multiplied(experts, rows, "gate_up_proj", numbers, ends))
    else:
        rows = experts.act_fn(multiplied(experts, rows, "up_proj", numbers, ends))
    rows = rows_in_order(multiplied(experts, rows, "down_proj", numbers, ends).where(own, 0.0), back, order, 1)
    weighted = rows * top_k_weights.reshape(-1, 1)
    return weighted.view(-1, visits, weighted.shape[-1]).sum(1).to(hidden_states.dtype)


class ChosenExperts(torch.nn.Module):
    """Feed-forward layer of Llama 4 that computes the chosen experts.

    transformers computes all of them: an expert that a token did not choose reads zeros, since the score multiplies the
    input, and returns zeros, as do the gradients.
    """

    top_k: int
    router: torch.nn.Module
    experts: Any
    shared_expert: torch.nn.Module

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums over experts [N, H] and the router's logits [N, E]."""
        hidden = hidden_states.flatten(0, -2)
        scores, logits = self.router(hidden)
        chosen = scores.topk(self.top_k, dim=-1).indices  # the others have a score of 0
        read = (hidden[:, None] * scores.gather(-1, chosen)[..., None]).flatten(0, 1)
        _, order, back, ends = by_expert(chosen.flatten(), len(self.experts.down_proj))
        # transformers keeps both matrices as [E, in, out].
        gate_up = grouped_product(rows_in_order(read, order, back, 1), self.experts.gate_up_proj.mT, ends)
        gate, up = gate_up.chunk(2, dim=-1)
        rows = grouped_product(up * self.experts.act_fn(gate), self.experts.down_proj.mT, ends)
        routed = rows_in_order(rows, back, order, 1).unflatten(0, chosen.shape).sum(1)
        return self.shared_expert(hidden) + routed, logits
