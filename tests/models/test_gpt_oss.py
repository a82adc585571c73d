"""gpt-oss, which has attention sinks, windows in every other layer, and experts with biases: packed documents have the
losses and gradients that they have alone in plain transformers, and what is saved loads there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import make_batch, make_examples, make_layout_of, tiny
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedModel

from sftkit.config.schema import LossConfig, OptimConfig
from sftkit.objectives.objective import ModelWithLoss, NextToken
from sftkit.ops.attention import has_sinks, plain_attention, unsupported_reason
from sftkit.optim.protocol import parameter_groups
from sftkit.verify.documents import check_documents

SIZES = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "initializer_range": 0.3}
LENGTHS = [3, 20, 30, 7]
"On both sides of the window."


def gpt_oss(**fields: int) -> PreTrainedModel:
    """Every sink, bias and router different from 0."""
    model = tiny(GptOssConfig, **(SIZES | fields))
    model.set_experts_implementation("batched_mm")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                p.normal_(0.0, 1.0, generator=torch.Generator().manual_seed(len(name)))
    return model.train()


def test_packed_documents_have_the_losses_and_gradients_that_they_have_alone_in_plain_transformers() -> None:
    model = gpt_oss()
    examples = make_examples(LENGTHS, target_share=0.6)
    for n in range(len(LENGTHS)):
        batch = make_batch(examples, ((n,),), LENGTHS[n])
        logits = model(input_ids=batch.inputs["input_ids"], use_cache=False).logits[0]
        F.cross_entropy(logits, batch.targets[0], reduction="sum").backward()
    alone = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    ours = ModelWithLoss(model, "reference", NextToken(LossConfig()))
    ours(make_batch(examples, ((0, 1, 2), (3,)), 64)).loss.backward()
    for name, p in model.named_parameters():
        assert alone[name] is not None, name
        assert float(alone[name].norm()) > 1e-3, name
        assert float((p.grad - alone[name]).norm() / alone[name].norm()) < 1e-4, name


def test_a_document_does_not_change_when_another_one_does_and_its_window_is_that_of_transformers() -> None:
    model = gpt_oss()
    layout = make_layout_of("packed", LENGTHS, row_length=64)
    found = check_documents(
        ModelWithLoss(model, "reference", NextToken(LossConfig())), "reference", torch.device("cpu"), layout
    )
    assert found.leak == 0.0
    assert found.changed > 0.1
    assert found.limits == (8,)
    assert max(found.beyond, found.logits_difference) < 1e-5


def test_a_model_saved_by_transformers_and_trained_again_has_its_sinks(tmp_path: Path) -> None:
    model = gpt_oss()
    ids = torch.arange(3, 33)[None]
    ModelWithLoss(model, "reference", NextToken(LossConfig()))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad(), plain_attention(model):
        torch.testing.assert_close(loaded(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_sinks_and_the_biases_of_experts_are_vectors_to_an_optimizer(name: str) -> None:
    model = gpt_oss()
    names = {id(p): n for n, p in model.named_parameters()}
    groups = parameter_groups(model, OptimConfig(name=name, weight_decay=0.1))
    decayed = {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}
    orthogonalized = {names[id(p)] for group in groups if group.get("block_matrices") for p in group["params"]}
    assert not [n for n in decayed | orthogonalized if n.endswith(("bias", "sinks"))]
    assert "model.layers.0.mlp.experts.gate_up_proj" in decayed - orthogonalized
    assert sum(len(group["params"]) for group in groups) >= len(names) - (name == "muon")


def test_a_backend_without_sinks_is_named_as_such() -> None:
    model, layout = gpt_oss(), make_layout_of("fixed", LENGTHS)
    assert has_sinks(model)
    problem = unsupported_reason("sdpa", model, layout, torch.device("cpu"), compiled=True)
    assert problem == "has no attention sinks, which this model has"
