"""Golden tests: a file of a few rows for each shape, with the settings of its source, and the text that is learned."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sftkit.config.schema import DataConfig, SampleConfig, SourceConfig, where_columns, where_counts
from sftkit.data.batches.loader import load_examples
from sftkit.data.hygiene import content_hash, head_hash
from sftkit.data.reading import origin, rows
from sftkit.data.reading.columns import finding_text
from sftkit.data.tokens import chat, sources, text
from sftkit.data.tokens.loss_mask import Targets
from sftkit.data.tokens.sources import RowTokenizer
from sftkit.data.types import ANSWERS_LEFT_OUT, CUT, Examples, Finding, Tokenized
from sftkit.errors import ConfigError, DataError, LeftOut
from sftkit.preflight.data import answers_line, source_facts

ASK, ANSWER = {"role": "user", "content": "Ask"}, {"role": "assistant", "content": "Answer"}
PLAIN = "user Ask. assistant [[Answer.]]"
TOOLS = '{"name": "f", "parameters": {"x": {"type": "int"}}}'
CALLED = '<tool_call> {"name": "f", "arguments": {"x": 1}} </tool_call>'


def tree(name: str, *replies: dict[str, Any], role: str = "assistant", **keys: Any) -> dict[str, Any]:
    return {"message_id": name, "text": name, "role": role, "replies": list(replies), **keys}


TREE = {
    "message_tree_id": "t1",
    "tree_state": "ready",
    "prompt": tree(
        "Q1",
        tree("WORSE", tree("Q3", tree("A3"), role="prompter"), rank=1),
        tree("BEST", tree("Q2", tree("A2"), role="prompter"), tree("Q4", role="prompter"), rank=0),
        role="prompter",
        lang="en",
    ),
}


def flat(node: dict[str, Any], parent: str | None = None, tree_id: str = "t1") -> list[dict[str, Any]]:
    """The rows of a tree, one for each message."""
    own = {key: value for key, value in node.items() if key != "replies"}
    found = [{**own, "parent_id": parent, "message_tree_id": tree_id}]
    return found + [row for reply in node["replies"] for row in flat(reply, node["message_id"], tree_id)]


# name -> rows, settings of the source, shape that each is read as, learned text of each row
GOLDEN: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str, list[str]]] = {
    "messages": ([{"messages": [ASK, ANSWER]}], {}, "messages", [PLAIN]),
    "messages as JSON": ([{"messages": json.dumps([ASK, ANSWER])}], {}, "messages", [PLAIN]),
    "sharegpt": (
        [{"conversations": [{"from": one, "value": "Ask"}, {"from": other, "value": "Answer"}]}
         for one, other in (("human", "gpt"), ("User", "Assistant"), ("user", "chatgpt"), ("prompter", "bing"))],
        {}, "turns (conversations)", [PLAIN] * 4),
    "roles of messages": (
        [{"messages": [{**ASK, "role": "Human"}, {**ANSWER, "role": "Model"}, {"role": "ipython", "content": "2"}, ANSWER]}],
        {}, "messages", [f"{PLAIN} tool 2. assistant [[Answer.]]"]),
    "roles of the source": (
        [{"conversations": [{"from": "Customer", "value": "Ask"}, {"from": "bot", "value": "Answer"}]},
         {"conversations": [{**ASK, "role": "customer"}, {**ANSWER, "role": "BOT"}]}],
        {"roles": {"customer": "user", "Bot": "assistant"}}, "turns (conversations)", [PLAIN] * 2),
    "roles that are swapped": (
        [{"messages": [{**ASK, "role": "assistant"}, {**ANSWER, "role": "user"}]}],
        {"roles": {"user": "assistant", "assistant": "user"}}, "messages", [PLAIN]),
    "conversation of messages": ([{"conversation": [ASK, ANSWER], "model": "m"}], {}, "turns (conversation)", [PLAIN]),
    "conversation of pairs": (
        [{"system": "Be.", "conversation": [{"human": "Q1", "assistant": "A1"}, {"human": "Ask", "assistant": "Answer"}]},
         {"system": "Be.", "conversation": [["Q1", "A1"], ["Ask", "Answer"]]}],
        {}, "turns (conversation)", [f"system Be.. user Q1. assistant [[A1.]] {PLAIN}"] * 2),
    "chat": ([{"chat": [ASK, ANSWER]}, {"chat": json.dumps([ASK, ANSWER])}], {}, "turns (chat)", [PLAIN] * 2),
    "alpaca": (
        [{"instruction": "Ask", "input": "", "output": "Answer", "history": [["Q1", "A1"]]}],
        {}, "alpaca (instruction, output, input, history)", [f"user Q1. assistant [[A1.]] {PLAIN}"]),
    "dolly": ([{"instruction": "Ask", "context": "This", "response": "Answer"}], {},
              "dolly (instruction, response, context)", ["user Ask  This. assistant [[Answer.]]"]),
    "query": ([{"system": "Be.", "query": "Ask", "response": "Answer", "history": [["Q1", "A1"]]}], {},
              "query (query, response, history)", [f"system Be.. user Q1. assistant [[A1.]] {PLAIN}"]),
    "input and output": ([{"input": "Ask", "output": "Answer"}, {"input": [ASK], "output": [ANSWER]}], {},
                         "input and output (input, output)", [PLAIN] * 2),
    "openorca": ([{"system_prompt": "Be.", "question": "Ask", "response": "Answer"}], {},
                 "question (question, response)", [f"system Be.. {PLAIN}"]),
    "prompt": ([{"prompt": "Ask", "completion": "Answer"}], {}, "prompt (prompt, completion)", [PLAIN]),
    "choices": ([{"question": "Ask", "choices": ["x", "y"], "answer": 1}], {}, "choices (question, choices, answer)",
                ["user Ask  A. x B. y  Answer with the letter.. assistant [[B.]]"]),
    "xlam": (
        [{"id": 1, "query": "Ask", "answers": '[{"name": "f", "arguments": {"x": 1}}]', "tools": f"[{TOOLS}]"}],
        {}, "calls (query, answers)", [f"...user Ask. assistant [[{CALLED}.]]"]),
    "glaive": (
        [{"system": "SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -\n"
                    f"{TOOLS}\n\n{TOOLS.replace('f', 'g', 1)}\n",
          "chat": "USER: Ask\n\n\nASSISTANT: Let me see. <functioncall> {\"name\": \"f\", \"arguments\": '{\"x\": 1}'} "
                  "<|endoftext|>\n\n\nFUNCTION RESPONSE: {\"r\": 2}\n\n\nASSISTANT: Answer <|endoftext|>\n\n\n"},
         {"system": "SYSTEM: You are a helpful assistant, with no access to external functions.",
          "chat": "USER: Ask\n\n\nASSISTANT: Answer <|endoftext|>"}],
        {}, "turns (chat)",
        [f"...user Ask. assistant [[Let me see. {CALLED}.]] tool {{\"r\": 2}}. assistant [[Answer.]]",
         f"system You are a helpful assistant, with no access to external functions.. {PLAIN}"]),
    "function_call": (
        [{"functions": [json.loads(TOOLS)],
          "messages": [ASK, {**ANSWER, "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}},
                       {"role": "function", "content": "2"}, ANSWER]}],
        {}, "messages", [f"...user Ask. assistant [[{CALLED}.]] tool 2. assistant [[Answer.]]"]),
    "roles of calls": (
        [{"messages": [ASK, {"role": "tool_call", "content": '{"name": "f", "arguments": {"x": 1}}'},
                       {"role": "tool_response", "content": "2"}, ANSWER]},
         {"messages": [{"from": "human", "value": "Ask"}, {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                       {"from": "observation", "value": "2"}, ANSWER]}],
        {}, "messages", [f"user Ask. assistant [[{CALLED}.]] tool 2. assistant [[Answer.]]"] * 2),
    "preferences": (
        [{"prompt": "Ask", "chosen": "Answer", "rejected": "Bad"}],
        {"columns": {"completion": "chosen"}}, "prompt (prompt, completion)", [PLAIN]),
    "preferences of texts": (
        [{"chosen": "\n\nHuman: Ask\n\nAssistant: Answer", "rejected": "\n\nHuman: Ask\n\nAssistant: Bad"}],
        {"columns": {"messages": "chosen"}}, "messages", [PLAIN]),
    "nested columns": (
        [{"data": {"turns": [ASK, ANSWER]}, "meta.persona": "Be."}],
        {"columns": {"messages": "data.turns", "system": "meta.persona"}}, "messages", [f"system Be.. {PLAIN}"]),
    "system of the source": (
        [{"messages": [ASK, ANSWER]}, {"messages": [ASK, ANSWER], "system": "Do."},
         {"messages": [{"role": "system", "content": "Do."}, ASK, ANSWER]}],
        {"system": "Be."}, "messages", [f"system {one}.. {PLAIN}" for one in ("Be", "Do", "Do")]),
    "tree, best": ([TREE], {"tree": "best"}, "tree of answers",
                   ["user Q1. assistant [[BEST.]] user Q2. assistant [[A2.]]"]),
    "tree, all": (
        [TREE], {"tree": "all"}, "tree of answers",
        ["user Q1. assistant [[BEST.]] user Q2. assistant [[A2.]]", "user Q1. assistant [[BEST.]]",
         "user Q1. assistant [[WORSE.]] user Q3. assistant [[A3.]]"]),
    "rows of trees": (
        [*flat(TREE["prompt"])[:3], *flat(tree("Q5", tree("A5"), role="prompter"), tree_id="t2")],
        {"tree": "all"}, "tree of answers",
        ["user Q1. assistant [[WORSE.]]", "user Q5. assistant [[A5.]]"]),
    "segments": ([{"segments": [{"label": False, "text": "<s>Ask"}, {"label": True, "text": "Answer</s>"}]}], {},
                 "segments", ["<s>Ask[[Answer</s>]]"]),
    "text": ([{"text": "Some"}], {}, "text", ["S[[ome.]]"]),
}  # fmt: skip


def shown(result: Tokenized, tokenizer) -> str:
    """The documents of a row, [[targets]] in brackets."""
    found = []
    for example in result.examples:
        parts, inside = "", False
        for target, token in zip(example.is_target.tolist(), example.ids.tolist(), strict=True):
            parts += ("[[" if target else "]]") * (target != inside) + tokenizer.decode([token])
            inside = target
        found.append(parts + "]]" * inside)
    return "|".join(found).replace("<|im_start|>", "").replace("<|im_end|>", ".").replace("\n", " ")


def source_of(folder: Path, given: list[dict[str, Any]], **keys: Any) -> SourceConfig:
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    return SourceConfig(path=str(folder / "a.jsonl"), **keys)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_shape_is_read_and_its_answers_are_learned(name: str, tmp_path: Path, tokenizer) -> None:
    given, keys, shape, expected = GOLDEN[name]
    read = list(sources.read_source(source_of(tmp_path, given, **keys)))
    rule = text.tokenize if name == "text" else chat.tokenize
    learned = [shown(rule(row, tokenizer, max_length=400), tokenizer) for row in read]
    assert {row.shape for row in read} == {shape}
    whole = [
        f"...{one[one.index('user Ask') :]}" if two.startswith("...") else one
        for one, two in zip(learned, expected, strict=True)
    ]
    assert whole == expected
    assert {column for row in read for column in row.unused} == (
        {"column rejected"} if "preferences" in name else set()
    )


def test_functions_of_glaive_are_tools(tmp_path: Path, tokenizer) -> None:
    [row, plain] = sources.read_source(source_of(tmp_path, GOLDEN["glaive"][0]))
    assert [tool["function"]["name"] for tool in row.tools] == ["f", "g"]
    assert row.messages[0] == {"role": "system", "content": "You are a helpful assistant."}
    assert plain.tools is None
    unread = rows.convert(
        {
            **GOLDEN["glaive"][0][0],
            "system": "SYSTEM: Be with access to the following functions. Use them if required -\n{x",
        },
        "a:1",
    )
    assert (unread.tools, unread.messages[0]["content"][-4:]) == (None, "-\n{x")
    odd = {"chat": 'USER: Ask\n\n\nASSISTANT: <functioncall> {"name": "f", "arguments": \'{x}\'} <|endoftext|>'}
    result = chat.tokenize(rows.convert(odd, "a:1"), tokenizer, max_length=400)
    assert list(result.odd) == ["tool arguments kept as text"]
    with pytest.raises(DataError, match="a:1: function call: not JSON"):
        rows.convert({"chat": "USER: Ask\n\n\nASSISTANT: <functioncall> {f}"}, "a:1")


def test_columns_named_chat_or_conversation_that_hold_no_turns_say_nothing() -> None:
    for name in ("chat", "conversation"):
        row = rows.convert({name: "general", "text": "Some"}, "a:1")
        assert (row.text, row.unused) == ("Some", (f"column {name}",))


# ---- trees -----------------------------------------------------------------------------------------------------------


def test_a_tree_is_rejected_until_the_source_says_what_is_learned(tmp_path: Path) -> None:
    for given in ([TREE], [{key: v for key, v in row.items() if key != "text"} for row in flat(TREE["prompt"])]):
        with pytest.raises(DataError, match="Set the source's tree: best") as error:
            list(sources.read_source(source_of(tmp_path, given)))
        assert error.value.reason in rows.WRONG_COLUMNS


def test_paths_of_a_tree_keep_what_the_tree_and_its_messages_say(tmp_path: Path) -> None:
    one = {**TREE, "prompt": tree("Q1", tree("A1", deleted=True, emojis={"+1": 3}), role="prompter", lang="en")}
    [row] = sources.read_source(source_of(tmp_path, [one], tree="all", where={"lang": "en", "tree_state": "ready"}))
    assert row.messages == [
        {"role": "user", "content": "Q1", "lang": "en"},
        {"role": "assistant", "content": "A1", "emojis": {"+1": 3}, "train": False},
    ]


def test_rows_of_a_tree_stand_together_with_parents_first(tmp_path: Path) -> None:
    other = flat(tree("Q5", tree("A5"), role="prompter"), tree_id="t2")
    broken = [*flat(TREE["prompt"])[:2], *other, *flat(TREE["prompt"])[2:3], {"text": "Some"}]
    source = source_of(tmp_path, broken, tree="best")
    with pytest.raises(DataError, match=r"a\.jsonl:5: .*parent \(WORSE\) is not among the rows of its tree before it"):
        list(sources.read_source(source))
    read = list(sources.read_source(source, "skip"))
    assert [row.where.rpartition(":")[2] for row in read] == ["1", "3", "6"]  # a row of another kind stays


SHARED = tree("Q1", tree("A1", *(tree(q, *(tree(a) for a in given), role="prompter") for q, given in {
    "Q2": ["A2 " * 30], "Q3": ["A3", "A4"], "Q5": []}.items())), role="prompter")  # fmt: skip
"Paths: A1 with A2, A1 with A3, A1 with A4, A1 alone."


def of_paths(
    folder: Path, tokenizer, max_length: int, too_long: str, targets: Targets, **keys: Any
) -> tuple[list[str], Examples]:
    given = [
        {**TREE, "prompt": SHARED},
        {**TREE, "message_tree_id": "t2", "prompt": tree("Q6", tree("A6"), role="prompter")},
    ]
    data = DataConfig(
        train=(source_of(folder, given, tree="all", **keys),), cache_dir=str(folder / "cache"), num_proc=1
    )
    learning = chat.Learning(targets)
    examples, _ = load_examples(data, RowTokenizer(chat.tokenize, tokenizer, max_length, too_long, learning))
    return [shown(Tokenized([examples[i]]), tokenizer) for i in range(len(examples))], examples


@pytest.mark.parametrize("repeat", [1, 2])
@pytest.mark.parametrize(
    ("max_length", "too_long", "where", "expected", "learned"),
    [
        (400, "drop", {}, ["[[A1.]] user Q2. assistant [[A2", "A1. user Q3. assistant [[A3.]]", "A1. user Q3. assistant [[A4.]]"], 5),
        (60, "drop", {}, ["[[A1.]] user Q3. assistant [[A3.]]", "A1. user Q3. assistant [[A4.]]"], 4),
        (60, "truncate", {}, ["[[A1.]] user Q2. assistant [[A2", "A1. user Q3. assistant [[A3.]]", "A1. user Q3. assistant [[A4.]]"], 4),
        (400, "drop", {"max_turns": 2}, ["[[A1.]]"], 2),
    ],
)  # fmt: skip
def test_an_answer_of_several_paths_is_learned_once_in_the_first_that_is_used(
    tmp_path: Path, tokenizer, max_length: int, too_long: str, where: dict[str, int], expected: list[str], learned: int,
    repeat: int,
) -> None:  # fmt: skip
    keys = {"where": where or None, "repeat": repeat}
    texts, examples = of_paths(tmp_path, tokenizer, max_length, too_long, "assistant", **keys)
    assert [
        one.partition("assistant ")[2][: len(e)] for one, e in zip(texts, [*expected, "[[A6.]]"] * repeat, strict=True)
    ] == [*expected, "[[A6.]]"] * repeat
    for i, one in enumerate(texts):
        assert examples.num_targets[i] == np.count_nonzero(examples[i].is_target)
        parts = re.findall(r"\[\[(.*?)\]\]", one)
        assert examples.num_bytes[i] == sum(len(part.removesuffix(".")) for part in parts), one
    counts = examples.counts["a"]
    assert counts["answers_learned"] == learned * repeat
    not_learned = sum(counts[name] for name in (*chat.NOT_LEARNED, CUT, ANSWERS_LEFT_OUT))
    assert counts["answers"] == counts["answers_learned"] + not_learned
    assert f"{learned * repeat} of" in (answers_line(source_facts(examples)[0]) or "")


def test_more_rows_than_there_are_is_said_once(tmp_path: Path, tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "sftkit")
    source = source_of(tmp_path, [{"messages": [ASK, ANSWER]}] * 3, max_rows=4, sample=SampleConfig(rows=5))
    data = DataConfig(train=(source,), cache_dir=str(tmp_path / "cache"), num_proc=1)
    examples, _ = load_examples(data, RowTokenizer(chat.tokenize, tokenizer, 100))
    told = ["max_rows: it has only 3 rows; all are taken", "sample: only 3 rows to draw from; all are taken"]
    assert examples.files == {"a": "; ".join(told)}
    assert [one.getMessage() for one in caplog.records if "all are taken" in one.getMessage()] == [
        f"a: {t}" for t in told
    ]
    enough = replace(source, max_rows=3, sample=SampleConfig(rows=3))
    assert not load_examples(replace(data, train=(enough,)), RowTokenizer(chat.tokenize, tokenizer, 100))[0].files


@pytest.mark.parametrize(("limit", "left"), [("min_tokens", {"long"}), ("max_tokens", {"short"})])
def test_limits_of_tokens_count_documents_before_they_are_cut(
    tmp_path: Path, tokenizer, limit: str, left: set[str]
) -> None:
    words = {"long": "many words " * 20, "short": "many words"}
    chats = [{"messages": [{**ASK, "content": name}, {**ANSWER, "content": said}]} for name, said in words.items()]
    texts = [{"text": f"{name} {said}"} for name, said in words.items()]
    rules = RowTokenizer(chat.tokenize, tokenizer, 30, "truncate"), RowTokenizer(text.tokenize, tokenizer, 30)
    for given, rule in zip((chats, texts), rules, strict=True):
        data = DataConfig(train=(source_of(tmp_path, given, where={limit: 60}),), cache_dir=str(tmp_path / "cache"))
        examples, _ = load_examples(replace(data, num_proc=1), rule)
        found = tokenizer.decode(np.concatenate([examples[i].ids for i in range(len(examples))]))
        assert {name for name in words if name in found} == left
        # All pieces of a long text stay, the last, short one too.
        assert given is chats or limit == "max_tokens" or (len(examples) > 2 and examples.lengths[-1] < 29)


def test_paths_that_are_drawn_learn_what_they_share_once(tmp_path: Path, tokenizer) -> None:
    seen = set()
    for seed in range(6):
        texts, examples = of_paths(
            tmp_path, tokenizer, 400, "drop", "assistant", sample=SampleConfig(rows=2, seed=seed)
        )
        learned = [part for one in texts for part in re.findall(r"\[\[(.*?)\.\]\]", one)]
        assert len(learned) == len(set(learned)) == examples.counts["a"]["answers_learned"]
        assert "A1" in learned or not any("Q1" in one for one in texts)
        seen.add(tuple(texts))
    assert len(seen) > 2


def test_an_answer_of_several_paths_is_learned_once_where_every_token_is(tmp_path: Path, tokenizer) -> None:
    texts, examples = of_paths(tmp_path, tokenizer, 400, "drop", "all")
    assert sum("A1" in part for one in texts for part in re.findall(r"\[\[(.*?)\]\]", one)) == 1
    assert len(texts) == 4, "the path with A1 alone has nothing new"
    assert examples.counts["a"]["answers_learned"] == 5


def test_a_tree_without_an_answer_is_a_bad_row(tmp_path: Path, tokenizer) -> None:
    [row] = sources.read_source(
        source_of(tmp_path, [{"message_tree_id": "t", "prompt": tree("Q", role="prompter")}], tree="all")
    )
    with pytest.raises(DataError, match="no assistant turn"):
        chat.tokenize(row, tokenizer, max_length=100)


# ---- settings of a source --------------------------------------------------------------------------------------------


def test_where_leaves_rows_out_and_counts_them_by_column(tmp_path: Path) -> None:
    given = [
        {"prompt": "a", "completion": "b", "label": label, "meta": {"lang": lang, "n": n}}
        for label, lang, n in (
            (True, "en", 1),
            (False, "en", 1),
            ("True", "de", 1),
            (True, "fr", 1),
            (True, "en", True),
            (1, "en", 1),
        )
    ]
    where = {"label": True, "meta.lang": ["en", "de"], "meta.n": 1, "min_tokens": 3}
    source = source_of(tmp_path, given, where=where)
    assert where_columns(source) == {name: value for name, value in where.items() if name != "min_tokens"}
    assert where_counts(source) == {"min_tokens": 3}
    left_out: dict[str, list[str]] = {}
    kept = []
    for raw in origin.find_source(source).part():
        try:
            kept.append(rows.parse(raw).where.rpartition(":")[2])
        except LeftOut as out:
            left_out.setdefault(out.reason, []).append(raw[0].rpartition(":")[2])
    assert kept == ["1", "3"]  # a CSV writes True out
    assert left_out == {"where: label": ["2", "6"], "where: meta.lang": ["4"], "where: meta.n": ["5"]}
    assert [row.where[-1] for row in sources.read_source(source)] == kept


def test_where_null_means_that_there_is_no_value(tmp_path: Path) -> None:
    given = [{"text": "a"}, {"text": "b", "flag": None}, {"text": "c", "flag": 1}]
    assert [row.text for row in sources.read_source(source_of(tmp_path, given, where={"flag": None}))] == ["a", "b"]


def test_what_columns_leave_or_replace_is_counted_as_unused(tmp_path: Path) -> None:
    given = [{"data": {"turns": [ASK, ANSWER], "mood": "dry"}, "messages": [ASK], "prompt": "Ask"}]
    [row] = sources.read_source(source_of(tmp_path, given, columns={"messages": "data.turns"}))
    assert (row.messages, row.unused) == ([ASK, ANSWER], ("column data", "column messages of the row"))
    [row] = sources.read_source(source_of(tmp_path, [{"messages": [ASK, ANSWER]}], columns={"system": "data.who"}))
    assert row.messages == [ASK, ANSWER]  # a row without that column is read as it is, and counted
    assert row.unused == ("no column data.who, which columns.system names",)
    found = finding_text(Finding("unused", row.unused[0], 2, "a.jsonl:1"))
    assert found == "2 rows have no column data.who, which columns.system names; the first: a.jsonl:1"


def test_a_row_without_the_columns_that_its_source_names_says_which(tmp_path: Path) -> None:
    given = source_of(tmp_path, [{"data": {"turns": [ASK, ANSWER]}}], columns={"messages": "data.turn"})
    with pytest.raises(
        DataError, match=r"columns data; not in this row: data\.turn are none .* source's columns, such as"
    ):
        list(sources.read_source(given))


def test_columns_name_columns_that_have_a_meaning(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'columns\.mesages is no column .*Did you mean "messages"\?'):
        origin.find_source(source_of(tmp_path, [{"text": "a"}], columns={"mesages": "text"}))
    with pytest.raises(ConfigError, match=r"columns\.asked is no column .*name comes first: {prompt: asked}$"):
        origin.find_source(source_of(tmp_path, [{"asked": "a"}], columns={"asked": "prompt", "said": "completion"}))


# ---- tokens ----------------------------------------------------------------------------------------------------------


def ids_of(tokenizer, given: str) -> list[int]:
    return tokenizer(given, add_special_tokens=False)["input_ids"]


def tokenized(tokenizer, **keys: Any) -> dict[str, Any]:
    """A row of eight tokens or more, of which the answer is learned."""
    before = ids_of(tokenizer, "<|im_start|>user\nAsk<|im_end|>\n<|im_start|>assistant\n")
    answer = ids_of(tokenizer, "Answer<|im_end|>")
    return {"input_ids": [*before, *answer], "labels": [*[-100] * len(before), *answer], **keys}


def test_masks_of_rows_that_are_tokenized_elsewhere_are_honoured(tokenizer) -> None:
    made = tokenized(tokenizer)
    ids, labels = made["input_ids"], made["labels"]
    mask = [int(label != -100) for label in labels]
    padded = {
        "input_ids": [0, *ids, 0, 0],
        "labels": [-100, *labels, -100, 5],
        "attention_mask": [0, *[1] * len(ids), 0, 0],
    }
    for raw in (
        made,
        {"input_ids": ids, "completion_mask": mask},
        {"input_ids": ids, "assistant_masks": [bool(one) for one in mask]},
        {"input_ids": ids, "labels": ids, "assistant_mask": mask, "position_ids": list(range(len(ids)))},
        padded,
    ):
        row = rows.convert(raw, "a:1")
        assert (row.unused, row.shape.partition(" (")[0]) == ((), rows.ELSEWHERE)
        for rule in (chat.tokenize, text.tokenize_any, text.tokenize):
            result = rule(row, tokenizer, max_length=100)
            assert (shown(result, tokenizer), result.odd) == (PLAIN, {})


BAD_TOKENS: dict[str, tuple[dict[str, Any], str]] = {
    "another label": ({"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 9, 8]}, r"labels\[2\] is 9, expected the token 7"),
    "shifted": ({"input_ids": [5, 6, 7, 8], "labels": [-100, 7, 8, -100]}, "labels are shifted already"),
    "shorter labels": ({"input_ids": [5, 6], "labels": [6]}, "labels is not a list of 2 whole numbers"),
    "no whole numbers": ({"input_ids": [5.0, 6.5]}, "input_ids is not a list of whole numbers"),
    "truth values": ({"input_ids": [True, False]}, "input_ids is not a list of whole numbers"),
    "a batch": ({"input_ids": [[5, 6]]}, "input_ids is not a list of whole numbers"),
    "lists of lengths": ({"input_ids": [[5, 6], [7]]}, "input_ids is not a list of whole numbers"),
    "below zero": ({"input_ids": [-1, 5]}, "input_ids has numbers below 0"),
    "a mask of weights": ({"input_ids": [5, 6], "completion_mask": [0, 2]}, "completion_mask has numbers below 0 or above 1"),
    "a gap": ({"input_ids": [5, 6, 7], "attention_mask": [1, 0, 1]}, "attention_mask has a gap"),
    "packed": ({"input_ids": [5, 6, 7], "position_ids": [0, 1, 0]}, "position_ids do not count up by one"),
    "vocabulary": ({"input_ids": [5, 99_999], "labels": [-100, 99_999]}, "token 99999 of a row .* tokenizer has"),
    "no mask": ({"input_ids": [5, 6]}, "without labels, completion_mask or assistant_masks"),
    "next to text": ({"input_ids": [5, 6], "text": "x"}, r"tokens \(input_ids\) next to text"),
    "next to messages": ({"input_ids": [5, 6], "messages": [ASK, ANSWER]}, r"tokens \(input_ids\) next to messages"),
    "segments of no label": ({"segments": [{"text": "a"}]}, "segments is not a list of objects with text, and label"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_TOKENS)
def test_tokens_that_do_not_fit_are_a_bad_row(name: str, tokenizer) -> None:
    raw, problem = BAD_TOKENS[name]
    with pytest.raises(DataError, match=f"^a:1: .*{problem}") as error:
        chat.tokenize(rows.convert(raw, "a:1"), tokenizer, max_length=100)
    assert error.value.reason in ("tokenized row", "malformed tokens", "malformed segments")


def test_targets_that_follow_no_header_are_counted(tokenizer) -> None:
    ids = ids_of(tokenizer, "user Ask. assistant Answer")
    result = chat.take(
        rows.convert({"input_ids": ids, "labels": [-100, -100, *ids[2:]]}, "a:1"),
        tokenizer,
        max_length=50,
        too_long="drop",
    )
    assert result.odd == {chat.UNASKED: "a:1: 1 of 1 runs of targets"}


def test_tokens_that_are_too_long_are_cut_as_a_conversation_or_chunked_as_a_text(tokenizer) -> None:
    ids = list(range(20, 40))
    plain, masked = rows.convert({"input_ids": ids}, "a:1"), rows.convert({"input_ids": ids, "labels": ids}, "a:1")
    chunks = text.tokenize_any(plain, tokenizer, max_length=8).examples
    assert [example.ids.tolist() for example in chunks] == [ids[:9], ids[8:17], ids[16:]]
    assert sum(int(example.is_target.sum()) for example in chunks) == 19
    assert [(len(r.examples), r.note) for r in (chat.tokenize(masked, tokenizer, max_length=8),
            chat.tokenize(masked, tokenizer, max_length=8, too_long="drop"))] == [(1, "truncated"), (0, "dropped_too_long")]  # fmt: skip


def test_hashes_of_tokenized_rows_and_segments_tell_them_apart() -> None:
    given = [{"input_ids": [5, 6, 7]}, {"input_ids": [5, 6, 8]}, {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}]
    given += [{"segments": [{"text": "a", "label": label}]} for label in (True, False)]
    converted = [rows.convert(raw, "a:1") for raw in given]
    assert len(set(map(content_hash, converted))) == 5
    assert head_hash(converted[0]) != head_hash(converted[1])


# ---- special tokens in plain texts -----------------------------------------------------------------------------------


def test_special_tokens_in_a_text_are_characters_tokens_or_an_error(tokenizer) -> None:
    row = rows.convert({"text": "a<|im_start|>b"}, "a:1")
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    for setting, known in (("split", False), ("parse", True)):
        for rule in (text.tokenize, partial(text.tokenize_any, special_tokens=setting)):
            made = partial(rule, special_tokens=setting)(row, tokenizer, max_length=100)
            assert (start in made.examples[0].ids) == known
            assert made.odd == {"special token in text": f"a:1: <|im_start|>, data.special_tokens_in_text={setting}"}
    with pytest.raises(DataError, match=r"a:1: the text holds the special token <\|im_start\|>"):
        text.tokenize(row, tokenizer, max_length=100, special_tokens="error")
    assert not text.tokenize(rows.convert({"text": "ab"}, "a:1"), tokenizer, max_length=100, special_tokens="error").odd


# ---- parts of an answer ----------------------------------------------------------------------------------------------


def detail(*parts: tuple[int, int, bool], content: str = "one two three") -> dict[str, Any]:
    given = [{"begin_offset": begin, "end_offset": end, "train": train} for begin, end, train in parts]
    return {"messages": [ASK, {**ANSWER, "content": content, "train_detail": given}]}


@pytest.mark.parametrize("template", ["chatml", "plain", "qwen3"])
def test_parts_of_an_answer_that_train_detail_marks_are_not_learned(template: str, make_tokenizer) -> None:
    tokenizer = make_tokenizer(template)
    for raw, expected in (
        (detail((0, 2, True), (3, 6, False)), "one]] two[[ three"),
        (detail((5, 5, False)), "one]] two[[ three"),  # a token that is only partly learned is not
        (detail((0, 8, False), (9, 12, False), content="\none two three"), "one two three[["),
    ):
        result = chat.tokenize(rows.convert(raw, "a:1"), tokenizer, max_length=200)
        assert expected in shown(result, tokenizer)
        assert result.counts["answers_learned"] == 1


def test_train_detail_that_cannot_be_honoured_is_rejected(tokenizer) -> None:
    everything = partial(chat.tokenize, learning=chat.EVERYTHING)
    for raw, rule in (
        (detail((0, 13, False)), chat.tokenize),
        (detail((3, 1, False)), chat.tokenize),
        ({"messages": [ASK, {**ANSWER, "train_detail": "x"}]}, chat.tokenize),
        (detail((0, 1, False), content="<think>a</think>b"), chat.tokenize),
        (detail((0, 1, False)), everything),
    ):
        with pytest.raises(DataError, match=r"^a:1: messages\[1\]: train_detail") as error:
            rule(rows.convert(raw, "a:1"), tokenizer, max_length=200)
        assert error.value.reason == "marks of parts"
