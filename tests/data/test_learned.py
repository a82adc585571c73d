"""What a record says of its own messages: nothing that it marks is learned, nothing that it gives is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from sftkit.config.schema import DataConfig, SourceConfig
from sftkit.data.reading import rows
from sftkit.data.reading.readers import without_fill
from sftkit.data.tokens import chat, sources
from sftkit.data.types import Row, Tokenized
from sftkit.errors import DataError
from sftkit.evals.suite import sample_prompt, sample_rows

A, B, C = ({"role": "assistant", "content": f"Answer {name}."} for name in "abc")
ASK = {"role": "user", "content": "And?"}
THREE = [ASK, A, ASK, B, ASK, C]


def learned(result: Tokenized, tokenizer) -> list[str]:
    (example,) = result.examples
    text = tokenizer.decode(example.ids[example.is_target].tolist())
    return [part for part in text.split("<|im_end|>") if part]


def tokenized(raw: dict[str, Any], tokenizer, **settings: Any) -> Tokenized:
    return chat.tokenize(
        rows.convert(raw, "data.jsonl:7"), tokenizer, max_length=1000, learning=chat.Learning(**settings)
    )


# ---- prompt and completion -------------------------------------------------------------------------------------------


def test_of_prompt_and_completion_only_the_completion_is_learned(tokenizer) -> None:
    result = tokenized({"prompt": THREE[:5], "completion": THREE[5:]}, tokenizer)
    assert learned(result, tokenizer) == ["Answer c."]
    assert result.counts["not_learned_prompt"] == 2
    assert learned(tokenized({"prompt": THREE[:3], "completion": THREE[3:]}, tokenizer), tokenizer) == [
        "Answer b.",
        "Answer c.",
    ]
    assert learned(tokenized({"prompt": "And?", "completion": "Answer a."}, tokenizer), tokenizer) == ["Answer a."]


def test_mid_training_learns_the_prompt_too(tokenizer) -> None:
    (example,) = tokenized({"prompt": THREE[:5], "completion": THREE[5:]}, tokenizer, targets="all").examples
    assert example.is_target.tolist() == [False] + [True] * (len(example.ids) - 1)


# ---- marks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"weight": 1, "train": False}])
@pytest.mark.parametrize("targets", ["assistant", "all"])
def test_an_answer_that_is_marked_is_not_learned(tokenizer, mark: dict[str, Any], targets: str) -> None:
    messages = [ASK, A, ASK, {**B, **mark}, ASK, C]
    result = tokenized({"messages": messages}, tokenizer, targets=targets)
    (example,) = result.examples
    text = tokenizer.decode(example.ids[example.is_target].tolist())
    assert "Answer a." in text
    assert "Answer b." not in text
    assert "Answer c." in text
    assert result.counts["not_learned_marked"] == 1
    assert ("And?" in text) == (targets == "all")


def test_marks_that_ask_for_learning_change_nothing(tokenizer) -> None:
    marked = [ASK, {**A, "weight": 1}, ASK, {**B, "train": True}, ASK, {**C, "weight": None}]
    plain = tokenized({"messages": THREE}, tokenizer).examples[0]
    assert tokenized({"messages": marked}, tokenizer).examples[0].ids.tolist() == plain.ids.tolist()
    assert learned(tokenized({"messages": marked}, tokenizer), tokenizer) == ["Answer a.", "Answer b.", "Answer c."]


def test_after_the_last_answer_that_is_learned_a_document_ends(tokenizer) -> None:
    result = tokenized({"messages": [ASK, A, ASK, {**B, "weight": 0}]}, tokenizer)
    assert "Answer b." not in tokenizer.decode(result.examples[0].ids)


def test_a_record_of_which_nothing_may_be_learned_is_dropped_and_counted(tokenizer) -> None:
    result = tokenized({"messages": [ASK, {**A, "train": False}]}, tokenizer)
    assert (result.examples, result.note) == ([], "dropped_no_target")


@pytest.mark.parametrize(
    "message",
    [
        {**A, "weight": 0.5},
        {**A, "weight": 2},
        {**A, "weight": "0"},
        {**A, "weight": True},
        {**A, "train": "no"},
        {**A, "train": 1},
    ],
)
def test_another_mark_is_an_error_with_its_place(tokenizer, message: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"^data\.jsonl:7: messages\[1\]: (weight|train) .* is not"):
        tokenized({"messages": [ASK, message]}, tokenizer)


@pytest.mark.parametrize("mark", [{"train": True}, {"weight": 1}])
def test_a_question_that_is_marked_as_learned_is_refused(tokenizer, mark: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"data\.jsonl:7: messages\[0\]: a message of role user is marked as learned"):
        tokenized({"messages": [{**ASK, **mark}, A]}, tokenizer)


def test_last_turn_learns_what_follows_the_last_user_message(tokenizer) -> None:
    assert learned(tokenized({"messages": THREE}, tokenizer, targets="last_turn"), tokenizer) == ["Answer c."]
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    messages = [ASK, A, ASK, call, {"role": "tool", "content": "seen"}, C]
    result = tokenized({"messages": messages}, tokenizer, targets="last_turn")
    assert ["look" in part for part in learned(result, tokenizer)] == [True, False]
    assert result.counts["not_learned_earlier_turn"] == 1


# ---- what Arrow adds -------------------------------------------------------------------------------------------------

CALLS = [
    [ASK, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": "v"}}}]}],
    [ASK, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "g", "arguments": {"y": 1}}}]}],
]
SCHEMAS = [
    [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "string"}}}}}],
    [{"type": "function", "function": {"name": "g", "parameters": {"properties": {"y": {"type": "number"}}}}}],
]


def test_a_parquet_file_gives_the_rows_that_were_written(tmp_path: Path) -> None:
    written = [{"messages": m, "tools": t} for m, t in zip(CALLS, SCHEMAS, strict=True)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(written), tmp_path / "calls.parquet")
    records = list(sources.read_source(SourceConfig(path=str(tmp_path / "calls.parquet"))))
    assert [row.messages for row in records] == CALLS
    assert [row.tools for row in records] == SCHEMAS


def test_a_hub_dataset_gives_the_rows_that_were_written() -> None:
    import datasets

    written = [{"messages": m, "tools": t} for m, t in zip(CALLS, SCHEMAS, strict=True)]
    dataset = datasets.Dataset.from_list(written)
    assert [without_fill(row, dict(dataset.features)) for row in dataset] == written


def test_a_null_that_a_json_file_holds_stays(tmp_path, tokenizer) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": None}}}]}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": [ASK, call]}))
    (row,) = sources.read_source(SourceConfig(path=str(path)))
    assert '"arguments": {"x": null}' in learned(chat.tokenize(row, tokenizer, max_length=1000), tokenizer)[0]


def test_a_null_inside_a_json_feature_stays_and_elements_of_lists_stay() -> None:
    class Json:
        """Stands for datasets.Json, which has no fields."""

    row = {"a": {"x": None, "y": [1, None]}, "b": {"x": None}}
    assert without_fill(row, {"a": {"x": 0, "y": 0}, "b": Json()}) == {"a": {"y": [1, None]}, "b": {"x": None}}


# ---- text beside the messages ----------------------------------------------------------------------------------------

SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    "raw",
    [
        {"messages": THREE},
        {"prompt": THREE[:5], "completion": THREE[5:]},
        {"prompt": "And?", "completion": "Answer c."},
        {"prompt": "And?", "response": "Answer c."},
        {"conversations": [{"from": "human", "value": "And?"}, {"from": "gpt", "value": "Answer c."}]},
        {"instruction": "And?", "output": "Answer c."},
        {"question": "And?", "answer": "Answer c."},
    ],
    ids=lambda raw: " ".join(raw),
)
def test_a_system_column_is_the_first_message_of_any_conversation(tokenizer, raw: dict[str, Any]) -> None:
    row = rows.convert({**raw, "system": "Be brief."}, "x:1")
    assert row.messages is not None
    assert row.messages[0] == SYSTEM
    plain = tokenized(raw, tokenizer)
    assert learned(chat.tokenize(row, tokenizer, max_length=1000), tokenizer) == learned(plain, tokenizer)


def test_two_system_texts_are_one_if_they_are_the_same_and_else_refused() -> None:
    row = rows.convert({"messages": [SYSTEM, ASK, A], "system": "Be brief."}, "x:1")
    assert row == Row("x:1", messages=[SYSTEM, ASK, A], shape="messages")
    with pytest.raises(DataError, match="x:1: the column system and the first message"):
        rows.convert({"messages": [SYSTEM, ASK, A], "system": "Be long."}, "x:1")
    with pytest.raises(DataError, match="x:1: system is a list, expected text"):
        rows.convert({"messages": [ASK, A], "system": ["Be long."]}, "x:1")


def test_arguments_of_the_template_are_an_object() -> None:
    assert rows.convert({"messages": [ASK, A], "chat_template_kwargs": {"a": 1}}, "x:1").template_args == {"a": 1}
    with pytest.raises(DataError, match="x:1: chat_template_kwargs is text, expected an object"):
        rows.convert({"messages": [ASK, A], "chat_template_kwargs": "a"}, "x:1")


def test_arguments_that_tokenizing_gives_are_none_of_a_record() -> None:
    with pytest.raises(DataError, match="x:1: chat_template_kwargs has add_generation_prompt"):
        rows.convert({"messages": [ASK, A], "chat_template_kwargs": {"add_generation_prompt": True}}, "x:1")


def test_marks_and_reasoning_of_sharegpt_turns_are_kept(tokenizer) -> None:
    ask, bad = {"from": "human", "value": "And?"}, {"from": "gpt", "value": "Bad.", "weight": 0}
    good = {"from": "gpt", "value": "Good.", "reasoning_content": "Because."}
    result = tokenized({"conversations": [ask, bad, ask, good]}, tokenizer)
    assert learned(result, tokenizer) == ["<think>\nBecause.\n</think>\n\nGood."]
    assert result.counts["not_learned_marked"] == 1


def test_the_last_turn_is_the_last_one_with_an_answer(tokenizer) -> None:
    result = tokenized({"messages": [*THREE, ASK]}, tokenizer, targets="last_turn")
    assert learned(result, tokenizer) == ["Answer c."]


@pytest.mark.parametrize("key", [2, "2"])
def test_labels_of_choices_may_be_numbers(key: object) -> None:
    raw = {"question": "Which?", "choices": {"text": ["x", "y", "z"], "label": [1, 2, 3]}, "answerKey": key}
    row = rows.convert(raw, "x:1")
    assert row.messages is not None
    assert row.messages[1]["content"] == "B"


def test_a_row_whose_answer_is_a_call_can_be_a_sample(tmp_path: Path, tokenizer) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": "v"}}}]}
    written = [{"messages": [ASK, call, {"role": "tool", "content": "seen"}, A]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(written), tmp_path / "calls.parquet")
    tokenize = sources.RowTokenizer(chat.tokenize, tokenizer, max_length=500)
    (row,) = sample_rows(DataConfig(train=(), val=(SourceConfig(path=str(tmp_path / "calls.parquet")),)), tokenize, 1)
    assert sample_prompt(row, tokenizer)[1] == "user: And?"


DIGITS = ["1", "2", "3", "4"]
ARC = {"text": DIGITS, "label": ["A", "B", "C", "D"]}


@pytest.mark.parametrize(
    ("choices", "column", "key", "letter"),
    [
        (DIGITS, "answer", "2", "B"),
        (DIGITS, "answer", 2, "C"),
        (DIGITS, "answer", " 2 ", "B"),
        (["x", "y", "z"], "answer", "2", "C"),
        (["x", "y", "z"], "answer", "y", "B"),
        (["10", "0"], "answer", "0", "B"),
        (["x", "x", "z"], "answer", 1, "B"),
        (["A", "B"], "answer", "A", "A"),
        (ARC, "answerKey", "B", "B"),
        (ARC, "answerKey", "2", "B"),
        ({"text": ["4", "3", "2", "1"], "label": DIGITS}, "answerKey", "2", "B"),
        ({"text": ["4", "3", "2", "1"], "label": [1, 2, 3, 4]}, "answerKey", 2, "B"),
        ({"text": ["B", "C", "A"], "label": ["A", "B", "C"]}, "answerKey", "A", "A"),
    ],
)
def test_the_answer_to_a_choice_is_a_label_else_a_text_else_an_index(
    choices, column: str, key: object, letter: str
) -> None:
    row = rows.convert({"question": "1 + 1?", "choices": choices, column: key}, "x:1")
    assert row.messages is not None
    assert row.messages[-1]["content"] == letter


@pytest.mark.parametrize(
    ("choices", "column", "key", "reason"),
    [
        (["B", "A"], "answer", "A", "answer names several choices"),
        (["2", "2", "3"], "answer", "2", "answer names several choices"),
        ({"text": ["4", "3", "2", "1"], "label": DIGITS}, "answer", "2", "answer names several choices"),
        (["x", "y"], "answer", True, "answer is none of the choices"),
        (["x", "y"], "answer", "²", "answer is none of the choices"),
        (["x", "y"], "answer", "-1", "answer is none of the choices"),
        (["x", "y"], "answer", "2", "answer is none of the choices"),
        ([str(i) for i in range(27)], "answer", 26, "malformed choices"),
        ({"text": ["x", "y"], "label": ["A"]}, "answerKey", "A", "malformed choices"),
    ],
)
def test_an_answer_that_names_no_choice_or_several_is_rejected(choices, column: str, key: object, reason: str) -> None:
    with pytest.raises(DataError, match=r"^x:1: ") as caught:
        rows.convert({"question": "1 + 1?", "choices": choices, column: key}, "x:1")
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("choices", "key", "advice", "better"),
    [
        ({"text": ["4", "3", "2", "1"], "label": DIGITS}, "2", "label in answerKey", {"answerKey": "3"}),
        (["2", "2", "3"], "2", "index as a number", {"answer": 2}),
    ],
)
def test_the_advice_for_an_answer_that_names_several_choices_works(choices, key: str, advice: str, better) -> None:
    with pytest.raises(DataError, match=advice):
        rows.convert({"question": "1 + 1?", "choices": choices, "answer": key}, "x:1")
    row = rows.convert({"question": "1 + 1?", "choices": choices, **better}, "x:1")
    assert row.messages is not None
    assert row.messages[-1]["content"] == "C"
