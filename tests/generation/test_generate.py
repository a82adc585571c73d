"""Greedy answers in batches: what they equal, what they cost, where they end."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from helpers import tiny, tiny_llama, tiny_qwen3_with_windows
from made_models import passes, tiny_gemma2
from transformers import GptOssConfig, GraniteSWAConfig, PretrainedConfig, PreTrainedModel

from sftkit.errors import ConfigError
from sftkit.generation import kv_cache
from sftkit.generation.decode import Batching, generate
from sftkit.generation.repl import Answer

NOTHING = [10**6]
"Stop ids that no model writes."


def lively(model: PreTrainedModel) -> PreTrainedModel:
    """Larger weights, so that different prompts have different answers."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(25.0)
    return model.eval()


def answers(
    model: PreTrainedModel, tokenizer: Any, prompts: Any, *, batch_size: int, replay: bool | None = None, **asked: Any
) -> list[Answer]:
    return generate(model, tokenizer, prompts, Batching(batch_size), replay=replay, **asked)


def with_sinks(config: type[PretrainedConfig], **fields: Any) -> PreTrainedModel:
    """Windows of 5 in every other layer."""
    model = tiny(config, sliding_window=5, initializer_range=0.5, layer_types=TYPES, **fields)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("sinks"):
                p.copy_(torch.linspace(-1.0, 3.0, len(p)))
    return model.eval()


TYPES = ["sliding_attention", "full_attention"]
MODELS = {
    "llama": lambda: lively(tiny_llama()),
    "qwen3 with windows": lambda: lively(tiny_qwen3_with_windows()),
    "gemma2": tiny_gemma2,
    "granite_swa": lambda: with_sinks(GraniteSWAConfig),
}
NOT_REPLAYED = {"gpt_oss": lambda: with_sinks(GptOssConfig, num_local_experts=4, num_experts_per_tok=2)}


def one_by_one(model: PreTrainedModel, prompt: list[int], max_new_tokens: int, stop_ids: list[int]) -> list[int]:
    """Greedy decoding without batch and cache."""
    tokens: list[int] = []
    with torch.no_grad():
        while len(tokens) < max_new_tokens:
            token = int(model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, -1].argmax())
            if token in stop_ids:
                break
            tokens.append(token)
    return tokens


def make_prompts(count: int, shared: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(0)
    first = rng.integers(3, 64, shared).tolist()
    return [first + rng.integers(3, 64, 1 + 3 * i % 17).tolist() for i in range(count)]


@pytest.mark.parametrize("name", [*MODELS, *NOT_REPLAYED])
def test_answers_equal_greedy_decoding_one_by_one_without_a_cache(tokenizer, name: str) -> None:
    model, prompts = (MODELS | NOT_REPLAYED)[name](), make_prompts(9, shared=24)
    stop_ids = [one_by_one(model, prompts[0], 3, [])[2]]
    expected = [one_by_one(model, prompt, 10, stop_ids) for prompt in prompts]
    assert len(set(map(tuple, expected))) > 3
    whole, halves = ["a"] * 9, ["a"] * 4 + ["b"] * 5
    batches = [(4, None), (4, halves), (9, whole)]
    if name == "llama":
        batches = list(product((1, 4, 9), (None, whole, halves)))
    for (batch_size, groups), replay in product(batches, (False, True) if name in MODELS else (False,)):
        found = answers(
            model,
            tokenizer,
            prompts,
            end_ids=stop_ids,
            max_new_tokens=10,
            batch_size=batch_size,
            groups=groups,
            replay=replay,
        )
        assert [answer.text for answer in found] == [tokenizer.decode(t, skip_special_tokens=True) for t in expected]
        assert [answer.tokens for answer in found] == [len(tokens) for tokens in expected]
        assert [a.stop for a in found] == ["length" if len(t) == 10 else "end_of_turn" for t in expected]


def test_a_batch_needs_a_fifth_of_the_passes_and_rows_that_have_ended_leave_it(tokenizer) -> None:
    model, prompts = MODELS["llama"](), make_prompts(16)
    settings = {"end_ids": NOTHING, "max_new_tokens": [20] * 2 + [2] * 14}
    with passes(model) as alone:
        answers(model, tokenizer, prompts, batch_size=1, **settings)
    with passes(model) as together:
        answers(model, tokenizer, prompts, batch_size=16, **settings)
    assert len(alone) == 2 * 20 + 14 * 2
    assert len(together) == 20
    settings["max_new_tokens"] = 20
    with passes(model) as alone:
        answers(model, tokenizer, prompts, batch_size=1, **settings)
    assert len(alone) >= 5 * len(together)
    assert [rows for rows, _ in together[:4]] == [16, 16, 2, 2]


def test_what_the_prompts_of_a_group_begin_with_is_computed_once(tokenizer) -> None:
    model, prompts = MODELS["llama"](), make_prompts(8, shared=40)
    with passes(model) as seen:
        answers(model, tokenizer, prompts, end_ids=NOTHING, max_new_tokens=1, batch_size=4, groups=["a"] * 8)
    assert seen[0] == (1, 40)
    assert [rows for rows, _ in seen[1:]] == [4, 4]
    assert all(positions <= 17 for _, positions in seen[1:])


def test_the_keys_and_values_of_a_batch_have_a_bound_that_follows_from_the_model(tokenizer, monkeypatch) -> None:
    model, prompts = MODELS["llama"](), make_prompts(12)
    settings = {"end_ids": NOTHING, "max_new_tokens": 20, "batch_size": 12}
    free = answers(model, tokenizer, prompts, **settings)
    each = 2 * 2 * 2 * 8 * 4  # keys and values, layers, key heads, their size, bytes
    assert kv_cache.max_cached_positions(model) == kv_cache.MAX_CACHE_BYTES // each
    monkeypatch.setattr(kv_cache, "MAX_CACHE_BYTES", 150 * each)
    with passes(model) as seen:
        bounded = answers(model, tokenizer, prompts, **settings)
    assert bounded == free
    firsts = [shape for shape in seen if shape[1] > 1]
    assert all(rows * (width + 20) <= 150 for rows, width in firsts)
    assert max(rows for rows, _ in seen) > 1
    monkeypatch.setattr(kv_cache, "MAX_CACHE_BYTES", each)
    with passes(model) as seen:
        assert answers(model, tokenizer, prompts, **settings) == free
    assert {rows for rows, _ in seen} == {1}


def test_a_shared_prefix_counts_for_each_row_that_copies_it(tokenizer, monkeypatch) -> None:
    model, prompts = MODELS["llama"](), make_prompts(8, shared=40)
    monkeypatch.setattr(kv_cache, "MAX_CACHE_BYTES", 120 * 256)
    with passes(model) as seen:
        answers(model, tokenizer, prompts, end_ids=NOTHING, max_new_tokens=1, batch_size=8, groups=["a"] * 8)
    assert seen[0] == (1, 40)
    assert {rows for rows, _ in seen[1:]} == {2}


def test_an_answer_ends_before_the_first_stop_text_even_inside_a_token(tokenizer) -> None:
    model, prompts = MODELS["llama"](), make_prompts(6)
    settings = {"end_ids": NOTHING, "max_new_tokens": 30, "batch_size": 3}
    plain = answers(model, tokenizer, prompts, **settings)
    assert {answer.stop for answer in plain} == {"length"}
    stops = [(answer.text[7:9], "never") for answer in plain]
    for found, whole, (stop, _) in zip(
        answers(model, tokenizer, prompts, stop_texts=stops, **settings), plain, stops, strict=True
    ):
        assert found.text == whole.text[: whole.text.index(stop)]
        assert found.stop == "stop_text"
        assert found.tokens < whole.tokens


def test_greedy_answers_ignore_the_penalties_in_a_models_generation_config(tokenizer) -> None:
    model = tiny_llama().eval()
    settings = {"end_ids": [3], "max_new_tokens": 8, "batch_size": 1}
    plain = answers(model, tokenizer, [[5, 6, 7]], **settings)
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.do_sample = True
    assert answers(model, tokenizer, [[5, 6, 7]], **settings) == plain
    assert model.generation_config.repetition_penalty == 5.0


def test_training_mode_comes_back_after_an_answer(tokenizer) -> None:
    model = tiny_llama(dropout=0.5).train()
    first, again = (
        answers(model, tokenizer, [[5, 6, 7]], end_ids=NOTHING, max_new_tokens=8, batch_size=1) for _ in range(2)
    )
    assert first == again
    assert model.training


@pytest.mark.parametrize("name", MODELS)
def test_replayed_steps_read_no_memory_that_is_not_filled(tokenizer, name: str, monkeypatch) -> None:
    """What lies behind the filled positions is NaN when the steps begin, as memory that was taken and not written may be."""
    model, prompts = MODELS[name](), make_prompts(4)
    settings = {"end_ids": NOTHING, "max_new_tokens": 6, "batch_size": 4}
    expected = answers(model, tokenizer, prompts, **settings)
    written_at = kv_cache.FixedLayer.written_at

    def planted(layer: kv_cache.FixedLayer, at: torch.Tensor, seen: int) -> None:
        layer.keys[:, :, seen:], layer.values[:, :, seen:] = torch.nan, torch.nan
        written_at(layer, at, seen)

    monkeypatch.setattr(kv_cache.FixedLayer, "written_at", planted)
    assert answers(model, tokenizer, prompts, replay=True, **settings) == expected


def test_a_prompt_of_one_token_is_read_before_steps_are_replayed(tokenizer) -> None:
    model = MODELS["llama"]()
    settings = {"end_ids": NOTHING, "max_new_tokens": 6, "batch_size": 1}
    expected = answers(model, tokenizer, [[7]], **settings)
    assert answers(model, tokenizer, [[7]], replay=True, **settings) == expected


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rotary embeddings of type dynamic"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "a layer of type linear_attention"),
        ({"num_experts": 4}, "experts are visited"),
    ],
)
def test_a_model_whose_steps_the_host_decides_is_not_replayed(tokenizer, changes: dict, reason: str) -> None:
    model = tiny_llama()
    for name, value in changes.items():
        setattr(model.config, name, value)
    with pytest.raises(ConfigError, match=reason):
        answers(model, tokenizer, [[7]], end_ids=NOTHING, max_new_tokens=1, batch_size=1, replay=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_replayed_steps_answer_on_a_gpu_as_eager_ones_do(tokenizer, name: str) -> None:
    """Also when rows end early and leave the batch, and the steps are recorded anew."""
    model, prompts = MODELS[name]().cuda(), make_prompts(16)
    settings = {"end_ids": NOTHING, "max_new_tokens": [40] * 3 + [4] * 13, "batch_size": 16}
    expected = answers(model, tokenizer, prompts, **settings)
    assert answers(model, tokenizer, prompts, replay=True, **settings) == expected
