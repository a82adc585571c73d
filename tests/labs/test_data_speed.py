"""The labs of tokenizing measure what they say, on a few rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEMPLATE = str(ROOT / "src/sftkit/data/tokens/chatml.jinja")


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"instruction": "ask {i}", "output": "answer {i}"}}\n' for i in range(20)))
    return str(path)


@pytest.fixture
def tokenizer(tmp_path: Path, small_bpe: str) -> str:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/tokenizer.json").write_text(small_bpe)
    (tmp_path / "tokenizer/tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return str(tmp_path / "tokenizer")


def lab(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_cold_start_tokenizes_different_rows_which_cached_starts_find(
    tmp_path: Path, rows: str, tokenizer: str
) -> None:
    out = tmp_path / "out"
    table = lab("labs.cold_start", tokenizer, rows, "--rows", "50", "--template", TEMPLATE, "--out", str(out))
    found = json.loads((out / "results.json").read_text())
    assert [path.name for path in out.iterdir()] == ["results.json"]
    assert [one["documents"] for one in (found["cold"], *found["cached"])] == [50] * 4
    assert 0.0 < found["cold"]["first_shard_seconds"] <= found["cold"]["seconds"]
    assert found["cold"]["store_bytes"] == found["cached"][0]["store_bytes"] > 2 * found["cold"]["tokens"]
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:4]] == ["cold", "cached"]


@pytest.mark.slow
def test_tokenizing_is_compared_with_the_tokenizer_alone(rows: str, tokenizer: str) -> None:
    _, _, line, *_ = lab("labs.tokenize", tokenizer, rows, "--template", TEMPLATE).splitlines()
    name, number, *speeds = [one.strip().replace(",", "") for one in line.strip("| ").split("|")]
    assert (name, number) == ("rows.jsonl", "10"), "the others are tokenized before"
    assert all(float(one) > 0 for one in speeds if one != "-")
