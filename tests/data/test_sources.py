"""Rows of every published shape, what bad input leads to, slices, the cache, and several processes."""

from __future__ import annotations

import gzip
import json
import logging
import pickle
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import SHARED_DATA

from sftkit.config.schema import DataConfig, SourceConfig, source_label
from sftkit.data.reading import origin, rows
from sftkit.data.store import view
from sftkit.data.tokens import chat, sources, text
from sftkit.data.tokens.chat import ANSWER_COUNTS
from sftkit.errors import ConfigError, DataError
from sftkit.evals.flags import flags_named
from sftkit.preflight.data import source_facts

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]


def write_lines(path: Path, items) -> Path:
    content = "".join(
        (item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)) + "\n" for item in items
    )
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content.encode()))
    else:
        path.write_text(content)
    return path


def numbered(n: int) -> list[dict]:
    return [{"text": f"row {i}"} for i in range(n)]


def texts(path, **settings) -> list[str | None]:
    return [row.text for row in sources.read_source(SourceConfig(path=str(path), **settings))]


@pytest.fixture
def data(tmp_path):
    return DataConfig(train=(), max_length=64, cache_dir=str(tmp_path / "cache"))


@pytest.fixture
def load(data, tokenizer):
    """load(source, ..., num_proc=2, on_bad_row="skip"): text and conversations, every token learned."""

    def run(*specs: SourceConfig | Path, **settings):
        chosen = replace(data, **settings)
        tokenize = sources.RowTokenizer(text.tokenize_any, tokenizer, max_length=64, too_long=chosen.too_long)
        listed = [spec if isinstance(spec, SourceConfig) else SourceConfig(path=str(spec)) for spec in specs]
        return sources.load_sources(listed, chosen, tokenize)

    return run


def assert_equal(a, b) -> None:
    for name in ("lengths", "num_targets", "num_bytes", "source"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name
    for one, other in zip(a.gather(np.arange(len(a))), b.gather(np.arange(len(b))), strict=True):
        assert np.array_equal(one, other)
    assert (a.source_names, a.counts, a.findings) == (b.source_names, b.counts, b.findings)


# ---- shapes ----------------------------------------------------------------------------------------------------------

CHOICES = "Which?\n\nA. x\nB. y\n\nAnswer with the letter."
CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]}  # fmt: skip

FORMATS = {
    "messages": ({"id": 3, "messages": MESSAGES, "tools": None}, MESSAGES),
    "sharegpt": (
        {"conversations": [
            {"from": "system", "value": "S"}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "2"}, {"from": "assistant", "value": "Two."}]},
        [{"role": "system", "content": "S"}, *MESSAGES, CALL, {"role": "tool", "content": "2"},
         {"role": "assistant", "content": "Two."}],
    ),
    "conversations with roles": ({"conversations": MESSAGES, "system": ""}, MESSAGES),
    "dolly": ({"instruction": "Hi", "context": "", "response": "Hello.", "category": "x"}, MESSAGES),
    "dolly with context": ({"instruction": "Do", "context": "this", "response": "ok"}, ("Do\n\nthis", "ok")),
    "alpaca": ({"instruction": "Hi", "input": "", "output": "Hello.", "text": "..."}, MESSAGES),
    "alpaca with input": ({"instruction": "Do", "input": "this", "output": "ok"}, ("Do\n\nthis", "ok")),
    "prompt and completion": ({"prompt": "Hi", "completion": "Hello."}, MESSAGES),
    "prompt and response": ({"prompt": "Hi", "response": "Hello."}, MESSAGES),
    "lists of messages": ({"prompt": MESSAGES[:1], "completion": MESSAGES[1:]}, MESSAGES),
    "gsm8k": ({"question": "Hi", "answer": "Hello.", "id": "x"}, MESSAGES),
    "mmlu": ({"question": "Which?", "subject": "s", "choices": ["x", "y"], "answer": 1}, (CHOICES, "B")),
    "mmlu letter": ({"question": "Which?", "choices": ["x", "y"], "answer": "B"}, (CHOICES, "B")),
    "arc": ({"question": "Which?", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "A"},
            (CHOICES, "A")),
    "arc numbered": ({"question": "Which?", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"},
                     (CHOICES, "B")),
    "openbookqa": ({"question_stem": "Which?", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "A"},
                   (CHOICES, "A")),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_shape(name):
    raw, expected = FORMATS[name]
    if isinstance(expected, tuple):
        expected = [{"role": "user", "content": expected[0]}, {"role": "assistant", "content": expected[1]}]
    row = rows.convert(raw, "x:1")
    assert (row.messages, row.text, row.where) == (expected, None, "x:1")


def test_text_shapes():
    assert rows.convert({"text": "a", "id": 1}, "x:1").text == "a"
    assert rows.convert({"content": "a", "text": None}, "x:1").text == "a"


def test_tools_column():
    bare = {"name": "f", "parameters": {}}
    wrapped = [{"type": "function", "function": bare}]
    for tools in ([bare], wrapped, json.dumps([bare])):
        assert rows.convert({"messages": MESSAGES, "tools": tools}, "x:1").tools == wrapped
    for nothing in (None, "", [], "[]"):
        assert rows.convert({"messages": MESSAGES, "tools": nothing}, "x:1").tools is None
    for bad in ("{", '{"a": 1}', 3):
        with pytest.raises(DataError, match="x:1: tools"):
            rows.convert({"messages": MESSAGES, "tools": bad}, "x:1")


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (
            {"a": 1, "b": None},
            r"columns a; null: b are none of the accepted ones\. If .*{prompt: .*Accepted: messages \| conv",
        ),
        ({}, r"columns \(none\) are none of"),
        ({"text": 3}, "text is a number, expected text"),
        ({"conversations": "x"}, "conversations is not a list"),
        (
            {"conversations": [{"from": "alien", "value": "x"}]},
            r"conversations\[0\]: from 'alien' is not one of system",
        ),
        ({"conversations": [{"speaker": "x"}]}, "has the keys speaker, expected from and value"),
        ({"conversations": [{"from": "function_call", "value": "{"}]}, "function_call: not JSON"),
        ({"prompt": 1, "completion": "x"}, "prompt is a number, expected text or a list of messages"),
        ({"question": "q", "choices": ["a"], "answer": 1}, "answer 1 is none of the 1 choices"),
        ({"question": "q", "choices": "a", "answer": 1}, "choices is not a list of texts"),
        ({"question": "q", "answer": True}, "answer is a truth value, expected text"),
        ([1], "the row is a list, expected an object"),
    ],
)
def test_bad_row(raw, reason):
    with pytest.raises(DataError, match=f"^x:1: .*{reason}|^x:1: {reason}"):
        rows.convert(raw, "x:1")


# ---- files -----------------------------------------------------------------------------------------------------------


def test_every_kind_of_file(tmp_path):
    import pyarrow
    import pyarrow.parquet

    items = numbered(3)
    expected = [item["text"] for item in items]
    write_lines(tmp_path / "a.jsonl", [*items[:2], "", items[2]])
    write_lines(tmp_path / "b.jsonl.gz", items)
    (tmp_path / "c.json").write_text(json.dumps(items))
    (tmp_path / "d.json").write_text(json.dumps({"data": items}))
    write_lines(tmp_path / "e.json", items)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(items), tmp_path / "f.parquet")
    (tmp_path / "g.csv").write_text("text\n" + "\n".join(expected))
    (tmp_path / "h.csv.gz").write_bytes(gzip.compress(("text\n" + "\n".join(expected)).encode()))
    for name in ("a.jsonl", "b.jsonl.gz", "c.json", "d.json", "e.json", "f.parquet", "g.csv", "h.csv.gz"):
        assert texts(tmp_path / name) == expected, name
    (tmp_path / "i.txt").write_text("One document.\n\nTwo paragraphs.\n")
    assert texts(tmp_path / "i.txt") == ["One document.\n\nTwo paragraphs.\n"]


def test_where_names_file_and_line(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [numbered(1)[0], "", numbered(1)[0]])
    assert [row.where for row in sources.read_source(SourceConfig(path=str(path)))] == [f"{path}:1", f"{path}:3"]


def test_folder_is_read_recursively_in_order(tmp_path):
    (tmp_path / "b").mkdir()
    write_lines(tmp_path / "b" / "x.jsonl", [{"text": "second"}])
    write_lines(tmp_path / "a.jsonl", [{"text": "first"}])
    (tmp_path / "README.txt").write_text("not data")
    (tmp_path / "dataset_info.json").write_text("{}")
    assert texts(tmp_path) == ["first", "second"]


def test_every_start_says_which_files_of_a_folder_are_read(tmp_path, load, caplog):
    folder = tmp_path / "chats"
    folder.mkdir()
    for name in ("a.jsonl", "test_prep.jsonl"):
        write_lines(folder / name, numbered(1))
    (folder / "c.jsonl.7z").write_bytes(b"x")
    for _ in range(2):  # also where the tokens come from the cache
        caplog.clear()
        with caplog.at_level(logging.INFO):
            facts = source_facts(load(folder))
        files = "train: 1 file, test: 1 (test_prep.jsonl); left out: c.jsonl.7z"
        assert f"chats: {files}" in caplog.messages
        assert [one["files"] for one in facts] == [files]


def test_folder_of_a_downloaded_hub_dataset(tmp_path):
    for subset in ("main", "socratic"):
        (tmp_path / subset).mkdir()
        for split in ("train-00000-of-00001", "test-00000-of-00001"):
            write_lines(tmp_path / subset / f"{split}.jsonl", [{"text": f"{subset} {split[:5]}"}])
    assert texts(tmp_path, subset="main") == ["main train"]
    assert texts(tmp_path, subset="main", split="test[:1]") == ["main test-"]
    with pytest.raises(ConfigError, match='no split "validation" among test, train'):
        texts(tmp_path, split="validation")
    with pytest.raises(DataError, match='no file with subset "other"'):
        texts(tmp_path, subset="other")


@pytest.mark.parametrize(
    "split",
    ["train", "train[:3]", "train[4:]", "train[2:5]", "train[:30%]", "train[90%:]", "train[-3:]", "train[:-4]",
     "train[15%:55%]", "train[-25%:]", "train[5:5]", "train[:100]"],
)  # fmt: skip
def test_slices_are_those_of_datasets(tmp_path, split):
    import datasets

    path = write_lines(tmp_path / "a.jsonl", numbered(11))
    (part,) = datasets.ReadInstruction.from_spec(split).to_absolute({"train": 11}) if "100" not in split else [None]
    expected = [f"row {i}" for i in (range(part.from_ or 0, 11 if part.to is None else part.to) if part else range(11))]
    assert texts(path, split=split) == expected
    assert texts(path, split=split, max_rows=2) == expected[:2]


def test_bad_splits(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", numbered(1))
    for split in ("train[1]", "train[a:]", "train[:2", "train[:200%]"):
        with pytest.raises(ConfigError, match="split"):
            texts(path, split=split)
    with pytest.raises(ConfigError, match='no split "test" in a single file'):
        texts(path, split="test")


# ---- bad files -------------------------------------------------------------------------------------------------------


def test_broken_lines(tmp_path, load, caplog):
    path = write_lines(tmp_path / "a.jsonl", ['{"text": "fine"}', '{"text": "bro', "[1]", '{"x": 1}', '"text"', "null"])
    for read in (load, texts, partial(load, num_proc=2)):
        with pytest.raises(DataError) as refused:
            read(path)
        assert str(refused.value).startswith(f"{path}:2: not JSON: ")
        assert str(refused.value).endswith(" (fix the row, or skip and count all such rows with data.on_bad_row=skip)")
        other_rank = pickle.loads(pickle.dumps(refused.value))
        assert (str(other_rank), other_rank.reason) == (str(refused.value), "not JSON")
        with pytest.raises(DataError, match=f"^{path}:2: not JSON") as renamed, flags_named():
            raise refused.value
        assert str(renamed.value) == str(refused.value)
    write_lines(path, ['{"text": "fine"}', '{"text": "bro', "[1]", '{"x": 1}', '"text"', "null"])
    with caplog.at_level(logging.WARNING):
        examples = load(path, on_bad_row="skip")
    assert (len(examples), examples.counts["a"]["rows"], examples.counts["a"]["skipped_bad"]) == (1, 6, 5)
    assert f"a: 1 bad row skipped, not JSON; the first: {path}:2: not JSON" in caplog.text
    assert f"a: 3 bad rows skipped, row is not an object; the first: {path}:3: the row is a list" in caplog.text
    assert [row.text for row in sources.read_source(SourceConfig(path=str(path)), "skip")] == ["fine"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl.gz", b"not gzip"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 5000, mtime=0)[:-20]),
        ("a.parquet", b"not parquet"),
        ("a.json", b"[1,"),
        ("a.json", b"3"),
        ("a.txt", b"\xff\xfe"),
        ("a.csv", b"text\n\xff\xfe\n"),
        ("a.jsonl", b'{"text": "\xff"}\n'),
    ],
)
def test_damaged_file(tmp_path, load, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
        load(tmp_path / name)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_empty_file(tmp_path, load, content):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"a\.jsonl \(split train\): empty, it has no rows"):
        load(tmp_path / "a.jsonl")


def test_nothing_to_learn(tmp_path, load):
    path = write_lines(tmp_path / "a.jsonl", [{"text": ""}, {"x": 1}])
    with pytest.raises(
        DataError, match=r"nothing to learn in its 2 rows .*1 bad row skipped, unknown columns; the first: .*a\.jsonl:2"
    ):
        load(path, on_bad_row="skip")


def test_half_a_surrogate_pair(tmp_path, load):
    path = write_lines(tmp_path / "a.jsonl", ['{"text": "a \\ud83d b"}'])
    with pytest.raises(DataError, match=rf"^{path}:1: not JSON: .*surrogates not allowed"):
        load(path)


def test_misspelled_paths(tmp_path, monkeypatch):
    write_lines(tmp_path / "train.jsonl", numbered(1))
    monkeypatch.chdir(tmp_path)
    for path in (str(tmp_path / "trian.jsonl"), "./trian.jsonl", "trian.jsonl", "~/no/such.jsonl", "a/b/c"):
        with pytest.raises(ConfigError, match="no such file or folder") as error:
            texts(path)
        assert ("Did you mean" in str(error.value) and "train.jsonl" in str(error.value)) == ("trian" in path)
    (tmp_path / "data.xyz").write_text("x")
    with pytest.raises(ConfigError, match=r"not one of \.jsonl"):
        texts(tmp_path / "data.xyz")


# ---- hub -------------------------------------------------------------------------------------------------------------


def test_hub_dataset_without_network(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)
    start = time.monotonic()
    with pytest.raises(ConfigError) as error:
        texts("nobody/nothing", subset="main")
    assert time.monotonic() - start < 15
    message = str(error.value)
    assert "data source nobody/nothing" in message
    assert "(subset main, split train)" in message
    assert "http://127.0.0.1:9 cannot be reached" in message
    assert "hf download --repo-type dataset nobody/nothing" in message
    assert "copy FOLDER here and name it in the place of this path" in message


def test_downloaded_snapshot_is_used_without_network(monkeypatch, tmp_path):
    import huggingface_hub

    (tmp_path / "main").mkdir()
    write_lines(tmp_path / "main" / "test-00000-of-00001.jsonl", numbered(4))
    monkeypatch.setattr(origin, "hub_answers", lambda: False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    assert texts("nobody/nothing", subset="main", split="test[:2]") == ["row 0", "row 1"]


def test_hub_dataset_is_read_by_its_columns(monkeypatch, load):
    import datasets

    dataset = datasets.Dataset.from_list([{"instruction": "Do", "input": "", "output": "ok"}] * 3)
    monkeypatch.setattr(origin, "load_from_hub", lambda source: dataset)
    found = list(sources.read_source(SourceConfig(path="org/name", split="train[:3]")))
    assert [row.where for row in found] == [f"org/name[train[:3]]:{i}" for i in range(3)]
    assert len(load(SourceConfig(path="org/name", max_rows=2))) == 2


def test_hub_dataset_that_does_not_exist(monkeypatch):
    import datasets

    def refuse(*_, **__):
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'gsm' doesn't exist on the Hub")

    monkeypatch.setattr(origin, "hub_answers", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(ConfigError, match=r"data source gsm .*doesn't exist on the Hub"):
        texts("gsm")


# ---- builtins --------------------------------------------------------------------------------------------------------


def test_builtins(load):
    docs = SourceConfig(path="builtin:docs", max_rows=3)
    tasks = SourceConfig(path="builtin:tasks", split="heldout[:4]", name="mine")
    examples = load(docs, tasks)
    assert examples.source_names == ("docs", "mine")
    assert (examples.counts["docs"]["rows"], examples.counts["mine"]["rows"]) == (3, 4)
    assert next(sources.read_source(tasks)).where == "builtin:tasks[heldout]:0"
    with pytest.raises(ConfigError, match="not one of builtin:docs, builtin:tasks"):
        texts("builtin:task")
    with pytest.raises(ConfigError, match="not one of train, heldout"):
        texts("builtin:docs", split="test")


# ---- loading ---------------------------------------------------------------------------------------------------------


def test_load_keeps_order_counts_and_sources(tmp_path, load, tokenizer):
    a = write_lines(tmp_path / "a.jsonl", [{"text": "long " * 100}, {"text": ""}])
    b = write_lines(tmp_path / "b.jsonl", [{"messages": MESSAGES}, {"messages": [MESSAGES[0], *MESSAGES[1:] * 30]}])
    examples = load(a, b)
    assert examples.source.tolist() == sorted(examples.source.tolist())
    zeros = dict.fromkeys((*view.COUNTS, *ANSWER_COUNTS, *view.ROLE_COUNTS.values()), 0)
    pieces = examples.counts["a"]["documents"]
    assert pieces > 2
    assert examples.counts["a"] == {**zeros, "rows": 2, "documents": pieces, "dropped_no_target": 1}
    answered = {
        "answers": 31,
        "answers_learned": 5,
        "not_learned_too_long": 26,
        "messages_user": 2,
        "messages_assistant": 31,
    }
    assert examples.counts["b"] == {**zeros, "rows": 2, "documents": 2, "truncated": 1, **answered}
    assert (
        tokenizer.decode(examples[pieces].ids)
        == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>"
    )
    assert load(b, too_long="drop").counts["b"]["dropped_too_long"] == 1


def test_repeat(tmp_path, load):
    path = write_lines(tmp_path / "a.jsonl", numbered(3))
    once, twice = load(path), load(SourceConfig(path=str(path), repeat=2))
    assert twice.gather(range(6))[0].tolist() == once.gather(range(3))[0].tolist() * 2
    assert twice.lengths.tolist() == once.lengths.tolist() * 2
    assert twice.counts["a"]["rows"] == 6


def test_names():
    named = {"builtin:docs": "docs", "a/b.jsonl.gz": "b", "a/c/": "c", "org/d": "d", "x.parquet": "x", "y.csv": "y"}
    assert {path: source_label(SourceConfig(path=path)) for path in named} == named


@pytest.mark.slow
def test_processes_give_the_same(tmp_path, load):
    items = [{"text": f"row {i} " * (i % 7)} for i in range(300)] + ["{broken", {"messages": MESSAGES}]
    path = write_lines(tmp_path / "a.jsonl", items)
    one = load(path, on_bad_row="skip", cache_dir=str(tmp_path / "one"))
    two = load(path, on_bad_row="skip", cache_dir=str(tmp_path / "two"), num_proc=2)
    assert_equal(one, two)


@pytest.mark.slow
def test_a_bad_row_in_a_process_is_reported(tmp_path, load):
    path = write_lines(tmp_path / "a.jsonl", [*numbered(300), "{broken"])
    with pytest.raises(DataError, match=rf"^{path}:301: not JSON"):
        load(path, num_proc=2)


# ---- real data, where it is ------------------------------------------------------------------------------------------


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="no shared data beside this checkout")
@pytest.mark.parametrize(
    "name", ["eval/mmlu_dev", "eval/arc_challenge_validation", "eval/gsm8k_test", "eval/commonsense_qa_validation"]
)
def test_real_exams(name, tokenizer):
    source = SourceConfig(path=str(SHARED_DATA / f"{name}.jsonl.gz"), max_rows=200)
    for row in sources.read_source(source):
        tokenized = chat.tokenize(row, tokenizer, max_length=10_000)
        assert tokenized.note is None, row.where
