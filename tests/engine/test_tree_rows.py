"""Rows of prefix trees have the losses and gradients of their documents, each alone through transformers."""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import pytest
import torch
from helpers import VOCAB_SIZE, tiny, tiny_llama
from made_trees import branching, tree_batch
from torch import Tensor
from transformers import Gemma3TextConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from sftkit.config.schema import LossConfig
from sftkit.data.batches.collate import Batch
from sftkit.engine.reference import documents_of, plain_sums, rows_of_batch
from sftkit.models.routing import routing_of
from sftkit.objectives.objective import ModelWithLoss, NextToken, Sums, Totals
from sftkit.ops.attention import plain_attention

LOSS = LossConfig(z_loss=1e-3, label_smoothing=0.1, token_metrics=True, chunk_tokens=64)
SHAPE = [(0, 20), (12, 9), (5, 20), (25, 1), (18, 8)]
"One tree: what each document shares with the one before it, and its own tokens."
EXAMPLES = branching(0, VOCAB_SIZE, [*SHAPE, (0, 6), (4, 3), *SHAPE])
MICRO_BATCHES: list[list[list[range]]] = [[[range(5), range(5, 7)], []], [[range(7, 10)], [range(10, 12)]]]
"Trees of documents in the rows of two micro-batches; the documents of the last two rows make one tree in the data."


def experts() -> PreTrainedModel:
    fields = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [1]}
    model = tiny(Qwen3MoeConfig, **fields)
    model.set_experts_implementation("batched_mm")
    for name, p in model.named_parameters():
        if name.endswith("gate.weight"):
            torch.nn.init.normal_(p, std=0.5)
    return model


MODELS = {
    "llama": tiny_llama,
    "qwen3": lambda: tiny(Qwen3Config),
    "gemma3": lambda: tiny(Gemma3TextConfig, num_hidden_layers=3, sliding_window=8, sliding_window_pattern=2),
    "qwen3_moe": experts,
}


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """A model whose norms round nothing to fp32, as those of transformers do."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            eps = getattr(module, "eps", None) or module.variance_epsilon

            def forward(x: Tensor, module: Any = module, eps: float = eps) -> Tensor:
                one = 1.0 if "Gemma" in type(module).__name__ else 0.0
                return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (one + module.weight)

            module.forward = forward  # type: ignore[method-assign]
    return model.double()


def learned(model: ModelWithLoss, found: Iterable[Sums]) -> tuple[Totals, dict[str, Tensor]]:
    """Sums and gradients."""
    totals = None
    model.zero_grad()
    for sums in found:
        (sums.loss / 100).backward()
        own = Totals.of(sums)
        totals = own if totals is None else Totals(own.names, totals.vector + own.vector)
    assert totals is not None
    return totals, {n: p.grad.clone() for n, p in model.orig_model.named_parameters() if p.grad is not None}


def batches() -> list[Batch]:
    return [tree_batch(EXAMPLES, rows, 96) for rows in MICRO_BATCHES]


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).norm() / other[name].norm()) for name in one)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sums_and_gradients_are_those_of_the_documents_alone(name: str, dtype: torch.dtype) -> None:
    orig_model = MODELS[name]().train()
    if dtype == torch.float64:
        in_float64(orig_model)
    # Routers take a softmax in fp32, whatever the model is in.
    limit = 1e-9 if dtype == torch.float64 and name != "qwen3_moe" else 2e-6
    routing = routing_of(orig_model, 0.5 if name == "qwen3_moe" else None)
    model = ModelWithLoss(orig_model, "reference", NextToken(LOSS), routing)
    ours, gradients = learned(model, (model(batch) for batch in batches()))
    recipe = [tuple(chain.from_iterable(row)) for rows in MICRO_BATCHES for row in rows]
    with plain_attention(orig_model):
        alone = plain_sums(model, documents_of(EXAMPLES, recipe, torch.device("cpu")))
        theirs, wanted = learned(model, alone)
    torch.testing.assert_close(ours.vector, theirs.vector, rtol=limit, atol=0.0)
    assert ours.names == theirs.names
    assert difference(gradients, wanted) < limit
    # And of the documents that the batch is taken apart into, as the reference engine learns from it.
    with plain_attention(orig_model):
        apart = chain.from_iterable(plain_sums(model, rows_of_batch(model, batch)) for batch in batches())
        again, parted = learned(model, apart)
    torch.testing.assert_close(again.vector, theirs.vector, rtol=limit, atol=0.0)
    assert difference(parted, wanted) < limit


def test_counts_are_those_of_the_documents() -> None:
    objective = NextToken(LOSS)
    assert sum(map(objective.count, batches())) == int(EXAMPLES.num_targets.sum())
    assert sum(batch.num_expanded for batch in batches()) == int(EXAMPLES.lengths.sum())
    assert sum(batch.num_tokens for batch in batches()) < 0.7 * EXAMPLES.lengths.sum()


def test_other_tokens_in_a_branch_change_its_descendants_alone() -> None:
    model = ModelWithLoss(MODELS["gemma3"](), "reference", NextToken(LOSS)).eval()
    (batch, _) = batches()
    assert batch.tree_ends is not None
    with torch.no_grad():
        before = model.hidden_states(batch, "reference")
        for first in (0, 15, 40):
            past = int(batch.tree_ends[0, first])
            ids = batch.inputs["input_ids"].clone()
            batch.inputs["input_ids"][0, first] = (ids[0, first] + 1) % VOCAB_SIZE
            changed = (model.hidden_states(batch, "reference") != before).any(-1)
            batch.inputs["input_ids"].copy_(ids)
            assert not changed[0, :first].any()
            assert changed[0, first:past].all()
            assert not changed[0, past:].any()
            assert not changed[1].any()
