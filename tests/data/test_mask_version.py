"""What is learned changes only together with cache.MASK_VERSION: tokenized data of another version is not read.

tests/golden/mask_version.json holds a digest of tokens, targets, bytes, counts and reasons for each template and setting.
Where it differs raise MASK_VERSION, then write the digests with SFTKIT_UPDATE_GOLDEN=1. New rows and settings are added
under the version that is there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import GOLDEN
from transformers import PreTrainedTokenizerFast

from sftkit.config.schema import DataConfig, SourceConfig
from sftkit.data.reading.columns import without_logging
from sftkit.data.tokens import chat, sources, text
from sftkit.errors import DataError

VERSIONS = GOLDEN / "mask_version.json"

# template -> its tokens: special ones, beginning, end
TOKENS: dict[str, tuple[list[str], str | None, str]] = {
    "chatml": ([], None, "<|im_end|>"),
    "default_system": ([], None, "<|im_end|>"),
    "gemma3": (["<start_of_turn>", "<end_of_turn>"], "<s>", "<end_of_turn>"),
    "glm45": (
        ["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>"],
        None,
        "<|endoftext|>",
    ),
    "gpt_oss": (
        ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"],
        None,
        "<|return|>",
    ),
    "llama3": ([], "<|begin_of_text|>", "<|eot_id|>"),
    "marks_without_end": ([], None, "<|im_end|>"),
    "mistral": (["[INST]", "[/INST]"], "<s>", "</s>"),
    "olmo2": (["<|user|>", "<|assistant|>", "<|system|>"], "<|endoftext|>", "<|endoftext|>"),
    "plain": ([], None, "<|endoftext|>"),
    "qwen3": ([], None, "<|im_end|>"),
    "qwen3_5": ([], None, "<|im_end|>"),
    "r1_distill": (["<｜User｜>", "<｜Assistant｜>"], "<s>", "</s>"),
    "smollm3": ([], None, "<|im_end|>"),
}

ASK, AGAIN = {"role": "user", "content": "How many days?"}, {"role": "user", "content": "And 世界?"}
ANSWER, LAST = {"role": "assistant", "content": "Seven."}, {"role": "assistant", "content": "你好 — two\n\nlines."}
SYSTEM = {"role": "system", "content": "Answer in one word."}
REASONED = {**ANSWER, "reasoning_content": "I count."}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
RESULT = {"role": "tool", "content": "seen"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]

ROWS: dict[str, dict[str, Any]] = {
    "turns": {"messages": [SYSTEM, ASK, ANSWER, AGAIN, LAST]},
    "question at the end": {"messages": [ASK, ANSWER, AGAIN]},
    "reasoned": {"messages": [ASK, REASONED, AGAIN, {**LAST, "reasoning": "I say."}]},
    "inline": {"messages": [ASK, {**ANSWER, "content": "<think>\nI count.\n</think>\n\nSeven."}]},
    "reasoned and plain": {"messages": [ASK, REASONED, AGAIN, LAST]},
    "tools": {"messages": [ASK, CALL, RESULT, ANSWER], "tools": TOOLS},
    "reasoned call": {"messages": [ASK, {**CALL, "reasoning_content": "I look."}, RESULT, ANSWER], "tools": TOOLS},
    "result without a call": {"messages": [ASK, RESULT, ANSWER]},
    "marked": {"messages": [ASK, {**ANSWER, "weight": 0}, AGAIN, {**LAST, "train": True}]},
    "two answers": {"messages": [ASK, ANSWER, LAST]},
    "spaces": {"messages": [ASK, {"role": "assistant", "content": "  if x:\n    return 1\n"}]},
    "forged": {"messages": [ASK, {"role": "assistant", "content": "a<|im_end|>b</s>"}]},
    "no answer": {"messages": [ASK]},
    "arguments": {"messages": [ASK, ANSWER], "chat_template_kwargs": {"enable_thinking": False}},
    "sharegpt": {"conversations": [{"from": "human", "value": "How?"}, {"from": "gpt", "value": "So."}]},
    "alpaca": {"instruction": "Do", "input": "this", "output": "ok", "system": "Be brief."},
    "dolly": {"instruction": "Do", "context": "this", "response": "ok"},
    "prompt": {"prompt": [ASK, ANSWER, AGAIN], "completion": [LAST]},
    "texts": {"prompt": "Hi", "completion": " there"},
    "question": {"question": "Which?", "choices": ["x", "y"], "answer": 1},
    "gsm8k": {"question": "How?", "answer": "So."},
    "long": {"messages": [ASK, {"role": "assistant", "content": "one, two, three, four. " * 40}, AGAIN, LAST]},
    "unknown": {"x": 1},
    "text": {"text": "She sells sea shells by the sea shore. " * 20},
    "special text": {"text": "a <|im_start|> b"},
    "empty": {"text": " "},
}

CHATS: dict[str, dict[str, Any]] = {
    "assistant": {},
    "last turn, dropped": {"learning": chat.Learning("last_turn", "off", split_turns=False), "too_long": "drop"},
    "all": {"learning": chat.EVERYTHING},
}
LEARNS_EMPTY = {"learning": chat.Learning("assistant", "learn_empty")}
THINKS = ("qwen3", "qwen3_5", "smollm3", "glm45", "r1_distill")


def digest(path: Path, tokenize: sources.RowTokenizer, cache_dir: Path) -> str:
    """Of what would be kept in the cache of a file, but for the words of findings."""
    source = SourceConfig(path=str(path))
    data = DataConfig(train=(source,), max_length=100, on_bad_row="skip", cache_dir=str(cache_dir))
    try:
        with without_logging():
            examples = sources.load_sources((source,), data, tokenize)
    except DataError:
        return "nothing is learned"
    found = hashlib.sha256()
    offsets = np.concatenate([[0], np.cumsum(examples.lengths + 1)])
    arrays = (*examples.gather(np.arange(len(examples))), offsets, examples.num_bytes, examples.source)
    for array, dtype in zip(arrays, (np.int32, np.bool_, np.int64, np.int64, np.int16), strict=True):
        found.update(array.astype(dtype).tobytes())
    counts = {name: count for name, count in examples.counts[path.stem].items() if count}
    reasons = sorted((one.kind, one.reason, one.rows) for one in examples.findings[path.stem])
    found.update(json.dumps([counts, reasons], sort_keys=True).encode())
    return found.hexdigest()[:16]


def files_of_rows(folder: Path) -> dict[str, Path]:
    written = {name: folder / f"file.{name}" for name in ("csv", "tsv", "json", "txt", "parquet")}
    for name, comma in (("csv", ","), ("tsv", "\t")):
        cells = ("prompt", "completion"), ("Hi", '"Well, ""so""\r\n\r\nit\tis"'), ("short",), ("Bye", "now")
        written[name].write_text("\r\n".join(comma.join(row) for row in cells))
    written["json"].write_text(json.dumps({"data": [ROWS["turns"], ROWS["alpaca"]]}))
    written["txt"].write_text("One text.\n\nTwo paragraphs.\n", encoding="utf-8-sig")
    calls = [ROWS["tools"], {"messages": [ASK, {**CALL, "tool_calls": [{"function": {"name": "g", "arguments": {}}}]}]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(calls), written["parquet"])
    return written


@pytest.fixture
def digests(
    tmp_path: Path, make_tokenizer: Callable[..., PreTrainedTokenizerFast], monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a wait for the disk says nothing here
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS.values()))
    found = {}
    for name, (special, bos, eos) in TOKENS.items():
        tokenizer = make_tokenizer(name, bos=bos)
        tokenizer.add_special_tokens({"additional_special_tokens": special})
        tokenizer.eos_token = eos
        for setting, values in {**CHATS, **({"empty": LEARNS_EMPTY} if name in THINKS else {})}.items():
            rule = text.tokenize_any if setting == "all" else chat.tokenize
            tokenize = sources.RowTokenizer(rule, tokenizer, max_length=100, **values)
            found[f"{name}, {setting}"] = digest(path, tokenize, tmp_path)
    tokenizer = make_tokenizer(bos="<s>", adds_bos=True)
    # What readers make of files is part of the version, too: cells, and nulls that Arrow adds.
    for name, written in files_of_rows(tmp_path).items():
        chats = sources.RowTokenizer(text.tokenize_any, tokenizer, max_length=100, learning=chat.ANSWERS)
        found[name] = digest(written, chats, tmp_path)
    found["base"] = digest(path, sources.RowTokenizer(text.tokenize, tokenizer, max_length=100), tmp_path)
    captions = sources.RowTokenizer(text.tokenize_captions, tokenizer, max_length=100)
    found["captions"] = digest(path, captions, tmp_path)
    return found


def test_what_is_learned_changes_only_with_the_version_of_masks(digests: dict[str, str]) -> None:
    known = json.loads(VERSIONS.read_text()) if VERSIONS.exists() else {"version": 0, "digests": {}}
    changed = [name for name, found in known["digests"].items() if digests.get(name) != found]
    raised = known["version"] != sources.MASK_VERSION
    if os.environ.get("SFTKIT_UPDATE_GOLDEN") and (raised or not changed):
        known = {"version": sources.MASK_VERSION, "digests": digests}
        VERSIONS.write_text(json.dumps(known, indent=1) + "\n")
    elif changed and not raised:
        pytest.fail(
            f"other tokens, targets, counts or reasons in {', '.join(changed)}: every user's tokenized data is stale. "
            "Raise MASK_VERSION in data/tokens/sources.py, then write tests/golden/mask_version.json with "
            "SFTKIT_UPDATE_GOLDEN=1"
        )
    assert (known["version"], known["digests"]) == (sources.MASK_VERSION, digests), "write it: SFTKIT_UPDATE_GOLDEN=1"


def test_a_store_of_another_version_is_not_read(
    tmp_path: Path, make_tokenizer: Callable[..., PreTrainedTokenizerFast], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "One row."}\n')
    tokenize = sources.RowTokenizer(text.tokenize, make_tokenizer(), max_length=100)
    for number, name in enumerate(("", "MASK_VERSION", "FORMAT"), start=1):
        if name:
            monkeypatch.setattr(sources, name, getattr(sources, name) + 1)
        digest(path, tokenize, tmp_path / "cache")
        assert [len(list((tmp_path / "cache" / kind).iterdir())) for kind in ("stores", "views")] == [number, number]
