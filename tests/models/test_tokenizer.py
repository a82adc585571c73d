"""The trained tokenizer and the chat template beside it."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import jinja2
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sftkit.data.demo import builtin
from sftkit.models import tokenizer as tokenizer_module
from sftkit.models.tokenizer import train_tokenizer

TEMPLATE = (Path(builtin.__file__).parents[1] / "tokens" / "chatml.jinja").read_text()
TEXTS = [
    "Hello world, 12345 and 1,000.\n\n\tdef f(x):\n        return x  # why\n",
    "naïve café — Ünïcödé, 東京, עברית, हिन्दी, 🙂👩‍👩‍👧, e\u0301",
    "\x00\x01\x7f \u200b\ufeff\u2028 \r\n\r \xa0 end ",
    "   leading and trailing   ",
    "٣٤ ⅷ ²",
    "".join(map(chr, range(32, 0x250))),
]


def training_texts() -> list[str]:
    files = [argparse.__file__, json.__file__, os.__file__]
    said = [message["content"] for task in islice(builtin.tasks("train"), 500) for message in task.messages]
    return [text for file in files for text in builtin._documents_of_file(Path(file))] + said


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return training_texts()


@pytest.fixture(scope="module")
def tokenizer(texts) -> PreTrainedTokenizerFast:
    return train_tokenizer(texts, 1024, TEMPLATE)


def test_it_has_the_asked_size_and_its_special_tokens_first(tokenizer):
    assert len(tokenizer) == 1024
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3]) == list(tokenizer_module.SPECIAL_TOKENS)
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|endoftext|>", "<|pad|>", None)
    assert set(tokenizer.all_special_ids) == {0, 1, 2, 3}


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_back_unchanged(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_nothing_is_put_before_or_after_a_text(tokenizer):
    assert tokenizer("").input_ids == []
    assert tokenizer("a").input_ids == tokenizer("a", add_special_tokens=False).input_ids
    assert len(tokenizer("a").input_ids) == 1


def test_every_digit_is_its_own_token(tokenizer):
    assert tokenizer.tokenize("x12345") == ["x", "1", "2", "3", "4", "5"]
    digits = [token for token in tokenizer.get_vocab() if any(c.isdigit() for c in token)]
    assert sorted(digits, key=len)[-1] in set("0123456789") | {"²", "³", "¹"}


def test_special_tokens_in_text_are_single_ids(tokenizer):
    assert tokenizer("<|im_start|>a<|im_end|><|endoftext|>").input_ids[::2] == [2, 3]
    assert tokenizer.decode([2, 3, 0, 1], skip_special_tokens=True) == ""


def test_saving_and_loading_keeps_ids_and_template(tokenizer, texts, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= {p.name for p in tmp_path.iterdir()}
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.chat_template == TEMPLATE
    assert loaded(texts[:20] + TEXTS).input_ids == tokenizer(texts[:20] + TEXTS).input_ids
    assert loaded.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert (loaded.eos_token_id, loaded.pad_token_id, loaded.bos_token_id) == (0, 1, None)
    assert set(loaded.all_special_ids) == {0, 1, 2, 3}


def digest_of(tokenizer: PreTrainedTokenizerFast) -> str:
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


@pytest.mark.slow
def test_the_same_texts_give_the_same_tokenizer_in_another_process(tokenizer):
    code = "import test_tokenizer as t; print(t.digest_of(t.train_tokenizer(t.training_texts(), 1024)))"
    env = {**os.environ, "PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    other = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert other.strip() == digest_of(tokenizer)


# ---- the chat template -----------------------------------------------------------------------------------------------

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
]
GOLDEN_CHAT = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
)


def render(tokenizer, messages, **kwargs) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)


def targets(tokenizer, messages, **kwargs) -> list[str]:
    """The text of each marked stretch of tokens."""
    out = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True, **kwargs)
    stretches, last = [], 0
    for token, is_target in zip(out["input_ids"], out["assistant_masks"], strict=True):
        if is_target:
            stretches = stretches if last else [*stretches, []]
            stretches[-1].append(token)
        last = is_target
    return [tokenizer.decode(tokens) for tokens in stretches]


def test_a_chat_renders_as_written_here(tokenizer):
    assert render(tokenizer, CHAT) == GOLDEN_CHAT


def test_the_marked_tokens_are_the_answers_and_their_ends(tokenizer):
    assert targets(tokenizer, CHAT) == ["2<|im_end|>", "4<|im_end|>"]


def test_the_generation_prompt_is_what_an_answer_continues(tokenizer):
    prompt = render(tokenizer, CHAT[:-1], add_generation_prompt=True)
    assert prompt.endswith("<|im_start|>assistant\n")
    assert prompt + "4<|im_end|>\n" == GOLDEN_CHAT


def test_there_is_no_system_message_of_its_own(tokenizer):
    assert render(tokenizer, CHAT[1:2]) == "<|im_start|>user\n1 + 1?<|im_end|>\n"


def test_tools_calls_and_results_render_as_written_here(tokenizer):
    messages = [
        CHAT[0],
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is 2."},
    ]
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
    assert render(tokenizer, messages, tools=[TOOL]) == (
        "<|im_start|>system\nBe brief.\n\n"
        'Tools, one per line. Call one with {"name": ..., "arguments": {...}} between <tool_call> tags.\n'
        f"<tools>\n{json.dumps(TOOL)}\n</tools><|im_end|>\n"
        "<|im_start|>user\nAdd.<|im_end|>\n"
        f"<|im_start|>assistant\n{call}\n{call}<|im_end|>\n"
        "<|im_start|>tool\n2<|im_end|>\n"
        "<|im_start|>assistant\nIt is 2.<|im_end|>\n"
    )
    assert targets(tokenizer, messages, tools=[TOOL]) == [f"{call}\n{call}<|im_end|>", "It is 2.<|im_end|>"]


def test_tools_without_a_system_message_get_one(tokenizer):
    text = render(tokenizer, CHAT[1:2], tools=[TOOL])
    assert text.startswith("<|im_start|>system\nTools, one per line.")
    assert text.count("<|im_start|>system") == 1


def test_arguments_given_as_json_text_stay_as_they_are(tokenizer):
    call = {"function": {"name": "f", "arguments": '{"x":1}'}}
    text = render(tokenizer, [{"role": "assistant", "content": "Now.", "tool_calls": [call]}])
    assert (
        text
        == '<|im_start|>assistant\nNow.\n<tool_call>\n{"name": "f", "arguments": {"x":1}}\n</tool_call><|im_end|>\n'
    )


def test_text_parts_are_joined(tokenizer):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(tokenizer, [{"role": "user", "content": parts}]) == "<|im_start|>user\nab<|im_end|>\n"


@pytest.mark.parametrize(
    "message", [{"role": "critic", "content": "no"}, {"role": "user", "content": [{"type": "image", "url": "x"}]}]
)
def test_what_the_template_does_not_know_is_an_error(tokenizer, message):
    with pytest.raises(jinja2.TemplateError, match=r"critic|image"):
        render(tokenizer, [message])


def test_every_task_marks_exactly_its_answers(tokenizer):
    for task in islice(builtin.tasks("train"), 60):
        answers = [m["content"] + "<|im_end|>" for m in task.messages if m["role"] == "assistant"]
        assert targets(tokenizer, task.messages) == answers
