"""What follows from positions is that of each document alone, in any layout of rows: frequencies of longrope, chunks and
temperatures of Llama 4; how long documents may be.
"""

from __future__ import annotations

import copy
import json
import shutil
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_batch, make_examples, make_layout_of
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    T5Config,
)

from sftkit.config.schema import LossConfig, RopeScaling
from sftkit.config.topology import Topology
from sftkit.engine.reference import documents_of
from sftkit.errors import ConfigError
from sftkit.models.load import empty_model, full_model
from sftkit.models.structure import check_rope, document_lengths, max_positions, scale_rope, use_document_lengths
from sftkit.objectives.objective import ModelWithLoss, NextToken
from sftkit.verify.documents import check_documents, document_checks, limits_of

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.3, "pad_token_id": 0}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, **FACTORS}


def longrope_model(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if family == "phi3":
        config = Phi3Config(
            **SIZES, max_position_embeddings=256, original_max_position_embeddings=32, rope_parameters=dict(LONGROPE)
        )
        return Phi3ForCausalLM(config).eval()
    rope = {**LONGROPE, "original_max_position_embeddings": 32, "factor": 8.0}
    return LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=256, rope_parameters=rope)).eval()


@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize("order", [(20, 40, 32, 33), (40, 20, 33, 32)])
def test_a_document_in_a_row_has_the_logits_that_plain_transformers_gives_it_alone(
    family: str, order: tuple[int, ...]
) -> None:
    model = longrope_model(family)
    model.set_attn_implementation("eager")
    plain = copy.deepcopy(model)
    use_document_lengths(model)
    assert model.state_dict().keys() == plain.state_dict().keys()
    documents = [torch.randint(1, 64, (1, n), generator=torch.Generator().manual_seed(n)) for n in order]
    alone = [plain(input_ids=one, use_cache=False).logits[0] for one in documents]
    packed = torch.cat([*documents, torch.zeros(1, 3, dtype=torch.int64)], dim=1)
    starts = torch.cat([torch.arange(n) for n in order] + [torch.zeros(3, dtype=torch.int64)])[None]
    # transformers finds the documents of a packed row by their positions.
    found = model(input_ids=packed, position_ids=starts, use_cache=False).logits[0]
    for logits, own in zip(found.split([*order, 3]), alone, strict=False):
        torch.testing.assert_close(logits, own, atol=2e-5, rtol=1e-5)
    # A short document in a batch with a long one.
    padded = torch.zeros(2, 40, dtype=torch.int64)
    padded[0, :20], padded[1, :40] = documents[order.index(20)][0], documents[order.index(40)][0]
    positions = torch.minimum(torch.arange(40)[None], torch.tensor([[19], [39]]))
    found = model(input_ids=padded, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found[0, :20], alone[order.index(20)], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(found[1], alone[order.index(40)], atol=2e-5, rtol=1e-5)


def test_the_length_of_a_document_is_known_at_each_of_its_positions() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 0], [0, 0, 0, 1, 2, 3, 4], [7, 8, 0, 1, 0, 1, 2]])
    expected = [[3, 3, 3, 2, 2, 1, 1], [1, 1, 5, 5, 5, 5, 5], [9, 9, 2, 2, 3, 3, 3]]
    assert document_lengths(positions).tolist() == expected


def test_dynamic_scaling_asks_no_device_for_the_longest_document() -> None:
    """Up to max_position_embeddings, the longest document, its frequencies do not change."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=32, rope_parameters=rope)).eval()
    ids, positions = torch.arange(32)[None], torch.tensor([[*range(20), *range(12)]])
    expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    use_document_lengths(model)
    assert torch.equal(model(input_ids=ids, position_ids=positions, use_cache=False).logits, expected)
    nowhere = torch.zeros(1, 32, dtype=torch.int64, device="meta")  # whose values cannot be read
    cos, _ = model.model.rotary_emb.to("meta")(torch.zeros(1, device="meta"), nowhere)
    assert cos.shape == (1, 32, 16)


def test_documents_longer_than_the_short_frequencies_are_rejected_where_ranks_share_them() -> None:
    model = longrope_model("phi3")
    check_rope(model, Topology(context=2), 32)
    check_rope(model, Topology(replicas=2), 256)
    with pytest.raises(ConfigError, match=r"data\.max_length: 33: longrope of phi3 .*: set 32 or less"):
        check_rope(model, Topology(context=2), 33)


def llama4(**fields: Any) -> PreTrainedModel:
    """A model whose layers see chunks of 7 positions, or all with a temperature that changes every 5."""
    sizes = {"num_local_experts": 2, "intermediate_size_mlp": 32, "head_dim": 16, "max_position_embeddings": 64}
    sizes |= {"attention_chunk_size": 7, "floor_scale": 5, "no_rope_layers": [1, 0], "moe_layers": [1], **fields}
    torch.manual_seed(0)
    return Llama4ForCausalLM(Llama4TextConfig(**SIZES | sizes)).eval()


@pytest.mark.parametrize("lengths", [(6, 7, 8, 4, 5), (16, 1, 14, 2), (3, 20, 11)])
def test_chunks_and_temperatures_of_a_document_in_a_row_are_those_that_it_has_alone(lengths: tuple[int, ...]) -> None:
    """Logits and gradients, with documents on both sides of each limit; no other document changes a bit."""
    plain = llama4()
    model = copy.deepcopy(plain)
    use_document_lengths(model)
    assert model.state_dict().keys() == plain.state_dict().keys()
    examples = make_examples(list(lengths), target_share=1.0)
    batch = make_batch(examples, (tuple(range(len(lengths))),), 40)
    packed = ModelWithLoss(model, "reference", NextToken(LossConfig()))
    packed(batch).loss.backward()
    hidden = packed.hidden_states(batch, "reference")[0]
    start = 0
    for number, length in enumerate(lengths):
        document = documents_of(examples, [(number,)], torch.device("cpu"))[0][0]
        alone = plain(**document.inputs, use_cache=False).logits[0]
        torch.testing.assert_close(model.lm_head(hidden[start : start + length]), alone, atol=1e-5, rtol=1e-5)
        F.cross_entropy(alone, document.targets.flatten(), reduction="sum").backward()
        start += length
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=2e-4, rtol=1e-4, msg=name)
    changed = replace(batch, inputs={name: value.clone() for name, value in batch.inputs.items()})
    changed.inputs["input_ids"][0, : lengths[0]] += 1
    moved = packed.hidden_states(changed, "reference")[0] - hidden
    assert moved[: lengths[0]].abs().max() > 0.01
    assert torch.equal(moved[lengths[0] :], torch.zeros_like(moved[lengths[0] :]))


def test_the_check_before_a_run_compares_documents_on_both_sides_of_chunk_and_temperature() -> None:
    model = llama4(max_position_embeddings=64, attention_chunk_size=13, floor_scale=9)
    assert limits_of(model) == [9, 13]
    use_document_lengths(model)
    layout = make_layout_of("packed", [30, 40, 20], row_length=64)
    wrapped = ModelWithLoss(model, "reference", NextToken(LossConfig()))
    found = check_documents(wrapped, "reference", torch.device("cpu"), layout)
    assert found.limits == (9, 13)
    assert max(found.beyond, found.logits_difference) < 1e-5
    assert found.leak == 0.0
    # No document of the run is beyond the second one, though an attention call may be told of more positions.
    shorter = check_documents(wrapped, "reference", torch.device("cpu"), replace(layout, max_length=13))
    assert shorter.limits == (9,)


@pytest.mark.parametrize("fault", ["temperatures of the row", "whole documents"])
def test_the_check_finds_temperatures_of_the_row_and_chunks_that_are_missing(fault: str) -> None:
    model = llama4(attn_scale=3.0, initializer_range=0.6)
    if fault == "whole documents":
        use_document_lengths(model)
    wrapped = ModelWithLoss(model, "reference", NextToken(LossConfig()))
    for module in model.modules() if fault == "whole documents" else ():
        vars(module).pop("sftkit_chunked", None)
    with suppress(ConfigError):
        found = check_documents(wrapped, "reference", torch.device("cpu"))
        failed = [check.name for check in document_checks(found, torch.float32, "reference") if not check.ok]
        assert "Same logits as the plain model" in failed


def test_chunked_attention_is_rejected_where_ranks_share_documents_longer_than_a_chunk() -> None:
    check_rope(llama4(), Topology(context=2), 7)
    check_rope(llama4(), Topology(replicas=2), 64)
    with pytest.raises(ConfigError, match=r"data\.max_length: 8 is longer than the 7 positions that llama4_text"):
        check_rope(llama4(), Topology(context=2), 8)


def rope(rope_type: str, **more: object) -> dict[str, object]:
    return {"rope_type": rope_type, "rope_theta": 1e4, **more}


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64)
SMALL = {"hidden_size": 32, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(max_position_embeddings=64, rope_parameters=YARN, **SMALL), 256),
        (Qwen2Config(max_position_embeddings=256, rope_parameters=YARN, **SMALL), 256),
        (Qwen2Config(max_position_embeddings=128, rope_parameters=rope("yarn", factor=2.0), **SMALL), 256),
        (LlamaConfig(max_position_embeddings=64, rope_parameters=rope("linear", factor=2.0), **SMALL), 128),
        (LlamaConfig(max_position_embeddings=64, rope_parameters=rope("dynamic", factor=2.0), **SMALL), 64),
        (
            LlamaConfig(
                max_position_embeddings=128,
                rope_parameters=rope(
                    "llama3", factor=32.0, original_max_position_embeddings=8, low_freq_factor=1.0, high_freq_factor=4.0
                ),
                **SMALL,
            ),
            128,
        ),
        (
            Gemma3TextConfig(
                max_position_embeddings=512,
                rope_parameters={
                    "full_attention": rope("linear", factor=8.0),
                    "sliding_attention": rope("default"),
                },
            ),
            512,
        ),
        (
            Gemma3TextConfig(
                max_position_embeddings=64,
                rope_parameters={"full_attention": YARN, "sliding_attention": rope("default")},
            ),
            256,
        ),
        (GPT2Config(n_positions=33), 33),
        (T5Config(), None),
    ],
)
def test_as_many_positions_as_the_scaling_of_the_config_reaches(config: PretrainedConfig, expected: int | None) -> None:
    assert max_positions(config) == expected


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize(
    ("scaling", "longest", "reach"),
    [
        (RopeScaling(rope_type="yarn", factor=4.0), 256, 256),
        (RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=16.0), 128, 128),
        (RopeScaling(rope_type="llama3", **LLAMA3), 512, 512),
        (RopeScaling(rope_type="linear", factor=4.0), 64, 256),
        (RopeScaling(rope_type="dynamic", factor=4.0, rope_theta=5e5), 64, 64),
    ],
)
def test_a_scaled_model_computes_and_is_saved_as_plain_transformers_reads_its_config(
    scaling: RopeScaling, longest: int, reach: int, empty: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=64, rope_parameters=rope("default"))).eval()
    plain.save_pretrained(tmp_path / "start")
    # What a person would write by hand, and what plain transformers makes of it.
    asked = {name: value for name, value in asdict(scaling).items() if value is not None}
    (tmp_path / "by_hand").mkdir()
    config = json.loads((tmp_path / "start" / "config.json").read_text())
    if scaling.rope_type in ("yarn", "llama3"):
        asked.setdefault("original_max_position_embeddings", 64)
    config |= {"max_position_embeddings": longest, "rope_parameters": {"rope_theta": 1e4, **asked}}
    (tmp_path / "by_hand" / "config.json").write_text(json.dumps(config))
    shutil.copy(tmp_path / "start" / "model.safetensors", tmp_path / "by_hand")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "by_hand").eval()

    load = empty_model if empty else full_model
    model = load(str(tmp_path / "start"), "fp32", {"trust_remote_code": False}, scaling)
    assert max_positions(model.config) == reach
    assert model.config.rope_parameters == expected.config.rope_parameters
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, expected.model.rotary_emb.inv_freq, rtol=0, atol=0)
    assert model.model.rotary_emb.attention_scaling == expected.model.rotary_emb.attention_scaling
    if scaling.rope_type != "dynamic":
        assert not torch.equal(model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)
    if empty:
        return
    ids = torch.arange(1, 60)[None]
    torch.testing.assert_close(model(ids).logits, expected(ids).logits, rtol=0, atol=0)
    # A checkpoint says it by itself, and a later stage with the same setting does not extend it again.
    model.save_pretrained(tmp_path / "checkpoint")
    saved = AutoConfig.from_pretrained(tmp_path / "checkpoint")
    assert (saved.max_position_embeddings, saved.rope_parameters) == (longest, expected.config.rope_parameters)
    scale_rope(saved, scaling)
    assert (saved.max_position_embeddings, saved.rope_parameters) == (longest, expected.config.rope_parameters)
    torch.testing.assert_close(
        AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")(ids).logits, model(ids).logits
    )


def test_models_without_one_kind_of_rotary_positions_are_not_scaled() -> None:
    scaling = RopeScaling(rope_type="yarn", factor=4.0)
    for config, told in (
        (GPT2Config(), "gpt2 has no rotary positions"),
        (T5Config(), "t5 has no rotary positions"),
        (longrope_model("phi3").config, "phi3 has rotary frequencies by layer or length"),
        (Gemma3TextConfig(), "gemma3_text has rotary frequencies by layer or length"),
    ):
        with pytest.raises(ConfigError, match=f"model.rope_scaling: {told}"):
            scale_rope(config, scaling)


def test_a_factor_that_makes_a_model_shorter_is_an_error() -> None:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {**llama3, "rope_theta": 5e5, "original_max_position_embeddings": 8192}
    config = LlamaConfig(**SIZES, max_position_embeddings=131072, rope_parameters=rope)
    with pytest.raises(ConfigError, match=r"factor 4 times \S+ 8,192 is 32,768 positions, and the model has 131,072"):
        scale_rope(config, RopeScaling(rope_type="yarn", factor=4.0))
    scale_rope(config, RopeScaling(rope_type="yarn", factor=32.0))
    assert config.max_position_embeddings == 262144
