"""Which tokens are learned, for every style of chat template, and what each bad conversation leads to."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN, OUR_TEMPLATE, SHARED_DATA
from tokenizers import processors

from sftkit.data.reading import conversation, rows
from sftkit.data.tokens import chat, text
from sftkit.data.tokens import encode as encoding
from sftkit.data.types import CUT, TOO_LONG, Row
from sftkit.errors import ConfigError, DataError

CONVERSATION = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And 世界?"},
    {"role": "assistant", "content": "你好 — two\n\nlines."},
    {"role": "user", "content": "Thanks"},
]
FIRST, SECOND = "Paris.", "你好 — two\n\nlines."

# template -> (tokenizer settings, the text that is learned)
TEMPLATES: dict[str, tuple[dict[str, Any], str]] = {
    "chatml": ({}, f"{FIRST}<|im_end|>{SECOND}<|im_end|>"),
    "qwen3": ({}, f"{SECOND}<|im_end|>"),  # the first answer ends a document of its own
    "llama3": ({"bos": "<|begin_of_text|>", "eos": "<|eot_id|>", "adds_bos": True, "trim_offsets": True},
               f"{FIRST}<|eot_id|>{SECOND}<|eot_id|>"),
    "mistral": ({"bos": "<s>", "eos": "</s>", "adds_bos": True}, f" {FIRST}</s> {SECOND}</s>"),
    "default_system": ({}, f"{FIRST}<|im_end|>{SECOND}<|im_end|>"),
    "marks_without_end": ({}, f"{FIRST}<|im_end|>{SECOND}<|im_end|>"),
    "plain": ({"eos": "<|endoftext|>"}, f" {FIRST} {SECOND}<|endoftext|>"),
}  # fmt: skip


def learned(example, tokenizer) -> str:
    return tokenizer.decode(example.ids[example.is_target].tolist())


def only(tokenized):
    (example,) = tokenized.examples
    return example


def all_learned(tokenized, tokenizer) -> str:
    return "".join(learned(example, tokenizer) for example in tokenized.examples)


@pytest.fixture(params=TEMPLATES)
def case(request, make_tokenizer):
    settings, expected = TEMPLATES[request.param]
    return request.param, make_tokenizer(request.param, **settings), expected


# ---- golden tokens ---------------------------------------------------------------------------------------------------


def test_learns_what_the_assistant_says_and_the_end_of_its_turn(case):
    _, tokenizer, expected = case
    example = chat.tokenize(Row("x:1", messages=CONVERSATION), tokenizer, max_length=1000).examples[-1]
    assert learned(example, tokenizer) == expected
    assert example.is_target[-1]
    assert not example.is_target[0]
    assert example.num_bytes == len(tokenizer.decode(example.ids[example.is_target], skip_special_tokens=True).encode())


def test_golden_tokens(case):
    """tests/golden/conversation.json; SFTKIT_UPDATE_GOLDEN=1 writes it anew, then read its diff."""
    name, tokenizer, _ = case
    example = chat.tokenize(Row("x:1", messages=CONVERSATION), tokenizer, max_length=1000).examples[-1]
    path = GOLDEN / "conversation.json"
    golden = json.loads(path.read_text()) if path.exists() else {}
    now = {"ids": example.ids.tolist(), "is_target": "".join("01"[int(t)] for t in example.is_target)}
    if os.environ.get("SFTKIT_UPDATE_GOLDEN"):
        lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted({**golden, name: now}.items()))
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    else:
        assert now == golden[name]


def test_tokens_are_those_of_the_rendered_conversation(case):
    name, tokenizer, _ = case
    example = chat.tokenize(Row("x:1", messages=CONVERSATION), tokenizer, max_length=1000).examples[-1]
    whole = tokenizer.apply_chat_template(CONVERSATION[:5], tokenize=True, return_dict=False)
    n = len(example.ids) - (name == "plain")  # whose end is an eos that the template does not write
    assert example.ids[:n].tolist() == whole[:n]


def test_prompt_for_generation_is_what_training_puts_before_the_answer(case):
    name, tokenizer, _ = case
    example = only(chat.tokenize(Row("x:1", messages=CONVERSATION[:3]), tokenizer, max_length=1000))
    prompt = chat.render_prompt(Row("x:1", messages=CONVERSATION[:2]), tokenizer)
    start = int(np.flatnonzero(example.is_target)[0])
    if name == "qwen3":
        assert tokenizer.decode(example.ids[len(prompt) : start]) == "<think>\n\n</think>\n\n"
        row = chat.as_trained(Row("x:1", messages=CONVERSATION[:3]), 2, tokenizer)
        prompt = chat.render_prompt(replace(row, messages=row.messages[:2]), tokenizer)
    assert example.ids[:start].tolist() == prompt


def test_one_bos_at_most(case):
    _, tokenizer, _ = case
    example = chat.tokenize(Row("x:1", messages=CONVERSATION), tokenizer, max_length=1000).examples[-1]
    for ids in (example.ids.tolist(), chat.render_prompt(Row("x:1", messages=CONVERSATION), tokenizer)):
        assert ids.count(tokenizer.bos_token_id) == (1 if tokenizer.bos_token_id is not None else 0)


def test_end_of_turn_ids(case):
    name, tokenizer, _ = case
    ends = {"llama3": "<|eot_id|>", "mistral": "</s>", "plain": "<|endoftext|>"}
    assert tokenizer.convert_ids_to_tokens(chat.end_of_turn_ids(tokenizer)) == [ends.get(name, "<|im_end|>")]


def test_base_tokenizer_stops_at_eos(make_tokenizer):
    tokenizer = make_tokenizer(None, eos="<|endoftext|>")
    assert chat.end_of_turn_ids(tokenizer) == [tokenizer.eos_token_id]


def test_end_of_turn_differs_from_eos(make_tokenizer):
    tokenizer = make_tokenizer("qwen3", eos="<|endoftext|>")
    assert tokenizer.convert_ids_to_tokens(chat.end_of_turn_ids(tokenizer)) == ["<|im_end|>", "<|endoftext|>"]
    example = chat.tokenize(Row("x:1", messages=CONVERSATION), tokenizer, max_length=1000).examples[-1]
    assert learned(example, tokenizer).endswith("lines.<|im_end|>")


def test_trimmed_offsets_do_not_lose_spaces(make_tokenizer):
    messages = [{"role": "user", "content": "code"}, {"role": "assistant", "content": "if x:\n    return   1 \n  2"}]
    for template, trim in (("qwen3", True), ("chatml", True), ("chatml", False)):
        tokenizer = make_tokenizer(template, trim_offsets=trim)
        example = only(chat.tokenize(Row("x:1", messages=messages), tokenizer, max_length=1000))
        assert learned(example, tokenizer) == messages[1]["content"] + "<|im_end|>"


# ---- templates with habits -------------------------------------------------------------------------------------------


def test_whitespace_after_the_end_of_turn_is_not_learned(make_tokenizer):
    tokenizer = make_tokenizer("marks_without_end")
    tokenizer.chat_template = (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
        "{%- if m.role == 'assistant' %}"
        "{%- generation %}{{- m.content + '<|im_end|>\\n' }}{%- endgeneration %}"
        "{%- else %}{{- m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    )
    example = chat.tokenize(Row("x:1", messages=CONVERSATION), tokenizer, max_length=1000).examples[-1]
    assert learned(example, tokenizer) == f"{FIRST}<|im_end|>{SECOND}<|im_end|>"


def test_conversation_that_begins_with_an_answer(make_tokenizer):
    messages = [{"role": "assistant", "content": "Hello."}, *CONVERSATION[1:3]]
    for template in ("chatml", "qwen3", "default_system", "llama3"):
        end = "<|eot_id|>" if template == "llama3" else "<|im_end|>"
        tokenizer = make_tokenizer(template, bos="<|begin_of_text|>", eos=end)
        example = only(chat.tokenize(Row("x:1", messages=messages), tokenizer, max_length=1000))
        assert learned(example, tokenizer).replace("<think>\n\n</think>\n\n", "") == f"Hello.{end}Paris.{end}"


def test_an_answer_that_the_template_rewrites_later_is_context_only(make_tokenizer):
    tokenizer = make_tokenizer("qwen3")
    tokenizer.chat_template = (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
        "{%- if loop.index0 == 1 and messages|length > 4 %}{{- '(earlier) ' }}{%- endif %}"
        "{{- m.content + '<|im_end|>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    )
    row = Row("x:1", messages=[*CONVERSATION[1:5], CONVERSATION[5], {"role": "assistant", "content": "Bye."}])
    found = chat.tokenize(row, tokenizer, max_length=1000, learning=chat.Learning(split_turns=False))
    assert all_learned(found, tokenizer) == "Bye.<|im_end|>"
    assert (found.counts["answers_learned"], found.counts["not_learned_history"]) == (1, 2)
    split = chat.tokenize(row, tokenizer, max_length=1000)
    assert [learned(e, tokenizer) for e in split.examples] == [f"{FIRST}<|im_end|>{SECOND}<|im_end|>", "Bye.<|im_end|>"]
    assert (split.counts["answers_learned"], split.counts["not_learned_history"]) == (3, 0)


def test_a_prompt_that_the_template_does_not_continue_is_refused(make_tokenizer):
    tokenizer = make_tokenizer("qwen3")
    tokenizer.chat_template = (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant says\n' }}{%- endif %}"
    )
    with pytest.raises(DataError, match=r"x:1: messages\[1\].*prompt has ' says.*', the conversation"):
        chat.tokenize(Row("x:1", messages=CONVERSATION[1:3]), tokenizer, max_length=1000)


def test_template_that_refuses(make_tokenizer):
    tokenizer = make_tokenizer("mistral", bos="<s>", eos="</s>")
    with pytest.raises(DataError, match=r"x:1: the chat template rejects.*must alternate"):
        chat.tokenize(Row("x:1", messages=[CONVERSATION[1], *CONVERSATION[1:3]]), tokenizer, max_length=1000)


def test_developer_is_system_for_templates_that_do_not_know_it(tokenizer):
    messages = [{**CONVERSATION[0], "role": "developer"}, *CONVERSATION[1:]]
    a = only(chat.tokenize(Row("x:1", messages=messages), tokenizer, max_length=1000))
    b = only(chat.tokenize(Row("x:1", messages=CONVERSATION), tokenizer, max_length=1000))
    assert a.ids.tolist() == b.ids.tolist()


def test_no_template(make_tokenizer):
    with pytest.raises(ConfigError, match=r"has no chat template.*model\.chat_template"):
        chat.tokenize(Row("x:1", messages=CONVERSATION), make_tokenizer(None), max_length=1000)


def test_no_token_to_stop_at(make_tokenizer):
    with pytest.raises(ConfigError, match="ends an answer"):
        chat.tokenize(Row("x:1", messages=CONVERSATION), make_tokenizer("plain", eos=None), max_length=1000)


# ---- tools -----------------------------------------------------------------------------------------------------------


def tool_conversation(arguments: Any, content: str | None = None) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
        {"role": "assistant", "content": "Rain."},
    ]


TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("arguments", ['{"city": "Berlin"}', {"city": "Berlin"}])
@pytest.mark.parametrize("template", ["chatml", "qwen3", "llama3"])
def test_tool_calls_are_learned(make_tokenizer, template, arguments):
    tokenizer = make_tokenizer(template, bos="<|begin_of_text|>")
    found = chat.tokenize(Row("x:1", None, tool_conversation(arguments), TOOLS), tokenizer, max_length=1000)
    said = all_learned(found, tokenizer)
    key = "parameters" if template == "llama3" else "arguments"
    assert f'{{"name": "get_weather", "{key}": {{"city": "Berlin"}}}}' in said
    assert "rain" not in said
    assert said.count("<|eot_id|>" if template == "llama3" else "<|im_end|>") == 2
    assert all('"object"' in tokenizer.decode(example.ids) for example in found.examples)


def test_arguments_that_are_not_json_stay_text(tokenizer):
    example = only(chat.tokenize(Row("x:1", messages=tool_conversation('{"a": ""b"}')), tokenizer, max_length=1000))
    assert '"arguments": {"a": ""b"}}' in learned(example, tokenizer)


def test_template_that_drops_tool_calls_is_refused(make_tokenizer):
    row = Row("x:1", messages=tool_conversation("{}"))
    with pytest.raises(DataError, match=r"messages\[1\].*does not render 'get_weather'"):
        chat.tokenize(row, make_tokenizer("default_system"), max_length=1000)


# ---- bad conversations -----------------------------------------------------------------------------------------------

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
BAD = {
    "empty": ([], "messages is empty"),
    "not a list": ({"role": "user"}, "messages is an object"),
    "not objects": (["hi"], r"messages\[0\] is text"),
    "unknown role": ([{"role": "bot", "content": "hi"}, ANSWER], r'messages\[0\]: role "bot" is not one of system'),
    "no role": ([{"content": "hi"}, ANSWER], "there is no role among"),
    "null content": ([{"role": "user", "content": None}, ANSWER], r"messages\[0\]: content is null"),
    "null answer": ([USER, {"role": "assistant", "content": None}], r"messages\[1\]: content is null"),
    "missing content": ([{"role": "user"}, ANSWER], "content is missing"),
    "number": ([{"role": "user", "content": 3}, ANSWER], "content is a number"),
    "image": ([{"role": "user", "content": [{"type": "image", "url": "x"}]}, ANSWER], "a part of type image"),
    "bare text": ([{"role": "user", "content": ["x"]}, ANSWER], "a part of type str"),
    "no answer": ([USER], r"no assistant turn \(roles: user\)"),
    "empty answer": ([USER, {"role": "assistant", "content": ""}], r"messages\[1\]: empty answer"),
    "blank answer": ([USER, {"role": "assistant", "content": " \n"}], r"messages\[1\]: empty answer"),
    "special token": ([USER, {"role": "assistant", "content": "a<|im_end|>b"}], r"special token '<\|im_end\|>'"),
    "forged turn": ([{"role": "user", "content": "<|im_start|>system"}, ANSWER], r"messages\[0\] contains"),
    "tool calls": ([USER, {"role": "assistant", "tool_calls": "x"}], "tool_calls must be a list"),
    "nameless call": ([USER, {"role": "assistant", "tool_calls": [{"function": {}}]}], "no function name"),
    "special token in a call": (
        [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "</s>"}'}}]}],
        "special token '</s>'",
    ),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("template", ["chatml", "qwen3"])
def test_bad_conversation(make_tokenizer, template, name):
    messages, reason = BAD[name]
    with pytest.raises(DataError, match=f"^data.jsonl:7: .*{reason}"):
        chat.tokenize(Row("data.jsonl:7", messages=messages), make_tokenizer(template), max_length=1000)


def test_text_parts_are_joined_and_null_keys_dropped(tokenizer):
    parts = [{"type": "text", "text": "What "}, {"type": "text", "text": "now?"}]
    row = Row("x:1", messages=[{"role": "user", "content": parts, "tool_calls": None, "name": None}, ANSWER])
    (user, _) = conversation.validated(row, [])
    assert user == {"role": "user", "content": "What now?"}
    assert "What now?" in tokenizer.decode(only(chat.tokenize(row, tokenizer, max_length=1000)).ids)


def test_validation_leaves_the_row_alone(tokenizer):
    messages = tool_conversation('{"city": "Berlin"}')
    before = json.dumps(messages)
    chat.tokenize(Row("x:1", messages=messages), tokenizer, max_length=1000)
    assert json.dumps(messages) == before


# ---- length ----------------------------------------------------------------------------------------------------------


def test_max_length_counts_positions(tokenizer):
    row = Row("x:1", messages=CONVERSATION)
    whole = only(chat.tokenize(row, tokenizer, max_length=1000))
    n = len(whole.ids)
    for too_long in ("truncate", "drop", "error"):
        fits = chat.tokenize(row, tokenizer, max_length=n - 1, too_long=too_long)
        assert (len(only(fits).ids), fits.note) == (n, None)
    short = chat.tokenize(row, tokenizer, max_length=n - 2)
    assert short.note == "truncated"
    assert only(short).ids.tolist() == whole.ids[: n - 1].tolist()
    assert chat.tokenize(row, tokenizer, max_length=n - 2, too_long="drop").note == "dropped_too_long"
    with pytest.raises(DataError, match=rf"x:1: {n} tokens, but data.max_length {n - 2} holds {n - 1}"):
        chat.tokenize(row, tokenizer, max_length=n - 2, too_long="error")


def test_truncation_ends_with_a_target_or_drops(tokenizer):
    row = Row("x:1", messages=CONVERSATION)
    whole = only(chat.tokenize(row, tokenizer, max_length=1000))
    targets = np.flatnonzero(whole.is_target)
    gap = int(targets[np.diff(targets, append=10**6) > 1][0])  # the last target of the first answer
    cut = chat.tokenize(row, tokenizer, max_length=gap + 3)
    assert len(only(cut).ids) == gap + 1
    assert cut.note == "truncated"
    before = chat.tokenize(row, tokenizer, max_length=int(targets[0]) - 1)
    assert (before.examples, before.note) == ([], "dropped_no_target")


def test_targets_all(tokenizer):
    row = Row("x:1", messages=CONVERSATION)
    some = only(chat.tokenize(row, tokenizer, max_length=1000))
    every = only(text.tokenize_any(row, tokenizer, max_length=1000))
    assert every.ids.tolist() == some.ids.tolist()
    assert every.is_target.tolist() == [False] + [True] * (len(every.ids) - 1)


# ---- plain text ------------------------------------------------------------------------------------------------------


def test_text_pieces_learn_each_token_once(make_tokenizer):
    content = "She sells sea shells by the sea shore, and then she counts them. 你好" * 3
    tokenizer = make_tokenizer(None, bos="<s>", eos="</s>", adds_bos=True)
    whole = [*tokenizer(content)["input_ids"], tokenizer.eos_token_id]
    assert whole[0] == tokenizer.bos_token_id
    for max_length in (1, 7, 8, len(whole) - 2, len(whole) - 1, len(whole)):
        examples = text.tokenize(Row("x:1", text=content), tokenizer, max_length=max_length).examples
        assert all(2 <= len(example.ids) <= max_length + 1 for example in examples)
        assert [int(i) for example in examples for i in example.ids[example.is_target]] == whole[1:]
    assert sum(
        e.num_bytes for e in text.tokenize(Row("x:1", text=content), tokenizer, max_length=1000).examples
    ) == len(content.encode())


def test_text_has_one_bos_and_one_eos(make_tokenizer):
    tokenizer = make_tokenizer(None, bos="<s>", eos="</s>", adds_bos=True)
    for content in ("Hello.", "<s>Hello.", "Hello.</s>"):
        ids = only(text.tokenize(Row("x:1", text=content), tokenizer, max_length=100)).ids.tolist()
        assert (ids.count(tokenizer.bos_token_id), ids.count(tokenizer.eos_token_id)) == (1, 1)
    no_bos = make_tokenizer(None, bos="<s>", eos="</s>")
    assert tokenizer.bos_token_id not in only(text.tokenize(Row("x:1", text="Hi"), no_bos, max_length=100)).ids


def test_a_tokenizer_that_adds_bos_twice_gives_a_text_one(make_tokenizer):
    tokenizer = make_tokenizer(None, bos="<s>", eos="</s>")
    bos = tokenizer.bos_token_id
    adds_two = processors.TemplateProcessing("<s> <s> $A", special_tokens=[("<s>", bos)])
    tokenizer.backend_tokenizer.post_processor = adds_two
    assert tokenizer("Hi")["input_ids"][:2] == [bos, bos]
    for content in ("Hi", "Hi " * encoding.CHUNK_CHARACTERS):
        ids = text.tokenize(Row("x:1", text=content), tokenizer, max_length=10**7).examples[0].ids.tolist()
        assert ids.count(bos) == 1


def test_rows_of_the_other_kind(tokenizer):
    for content in ("", " \n"):
        assert text.tokenize(Row("x:1", text=content), tokenizer, max_length=8).note == "dropped_no_target"
    with pytest.raises(DataError, match="x:1: a conversation, but this script learns from plain text"):
        text.tokenize(Row("x:1", messages=CONVERSATION), tokenizer, max_length=8)
    with pytest.raises(DataError, match="x:1: a text without turns, but this script learns from conversations"):
        chat.tokenize(Row("x:1", text="hi"), tokenizer, max_length=8)


# ---- real data, where it is ------------------------------------------------------------------------------------------

CHAT_FILES = sorted((SHARED_DATA / "chat").glob("*.jsonl.gz"))


@pytest.mark.slow
@pytest.mark.skipif(not CHAT_FILES, reason="no shared data beside this checkout")
@pytest.mark.parametrize("path", CHAT_FILES, ids=lambda path: path.name.split(".")[0])
@pytest.mark.parametrize("ours", [True, False], ids=["chatml", "smollm2"])
def test_real_conversations(path, ours):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SHARED_DATA / "tokenizers" / "smollm2")
    if ours:
        tokenizer.chat_template = OUR_TEMPLATE.read_text()
    with gzip.open(path, "rt") as file:
        for number, line in enumerate(islice(file, 50), start=1):
            where, raw = f"{path.name}:{number}", json.loads(line)
            if "message_tree_id" in raw:
                with pytest.raises(DataError, match="messages of a tree"):
                    rows.convert(raw, where)
                continue
            row = rows.convert(raw, where)
            answers = [m for m in conversation.validated(row, []) if m["role"] == "assistant"]
            if not ours and (row.tools or any("tool_calls" in m for m in answers)):
                with pytest.raises(DataError, match=r"does not render|leaves out"):
                    chat.tokenize(row, tokenizer, max_length=100_000)
                continue
            example = only(chat.tokenize(row, tokenizer, max_length=100_000))
            said = learned(example, tokenizer).split("<|im_end|>")
            assert said.pop() == ""
            for answer, expected in zip(said, answers, strict=True):
                if "tool_calls" in expected:
                    assert answer.startswith(expected["content"])
                    assert all(call["function"]["name"] in answer for call in expected["tool_calls"])
                else:
                    # The header's newline may share a token with newlines that begin the answer.
                    begins = "\n" if expected["content"].startswith("\n") and answer != expected["content"] else ""
                    assert answer == begins + expected["content"]


def test_the_header_before_an_answer_is_tokenized_once_for_all_conversations(tokenizer, monkeypatch) -> None:
    texts: list[str] = []

    def encode(tokenizer, text, *settings):
        texts.append(text)
        return encoded(tokenizer, text, *settings)

    encoded = encoding.encode
    monkeypatch.setattr(encoding, "encode", encode)
    for i in range(3):
        chat.tokenize(Row(f"x:{i}", messages=[{**m} for m in CONVERSATION[:3]]), tokenizer, max_length=1000)
    header = [text for text in texts if not text.endswith("<|im_end|>")]
    assert (len(texts), len(header)) == (4, 1), texts


LONG = [
    {"role": role, "content": f"{word} " * 12}
    for word in ("one", "two", "three", "four")
    for role in ("user", "assistant")
]


@pytest.mark.parametrize("targets", ["assistant", "all"])
@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama3", "plain", "mistral"])
def test_answers_count_as_learned_only_as_far_as_max_length_reaches(make_tokenizer, name: str, targets: Any) -> None:
    tokenizer = make_tokenizer(name, **TEMPLATES[name][0])
    learning = chat.Learning(targets, split_turns=False)
    row, seen = Row("x:1", messages=LONG), set()
    (whole,) = chat.tokenize(row, tokenizer, max_length=10_000, learning=learning).examples
    ends = np.flatnonzero(np.diff(np.append(whole.is_target, False).astype(int)) == -1) + 1
    for max_length in range(40, len(whole.ids) + 1):
        found = chat.tokenize(row, tokenizer, max_length=max_length, learning=learning)
        counts = found.counts
        parts = ("answers_learned", CUT, TOO_LONG, "not_learned_history")
        assert sum(counts.get(part, 0) for part in parts) == counts["answers"] == 4
        if targets == "assistant" and name != "qwen3":
            kept = max_length + 1
            begun = sum(example.is_target.any() for example in found.examples)
            assert counts["answers_learned"] == int((ends <= kept).sum())
            assert counts[CUT] <= begun
        seen.add((counts["answers_learned"], counts[CUT]))
    last = chat.tokenize(row, tokenizer, max_length=len(whole.ids) - 1, learning=learning).counts
    assert (last[CUT], last[TOO_LONG]) == (0, 0)
    short = chat.tokenize(row, tokenizer, max_length=len(whole.ids) - 2, learning=learning).counts
    assert short[CUT] == 1, "without the token that ends it an answer is cut"
    assert len(seen) > 3 or name == "qwen3"


@pytest.mark.parametrize("token", ["<|x|>", "<it's>", '<"x">', "<\\x>", "<\n>", "<\x00>", "<｜x｜>", "<\u200b>"])
def test_a_special_token_of_any_characters_is_found_in_a_call_and_in_tools(token) -> None:
    for near in ("", "'", '"', "'\"", "\\", "\n", "\u200b"):
        for given in (f"{near}{token}{near}", near):
            called = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"a": [given]}}]}
            asked = {"role": "user", "content": "Ask"}
            for row in (Row("x:1", messages=[asked, called]), Row("x:1", messages=[asked], tools=[{"name": given}])):
                if token in given:
                    with pytest.raises(DataError, match="would forge"):
                        conversation.validated(row, (token,))
                else:
                    conversation.validated(row, (token,))
