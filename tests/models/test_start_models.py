"""What a model on disk says of itself is kept, repaired and told, or rejected: tied heads, generation, routers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from made_models import MODELS
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from sftkit.config.schema import ModelConfig
from sftkit.data.tokens import chat
from sftkit.errors import ConfigError
from sftkit.generation.decode import Batching, generate, stream
from sftkit.generation.repl import Sampling
from sftkit.models.load import load_model, model_of_files, stop_ids
from sftkit.models.weights import load_model_weights, make_room


def loaded(folder: Path, tokenizer: PreTrainedTokenizerFast, *, empty: bool = False, **more: Any) -> PreTrainedModel:
    """The model of a folder as one process loads it, or as each of several does that hold parts."""
    source = ModelConfig(path=str(folder), **more)
    model = load_model(source, tokenizer, 0, empty=empty)
    if empty:
        make_room(model, torch.device("cpu"))
        load_model_weights(model, source)
    return model


def small_llama(tokenizer: PreTrainedTokenizerFast, **more: Any) -> PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **more))


def with_own_head(folder: Path, family: str, vocab_size: int) -> Path:
    torch.manual_seed(0)
    model = MODELS[family]()
    model.config.tie_word_embeddings = True
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = torch.randn_like(weights["model.embed_tokens.weight"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("sharded_files", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_a_head_of_its_own_is_the_same_on_every_layout_and_its_checkpoint_is_untied(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    family: str,
    sharded_files: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sftkit.models.load.check_rows", lambda *_: None)
    folder = with_own_head(tmp_path / "start", family, 67)
    if sharded_files:
        whole = AutoModelForCausalLM.from_pretrained(folder)
        whole.config.tie_word_embeddings = False
        whole.save_pretrained(folder, max_shard_size="20KB")
        (folder / "model.safetensors").unlink(missing_ok=True)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.arange(16)[None]
    expected = plain(input_ids=ids).logits
    for empty in (False, True):
        model = loaded(folder, tokenizer, empty=empty).eval()
        torch.testing.assert_close(model(input_ids=ids).logits, expected)
        assert model.config.tie_word_embeddings is False
        model.tie_weights()
        assert model.lm_head.weight is not model.model.embed_tokens.weight
        model.save_pretrained(tmp_path / "saved")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
        torch.testing.assert_close(again(input_ids=ids).logits, expected)


@pytest.mark.parametrize("empty", [False, True], ids=["one process", "ranks with parts"])
def test_what_files_have_wrong_is_reported_once_though_the_plain_model_reads_them_too(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    empty: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("sftkit.models.load.check_rows", lambda *_: None)
    folder = with_own_head(tmp_path, "llama", 67)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"left.over": torch.zeros(1)}, folder / "model.safetensors", metadata={"format": "pt"})
    loaded(folder, tokenizer, empty=empty)
    assert model_of_files(ModelConfig(path=str(folder))) is not None
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("sftkit")]
    assert sorted(("left.over" in text, "trained untied" in text) for text in ours) == [(False, True), (True, False)]


def test_code_in_a_bin_file_is_not_run_and_nobody_is_advised_to_run_it(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    small_llama(tokenizer).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(f"cos\nmkdir\n(S'{tmp_path}/made'\ntR.".encode())
    with pytest.raises(ConfigError, match=r"cannot load the model: .*holds more than pickled tensors") as caught:
        loaded(tmp_path, tokenizer)
    assert "weights_only" not in str(caught.value)
    assert not (tmp_path / "made").exists()


def test_a_tied_head_that_the_file_repeats_stays_tied(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tied = small_llama(tokenizer, tie_word_embeddings=True)
    tied.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for empty in (False, True):
        model = loaded(tmp_path, tokenizer, empty=empty)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert model.config.tie_word_embeddings is True


def test_an_encoder_model_with_a_head_of_its_own_is_rejected(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    sizes = {"d_model": 32, "num_layers": 1, "num_heads": 2, "d_kv": 16, "d_ff": 64}
    T5ForConditionalGeneration(T5Config(vocab_size=len(tokenizer), decoder_start_token_id=0, **sizes)).save_pretrained(
        tmp_path
    )
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = torch.randn_like(weights["shared.weight"])
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lm_head\.weight differs from its tied weight, and T5.* ties other"):
        load_model(ModelConfig(path=str(tmp_path)), tokenizer, 0)


# ---- generation_config.json ------------------------------------------------------------------------------------------


def with_generation(folder: Path, tokenizer: PreTrainedTokenizerFast, fields: dict[str, Any]) -> Path:
    small_llama(tokenizer).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"do_sample": False, "top_k": 20}, {"do_sample": False, "top_k": None}),
        ({"top_k": 20}, {"do_sample": True, "top_k": 20}),
        ({"temperature": 0.7, "top_p": 0.8}, {"do_sample": True, "temperature": 0.7, "top_p": 0.8}),
        ({"min_p": 0.1, "do_sample": False, "temperature": 0.6}, {"do_sample": False, "min_p": None}),
        ({"early_stopping": True, "length_penalty": 2.0}, {"early_stopping": None, "length_penalty": None}),
        ({"num_beams": 4, "early_stopping": True}, {"num_beams": 4, "early_stopping": True}),
        ({"output_scores": True}, {"output_scores": None}),
        ({"pad_token_id": -1}, {"pad_token_id": None}),
        ({"repetition_penalty": 1.1, "max_length": 77, "bos_token_id": 3, "suppress_tokens": [4]}, None),
    ],
)
def test_a_generation_config_can_be_saved_and_keeps_its_meaning(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, fields: dict[str, Any], kept: dict[str, Any] | None, empty: bool
) -> None:
    model = load_model(
        ModelConfig(path=str(with_generation(tmp_path / "a", tokenizer, fields))), tokenizer, 0, empty=empty
    )
    model.generation_config.save_pretrained(tmp_path / "saved")
    saved = GenerationConfig.from_pretrained(tmp_path / "saved")
    expected = fields if kept is None else kept
    assert {name: getattr(saved, name) for name in expected} == expected


def test_a_generation_config_that_no_checkpoint_could_hold_is_rejected(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    folder = with_generation(tmp_path, tokenizer, {"num_return_sequences": 3})
    with pytest.raises(ConfigError, match=r"generation_config\.json: .*num_return_sequences"):
        load_model(ModelConfig(path=str(folder)), tokenizer, 0)


@pytest.mark.parametrize("stops", ["two", {"a": 1}, [10**12], [-5], [2.5], 10**6])
def test_stops_that_are_no_tokens_are_rejected(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, stops: object
) -> None:
    folder = with_generation(tmp_path, tokenizer, {"eos_token_id": stops})
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id has .* not a token of the model's"):
        load_model(ModelConfig(path=str(folder)), tokenizer, 0)


def test_the_stops_of_the_start_model_are_kept_and_end_answers(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    ends = chat.end_of_turn_ids(tokenizer)
    other = next(i for i in range(40, 60) if i not in ends)
    folder = with_generation(tmp_path, tokenizer, {"eos_token_id": [other, ends[0]]})
    model = load_model(ModelConfig(path=str(folder)), tokenizer, 0)
    assert model.generation_config.eos_token_id == stop_ids(model, tokenizer) == [*ends, other]


def test_a_default_of_the_architecture_is_no_stop(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    special = tokenizer.added_tokens_decoder
    plain = next(i for i in range(len(tokenizer)) if i not in special)
    model = small_llama(tokenizer, eos_token_id=plain)
    model.save_pretrained(tmp_path)
    assert plain not in load_model(ModelConfig(path=str(tmp_path)), tokenizer, 0).generation_config.eos_token_id


# ---- experts ---------------------------------------------------------------------------------------------------------


def test_a_model_that_collects_router_logits_generates_and_streams(tokenizer: PreTrainedTokenizerFast) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MixtralConfig(vocab_size=len(tokenizer), num_key_value_heads=2, num_local_experts=4, **sizes)
    config.output_router_logits = True
    torch.manual_seed(0)
    model = MixtralForCausalLM(config).eval()
    ids = tokenizer("one two three four five")["input_ids"]
    asked = {"end_ids": [0], "max_new_tokens": 4, "groups": ["a", "a", "a"]}
    prompts = [ids, ids[:3], ids[:4]]
    answers = generate(model, tokenizer, prompts, Batching(2), **asked)
    model.config.output_router_logits = False
    assert [a.text for a in generate(model, tokenizer, prompts, Batching(2), **asked)] == [a.text for a in answers]
    model.config.output_router_logits = True
    messages = [{"role": "user", "content": "Hi"}]
    assert list(stream(model, tokenizer, messages, Sampling(temperature=0.0, max_new_tokens=3))) is not None
    assert model.config.output_router_logits is True
