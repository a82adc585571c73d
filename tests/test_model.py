"""Models from a config, a folder, and the errors of both; counts; generation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import VOCAB_SIZE, tiny_llama

from sftkit.config import ModelConfig
from sftkit.errors import ConfigError
from sftkit.generate import generate, until_stop
from sftkit.model import count_parameters, from_scratch, inherit, load_model, train_flops

FIELDS = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def test_a_new_model_has_the_tokenizers_vocabulary_and_the_same_weights_for_the_same_seed(tokenizer) -> None:
    a, b, c = (from_scratch({**FIELDS, **HEADS}, tokenizer, seed) for seed in (1, 1, 2))
    assert a.config.vocab_size == len(tokenizer)
    assert a.config.eos_token_id == tokenizer.eos_token_id
    states = [m.state_dict() for m in (a, b, c)]
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])
    assert any(not torch.equal(states[0][k], states[2][k]) for k in states[0])


def test_weights_are_loaded_in_fp32_whatever_the_checkpoint_holds(tmp_path: Path, tokenizer) -> None:
    from_scratch({**FIELDS, **HEADS}, tokenizer, 0).to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = load_model(ModelConfig(path=str(tmp_path)), tokenizer, seed=0)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}


def test_a_tokenizer_larger_than_the_model_is_refused(tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"the tokenizer has \d+ tokens, the model embeds 64"):
        load_model(ModelConfig(scratch={**FIELDS, **HEADS, "vocab_size": 64}), tokenizer, seed=0)


def test_a_config_that_transformers_refuses_is_a_config_error(tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"model\.scratch"):
        from_scratch({"model_type": "no_such_model"}, tokenizer, 0)


def test_the_row_length_must_come_from_somewhere(tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"data\.max_length"):
        inherit(ModelConfig(scratch={}), None, tokenizer, "fp32")
    assert inherit(ModelConfig(scratch={}), 64, tokenizer, "fp32")[0] == 64


def test_tied_embeddings_count_once_and_as_a_matrix_product(tokenizer) -> None:
    untied = from_scratch({**FIELDS, **HEADS}, tokenizer, 0)
    tied = from_scratch({**FIELDS, **HEADS, "tie_word_embeddings": True}, tokenizer, 0)
    embedding = len(tokenizer) * 32
    assert count_parameters(untied)[0] - count_parameters(untied)[1] == embedding
    assert count_parameters(tied) == (count_parameters(untied)[1], count_parameters(untied)[1])


def test_model_flops_are_those_that_torch_counts_for_one_document() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = tiny_llama()
    model.set_attn_implementation("eager")
    length = 16
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.ones(1, length, dtype=torch.int64), use_cache=False).logits.sum().backward()
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    # The counter sees the whole square of attention scores, of which we count the causal half, and no norms; beyond
    # that only the outer product of the rotary angles, 0.01 %.
    counted = train_flops(model, length, length * length) - 6.0 * norms * length
    assert counter.get_total_flops() == pytest.approx(counted, rel=1e-3)


def test_batched_answers_equal_those_one_by_one(tokenizer) -> None:
    model = tiny_llama().eval()
    prompts = [[5, 6, 7, 8, 9], [10], [11, 12, 13]]
    settings = {"stop_ids": [3], "max_new_tokens": 6}
    together = generate(model, tokenizer, prompts, batch_size=3, **settings)
    alone = [generate(model, tokenizer, [prompt], batch_size=1, **settings)[0] for prompt in prompts]
    assert together == alone
    assert max(max(p) for p in prompts) < VOCAB_SIZE


def test_answers_end_before_the_first_stop_token() -> None:
    assert until_stop([4, 5, 1, 6, 2], [1, 2]) == [4, 5]
    assert until_stop([4, 5], [1]) == [4, 5]
