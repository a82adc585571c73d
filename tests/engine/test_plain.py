"""The plain model is new and of the files; its documents are their own; what is lost or shifted wrongly shows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import cpu_runtime, flat, make_examples, make_layout_of, relearned, tiny, tiny_llama, tiny_recipe
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen3Config,
)

from sftkit.config.schema import AttentionConfig, CompileConfig, LossConfig, ModelConfig, OptimConfig, TrainConfig
from sftkit.data.batches import collate as collating
from sftkit.data.batches.collate import Batch
from sftkit.data.batches.pack import Layout
from sftkit.data.types import Examples
from sftkit.engine.engine import Training
from sftkit.errors import ConfigError
from sftkit.models.load import full_model
from sftkit.models.structure import output_projection
from sftkit.models.vocabulary import NewRows, fill, pad_vocabulary, resize, set_new_rows, vocabulary_of
from sftkit.objectives.objective import ModelWithLoss, NextToken
from sftkit.tracking.names import Check
from sftkit.train.assemble import make_engine
from sftkit.verify import documents as document_check
from sftkit.verify import gradients as gradient_check
from sftkit.verify.documents import limits_of
from sftkit.verify.plain import PlainModel
from sftkit.verify.proof import verified_warm_up

LENGTHS = [30, 4, 25, 8, 31, 3, 17, 29, 12, 5, 6, 31, 2, 20] * 4
WEIGHTS, LOGITS = "Weights are those of the files", "Same logits as the plain model"
LOSS, GRADIENTS = "Loss equals plain cross entropy", "Same gradients as the plain model"


def warmed(
    folder: Path, orig_model: PreTrainedModel, layout: Layout | None = None, engine: str = "blocks", **of_training: Any
) -> dict[str, Check]:
    """The checks of a warm-up without the compiler."""
    cfg = tiny_recipe(
        folder,
        optim=OptimConfig(name="adamw"),
        train=TrainConfig(max_steps=20, engine=engine),  # type: ignore[arg-type]
        attention=AttentionConfig(backend="reference"),
        compile=CompileConfig(enabled=False),
    )
    layout = layout or make_layout_of("packed", make_examples(LENGTHS).lengths)
    built = make_engine(
        cfg, cpu_runtime(), folder, Training(orig_model, NextToken(LossConfig()), layout, **of_training)
    )
    try:
        return {check.name: check for check in verified_warm_up(built, cpu_runtime(), lambda _: None).checks}
    finally:
        built.close()


def saved(orig_model: PreTrainedModel, folder: Path, **config: Any) -> ModelConfig:
    """Its files; `config`: fields that the saved config.json has instead."""
    orig_model.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return ModelConfig(path=str(folder))


@pytest.mark.parametrize("engine", ["blocks", "graph"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_the_files_pass_in_the_precision_of_the_run(tmp_path: Path, dtype: torch.dtype, engine: str) -> None:
    source = saved(tiny_llama(), tmp_path / "start")
    live = full_model(str(source.path), "bf16" if dtype == torch.bfloat16 else "fp32", {})
    found = warmed(tmp_path, live, engine=engine, source=source)
    assert [name for name, check in found.items() if check.ok is False] == []
    assert found[WEIGHTS].ok is True
    assert found[WEIGHTS].found == "21 parameters"


def test_a_head_that_is_lost_while_loading_ends_the_start_with_its_name(tmp_path: Path) -> None:
    source = saved(tiny_llama(), tmp_path / "start", tie_word_embeddings=True)
    live = tiny(LlamaConfig, tie_word_embeddings=True)
    live.load_state_dict(load_file(tmp_path / "start/model.safetensors"), strict=False)
    with torch.no_grad():
        live.lm_head.weight.copy_(load_file(tmp_path / "start/model.safetensors")["model.embed_tokens.weight"])
    with pytest.raises(ConfigError, match=r"not those of the files: lm_head\.weight"):
        warmed(tmp_path, live, source=source)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_a_weight_that_is_not_that_of_the_files_is_named(tmp_path: Path, name: str) -> None:
    source = saved(tiny_llama(), tmp_path / "start")
    live = full_model(str(source.path), "fp32", {})
    with torch.no_grad():
        live.get_parameter(name).mul_(1.02)
    found = warmed(tmp_path, live, source=source)
    assert found[WEIGHTS].ok is False
    assert name in found[WEIGHTS].found
    assert found[LOGITS].ok is False, "the plain side has the files' own"


def one_block_of_experts() -> DeepseekV3ForCausalLM:
    sizes = ("hidden_size", "intermediate_size", "moe_intermediate_size", "q_lora_rank", "kv_lora_rank")
    config = DeepseekV3Config(
        **dict.fromkeys(sizes, 16),
        **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_experts_per_tok"), 2),
        **dict.fromkeys(("num_hidden_layers", "n_group", "topk_group"), 1),
        vocab_size=64,
        n_routed_experts=4,
        first_k_dense_replace=0,
    )
    return DeepseekV3ForCausalLM(config)


@pytest.mark.parametrize("kind", ["parameter", "buffer", "lost buffer"])
def test_what_only_one_side_has_and_a_buffer_of_another_value_are_named(tmp_path: Path, kind: str) -> None:
    source = saved(one_block_of_experts(), tmp_path)
    live = full_model(str(source.path), "fp32", {})
    gate = live.model.layers[0].mlp.gate
    plain = PlainModel(ModelWithLoss(live, "reference", NextToken(LossConfig())), torch.device("cpu"), source)
    assert plain.differing == {}
    if kind == "parameter":
        gate.added = torch.nn.Parameter(torch.zeros(2))
    elif kind == "buffer":
        gate.e_score_correction_bias.add_(1.0)
    else:
        gate.register_buffer("e_score_correction_bias", gate.e_score_correction_bias, persistent=False)
    name = "added" if kind == "parameter" else "e_score_correction_bias"
    plain = PlainModel(ModelWithLoss(live, "reference", NextToken(LossConfig())), torch.device("cpu"), source)
    assert plain.differing == {f"model.layers.0.mlp.gate.{name}": 1.0}


def test_the_files_of_a_resumed_run_are_its_checkpoints(tmp_path: Path) -> None:
    source = saved(tiny_llama(), tmp_path / "start")
    live = tiny_llama(seed=1)
    live.save_pretrained(tmp_path / "step-000002")
    found = warmed(tmp_path, live, source=source, checkpoint=tmp_path / "step-000002")
    assert found[WEIGHTS].ok is True
    with pytest.raises(ConfigError, match="not those of the files"):
        warmed(tmp_path, tiny_llama(seed=1), source=source)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("row", [None, 3, 62, 66, 72])
def test_rows_that_were_added_or_padded_are_left_out_and_all_others_compared(
    tmp_path: Path, tied: bool, row: int | None
) -> None:
    source = saved(tiny(LlamaConfig, tie_word_embeddings=tied), tmp_path / "start")
    live = full_model(str(source.path), "fp32", {})
    resize(live, 70)
    new = NewRows(64, 60, (62, 64, 65))
    set_new_rows(live, new)
    for tensor in vocabulary_of(live):
        fill(tensor, tensor, new)
    pad_vocabulary(live, 16)
    if row is not None:
        with torch.no_grad():
            live.lm_head.weight[row].add_(0.002)
    found = warmed(tmp_path, live, source=source)
    in_files = row == 3
    assert found[WEIGHTS].ok is (row in (None, 72)), found[WEIGHTS]
    assert ("added rows" in found[WEIGHTS].found) is (row in (62, 66)), "the mean of the known ones"
    assert found[LOGITS].ok is not in_files, found[LOGITS]
    assert found[GRADIENTS].ok is True or in_files


def test_a_new_model_has_no_files_and_lends_its_config_and_weights_to_modules_of_its_own() -> None:
    live = tiny_llama()
    model = ModelWithLoss(live, "reference", NextToken(LossConfig()))
    plain = PlainModel(model, torch.device("cpu"), ModelConfig(scratch={"model_type": "llama"}))
    assert not plain.has_files
    assert not set(map(id, plain.orig_model.modules())) & set(map(id, live.modules()))
    ours, theirs = dict(live.named_parameters()), dict(plain.orig_model.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(ours[name].data_ptr() == theirs[name].data_ptr() for name in ours), "no memory of its own"


def test_a_new_model_has_its_trained_buffers_on_the_plain_side() -> None:
    live = one_block_of_experts()
    bias = live.model.layers[0].mlp.gate.e_score_correction_bias
    bias[:2] += 10.0
    plain = PlainModel(ModelWithLoss(live, "reference", NextToken(LossConfig())), torch.device("cpu"))
    assert plain.orig_model.model.layers[0].mlp.gate.e_score_correction_bias.equal(bias)


def test_a_module_of_the_trained_model_that_computes_something_else_is_found_though_both_sides_had_it(
    tmp_path: Path,
) -> None:
    live = tiny_llama()
    live.model.norm.register_forward_hook(lambda _, __, out: out * 1.01)
    assert warmed(tmp_path, live)[LOGITS].ok is False


def unshifted(examples: Examples, *args: Any, **kwargs: Any) -> Batch:
    """Each position learns the token that it reads: a model that copies its input."""
    batch = RIGHT(examples, *args, **kwargs)
    ids = batch.inputs["input_ids"]
    return replace(batch, targets=torch.where(batch.targets == collating.IGNORE, batch.targets, ids))


def masked_late(examples: Examples, *args: Any, **kwargs: Any) -> Batch:
    """The mask is that of the token before."""
    return RIGHT(relearned(examples, np.roll(flat(examples).is_target, 1)), *args, **kwargs)


def all_learned(examples: Examples, *args: Any, **kwargs: Any) -> Batch:
    return RIGHT(relearned(examples, np.ones_like(flat(examples).is_target)), *args, **kwargs)


RIGHT = collating.collate


def test_the_reference_engine_has_all_compared_that_others_have(tmp_path: Path, monkeypatch) -> None:
    source = saved(tiny_llama(), tmp_path / "start")
    found = warmed(tmp_path, tiny_llama(), engine="reference", source=source)
    assert (found[WEIGHTS].ok, found[LOSS].ok) == (True, True), found
    assert (found[LOGITS].ok, found[GRADIENTS].ok) == (True, True), found
    with pytest.raises(ConfigError, match="not those of the files"):
        warmed(tmp_path, tiny_llama(seed=1), engine="reference", source=source)
    for owner in (document_check, gradient_check):
        monkeypatch.setattr(owner, "collate", unshifted)
    found = warmed(tmp_path, tiny_llama(), engine="reference", source=source)
    assert (found[WEIGHTS].ok, found[LOSS].ok, found[GRADIENTS].ok) == (True, False, False), found


@pytest.mark.parametrize("wrong", [unshifted, masked_late, all_learned])
def test_a_collation_with_other_targets_than_the_documents_have_turns_rows_red(
    tmp_path: Path, monkeypatch, wrong: Any
) -> None:
    for owner in (document_check, gradient_check):
        monkeypatch.setattr(owner, "collate", wrong)
    found = warmed(tmp_path, tiny_llama())
    assert found[GRADIENTS].ok is False
    assert found[LOSS].ok is (wrong is all_learned), "whose targets those of the first check are"


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [1.5] * 4,
    "original_max_position_embeddings": 16,
}


def longrope() -> PreTrainedModel:
    return tiny(
        Phi3Config,
        rope_parameters=LONGROPE,
        original_max_position_embeddings=16,
        head_dim=8,
        max_position_embeddings=64,
        pad_token_id=0,
    )


def test_limits_of_a_config_are_its_windows_and_where_its_rotary_factors_change() -> None:
    assert limits_of(tiny_llama()) == []
    assert limits_of(tiny(Qwen3Config, use_sliding_window=True, sliding_window=5, max_window_layers=1)) == [5]
    assert limits_of(longrope()) == [16]
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert limits_of(tiny(LlamaConfig, rope_parameters=dynamic, max_position_embeddings=20)) == [20]


def test_documents_on_both_sides_of_a_window_are_compared(tmp_path: Path, monkeypatch) -> None:
    orig_model = tiny(Qwen3Config, use_sliding_window=True, sliding_window=9, max_window_layers=1)
    assert "around 9 positions" in warmed(tmp_path, orig_model)[LOGITS].found
    # Another window than the config says: what windows of three positions hide.
    for block in orig_model.model.layers:
        if block.self_attn.sliding_window:
            block.self_attn.sliding_window = 8
    with pytest.raises(ConfigError, match=r"more than 9 positions: .* Set data\.max_length=9 or less"):
        warmed(tmp_path, orig_model)


@pytest.mark.parametrize("kind", ["packed", "fixed"])
def test_rotary_factors_that_follow_the_longest_document_of_a_batch_are_found(tmp_path: Path, kind: str) -> None:
    lengths = make_examples(LENGTHS).lengths
    alone = make_layout_of("fixed", lengths, micro=1)
    assert warmed(tmp_path, longrope(), alone)[LOGITS].ok is True
    try:
        check = warmed(tmp_path, longrope(), make_layout_of(kind, lengths))[LOGITS]
    except ConfigError as error:
        assert "more than 16 positions" in str(error)  # noqa: PT017 - how far logits are off decides
    else:
        assert check.ok is False


def test_what_rotary_embeddings_remember_is_as_before(tmp_path: Path) -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    live = tiny(LlamaConfig, rope_parameters=dynamic, max_position_embeddings=20)
    before = live.model.rotary_emb.inv_freq.clone(), int(live.model.rotary_emb.max_seq_len_cached)
    layout = make_layout_of("fixed", make_examples(LENGTHS).lengths, micro=1)
    assert "around 20 positions" in warmed(tmp_path, live, layout)[LOGITS].found
    assert torch.equal(live.model.rotary_emb.inv_freq, before[0])
    assert int(live.model.rotary_emb.max_seq_len_cached) == before[1]


def test_files_that_transformers_cannot_load_are_an_error_of_the_user(tmp_path: Path) -> None:
    source = saved(tiny_llama(), tmp_path / "start")
    weights = load_file(tmp_path / "start/model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "start/model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack lm_head\.weight"):
        warmed(tmp_path, tiny_llama(), source=source)
    assert output_projection(tiny_llama()).weight.shape == (64, 32)
