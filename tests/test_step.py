"""The loss and its gradients: documents apart, accumulation exact, layouts equal."""

from __future__ import annotations

import pytest
import torch
from helpers import VOCAB_SIZE, cpu_runtime, make_examples, tiny_llama, tiny_qwen3_with_windows

from sftkit import runtime
from sftkit.attention import attention_masks, document_mask
from sftkit.config import LogConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from sftkit.data.collate import IGNORE, Batch, collate
from sftkit.data.loader import Batches, StepBatches
from sftkit.data.pack import Layout
from sftkit.loss import sum_nll, token_nll
from sftkit.optim import build_optimizer
from sftkit.step import ModelWithLoss, forward_backward, optimizer_step

MODELS = {"llama": tiny_llama, "qwen3 with sliding windows": tiny_qwen3_with_windows}


def logits_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    masks = attention_masks(model.config, batch.doc_ids)
    return model(
        input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=masks, use_cache=False
    ).logits


@pytest.mark.parametrize("make_model", MODELS.values(), ids=MODELS.keys())
def test_packed_logits_equal_unpacked_logits_document_by_document(make_model) -> None:
    model = make_model().eval()
    examples = make_examples([9, 14, 1, 6])
    with torch.no_grad():
        packed = logits_of(model, collate(examples, ((0, 1, 2, 3),), row_length=32, pad_id=0))
        start = 0
        for i in range(4):
            ids = torch.tensor(examples[i].ids[None, :-1], dtype=torch.int64)
            alone = model(input_ids=ids, use_cache=False).logits
            torch.testing.assert_close(packed[:, start : start + ids.shape[1]], alone, atol=2e-6, rtol=1e-5)
            start += ids.shape[1]


def test_perturbing_one_document_leaves_the_losses_of_the_others_unchanged() -> None:
    model = tiny_llama().eval()
    batch = collate(make_examples([9, 14, 6], target_share=1.0), ((0, 1, 2),), row_length=32, pad_id=0)
    changed = batch.input_ids.clone()
    changed[0, 9:23] = (changed[0, 9:23] + 7) % VOCAB_SIZE
    with torch.no_grad():
        before = token_nll(logits_of(model, batch), batch.targets)
        after = token_nll(
            logits_of(model, Batch(changed, batch.targets, batch.position_ids, batch.doc_ids, 29, 29, 0)), batch.targets
        )
    others = torch.ones(32, dtype=torch.bool)
    others[9:23] = False
    assert torch.equal(before[0, others], after[0, others])
    assert not torch.equal(before[0, 9:23], after[0, 9:23])


def test_padding_changes_no_loss() -> None:
    model = tiny_llama().eval()
    examples = make_examples([9, 14])
    with torch.no_grad():
        sums = [
            sum_nll(logits_of(model, batch), batch.targets)
            for batch in (collate(examples, rows, 32, 0) for rows in (((0, 1),), ((0, 1), (), ())))
        ]
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-6, atol=1e-5)
    assert torch.isfinite(sums[1])


def test_document_mask_is_causal_isolated_windowed_and_never_empty() -> None:
    doc_ids = torch.tensor([[0, 0, 0, 1, 1, -1, -1]])
    mask = document_mask(doc_ids)[0, 0]
    expected = [[j <= i and doc_ids[0, i] == doc_ids[0, j] for j in range(7)] for i in range(7)]
    assert mask.tolist() == expected
    windowed = document_mask(doc_ids, window=2)[0, 0]
    assert windowed.tolist() == [[expected[i][j] and i - j < 2 for j in range(7)] for i in range(7)]
    assert mask.any(-1).all()


def test_models_with_two_kinds_of_layers_get_a_mask_for_each() -> None:
    masks = attention_masks(tiny_qwen3_with_windows().config, torch.zeros(1, 8, dtype=torch.int32))
    assert isinstance(masks, dict)
    assert set(masks) == {"full_attention", "sliding_attention"}
    assert int(masks["sliding_attention"].sum(-1).max()) == 5


def test_loss_without_targets_is_zero_not_nan() -> None:
    assert sum_nll(torch.randn(1, 4, 8), torch.full((1, 4), IGNORE)) == 0.0


def test_loss_equals_float64_arithmetic() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 6, 50) * 5, torch.randint(0, 50, (2, 6))
    targets[0, :3] = IGNORE
    exact = -torch.log_softmax(logits.double(), -1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    exact[targets == IGNORE] = 0.0
    torch.testing.assert_close(token_nll(logits, targets).double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sum_nll(logits, targets).double(), exact.sum(), rtol=1e-6, atol=1e-6)


def step_of(micro_batch_size: int, layout_kind: str = "packed") -> tuple[dict[str, torch.Tensor], float, float]:
    """(weights, loss sum, gradient norm) after one step on 8 rows with unequal target counts."""
    rt = cpu_runtime()
    examples = make_examples([30, 4, 25, 8, 31, 3, 17, 29, 12, 5, 6, 31, 2, 20], target_share=0.3)
    lengths = (16, 32) if layout_kind == "bucketed" else (32,)
    layout = Layout(layout_kind, lengths, global_batch_size=8, micro_batch_size=micro_batch_size, world_size=1)
    model = ModelWithLoss(tiny_llama())
    optimizer = build_optimizer(model.orig_model, OptimConfig(lr=1e-2, eps=1e-4))
    (step,) = Batches(examples, layout, seed=0, rank=0, pad_id=0).steps(0, 1)
    loss_sum, grad_norm = optimizer_step(model, optimizer, step, 1e-2, 1.0, rt)
    return model.state_dict(), float(loss_sum), float(grad_norm)


def test_accumulation_of_8_micro_batches_of_1_equals_1_of_8() -> None:
    one, eight = step_of(micro_batch_size=8), step_of(micro_batch_size=1)
    assert one[1] == pytest.approx(eight[1], rel=1e-6)
    assert one[2] == pytest.approx(eight[2], rel=1e-5)
    for name, value in one[0].items():
        torch.testing.assert_close(value, eight[0][name], rtol=1e-4, atol=2e-6)


def test_the_gradient_is_that_of_the_mean_over_all_target_tokens() -> None:
    rt = cpu_runtime()
    examples = make_examples([30, 4, 25, 8], target_share=0.3)
    model = ModelWithLoss(tiny_llama())
    parts = [collate(examples, rows, 32, 0) for rows in (((0,),), ((1, 2),), ((3,),))]
    total = sum(part.num_targets for part in parts)
    for part in parts:
        forward_backward(model, part, total, rt)
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    nll = [
        token_nll(
            logits_of(model.orig_model, collate(examples, ((i,),), 32, 0)), collate(examples, ((i,),), 32, 0).targets
        )
        for i in range(4)
    ]
    (torch.stack([n.sum() for n in nll]).sum() / total).backward()
    for gradient, p in zip(got, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, p.grad, rtol=1e-4, atol=1e-7)


def test_the_same_documents_give_the_same_loss_in_every_layout() -> None:
    examples = make_examples([30, 4, 25, 8, 16, 1], target_share=0.5)
    model = ModelWithLoss(tiny_llama())
    sums = {}
    for kind in ("packed", "bucketed", "fixed"):
        lengths = (16, 32) if kind == "bucketed" else (32,)
        batches = Batches(examples, Layout(kind, lengths, 2, 2, 1), seed=0, rank=0, pad_id=0)
        micro = [b for step in batches.steps(0, batches.num_steps(1)) for b in step.micro_batches]
        with torch.no_grad():
            sums[kind] = sum(float(model(b.input_ids, b.targets, b.position_ids, b.doc_ids)) for b in micro)
    assert sums["bucketed"] == pytest.approx(sums["packed"], rel=1e-6)
    assert sums["fixed"] == pytest.approx(sums["packed"], rel=1e-6)


def test_a_step_without_any_target_changes_nothing_and_is_finite() -> None:
    rt = cpu_runtime()
    model = ModelWithLoss(tiny_llama())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    empty = collate(make_examples([4]), ((), ()), 16, 0)
    step = StepBatches(0, [empty], num_targets=0, num_tokens=0, num_positions=32, attention_pairs=0)
    loss_sum, grad_norm = optimizer_step(model, build_optimizer(model.orig_model, OptimConfig()), step, 1e-3, 1.0, rt)
    assert float(loss_sum) == 0.0
    assert float(grad_norm) == 0.0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_accelerates_own_loss_division_stays_off(monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    rt = runtime.start(RunConfig(dir="."), TrainConfig(max_steps=1), LogConfig(wandb="off"))
    weight = torch.nn.Parameter(torch.ones(()))
    rt.accelerator.backward(8.0 * weight)
    assert float(weight.grad) == 8.0


def test_gradient_checkpointing_changes_no_gradient(tmp_path, tokenizer) -> None:
    from sftkit.model import load_model

    fields = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    gradients = []
    for checkpointing in (False, True):
        config = ModelConfig(scratch={**fields, **heads}, gradient_checkpointing=checkpointing)
        model = ModelWithLoss(load_model(config, tokenizer, seed=0)).train()
        assert model.orig_model.is_gradient_checkpointing is checkpointing
        batch = collate(make_examples([9, 14]), ((0, 1),), 32, 0)
        forward_backward(model, batch, batch.num_targets, cpu_runtime())
        gradients.append([p.grad for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
