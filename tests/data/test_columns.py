"""Every column of a row and every key of a message is honoured, rejected with its reason, or counted as unused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sftkit.config.schema import DataConfig, SourceConfig
from sftkit.data.reading import columns, rows
from sftkit.data.tokens import chat, sources, text
from sftkit.data.types import Examples, Tokenized
from sftkit.errors import DataError

ASK, ANSWER = {"role": "user", "content": "Ask"}, {"role": "assistant", "content": "Answer"}
CHAT = {"messages": [ASK, ANSWER]}
PAIR = {"prompt": "Ask", "completion": "Answer"}
ALPACA = {"instruction": "Ask", "output": "Answer"}
SCHEMA = {"name": "f", "parameters": {"type": "object"}}
CHOICES = {"question": "Ask", "choices": ["x", "y"], "answerKey": "B"}


def key(**keys: Any) -> dict[str, Any]:
    """A conversation whose answer has further keys."""
    return {"messages": [ASK, {**ANSWER, **keys}]}


def call(**function: Any) -> dict[str, Any]:
    return {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}]}


def text_of(result: Tokenized, tokenizer) -> str:
    """The documents of a row, [[targets]] in brackets, turns as role: text."""
    shown = []
    for example in result.examples:
        parts = ""
        for target, token in zip([*example.is_target.tolist()], example.ids.tolist(), strict=True):
            inside = parts.count("[[") > parts.count("]]")
            parts += ("[[" if target and not inside else "]]" if inside and not target else "") + tokenizer.decode(
                [token]
            )
        shown.append(parts + ("]]" if parts.count("[[") > parts.count("]]") else ""))
    return "|".join(shown).replace("<|im_start|>", "").replace("<|im_end|>", ".").replace("\n", " ")


def read(raw: dict[str, Any], tokenizer, tokenize=chat.tokenize) -> tuple[str, tuple[str, ...]]:
    """What is learned of a row, and what of it is not used."""
    row = rows.convert(raw, "a.jsonl:1")
    result = tokenize(row, tokenizer, max_length=400)
    return text_of(result, tokenizer), (*row.unused, *result.unused)


PLAIN = "user Ask. assistant [[Answer.]]"
# One row of the table for each column or key: what is learned, of which nothing is left out.
HONOURED: dict[str, tuple[dict[str, Any], str]] = {
    "label true": ({**CHAT, "label": True}, PLAIN),
    "label of a CSV": ({**PAIR, "label": "True"}, PLAIN),
    "kto_tag true": ({**CHAT, "kto_tag": True}, PLAIN),
    "chosen that is the answer": ({**CHAT, "chosen": CHAT["messages"]}, PLAIN),
    "chosen text that is the answer": ({**CHAT, "chosen": "Answer"}, PLAIN),
    "loss false": ({"messages": [ASK, {**ANSWER, "loss": False}, ASK, ANSWER]},
                   "user Ask. assistant Answer. user Ask. assistant [[Answer.]]"),
    "training false": ({"messages": [ASK, {**ANSWER, "training": False}, ASK, ANSWER]},
                       "user Ask. assistant Answer. user Ask. assistant [[Answer.]]"),
    "step_loss_mask 0": ({"messages": [ASK, {**ANSWER, "step_loss_mask": 0}, ASK, ANSWER]},
                         "user Ask. assistant Answer. user Ask. assistant [[Answer.]]"),
    "loss_mask false": ({"messages": [ASK, {**ANSWER, "loss_mask": False}, ASK, ANSWER]},
                        "user Ask. assistant Answer. user Ask. assistant [[Answer.]]"),
    "loss_scale 0": ({"messages": [ASK, {**ANSWER, "loss_scale": 0}, ASK, ANSWER]},
                     "user Ask. assistant Answer. user Ask. assistant [[Answer.]]"),
    "loss_scale 1": (key(loss_scale=1.0), PLAIN),
    "one of two marks": (key(loss=False, weight=1), ""),
    "a mark of ShareGPT": ({"conversations": [{"from": "human", "value": "Ask"},
                                              {"from": "gpt", "value": "Answer", "loss": False}]}, ""),
    "weight 0 of the row": ({**CHAT, "weight": 0}, ""),
    "weight of a CSV": ({**PAIR, "weight": "0.0"}, ""),
    "weight 1 of the row": ({**CHAT, "weight": 1.0}, PLAIN),
    "train false of the row": ({**CHAT, "train": False}, ""),
    "loss_mask 0 of the row": ({**CHAT, "loss_mask": 0}, ""),
    "mask of NeMo": ({**CHAT, "mask": "User"}, PLAIN),
    "history": ({**ALPACA, "history": [["Before", "Said"]]},
                "user Before. assistant [[Said.]] user Ask. assistant [[Answer.]]"),
    "history of prompt and response": ({"prompt": "Ask", "response": "Answer", "history": [["Before", "Said"]]},
                                       "user Before. assistant [[Said.]] user Ask. assistant [[Answer.]]"),
    "history and system": ({**PAIR, "history": [["Before", "Said"]], "system": "Be."},
                           "system Be.. user Before. assistant [[Said.]] user Ask. assistant [[Answer.]]"),
    "empty history": ({**CHAT, "history": []}, PLAIN),
    "system_prompt": ({**CHAT, "system_prompt": "Be."}, f"system Be.. {PLAIN}"),
    "system_message": ({**PAIR, "system_message": "Be."}, f"system Be.. {PLAIN}"),
    "two spellings of one system text": ({**CHAT, "system": "Be.", "system_prompt": "Be."}, f"system Be.. {PLAIN}"),
    "input": ({**ALPACA, "input": "More"}, "user Ask  More. assistant [[Answer.]]"),
    "context of an Alpaca row": ({**ALPACA, "context": "More"}, "user Ask  More. assistant [[Answer.]]"),
    "context of a question": ({"question": "Ask", "answer": "Answer", "context": "More"},
                              "user Ask  More. assistant [[Answer.]]"),
    "context that the prompt has": ({"prompt": "More: Ask", "completion": "Answer", "context": "More"},
                                    "user More: Ask. assistant [[Answer.]]"),
    "NaN": ({**ALPACA, "input": float("nan"), "weight": float("nan"), "tools": float("nan")}, PLAIN),
    "a prompt that is the question": ({**CHAT, "prompt": "Ask"}, PLAIN),
    "two equal conversations": ({**CHAT, **PAIR}, PLAIN),
    "another case": ({"Messages": [{"Role": "user", "Content": "Ask"}, {**ANSWER, "Loss": True}]}, PLAIN),
    "another spelling": ({**CHAT, "systemPrompt": "Be."}, f"system Be.. {PLAIN}"),
    "metadata": ({**CHAT, "id": 1, "source": "s", "prompt_id": 2, "__index_level_0__": 3, "Model": "m"}, PLAIN),
    "masked false": ({"messages": [ASK, {**ANSWER, "masked": False}], "masked": False}, PLAIN),
    "nothing in it": ({**CHAT, "quality": None, "note": " ", "tags2": [], "images": [], "weight": None}, PLAIN),
    "refusal null": (key(refusal=None, audio=None, annotations=[], function_call=None, prefix=False), PLAIN),
    "text parts": (
        {"messages": [{**ASK, "content": [{"type": "text", "text": "Ask", "weight": None}]}, ANSWER]}, PLAIN),
    "both labels of choices": ({**CHOICES, "answer": 1},
                               "user Ask  A. x B. y  Answer with the letter.. assistant [[B.]]"),
}  # fmt: skip


@pytest.mark.parametrize("name", HONOURED)
def test_what_has_a_meaning_is_honoured(name: str, tokenizer) -> None:
    raw, expected = HONOURED[name]
    before = json.dumps(raw)
    assert read(raw, tokenizer) == (expected, ())
    assert json.dumps(raw) == before


CALLED = '{"name": "f", "arguments": {"x": 1}}'
CALLS = {
    "function_call": {"messages": [ASK, {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}}]},
    "function_call next to text": {"messages": [ASK, {**ANSWER, "function_call": {"name": "f", "arguments": {"x": 1}}}]},
    "parameters": call(name="f", parameters={"x": 1}),
    "args": call(name="f", args={"x": 1}),
    "input": call(name="f", input={"x": 1}),
    "a call of ShareGPT": {"conversations": [{"from": "human", "value": "Ask"}, {"from": "function_call", "value": '{"name": "f", "parameters": {"x": 1}}'}]},
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_learned_however_it_is_written(name: str, tokenizer) -> None:
    learned, unused = read(CALLS[name], tokenizer)
    assert CALLED in learned.split("[[")[1]
    assert unused == ()
    assert ("Answer" in learned) == ("text" in name)


def test_a_template_gets_calls_in_the_shape_of_openai_and_their_names_once(tokenizer) -> None:
    template = "{% for m in messages %}{{ m.role }} {{ m.content or '' }}{{ m.tool_calls | tojson if m.tool_calls }}"
    tokenizer.chat_template = template + "<|im_end|>{% endfor %}{{ 'assistant ' if add_generation_prompt }}"
    bare = {"name": "f", "parameters": {"x": 1}}
    learned, _ = read({"messages": [ASK, {"role": "assistant", "tool_calls": [bare]}]}, tokenizer)
    assert json.dumps([{"type": "function", "function": json.loads(CALLED)}]) in learned


@pytest.mark.parametrize("raw", [CHAT, PAIR, ALPACA, CHOICES], ids=lambda raw: next(iter(raw)))
@pytest.mark.parametrize("name", ["tools", "functions"])
def test_tools_of_any_conversation_are_rendered(raw: dict[str, Any], name: str, tokenizer) -> None:
    learned, unused = read({**raw, name: [SCHEMA]}, tokenizer)
    assert (learned.count('"name": "f"'), unused) == (1, ())
    assert read({**raw, name: [{**SCHEMA, "type": "function"}]}, tokenizer)[0] == learned  # the Responses API's


def test_a_result_of_role_function_is_one_of_a_tool(tokenizer) -> None:
    turns = [*CALLS["function_call"]["messages"], {"role": "function", "name": "f", "content": "2"}, ANSWER]
    learned, unused = read({"messages": turns, "functions": [SCHEMA]}, tokenizer)
    assert learned.endswith("tool 2. assistant [[Answer.]]")
    assert unused == ("message key name",)  # which this template does not render


def test_documents_are_for_templates_that_render_them(tokenizer, make_tokenizer) -> None:
    raw = {**CHAT, "documents": [{"text": "Fact"}]}
    with pytest.raises(DataError, match=r"a\.jsonl:1: documents: the chat template has no documents") as error:
        read(raw, tokenizer)
    assert error.value.reason == "template does not use an argument"
    other = make_tokenizer()
    other.chat_template = "{%- for d in documents or [] %}{{ d.text ~ ' ' }}{%- endfor %}" + tokenizer.chat_template
    assert read(raw, other)[0] == f"Fact {PLAIN}"


# One row of the table for each column or key: why the row is not learned from.
REJECTED: dict[str, tuple[dict[str, Any], str]] = {
    "label false": ({**PAIR, "label": False}, "answer labelled false"),
    "label false of a CSV": ({**PAIR, "label": "False"}, "answer labelled false"),
    "Label false": ({**CHAT, "Label": False}, "answer labelled false"),
    "label false of choices": ({**CHOICES, "label": False}, "answer labelled false"),
    "kto_tag false": ({**CHAT, "kto_tag": False}, "answer labelled false"),
    "chosen and rejected": ({"prompt": "Ask", "chosen": "Good", "rejected": "Bad"}, "preference row"),
    "chosen and rejected texts": ({"chosen": "Human: Ask", "rejected": "Human: Ask"}, "preference row"),
    "chosen that is not the answer": ({**CHAT, "chosen": [ASK, {**ANSWER, "content": "Other"}]}, "preference row"),
    "one of two chosen": ({**CHAT, "chosen": "Answer", "chosen_messages": [ASK]}, "preference row"),
    "rejected next to text": ({"text": "Some", "rejected": "Other"}, "preference row"),
    "rejected_response": ({**CHAT, "rejected_response": "Bad"}, "preference row"),
    "loss_scale": (key(loss_scale=0.5), "bad weight"),
    "loss that is a number": (key(loss=0), "bad train mark"),
    "step_loss_mask": (key(step_loss_mask=2), "bad weight"),
    "loss of a question": ({"messages": [{**ASK, "loss": True}, ANSWER]}, "bad train mark"),
    "train_detail": (key(train_detail=[{"begin_offset": 0, "train": False}]), "marks of parts"),
    "train_detail of a question": ({"messages": [{**ASK, "train_detail": [{"train": False}]}, ANSWER]},
                                   "unsupported message key"),
    "mask of a message": (key(mask=[0, 1]), "unsupported message key"),
    "masked": (key(masked=True), "unsupported message key"),
    "train_detail of the row": ({**CHAT, "train_detail": [1]}, "marks of parts"),
    "assistant_masks": ({**CHAT, "assistant_masks": [0, 1]}, "marks of parts"),
    "loss_mask of tokens": ({**CHAT, "loss_mask": [0, 1]}, "marks of parts"),
    "train of the messages": ({**CHAT, "train": [False, True]}, "marks of parts"),
    "loss of the messages": ({**CHAT, "loss": [False]}, "marks of parts"),
    "mask that is the assistant": ({**CHAT, "mask": "Assistant"}, "marks of parts"),
    "mask of tokens": ({**CHAT, "mask": [0, 1]}, "marks of parts"),
    "marks of a part": ({"messages": [ASK, {**ANSWER, "content": [{"type": "text", "text": "A", "train": False}]}]},
                        "marks of parts"),
    "weight of the row": ({**CHAT, "weight": 0.1}, "bad weight"),
    "weight of a text": ({"text": "Some", "weight": 2}, "bad weight"),
    "weight true of the row": ({**CHAT, "weight": True}, "bad weight"),
    "history next to messages": ({**CHAT, "history": [["Q", "A"]]}, "malformed history"),
    "history of a prompt of messages": ({"prompt": [ASK], "completion": [ANSWER], "history": [["Q", "A"]]},
                                        "malformed history"),
    "history of other pairs": ({**ALPACA, "history": [["Q", "A", "?"]]}, "malformed history"),
    "history that is text": ({**ALPACA, "history": "Q: A"}, "malformed history"),
    "numeric input": ({**ALPACA, "input": 5}, "column is not text"),
    "input of parts": ({**ALPACA, "input": ["a", "b"]}, "column is not text"),
    "input and context": ({**ALPACA, "input": "a", "context": "b"}, "context outside the messages"),
    "context of a prompt": ({**PAIR, "context": "More"}, "context outside the messages"),
    "context of choices": ({**CHOICES, "context": "More"}, "context outside the messages"),
    "input next to messages": ({**CHAT, "input": {"a": 1}}, "context outside the messages"),
    "documents that are text": ({**CHAT, "documents": "Fact"}, "malformed template arguments"),
    "two system texts": ({**CHAT, "system": "Be.", "system_prompt": "Do."}, "two system texts"),
    "system_prompt and another first message": (
        {"messages": [{"role": "system", "content": "Be."}, ASK, ANSWER], "system_prompt": "Do."}, "two system texts"),
    "tools and functions": ({**CHAT, "tools": [SCHEMA], "functions": [SCHEMA]}, "malformed tools"),
    "function_call and tool_calls": (key(function_call={"name": "f"}, tool_calls=[{"function": {"name": "f"}}]),
                                     "malformed tool call"),
    "function_call of a user": ({"messages": [{**ASK, "function_call": {"name": "f"}}, ANSWER]}, "malformed tool call"),
    "function_call that is text": (key(function_call="f"), "malformed tool call"),
    "arguments twice": (call(name="f", arguments={"x": 1}, parameters={"x": 2}), "malformed tool call"),
    "images": ({**CHAT, "images": ["a.png"]}, "pictures or sound with a text"),
    "image": ({"conversations": CHAT["messages"], "image": "a.png"}, "pictures or sound with a text"),
    "audios": ({**PAIR, "audios": ["a.wav"]}, "pictures or sound with a text"),
    "video of a text": ({"text": "Some", "video": {"bytes": "x"}}, "pictures or sound with a text"),
    "a picture that is not there": ({"image": "a.png", "text": "Some"}, "picture is missing"),
    "images of a message": ({"messages": [{**ASK, "images": ["a.png"]}, ANSWER]}, "unsupported message key"),
    "input_ids without a mask": ({"input_ids": [1, 2]}, "tokenized row"),
    "input_ids next to messages": ({**CHAT, "input_ids": [1, 2]}, "tokenized row"),
    "input_ids next to text": ({"text": "Some", "input_ids": [1, 2]}, "tokenized row"),
    "two conversations": ({**CHAT, "prompt": "Ask", "completion": "Other"}, "two conversations"),
    "two answers": ({**ALPACA, "response": "Other"}, "two conversations"),
    "two answers to a question": ({"question": "Ask", "answer": "Answer", "response": "Other"}, "two conversations"),
    "messages and conversations": ({**CHAT, "conversations": [ASK, {**ANSWER, "content": "Other"}]},
                                   "two conversations"),
    "two answers of choices": ({**CHOICES, "answer": 0}, "two conversations"),
    "from and another role": ({"conversations": [{"from": "gpt", "role": "user", "value": "x"}]},
                              "malformed conversations"),
    "value and another content": ({"conversations": [{"from": "gpt", "value": "x", "content": "y"}]},
                                  "malformed conversations"),
    "refusal": (key(refusal="I cannot."), "unsupported message key"),
    "audio": (key(audio={"id": "x"}), "unsupported message key"),
    "prefix": (key(prefix=True), "unsupported message key"),
    "two spellings": ({**CHAT, "system": "Be.", "System": "Do."}, "one column in two spellings"),
    "two spellings in a message": (key(Content="Other"), "one column in two spellings"),
}  # fmt: skip


@pytest.mark.parametrize("name", REJECTED)
def test_what_cannot_be_honoured_is_rejected_with_its_reason(name: str, tokenizer) -> None:
    raw, reason = REJECTED[name]
    with pytest.raises(DataError, match=r"^a\.jsonl:1: ") as error:
        read(raw, tokenizer, text.tokenize if "text" in raw else chat.tokenize)
    assert error.value.reason == reason


# One row of the table for each column or key that nothing reads.
UNUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "an unknown column": ({**CHAT, "quality": 3, "Persona": "Bob"}, ("column quality", "column Persona")),
    "zero and false": ({**CHAT, "score": 0, "safe": False}, ("column score", "column safe")),
    "rendered text": ({**ALPACA, "text": "### Ask: Answer"}, ("column text",)),
    "label of a class": ({**CHAT, "label": 0}, ("column label",)),
    "a label in words": ({**CHAT, "label": "sports"}, ("column label",)),
    "a measured loss": ({**CHAT, "loss": 1.25}, ("column loss",)),
    "a weight in words": ({**CHAT, "weight": "3 kg"}, ("column weight",)),
    "labels without ids": ({**CHAT, "labels": [1]}, ("column labels",)),
    "an answer that is no text": ({**CHAT, "question": "Ask", "answer": True}, ("column answer",)),
    "rejected that is a flag": ({**CHAT, "rejected": False}, ("column rejected",)),
    "hints of choices": ({**CHOICES, "hint": "Not x"}, ("column hint",)),
    "keys of choices": ({**CHOICES, "choices": {"text": ["x", "y"], "label": ["A", "B"], "why": ["a", "b"]}},
                        ("choices key why",)),
    "a name with control characters": ({**CHAT, "a\nb\x1b[31m": 1}, (r"column a\nb\x1b[31m",)),
    "a name of a message": ({"messages": [{**ASK, "name": "Ann"}, ANSWER]}, ("message key name",)),
    "logprobs": (key(logprobs=[{"a": 1}], annotations=[{"url": "x"}]), ("message key annotations", "message key logprobs")),
    "reasoning under another name": (key(thought="Because"), ("message key thought",)),
    "reasoning of a question": ({"messages": [{**ASK, "thinking": "Hm"}, ANSWER]}, ("message key thinking",)),
    "value next to content": (key(value="Other"), ("message key value",)),
    "keys of parts": ({"messages": [{**ASK, "content": [{"type": "text", "text": "Ask", "cache_control": {"a": 1}}]}, ANSWER]},
                      ("content part key cache_control",)),
    "keys of calls": (
        {"messages": [ASK, {"role": "assistant", "content": "x", "tool_calls": [
            {"id": "1", "index": 0, "extra": 1, "function": {"name": "f", "arguments": {}, "strict": True}}]}]},
        ("tool call key extra", "tool call key function.strict")),
}  # fmt: skip


@pytest.mark.parametrize("name", UNUSED)
def test_what_nothing_reads_is_counted(name: str, tokenizer) -> None:
    raw, expected = UNUSED[name]
    learned, unused = read(raw, tokenizer)
    assert unused == expected
    assert "[[" in learned


@pytest.mark.parametrize("name", ["Ann", 3])
def test_a_key_that_the_template_renders_is_used(name: object, make_tokenizer) -> None:
    named = make_tokenizer()
    named.chat_template = named.chat_template.replace(
        "message.role ~ '\\n'", "message.role ~ ' ' ~ message.name ~ '\\n'"
    )
    learned, unused = read({"messages": [{**ASK, "name": name}, {**ANSWER, "name": "Bot"}]}, named)
    assert learned.startswith(f"user {name} Ask.")
    assert unused == ("message key name",)  # of the answer, where it is not rendered


# ---- texts and pictures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "unused"),
    [
        ({"text": "Some", "id": 1, "url": "x"}, ()),
        ({"text": "Some", "title": "T", "label": False}, ("column title", "column label")),
        ({"text": "Some", "system": "Be.", "history": [["a", "b"]]}, ("column system", "column history")),
        ({"content": "Some", "file_name": "main.py", "stars": 3}, ("column stars",)),
        ({"Text": "Some", "prompt": "Some"}, ()),
    ],
)
@pytest.mark.parametrize("tokenize", [text.tokenize, text.tokenize_any], ids=["base", "mid"])
def test_columns_next_to_text_are_counted(raw: dict[str, Any], unused: tuple[str, ...], tokenize, tokenizer) -> None:
    learned, found = read(raw, tokenizer, tokenize)
    assert (learned.replace("[[", "").startswith("Some"), found) == (True, unused)


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"loss_mask": 0}])
def test_a_row_that_is_marked_is_learned_by_no_stage(mark: dict[str, Any], tokenizer) -> None:
    everything = partial(chat.tokenize, learning=chat.EVERYTHING)
    for raw, tokenize in (({"text": "Some"}, text.tokenize), (CHAT, everything), (PAIR, text.tokenize_captions)):
        result = tokenize(rows.convert({**raw, **mark}, "a:1"), tokenizer, max_length=100)
        assert (result.examples, result.note) == ([], "dropped_no_target")
        assert "marked as not to be learned" in result.details
        assert result.counts.get("not_learned_marked", 0) == (raw is CHAT)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({"messages": [{**ASK, "train": False}, ANSWER]}, "bad train mark"),
        ({"messages": [{"role": "system", "content": "Be.", "weight": 0}, ASK, ANSWER]}, "bad train mark"),
        ({**CHAT, "mask": "User"}, "marks of parts"),
    ],
)
def test_a_question_that_is_marked_as_not_learned_is_not_learned_with_all_tokens(
    raw: dict[str, Any], reason: str, tokenizer
) -> None:
    assert read(raw, tokenizer)[0].endswith(PLAIN)
    with pytest.raises(DataError, match=r"^a\.jsonl:1: .*data\.targets=assistant") as caught:
        read(raw, tokenizer, partial(chat.tokenize, learning=chat.EVERYTHING))
    assert caught.value.reason == reason


def test_a_text_with_the_place_of_a_picture_is_counted(tokenizer) -> None:
    for raw, tokenize in (
        ({"messages": [{**ASK, "content": "<image>\nWhat?"}, ANSWER]}, chat.tokenize),
        ({"text": "See <audio>"}, text.tokenize),
    ):
        result = tokenize(rows.convert(raw, "a:1"), tokenizer, max_length=100)
        assert list(result.odd) == ["place of a picture in the text"]
    for raw in ({"text": "<video src='x'></video> <video></video>"}, {"text": "an image"}):
        assert not text.tokenize(rows.convert(raw, "a:1"), tokenizer, max_length=100).odd


def test_columns_next_to_captions_are_counted(tokenizer) -> None:
    raw = {"image": "builtin:x", "caption": "A cat.", "filename": "x", "instruction": "Describe"}
    row = rows.convert(raw, "a:1")
    assert row.unused == ("column instruction",)
    assert len(text.tokenize_captions(row, tokenizer, max_length=40).examples) == 1


def test_an_encoder_is_given_what_is_marked_as_learned_and_nothing_is_left_out(tokenizer) -> None:
    def made(**keys: Any) -> Tokenized:
        return text.tokenize_captions(rows.convert(key(**keys), "a:1"), tokenizer, max_length=40)

    assert made(loss=False).note == "dropped_no_target"
    assert made(mood="x", reasoning="Because").unused == ("message key mood", "message key reasoning")
    for more in ({"tools": [SCHEMA]}, {"chat_template_kwargs": {"a": 1}}):
        with pytest.raises(DataError, match="neither a picture with captions"):
            text.tokenize_captions(rows.convert({**CHAT, **more}, "a:1"), tokenizer, max_length=40)


# ---- a source --------------------------------------------------------------------------------------------------------


@pytest.fixture
def load(tmp_path: Path, tokenizer):
    """load([row, ...], "sft", num_proc=2): the rows of a file, as a stage reads them."""

    def run(
        given: list[dict[str, Any]], stage: str, *, repeat: int = 1, columns: Any = None, **settings: Any
    ) -> Examples:
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
        source = SourceConfig(path=str(tmp_path / "a.jsonl"), repeat=repeat, columns=columns)
        data = replace(DataConfig(train=(source,), cache_dir=str(tmp_path / "cache")), **settings)
        tokenize = sources.stage_rule(stage)(data, tokenizer, 200)
        return sources.load_sources(data.train, data, tokenize)

    return run


@pytest.mark.parametrize(
    ("stage", "raw"), [("sft", CHAT), ("mid", CHAT), ("base", {"text": "Some text"}), ("sft", CHOICES)]
)
def test_unused_columns_of_a_source_are_counted_and_shown_also_from_the_cache(load, stage: str, raw, caplog) -> None:
    given = [raw] + [{**raw, "quality": i} for i in range(3)] + [{**raw, "tone": "dry"}]
    for _ in range(2):
        caplog.clear()
        examples = load(given, stage, repeat=2)
        found = [(one.kind, one.reason, one.rows) for one in examples.findings["a"] if one.kind != "read"]
        assert found == [("unused", "column quality", 6), ("unused", "column tone", 2)]
        said = [message for message in caplog.messages if message.startswith("a: ")]
        assert said[0].startswith("a: 6 rows have a column quality, which is not used; the first: ")
        assert said[0].endswith("a.jsonl:2")
    assert isinstance(examples.lengths, np.memmap)


def test_rows_of_which_none_has_the_column_of_their_turns_are_no_source(load) -> None:
    named = {"messages": "turns"}
    with pytest.raises(DataError, match=r"columns\.messages: no row has a column turns.* 2 rows read as messages"):
        load([CHAT, CHAT], "sft", columns=named)
    assert len(load([CHAT, {"turns": CHAT["messages"]}], "sft", columns=named)) == 2
    assert len(load([CHAT, CHAT], "sft", columns={"system": "persona"})) == 2


def test_keys_of_messages_are_counted_once_a_row(load) -> None:
    turns = [{**ASK, "name": "Ann"}, {**ANSWER, "mood": 1}, {**ASK, "name": "Bob"}, {**ANSWER, "mood": 2}]
    for stage in ("sft", "mid"):
        *found, _ = load([CHAT, {"messages": turns}, {"messages": turns[2:]}], stage).findings["a"]
        assert {one.reason: one.rows for one in found} == {"message key name": 2, "message key mood": 2}
        assert all(one.first.endswith("a.jsonl:2") for one in found)


def test_rows_that_are_dropped_or_rejected_count_their_unused_columns_once_or_not(load) -> None:
    rejected, dropped = {**PAIR, "label": False, "tone": 1}, {**PAIR, "weight": 0, "tone": 1}
    found = load([PAIR, rejected, dropped], "sft", on_bad_row="skip").findings["a"]
    assert [(one.kind, one.reason, one.rows) for one in found] == [
        ("skipped", "answer labelled false", 1),
        ("dropped", "without a target", 1),
        ("unused", "column tone", 1),
        ("read", "prompt (prompt, completion)", 2),
    ]


def test_columns_of_which_there_are_too_many_are_counted_together(load) -> None:
    *found, read = load([{**CHAT, f"c{i % 70}": i} for i in range(300)], "sft").findings["a"]
    assert (read.kind, read.rows) == ("read", 300)
    assert len(found) == columns.MAX_UNUSED + 1
    (more,) = [one for one in found if one.reason == columns.MORE_UNUSED]
    assert sum(one.rows for one in found) == 300
    assert columns.finding_text(more).startswith("further columns and keys are not used, of more than 20; the first: ")


def test_no_name_is_in_two_lists() -> None:
    meaning = {*columns.SYSTEM, *columns.CONTEXT_COLUMNS, *columns.WITH_ANSWERS, *columns.MARKS, *columns.PREFERENCES}
    meaning |= {*columns.MARKS_OF_PARTS, *columns.MEDIA, *columns.MESSAGE, *columns.REJECTED_KEYS}
    assert not {name for name in meaning if columns.is_metadata(name)} - {"tool_call_id"}


@pytest.mark.parametrize(
    "raw",
    [
        {"messages": [ASK, ANSWER], "id": 7, "language": None},
        {"messages": [{"role": "system", "content": "Be brief."}, ASK, ANSWER]},
        {"messages": [ASK, ANSWER], "quality": 3},
        {"messages": [ASK, ANSWER], "label": False},
        {"messages": [ASK, ANSWER], "weight": 0},
        {"messages": [ASK, ANSWER], "system": "Be brief."},
        {"messages": [ASK, ANSWER], "input": "What is in none of the messages."},
        {"messages": [ASK, {**ANSWER, "mood": "dry"}]},
        {"messages": [ASK, {"role": "Assistant", "content": "So."}]},
        {"messages": []},
        {"messages": "How?"},
        {"conversations": [{"from": "human", "value": "How?"}, {"from": "gpt", "value": "So."}], "source": "x"},
        {"instruction": "How?", "input": "", "output": "So.", "category": "qa"},
        {"instruction": "How?", "context": "It is.", "response": "So.", "score": float("nan")},
        {"instruction": "How?", "output": "So.", "history": [["Who?", "He."]]},
        {"instruction": "How?", "output": "So.", "rejected": "No."},
        {"prompt": [ASK], "completion": [ANSWER], "model": "x"},
        {"prompt": "How?", "response": "So.", "messages": [{**ASK, "content": "Why?"}, ANSWER]},
        {"question": "How?", "answer": "So.", "choices": ["So.", "No."]},
        {"question": "How?", "answer": 4},
    ],
    ids=str,
)
def test_a_conversation_next_to_metadata_is_read_as_one_whose_columns_are_all_looked_at(
    raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcome() -> object:
        rows._shapes.cache_clear()
        try:
            return rows.convert(raw, "x:1")
        except DataError as error:
            return str(error)

    before = json.dumps(raw)
    found = outcome()
    assert json.dumps(raw) == before
    monkeypatch.setattr(rows, "_SIMPLE", ())
    assert found == outcome()
    rows._shapes.cache_clear()
