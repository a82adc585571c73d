"""A loaded tokenizer is the one of its tokenizer.json, and texts of encoders begin as the start model's do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BartConfig, PreTrainedTokenizerFast, T5Config

from sftkit.config.schema import ModelConfig
from sftkit.data.tokens import text
from sftkit.data.tokens.sources import tokenizer_fingerprint
from sftkit.data.types import Row
from sftkit.errors import ConfigError
from sftkit.models.tokenizer import ROUND_TRIP, load_tokenizer

SPLIT = {
    "type": "Sequence",
    "pretokenizers": [
        {
            "type": "Split",
            "pattern": {
                "Regex": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            },
            "behavior": "Isolated",
            "invert": False,
        },
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ],
}


def folder_of(folder: Path, tokenizer: dict[str, Any], tokenizer_class: str, model_type: str) -> ModelConfig:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    own = {"tokenizer_class": tokenizer_class, "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return ModelConfig(path=str(folder))


@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizerFast", "LlamaTokenizer"])
def test_a_class_that_replaces_the_pre_tokenizer_of_its_file_is_rejected_and_the_advice_helps(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, tokenizer_class: str
) -> None:
    file = json.loads(tokenizer.backend_tokenizer.to_str()) | {"pre_tokenizer": SPLIT}
    with pytest.raises(ConfigError, match=r"does not tokenize as tokenizer\.json says: .*PreTrainedTokenizerFast"):
        load_tokenizer(folder_of(tmp_path / "a", file, tokenizer_class, "llama"))
    loaded = load_tokenizer(folder_of(tmp_path / "b", file, "PreTrainedTokenizerFast", "llama"))
    assert loaded.decode(loaded(ROUND_TRIP)["input_ids"]) == ROUND_TRIP


@pytest.mark.parametrize(
    "content", [b"\0\0", b'{"model": ' + b"[" * 100_000, b"{}", b'{"version": "1.0", "model": {}}']
)
def test_a_damaged_tokenizer_json_is_named(tmp_path: Path, content: bytes) -> None:
    model = folder_of(tmp_path, {}, "PreTrainedTokenizerFast", "llama")
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/tokenizer\.json: cannot load the tokenizer: "):
        load_tokenizer(model)


def test_a_folder_without_a_tokenizer_is_an_error_and_not_an_empty_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    for template in (None, "chatml"):
        with pytest.raises(ConfigError, match=rf"^{tmp_path}: no tokenizer in it.* set model\.tokenizer"):
            load_tokenizer(ModelConfig(path=str(tmp_path), chat_template=template))


def test_a_tokenizer_that_its_class_leaves_as_it_is_passes(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    file = json.loads(tokenizer.backend_tokenizer.to_str())
    truncated = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    assert load_tokenizer(folder_of(tmp_path / "a", file, "PreTrainedTokenizerFast", "llama")).is_fast
    assert load_tokenizer(
        folder_of(tmp_path / "b", file | {"truncation": truncated}, "TokenizersBackend", "llama")
    ).is_fast


def test_the_tokenizer_of_llama_2_passes(tmp_path: Path) -> None:
    """Its file prepends and replaces in a normalizer what the class does in a pre-tokenizer."""
    fallback = [f"<0x{i:02X}>" for i in range(256)]
    words = [
        "It",
        "'",
        "s",
        "12345",
        ",",
        "WE",
        "LL",
        "go",
        "on",
        ":",
        "def",
        "f",
        "(",
        "x",
        ")",
        "return",
        "!",
        "=",
        "1",
        ";",
        "na",
        "ve",
        "end",
    ]
    letters = sorted({c for word in words for c in word} | {"▁"})
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *fallback, *letters, "▁g", "▁go"])}
    merges = [("▁", "g"), ("▁g", "o")]
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(strip)
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    model = folder_of(tmp_path, json.loads(made.to_str()), "LlamaTokenizer", "llama")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})
    )
    assert load_tokenizer(model).is_fast


# ---- what the texts of an encoder's decoder begin with ---------------------------------------------------------------


def encoder_folder(folder: Path, config: T5Config | BartConfig, special: list[str], template: str) -> ModelConfig:
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=special, unk_token="<unk>")
    made.train_from_iterator(["say it again", "and once more please"] * 50, trainer)
    ids = [(token, special.index(token)) for token in ("<s>", "</s>") if token in template]
    made.post_processor = processors.TemplateProcessing(single=template, pair=None, special_tokens=ids)
    names = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    if "<s>" in special:
        names["bos_token"] = "<s>"
    PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(folder)
    config.save_pretrained(folder)
    return ModelConfig(path=str(folder))


T5 = (["<pad>", "</s>", "<unk>"], "$A </s>")
BART = (["<s>", "<pad>", "</s>", "<unk>"], "<s> $A </s>")


@pytest.mark.parametrize(
    ("config", "tokens", "expected"),
    [
        (T5Config(decoder_start_token_id=0), T5, ["<pad>", "</s>"]),
        (BartConfig(decoder_start_token_id=2), BART, ["</s>", "<s>", "</s>"]),
        (BartConfig(decoder_start_token_id=0), BART, ["<s>", "</s>"]),
        (T5Config(decoder_start_token_id=None), T5, ["</s>", "</s>"]),
    ],
    ids=["t5", "bart", "start is bos", "without one"],
)
def test_a_text_is_what_transformers_makes_of_its_labels_shifted_by_the_start_token(
    tmp_path: Path, config: Any, tokens: tuple[list[str], str], expected: list[str]
) -> None:
    tokenizer = load_tokenizer(encoder_folder(tmp_path, config, *tokens))
    row = Row("a row", image="say it", captions=("once more",))
    (document,) = text.tokenize_captions(row, tokenizer, max_length=32).examples
    bare = tokenizer("once more", add_special_tokens=False)["input_ids"]
    before, after = expected[:-1], expected[-1:]
    ids = [*tokenizer.convert_tokens_to_ids(before), *bare, *tokenizer.convert_tokens_to_ids(after)]
    assert document.ids.tolist() == ids
    assert document.is_target.tolist() == [False] + [True] * (len(ids) - 1)


def test_cached_texts_that_begin_otherwise_are_not_taken(tmp_path: Path) -> None:
    one = load_tokenizer(encoder_folder(tmp_path, T5Config(decoder_start_token_id=0), *T5))
    other = load_tokenizer(encoder_folder(tmp_path, T5Config(decoder_start_token_id=1), *T5))
    assert tokenizer_fingerprint(one) != tokenizer_fingerprint(other)


def test_two_start_tokens_are_rejected(tmp_path: Path) -> None:
    model = encoder_folder(tmp_path, T5Config(decoder_start_token_id=0), *T5)
    (tmp_path / "generation_config.json").write_text(json.dumps({"decoder_start_token_id": 1}))
    with pytest.raises(ConfigError, match=r"decoder_start_token_id is 0 and 1 in config\.json and generation_config"):
        load_tokenizer(model)
