"""Records that are too large, and large ones: refused by file and line, or learned in a time that grows with their size."""

from __future__ import annotations

import gzip
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from sftkit.config.schema import DataConfig, SourceConfig
from sftkit.data.reading import readers
from sftkit.data.tokens import chat, encode, loss_mask, sources, template, text
from sftkit.data.types import Examples, Row
from sftkit.errors import DataError

GOOD = json.dumps({"messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}]})
LONG_LINE = "record too long to read"


def load(path: Path, tokenizer: PreTrainedTokenizerFast, folder: Path, on_bad_row: str = "skip") -> Examples:
    data = DataConfig(train=(), on_bad_row=on_bad_row, cache_dir=str(folder / "cache"))  # type: ignore[arg-type]
    tokenize = sources.RowTokenizer(chat.tokenize, tokenizer, max_length=500)
    return sources.load_sources([SourceConfig(path=str(path))], data, tokenize)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LONGEST_RECORD", 2**20)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_line_that_is_too_long_is_one_bad_row_and_the_next_ones_are_read(
    name: str, short: None, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / name
    lines = [GOOD, "x" * 3_000_000, GOOD, "y" * 2**20, "z" * (2**20 - 1), GOOD]
    content = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    (told,) = [one for one in load(path, tokenizer, tmp_path).findings["a"] if one.reason == LONG_LINE]
    assert (told.kind, told.rows) == ("skipped", 2)
    assert told.first.startswith(f"{path}:2: more than 1 MiB")
    with pytest.raises(DataError, match=r"a\.jsonl(\.gz)?:2: more than 1 MiB: cut it into several records"):
        load(path, tokenizer, tmp_path, "error")


def test_other_files_that_are_too_long_are_refused_too(short: None, tmp_path: Path, monkeypatch) -> None:
    text, csv, listed = tmp_path / "a.txt", tmp_path / "a.csv", tmp_path / "a.json"
    text.write_text("x" * (2**20 + 1))
    csv.write_text("text\n" + "x" * (2**20 + 1))
    listed.write_text(json.dumps(["x" * 2**20]))
    with pytest.raises(DataError, match=r"a\.txt: more than 1 MiB"):
        readers.parsed(next(readers.rows_of(text)))
    with pytest.raises(DataError, match=r"a\.csv:2: more than 1 MiB"):
        next(readers.rows_of(csv))
    monkeypatch.setattr(readers, "LONGEST_JSON", 2**20)
    with pytest.raises(DataError, match=r"a\.json: more than 0 GiB in one JSON value"):
        next(readers.rows_of(listed))
    csv.write_text("text\n" + "x" * 2**19)
    assert len(next(readers.rows_of(csv))[1]["text"]) == 2**19


READ = """
import sys
from sftkit.config.schema import SourceConfig
from sftkit.data.tokens import sources
from sftkit.errors import DataError
try:
    for row in sources.read_source(SourceConfig(path=sys.argv[1])):
        pass
except DataError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.jsonl.gz"])
def test_a_line_of_1_gb_is_refused_without_being_read_into_memory(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with gzip.open(path, "wb", compresslevel=1) if name.endswith(".gz") else open(path, "wb") as file:
        file.write(f"{GOOD}\n".encode())
        for _ in range(1000):
            file.write(b" " * 10**6)
    words = ["prlimit", f"--as={4 * 2**30}", sys.executable, "-c", READ, str(path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    refused = f"{path}:2: more than 32 MiB: cut it into several records (fix the row, or skip and count all such rows"
    assert done.stdout.startswith(refused), done.stderr[-2000:]


def test_a_large_object_with_a_key_twice_is_refused_at_once() -> None:
    began = time.process_time()
    keys = [f'"{i}": 0' for i in range(100_000)]
    with pytest.raises(readers.DuplicateKey, match='the key "99999" twice'):
        readers.loads("{" + ", ".join([*keys, '"99999": 1']) + "}")
    assert time.process_time() - began < 5


def turns(number: int, **answer: str) -> list[dict[str, Any]]:
    ask, reply = {"role": "user", "content": "What comes next?"}, {"role": "assistant", "content": "This.", **answer}
    return [message for _ in range(number) for message in (ask, reply)]


LONG = {
    "chatml": ("chatml", lambda n: turns(n)),
    "llama3": ("llama3", lambda n: turns(n)),
    "earlier answers without their reasoning": ("qwen3", lambda n: turns(n, reasoning_content="I think.")),
    "earlier answers without their empty block": ("qwen3", lambda n: turns(n)),
    "system messages": ("chatml", lambda n: [*turns(n), *({"role": "system", "content": f"{i}!"} for i in range(n)), *turns(1)]),
}  # fmt: skip


@pytest.mark.parametrize(("name", "made"), LONG.values(), ids=LONG)
def test_the_time_of_a_conversation_grows_with_its_turns_and_not_with_their_square(
    name: str, made: Callable[[int], list[dict[str, Any]]], make_tokenizer
) -> None:
    tokenizer = make_tokenizer(name, bos="<s>", eos="<|im_end|>")

    def seconds(number: int) -> float:
        row, began = Row("x", messages=made(number)), time.process_time()
        found = chat.tokenize(row, tokenizer, max_length=100)
        assert found.examples
        assert found.counts["answers"] == sum(
            found.counts.get(name, 0) for name in ("answers_learned", *chat.NOT_LEARNED)
        )
        return time.process_time() - began

    seconds(10)
    few, many = min(seconds(200) for _ in range(2)), min(seconds(800) for _ in range(2))
    assert many < 8 * few + 0.5  # 16 times as long with the square


def test_documents_that_can_only_be_too_long_are_counted_as_those_that_are(make_tokenizer) -> None:
    """What is left out without being rendered is what would be cut or dropped."""
    tokenizer = make_tokenizer("qwen3", eos="<|im_end|>")
    row = Row("x", messages=turns(40, reasoning_content="I think."))
    reach, found = chat._reach, {}
    try:
        for name, one in (("pruned", reach), ("rendered", lambda messages, *_: len(messages))):
            chat._reach = one  # type: ignore[assignment]
            for too_long in ("truncate", "drop"):
                got = chat.tokenize(row, tokenizer, max_length=150, too_long=too_long)
                found[name, too_long] = [e.ids.tolist() for e in got.examples], dict(got.counts), got.note
    finally:
        chat._reach = reach
    for too_long in ("truncate", "drop"):
        assert found["pruned", too_long] == found["rendered", too_long]
        assert found["pruned", too_long][1]["not_learned_too_long"] > 30
        assert len(found["pruned", too_long][0]) > 1


@pytest.mark.parametrize("name", ["chatml", "marks_without_end"])
def test_marks_are_where_transformers_finds_them(name: str, make_tokenizer) -> None:
    tokenizer = make_tokenizer(name)
    messages = [{"role": "system", "content": "Be brief."}, *turns(3)]
    text, spans = template.render_conversation(
        tokenizer, tokenizer.chat_template, Row("x:1", messages=messages), marks=True
    )
    texts, expected = render_jinja_template(
        [messages],
        chat_template=tokenizer.chat_template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    assert (text, list(spans)) == (texts[0], expected[0])
    assert len(spans) >= 3


MIXED = "Größe 12,345 💡👩\u200d👧  \t\n\nif (a != b): 你好吗 שלום don't   <b>x</b> " * 12


@pytest.mark.parametrize("trim_offsets", [True, False])
@pytest.mark.parametrize("text", [MIXED, "a" * 3000 + " b " * 300, "    " * 500 + "x" + "\n" * 900, "早上好" * 500])
def test_a_text_in_pieces_has_the_tokens_of_one_call(
    text: str, trim_offsets: bool, make_tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_tokenizer(trim_offsets=trim_offsets)
    whole = encode.encode(tokenizer, text)
    monkeypatch.setattr(encode, "CHUNK_CHARACTERS", 150)
    chunks, some = encode.encode(tokenizer, text), encode.encode(tokenizer, text, enough=40)
    assert (chunks.complete, len(some.ids) >= 40) == (True, True)
    for one, other, first in zip(whole[:3], chunks[:3], some[:3], strict=True):
        assert one.tolist() == other.tolist()
        assert one[: len(first)].tolist() == first.tolist()
    if text is MIXED:
        assert not some.complete


@pytest.mark.parametrize("name", ["chatml", "llama3", "qwen3", "marks_without_end"])
@pytest.mark.parametrize("targets", ["assistant", "all"])
def test_what_lies_far_beyond_max_length_is_counted_without_being_tokenized(
    name: str, targets: loss_mask.Targets, make_tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_tokenizer(name, bos="<s>", eos="<|im_end|>")
    ask, reply = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
    long = {"question": [{**ask, "content": MIXED}, reply], "answer": [ask, {**reply, "content": MIXED}]}
    records = [*long.values(), [*long["answer"], *long["question"]], [*turns(3), *long["question"], *turns(30)]]

    def made() -> list[Any]:
        found = [
            chat.tokenize(
                Row("x", messages=one),
                tokenizer,
                max_length=60,
                too_long=too_long,
                learning=chat.Learning(targets=targets),
            )
            for one in records
            for too_long in ("truncate", "drop")
        ]
        return [
            (
                [e.ids.tolist() for e in f.examples],
                [e.is_target.tolist() for e in f.examples],
                f.counts,
                f.note,
                f.details,
            )
            for f in found
        ]

    whole = made()
    monkeypatch.setattr(encode, "CHUNK_CHARACTERS", 150)
    for one, other in zip(whole, made(), strict=True):
        assert one[:4] == other[:4]
        assert (one[4] or "").partition("tokens")[2] == (other[4] or "").partition("tokens")[2]


def test_base_training_learns_a_text_in_pieces_as_in_one_call(make_tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer(bos="<|endoftext|>", adds_bos=True)
    row = Row("x", text=MIXED)
    whole = text.tokenize(row, tokenizer, max_length=64)
    monkeypatch.setattr(encode, "CHUNK_CHARACTERS", 150)
    monkeypatch.setattr(text, "CHUNK_CHARACTERS", 150)
    chunks = text.tokenize(row, tokenizer, max_length=64)
    assert [e.ids.tolist() for e in chunks.examples] == [e.ids.tolist() for e in whole.examples]


@pytest.mark.parametrize("kind", ["question", "answer"])
def test_a_record_of_10_mb_takes_a_second_where_little_of_it_is_kept(
    kind: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    words = "How many days are in a week? There are seven days. " * 200_000
    question, answer = (words, "Seven.") if kind == "question" else ("How many?", words)
    row = Row("x", messages=[{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
    began = time.process_time()
    assert chat.tokenize(row, tokenizer, max_length=512).note == (
        "dropped_no_target" if kind == "question" else "truncated"
    )
    assert time.process_time() - began < 6  # the tokenizer alone takes 15 for all of it


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["answer", "text", "turns"])
def test_a_record_of_10_mb_takes_seconds_and_not_all_memory(kind: str, tokenizer: PreTrainedTokenizerFast) -> None:
    words = "How many days are in a week? There are seven days. " * 200_000
    ask, reply = {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}
    messages = {
        "answer": [ask, {**reply, "content": words}],
        "turns": [
            m for _ in range(5000) for m in ({**ask, "content": words[:1000]}, {**reply, "content": words[:1000]})
        ],
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    if kind == "text":
        assert text.tokenize(Row("x", text=words), tokenizer, max_length=1000).examples
    else:
        assert chat.tokenize(Row("x", messages=messages[kind]), tokenizer, max_length=1000).counts["answers"]
    assert time.process_time() - began < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB
