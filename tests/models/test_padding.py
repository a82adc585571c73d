"""model.pad_vocab_to_multiple_of: rows that no token has are in memory alone, and everything else is as without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_batch, make_examples, make_layout_of, torchrun
from made_captioners import CAPTIONER, made
from test_vocabulary import make_model, plain_tokenizer, run_stage
from transformers import AutoModelForCausalLM, PreTrainedModel

from sftkit.checkpoint.resume import identity_differences, run_identity
from sftkit.checkpoint.states import snapshot_weights, write_weights
from sftkit.config.schema import LossConfig, ModelConfig, OptimConfig
from sftkit.errors import ConfigError
from sftkit.models.load import load_model
from sftkit.models.structure import count_parameters, embedding_of, output_projection, vocab_size
from sftkit.models.tokenizer import load_tokenizer
from sftkit.models.vocabulary import describe_padding, pad_vocabulary, padding_rows, vocabulary_of
from sftkit.models.weights import load_model_weights, load_weights, make_room
from sftkit.objectives.objective import ModelWithLoss, NextToken
from sftkit.ops.linear_cross_entropy import Head, linear_nll
from sftkit.optim.protocol import build_optimizer

ROWS, MULTIPLE, PADDED = 70, 32, 96
KINDS = ("untied", "tied", "head bias", "tied, head bias")


def pair(kind: str, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same model without and with padding."""
    plain, padded = make_model(kind, ROWS).to(dtype), make_model(kind, ROWS).to(dtype)
    pad_vocabulary(padded, MULTIPLE)
    return plain, padded


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_zeros_behind_the_tokens_and_in_no_logit(kind: str) -> None:
    plain, padded = pair(kind)
    assert (vocab_size(padded), embedding_of(padded).shape[0], padding_rows(padded)) == (ROWS, PADDED, PADDED - ROWS)
    assert padded.config.to_dict() == plain.config.to_dict()
    assert count_parameters(padded) == count_parameters(plain)
    for whole, rows in zip(vocabulary_of(padded), vocabulary_of(plain), strict=True):
        assert torch.equal(whole[:ROWS], rows)
        assert not whole[ROWS:].any()
    ids = torch.randint(3, ROWS, (2, 9))
    torch.testing.assert_close(padded(ids).logits, plain(ids).logits)
    assert describe_padding(padded) == "vocabulary padded from 70 to 96 rows: zeros, not in logits and files"
    assert describe_padding(plain) is None
    assert output_projection(padded).out_features == PADDED


def test_a_vocabulary_that_is_a_multiple_already_stays() -> None:
    model = make_model("untied", 64)
    pad_vocabulary(model, 32)
    assert (padding_rows(model), embedding_of(model).shape[0], len(output_projection(model)._forward_hooks)) == (
        0,
        64,
        0,
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("settings", "softcap"), [({}, None), ({"z_loss": 0.1, "label_smoothing": 0.2, "token_metrics": True}, 3.0)]
)
def test_loss_and_gradients_are_those_without_padding(
    settings: dict[str, Any], softcap: float | None, bias: bool
) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(150, 8), torch.randn(ROWS, 8)
    targets = torch.randint(0, ROWS, (150,)).masked_fill(torch.arange(150) % 5 == 0, -100)
    offsets = torch.randn(ROWS) if bias else None
    options, found = LossConfig(chunk_tokens=64, **settings), []
    for rows in (0, PADDED - ROWS):
        inputs = [hidden.clone(), torch.nn.functional.pad(weight, (0, 0, 0, rows), value=2.0)]  # even if it is not zero
        inputs += [torch.nn.functional.pad(offsets, (0, rows), value=50.0)] if offsets is not None else []
        for tensor in inputs:
            tensor.requires_grad_()
        own_bias = inputs[2] if bias else None
        sums = linear_nll(inputs[0], Head(inputs[1], own_bias, softcap, ROWS if rows else None), targets, options)
        sums.loss.backward()
        found.append((sums, [tensor.grad for tensor in inputs]))
    (plain, gradients), (padded, with_padding) = found
    torch.testing.assert_close(list(padded), list(plain), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(with_padding[0], gradients[0], rtol=1e-5, atol=1e-6)
    for whole, rows in zip(with_padding[1:], gradients[1:], strict=True):
        torch.testing.assert_close(whole[:ROWS], rows, rtol=1e-5, atol=1e-6)
        assert not whole[ROWS:].any()


def trained(model: PreTrainedModel, optim: str, steps: int = 3) -> list[float]:
    """Losses per target of updates that decay matrices, and so an untied head, by a tenth."""
    with_loss = ModelWithLoss(model, "reference", NextToken(LossConfig()))
    optimizer = build_optimizer(model, OptimConfig(name=optim, lr=1e-2, weight_decay=10.0), seed=1)
    losses = []
    for step in range(steps):
        batch = make_batch(make_examples([20, 11, 14], seed=step), ((0, 1), (2,)), 32)
        sums = with_loss(batch)
        (sums.loss / batch.num_targets).backward()
        optimizer.update(1e-2, torch.tensor(1.0))
        optimizer.zero_grad()
        losses.append(float(sums.loss.detach()) / batch.num_targets)
    return losses


@pytest.mark.parametrize(
    ("kind", "optim", "dtype"),
    [
        ("untied", "adamw", torch.float32),
        ("tied, head bias", "adamw", torch.float32),
        ("untied", "adamw", torch.bfloat16),
        ("tied", "adamw_sr", torch.bfloat16),
        ("untied", "muon", torch.float32),
    ],
)
def test_training_is_that_without_padding_and_nothing_moves_it(kind: str, optim: str, dtype: torch.dtype) -> None:
    plain, padded = pair(kind, dtype)
    expected, found = trained(plain, optim), trained(padded, optim)
    exact = dtype == torch.float32 and optim == "adamw"  # Muon's products are bf16
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 if exact else 2e-2)
    for tensor in vocabulary_of(padded):
        assert not tensor[ROWS:].any()
    for whole, rows in zip(vocabulary_of(padded), vocabulary_of(plain), strict=True):
        assert not torch.equal(rows, torch.zeros_like(rows))
        if exact:
            torch.testing.assert_close(whole[:ROWS], rows, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_has_no_padding_and_comes_back_into_a_padded_model(kind: str, tmp_path: Path) -> None:
    _, padded = pair(kind)
    trained(padded, "adamw", steps=1)
    snapshot = snapshot_weights(padded, 0, 1)
    write_weights(snapshot, padded, tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert saved.config.vocab_size == ROWS
    live = dict(padded.named_parameters())
    cut = {id(tensor) for tensor in vocabulary_of(padded)}
    for name, value in saved.named_parameters():
        assert torch.equal(value, live[name][:ROWS] if id(live[name]) in cut else live[name]), name

    again = make_model(kind, ROWS)
    pad_vocabulary(again, MULTIPLE)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.fill_(7.0)
    load_weights(again, tmp_path)
    for name, value in again.named_parameters():
        assert torch.equal(value, live[name]), name


def source_of(tmp_path: Path, kind: str, **settings: Any) -> ModelConfig:
    tokenizer = plain_tokenizer(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    make_model(kind, len(tokenizer)).save_pretrained(tmp_path)
    return ModelConfig(path=str(tmp_path), **settings)


@pytest.mark.parametrize("template", [None, "chatml"])
@pytest.mark.parametrize("kind", ["untied", "tied, head bias"])
def test_an_empty_model_is_filled_with_the_rows_and_padding_of_a_whole_one(
    tmp_path: Path, kind: str, template: str | None
) -> None:
    source = source_of(tmp_path, kind, chat_template=template, pad_vocab_to_multiple_of=128)
    tokenizer = load_tokenizer(source)
    whole, empty = (load_model(source, tokenizer, 0, empty=empty) for empty in (False, True))
    assert (vocab_size(whole), padding_rows(whole)) == ((320, 64) if template else (272, 112))
    make_room(empty, torch.device("cpu"))
    load_model_weights(empty, source)
    for name, value in whole.named_parameters():
        assert torch.equal(dict(empty.named_parameters())[name], value), name


def test_a_new_model_has_the_weights_that_it_has_without_padding(tmp_path: Path) -> None:
    plain_tokenizer(tmp_path).save_pretrained(tmp_path)
    shape = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2}
    models = []
    for multiple in (None, 128):
        source = ModelConfig(scratch=shape, tokenizer=str(tmp_path), pad_vocab_to_multiple_of=multiple)
        models.append(load_model(source, load_tokenizer(source), 42))
    plain, padded = models
    assert (embedding_of(plain).shape[0], embedding_of(padded).shape[0], padded.config.vocab_size) == (272, 384, 272)
    for name, value in plain.named_parameters():
        assert torch.equal(dict(padded.named_parameters())[name][: len(value)], value), name


def test_generation_never_gives_a_row_of_padding() -> None:
    plain, padded = pair("untied")
    with torch.no_grad():
        for model in (plain, padded):
            output_projection(model).weight[:ROWS].sub_(10.0)  # so that a logit of 0 would win
    ids = torch.randint(3, ROWS, (2, 5))
    asked = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(padded.generate(ids, **asked), plain.generate(ids, **asked))


def test_a_checkpoint_is_not_resumed_with_another_padding(tmp_path: Path) -> None:
    examples = make_examples([5, 9, 13])
    rest = (plain_tokenizer(tmp_path), examples, make_layout_of("packed", examples.lengths))
    plain, padded = (json.loads(json.dumps(run_identity(model, *rest))) for model in pair("tied"))
    assert identity_differences(padded, padded) == []
    for there, here, wanted in (
        (padded, plain, "26 in the checkpoint, (none)"),
        (plain, padded, "(none) in the checkpoint, 26"),
    ):
        assert identity_differences(there, here) == [f"model.padding_rows: {wanted} in this run"]


@pytest.mark.slow
def test_a_run_with_padding_resumes(tmp_path: Path) -> None:
    source = source_of(tmp_path / "base", "tied")
    words = (
        *(f"run.dir={tmp_path}/sft", f"model.path={source.path}", "model.chat_template=chatml", "train.resume=auto"),
        *("model.pad_vocab_to_multiple_of=128", "optim.name=adamw"),
        "train.precision=bf16",
        *("optim.schedule=constant", "optim.warmup_ratio=0"),
    )
    assert "vocabulary padded from 320 to 384 rows" in run_stage(
        "chat_sft", tmp_path, *words, "train.max_steps=2", timeout=900
    )
    assert "resumed" in run_stage("chat_sft", tmp_path, *words, "train.max_steps=4", timeout=900)
    for step in (2, 4):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "sft" / f"step-{step:06d}")
        assert embedding_of(model).shape[0] == model.config.vocab_size == 320
    lines = [json.loads(line) for line in (tmp_path / "sft" / "metrics.jsonl").read_text().splitlines()]
    assert {line["compile/recompiles"] for line in lines} == {0}
    straight = run_stage("chat_sft", tmp_path, *words, f"run.dir={tmp_path}/straight", "train.max_steps=4", timeout=900)
    assert "finished step 4" in straight
    ends = [AutoModelForCausalLM.from_pretrained(tmp_path / name / "step-000004") for name in ("sft", "straight")]
    for resumed, alone in zip(*(model.parameters() for model in ends), strict=True):
        assert torch.equal(resumed, alone)


@pytest.mark.slow
def test_ranks_pad_what_one_process_pads_and_train_and_resume_as_without(tmp_path: Path) -> None:
    """Two ranks of FSDP2 and of tensor parallelism; the vocabulary grows for a chat template first."""
    plan: dict[str, Any] = {}
    for kind, topology in (("untied", "fsdp2"), ("tied", "tensor")):
        source = source_of(tmp_path / kind, kind)
        for multiple in (None, 128):
            plan[f"{kind} {multiple}"] = (source.path, topology, "fp32", multiple)
    load_tokenizer(ModelConfig(path=source.path, chat_template="chatml")).save_pretrained(tmp_path / "tokenizer")
    torchrun(2, "vocabulary_worker.py", str(tmp_path), json.dumps(plan), timeout=900)
    found = json.loads((tmp_path / "out.json").read_text())
    for name, case in found.items():
        assert case["repeated"] == case["losses"], name
        assert case["restored"] == case["finished"] == [], name
    for kind in ("untied", "tied"):
        padded, plain = found[f"{kind} 128"], found[f"{kind} None"]
        torch.testing.assert_close(padded["losses"], plain["losses"], rtol=0, atol=1e-6)
        begun, without = (torch.load(tmp_path / f"{kind} {multiple}.start.pt") for multiple in (128, None))
        for name, value in without.items():
            assert torch.equal(begun[name][: len(value)] if value.ndim else begun[name], value), name
        assert begun["model.embed_tokens.weight"].shape[0] == 384
        assert not begun["model.embed_tokens.weight"][320:].any()
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / f"{kind} 128" / "step-000002")
        trained_weights = torch.load(tmp_path / f"{kind} 128.pt")
        for name, value in saved.named_parameters():
            assert torch.equal(value, trained_weights[name][: len(value)]), name


def test_a_model_with_an_encoder_is_not_padded_and_told_so() -> None:
    with pytest.raises(
        ConfigError, match="VisionEncoderDecoderModel has an encoder, and only the vocabulary of causal"
    ):
        pad_vocabulary(made(CAPTIONER), MULTIPLE)
