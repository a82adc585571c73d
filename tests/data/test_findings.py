"""Records that are odd or bad: each is learned, counted or refused on purpose, and told by its reason."""

from __future__ import annotations

import ast
import importlib
import json
import logging
import pickle
import re
from dataclasses import replace
from pathlib import Path
from string import Formatter
from typing import Any

import pytest
from helpers import ROOT
from transformers import PreTrainedTokenizerFast

from sftkit.config.schema import DataConfig, SourceConfig
from sftkit.data.reading import columns, readers
from sftkit.data.reading.rows import parse
from sftkit.data.tokens import chat, sources
from sftkit.data.types import Examples, Finding, Row
from sftkit.errors import DataError, texts

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather?"}
ANSWER, RESULT = {"role": "assistant", "content": "Rain."}, {"role": "tool", "content": "rain"}


def call(arguments: Any = "{}", **more: str) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function, **more}]}


def record(*messages: dict[str, Any]) -> str:
    return json.dumps({"messages": messages})


def with_arguments(**args: Any) -> str:
    return json.dumps({"messages": [USER, ANSWER], "chat_template_kwargs": args})


GOOD = record(USER, ANSWER)
LEARNED, ACCEPTED, SKIPPED = "learned", "accepted", "skipped"
NO_CALL, AS_TEXT = "tool result without a call", "tool arguments kept as text"
NO_EFFECT = "template argument without effect"

# name -> (record, template, what becomes of it, reason)
DECISIONS: dict[str, tuple[str, str, str, str]] = {
    "result of a call": (record(USER, call(), RESULT, ANSWER), "chatml", LEARNED, ""),
    "result without a call": (record(USER, RESULT, ANSWER), "chatml", ACCEPTED, NO_CALL),
    "result of another id": (
        record(USER, call(id="a"), {**RESULT, "tool_call_id": "b"}, ANSWER), "chatml", ACCEPTED, NO_CALL),
    "result without an id": (record(USER, call(id="a"), RESULT, ANSWER), "chatml", LEARNED, ""),
    "result of a call without an id": (
        record(USER, call(), {**RESULT, "tool_call_id": "b"}, ANSWER), "chatml", LEARNED, ""),
    "two results of one call": (record(USER, call(), RESULT, RESULT, ANSWER), "chatml", ACCEPTED, NO_CALL),
    "result after another question": (record(USER, call(), USER, RESULT, ANSWER), "chatml", ACCEPTED, NO_CALL),
    "broken JSON in arguments": (record(USER, call('{"a": ""b"}')), "chatml", ACCEPTED, AS_TEXT),
    "a list as arguments": (record(USER, call("[1]")), "chatml", ACCEPTED, AS_TEXT),
    "a key twice in arguments": (record(USER, call('{"a": 1, "a": 2}')), "chatml", ACCEPTED, AS_TEXT),
    "no arguments": (record(USER, call("")), "chatml", LEARNED, ""),
    "assistant only": (record(ANSWER), "chatml", LEARNED, ""),
    "two users in a row": (record(USER, USER, ANSWER), "chatml", LEARNED, ""),
    "two answers in a row": (record(USER, ANSWER, ANSWER), "chatml", LEARNED, ""),
    "two answers that are rendered as in no prompt": (
        record(USER, ANSWER, ANSWER), "qwen3", SKIPPED, "template renders the prompt differently"),
    "two users where turns alternate": (record(USER, USER, ANSWER), "mistral", SKIPPED, "template refuses it"),
    "system in the middle": (record(USER, ANSWER, SYSTEM, USER, ANSWER), "qwen3", LEARNED, ""),
    "system in the middle left out": (
        record(USER, ANSWER, SYSTEM, USER, ANSWER), "first_system", SKIPPED, "template leaves out a system message"),
    "system in the middle refused": (record(USER, ANSWER, SYSTEM, USER, ANSWER), "mistral", SKIPPED, "template refuses it"),
    "a key twice": ('{"messages": [], "messages": []}', "chatml", SKIPPED, "duplicate JSON key"),
    "a key twice in a message": (
        GOOD.replace('"role": "user"', '"role": "user", "role": "user"'), "chatml", SKIPPED, "duplicate JSON key"),
    "argument that the template has": (with_arguments(enable_thinking=True), "qwen3", LEARNED, ""),
    "argument without effect": (with_arguments(enable_thinking=True, depth=2), "chatml", ACCEPTED, NO_EFFECT),
    "argument that is null": (with_arguments(depth=None), "chatml", LEARNED, ""),
    "text that the template does not use": (
        with_arguments(custom_instructions="Be brief."), "chatml", SKIPPED, "template does not use an argument"),
    "forged turn in an argument": (
        with_arguments(enable_thinking="<|im_end|>"), "qwen3", SKIPPED, "special token beside the messages"),
    "forged turn in a tool": (
        json.dumps({"messages": [USER, ANSWER], "tools": [{"name": "<|im_end|>"}]}), "chatml", SKIPPED,
        "special token beside the messages"),
    "developer": (record({**SYSTEM, "role": "developer"}, USER, ANSWER), "chatml", LEARNED, ""),
    "unknown role": (record({**USER, "role": "bot"}, ANSWER), "chatml", SKIPPED, "unknown role"),
    "no answer": (record(USER), "chatml", SKIPPED, "no assistant turn"),
    "empty answer": (record(USER, {**ANSWER, "content": " "}), "chatml", SKIPPED, "empty answer"),
    "null content": (record({**USER, "content": None}, ANSWER), "chatml", SKIPPED, "no content"),
    "image": (record({**USER, "content": [{"type": "image"}]}, ANSWER), "chatml", SKIPPED, "content is not text"),
    "forged turn": (record({**USER, "content": "<|im_end|>"}, ANSWER), "chatml", SKIPPED, "special token in text"),
    "calls that the template drops": (
        record(USER, call()), "default_system", SKIPPED, "template does not render the answer"),
    "broken line": ('{"messages": [', "chatml", SKIPPED, "not JSON"),
    "other columns": ('{"talk": []}', "chatml", SKIPPED, "unknown columns"),
}  # fmt: skip

FIRST_SYSTEM = (
    "{%- for m in messages %}{%- if loop.first or m.role != 'system' %}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def faults(examples: Examples) -> list[Finding]:
    """What is wrong or odd in the rows of a source."""
    return [one for one in examples.findings["a"] if one.kind != "read"]


@pytest.fixture
def load(tmp_path: Path, make_tokenizer):
    """load(line, ..., template="chatml", num_proc=2): the lines of a file, as chat_sft.py reads them; bad ones skipped."""

    def run(*lines: str, template: str = "chatml", **settings: Any) -> Examples:
        if template == "first_system":
            tokenizer = make_tokenizer()
            tokenizer.chat_template = FIRST_SYSTEM
        else:
            tokenizer = make_tokenizer(template, bos="<s>", eos="</s>" if template == "mistral" else "<|im_end|>")
        path = tmp_path / "a.jsonl"
        content = "".join(f"{line}\n" for line in lines)
        if not path.exists() or path.read_text() != content:  # a file that was written anew is not in the cache
            path.write_text(content)
        data = replace(DataConfig(train=(), on_bad_row="skip", cache_dir=str(tmp_path / "cache")), **settings)
        tokenize = sources.RowTokenizer(chat.tokenize, tokenizer, max_length=500, too_long=data.too_long)
        return sources.load_sources([SourceConfig(path=str(path))], data, tokenize)

    return run


@pytest.mark.parametrize("name", DECISIONS)
def test_what_becomes_of_an_odd_record_is_decided(load, name: str) -> None:
    line, template, outcome, reason = DECISIONS[name]
    good = record({**USER, "content": "Hello?"}, ANSWER)
    examples = load(good, line, template=template)
    assert (len(examples) > 1) == (outcome != SKIPPED)
    assert examples.counts["a"]["skipped_bad"] == (outcome == SKIPPED)
    found = [(one.kind, one.reason, one.rows) for one in faults(examples)]
    assert found == ([] if outcome == LEARNED else [(outcome, reason, 1)])
    assert all("a.jsonl:2: " in one.first for one in faults(examples))


def test_arguments_with_a_key_twice_are_learned_as_they_are_written(load, tokenizer) -> None:
    examples = load(record(USER, call('{"a": 1, "a": 2}')))
    assert '"arguments": {"a": 1, "a": 2}}' in tokenizer.decode(examples[0].ids)


def test_rows_are_counted_by_reason_with_the_first_of_each_as_example(load, caplog) -> None:
    alien = record({**USER, "role": "alien"}, ANSWER)
    lines = (GOOD, "{", record(USER), alien, "[", record(USER, RESULT, ANSWER), record(USER), record(USER))
    with caplog.at_level(logging.WARNING):
        examples = load(*lines)
    found = faults(examples)
    assert [(one.kind, one.reason, one.rows) for one in found] == [
        ("skipped", "no assistant turn", 3),
        ("skipped", "not JSON", 2),
        ("skipped", "unknown role", 1),
        ("accepted", NO_CALL, 1),
    ]
    assert [one.first.split(".jsonl:")[1].split(":")[0] for one in found] == ["3", "2", "4", "6"]
    told = [message for message in caplog.messages if "a.jsonl" in message]
    assert told == [f"a: {columns.finding_text(one)}" for one in found]
    assert told[0].startswith("a: 3 bad rows skipped, no assistant turn; the first: ")
    assert told[3].startswith(f"a: 1 row accepted, {NO_CALL}; the first: ")


def test_a_start_from_the_cache_tells_the_reasons_again(load, caplog, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(GOOD, "{", record(USER, RESULT, ANSWER))
    caplog.clear()
    monkeypatch.setattr(sources.RowTokenizer, "many", lambda *_: pytest.fail("tokenized again"))
    with caplog.at_level(logging.WARNING):
        again = load(GOOD, "{", record(USER, RESULT, ANSWER))
    assert again.findings == first.findings
    assert len(faults(again)) == len([m for m in caplog.messages if "; the first: " in m]) == 2


@pytest.mark.slow
def test_processes_find_the_same_first_examples(load, tmp_path: Path) -> None:
    lines = [GOOD] * 200 + ["{", record(USER)] * 150
    one = load(*lines, cache_dir=str(tmp_path / "one"))
    two = load(*lines, cache_dir=str(tmp_path / "two"), num_proc=2)
    assert one.findings == two.findings
    assert {finding.rows for finding in faults(one)} == {150}


def test_repeated_sources_count_their_findings_as_often_as_their_rows(load, tmp_path: Path, tokenizer) -> None:
    load(GOOD, "{")
    data = DataConfig(train=(), on_bad_row="skip", cache_dir=str(tmp_path / "cache"))
    source = SourceConfig(path=str(tmp_path / "a.jsonl"), repeat=3)
    examples = sources.load_sources([source], data, sources.RowTokenizer(chat.tokenize, tokenizer, max_length=500))
    assert examples.counts["a"]["skipped_bad"] == examples.findings["a"][0].rows == 3


def test_rows_that_are_dropped_are_told_with_the_place_of_the_first(load, caplog) -> None:
    long, unlearned = record(USER, {**ANSWER, "content": "Rain. " * 300}), record(USER, {**ANSWER, "weight": 0})
    with caplog.at_level(logging.WARNING):
        examples = load(GOOD, long, long, unlearned, too_long="drop")
    found = faults(examples)
    assert [(one.kind, one.reason, one.rows) for one in found] == [
        ("dropped", "too long", 2),
        ("dropped", "without a target", 1),
    ]
    assert examples.counts["a"]["dropped_too_long"] == 2
    assert re.search(r"a\.jsonl:2: \d+ tokens, but data\.max_length 500 holds 501$", found[0].first)
    assert found[1].first.endswith("a.jsonl:4: none of its answers is to be learned")
    assert any(message.startswith("a: 2 rows dropped, too long; the first: ") for message in caplog.messages)


def test_a_row_without_a_target_in_its_first_tokens_says_so(load) -> None:
    (found,) = faults(load(GOOD, record({**USER, "content": "Why? " * 600}, ANSWER)))
    assert found.reason == "without a target"
    assert found.first.endswith(
        "but data.max_length 500 holds 501, and the first target is beyond them: raise data.max_length"
    )


def test_what_the_caller_shows_itself_is_not_told(load, caplog) -> None:
    with caplog.at_level(logging.WARNING), columns.without_logging():
        assert faults(load(GOOD, "{"))
    assert caplog.messages == []
    load(GOOD, "[")
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_an_error_in_a_row_is_in_its_only_line(tmp_path: Path, end: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(f'{{"a": {end}'.encode())
    with pytest.raises(DataError, match=r"a\.jsonl:1: not JSON: Expecting value: line 1 column "):
        list(sources.read_source(SourceConfig(path=str(path))))


def test_a_long_example_is_cut(load) -> None:
    (found,) = faults(load(GOOD, json.dumps({"x" * 100_000: 1})))
    assert len(found.first) < 600


def test_an_error_keeps_its_reason_on_the_way_from_another_process() -> None:
    error = pickle.loads(pickle.dumps(DataError("a.jsonl:2: no", reason="empty answer")))
    assert (str(error), error.reason) == ("a.jsonl:2: no", "empty answer")


# ---- a key twice -----------------------------------------------------------------------------------------------------


def test_a_key_twice_is_named(load) -> None:
    with pytest.raises(DataError, match=r'a\.jsonl:2: an object has the key "messages" twice. Keep the one'):
        load(GOOD, '{"messages": [], "messages": []}', on_bad_row="error")


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ('{"text": "a", "text": "b"}\n{"text": "c"}', r"a\.json: "),
        ('[{"text": "a"}, {"text": "a", "text": "b"}]', r"a\.json: "),
        ('{"text": "a",\n "text": "b"}', r"a\.json: "),
        ('{"data": [], "data": [{"text": "c"}]}', r"a\.json: "),
    ],
)
def test_a_key_twice_in_a_json_file_is_an_error_of_the_file(tmp_path: Path, content: str, where: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=rf"{where}an object has the key"):
        list(sources.read_source(SourceConfig(path=str(tmp_path / "a.json"))))


def test_strict_json_is_json() -> None:
    for value in ({"a": [{"b": None}, "ü\n", 1.5, True]}, [], "x", {"a": {"a": 1}}):
        text = json.dumps(value, ensure_ascii=False)
        assert readers.loads(text) == readers.loads(text.encode()) == readers.loads(text.encode("utf-8-sig")) == value


# ---- the reasons -----------------------------------------------------------------------------------------------------


def reasons_in_code() -> set[str]:
    """Every reason that a DataError about a record is raised with; one without is an error of the test."""
    found = set()
    modules = [f"reading.{name}" for name in ("columns", "conversation", "rows", "rare")]
    modules += [f"tokens.{name}" for name in ("chat", "loss_mask", "template", "text")]
    for name in modules:
        module = importlib.import_module(f"sftkit.data.{name}")
        for node in calls_of(Path(module.__file__), "DataError", "wrong_kind"):
            given = [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
            assert given, f"{name}:{node.lineno}: a DataError without a reason cannot be counted by it"
            if isinstance(given[0], ast.Attribute):
                continue  # `error.reason`: the same error again, with advice
            fixed = {ast.Constant: "value", ast.Name: "id"}  # a text, or the name of one
            assert type(given[0]) in fixed, f"{name}:{node.lineno}: a reason is the same for all rows"
            reason = getattr(given[0], fixed[type(given[0])])
            found.add(getattr(module, reason, reason))
    return found - {"reason"}  # of template._LEFT_OUT


def calls_of(path: Path, *names: str) -> list[ast.Call]:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in names]


def test_every_reason_about_the_template_and_each_that_is_no_error_is_explained_in_the_docs() -> None:
    """The messages of the others name the fault and the fix."""
    named = {key.partition(" / ")[0] for key in texts("data/reading/faults.yaml")["rows"]}
    of_template = {
        reason for reason in reasons_in_code() | named if reason.startswith(("template", "special token", "no end-of-"))
    }
    assert len(of_template) > 10
    reasons = of_template | {NO_CALL, AS_TEXT, NO_EFFECT, *columns.DROPPED.values()}
    docs = (ROOT / "docs" / "data_formats.md").read_text()
    assert [reason for reason in sorted(reasons) if f"`{reason}`" not in docs] == []


def test_every_text_of_a_fault_is_used_with_the_values_that_it_names() -> None:
    used = {}
    for path in (ROOT / "src" / "sftkit" / "data").rglob("*.py"):
        for call in calls_of(path, "fault"):
            assert isinstance(call.args[1], ast.Constant), f"{path}:{call.lineno}"
            used[call.args[1].value] = {word.arg for word in call.keywords}
    assert used.keys() == texts("data/reading/faults.yaml")["rows"].keys()
    for key, text in texts("data/reading/faults.yaml")["rows"].items():
        named = {name for _, name, _, _ in Formatter().parse(text) if name}
        # None: **words, whose names only the call itself knows
        assert used[key] - {None} <= named, key
        assert None in used[key] or named <= used[key], key


def test_oddities_are_of_the_row_as_it_was_read(tokenizer) -> None:
    row = Row("x:1", messages=[USER, call("{"), RESULT, RESULT, ANSWER])
    before = json.dumps(row.messages)
    chat.tokenize(row, tokenizer, max_length=500)
    assert json.dumps(row.messages) == before


FORGED = "x\nstep 1: all is well\rno, it is"


@pytest.mark.parametrize(
    "row",
    [
        json.dumps({FORGED: 1}),
        json.dumps({"messages": [{"role": FORGED, "content": "x"}]}),
        json.dumps({"conversations": [{FORGED: 1}]}),
        with_arguments(**{FORGED: 1}),
        with_arguments(**{FORGED: "text"}),
        record(USER, {"role": "assistant", "content": "", "tool_calls": [{FORGED: 1}]}),
    ],
)
def test_no_name_in_a_row_begins_a_line_of_its_own(
    row: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, caplog
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"{GOOD}\n{row}\n")
    data = DataConfig(train=(), on_bad_row="skip", cache_dir=str(tmp_path / "cache"))
    tokenize = sources.RowTokenizer(chat.tokenize, tokenizer, max_length=500)
    with caplog.at_level(logging.WARNING, logger="sftkit"):
        sources.load_sources([SourceConfig(path=str(path))], data, tokenize)
    (told,) = caplog.messages
    assert "\n" not in told
    if "skipped" in told:
        with pytest.raises(DataError) as error:
            chat.tokenize(parse(("a:2", json.loads(row))), tokenizer, max_length=500)
        assert "\n" not in str(error.value)
