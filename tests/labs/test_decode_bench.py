"""benchmarks/h200_decode: every way writes the same texts, and tables are made of raw results alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from labs import decode
from labs.pages import decode_tables


def run(way: str, **changes: Any) -> dict[str, Any]:
    measured = {
        "task": "captions", "rows": 64, "way": way, "exact": False, "error": None, "tok_per_sec": 1234.5, "seconds": [1.0, 2.0],
        "first_token_seconds": 0.02, "step_seconds": 0.0034, "recording_seconds": 0.05, "warm_up_seconds": 12.34,
        "same_texts": 0.75, "different_texts": 60,
    }  # fmt: skip
    return measured | changes


def test_a_table_says_what_a_way_wins_and_what_failed() -> None:
    wins = {"times_eager": 4.0, "pays_from_steps": 7.6, "pays_from_tokens": None}
    runs = [
        run("eager steps"),
        run("replayed steps", **wins),
        run("compiled steps", error="RuntimeError: a | b\nc"),
        run("replayed steps", exact=True),
    ]
    environment = {"device": "a GPU", "packages": {"torch": "2.11"}}
    sizes = {"new_tokens": 64, "exact_layers": 4, "exact_tokens": 32}
    text = decode_tables({"environment": environment, "runs": runs, **sizes})
    assert "| 64 | eager steps | 1,234 |  | 20.0 | 3.4 |  | 12.3 |  |  | 75% |" in text
    assert "| 64 | replayed steps | 1,234 | 4.00 | 20.0 | 3.4 | 50.0 | 12.3 | 8 | never | 75% |" in text
    assert "| 64 | compiled steps | failed: RuntimeError: a \\| b c |" in text
    assert "| Captions, ViT-base and GPT-2 small | replayed steps | 75% of 64, 60 different |" in text


@pytest.mark.slow
def test_every_way_writes_what_eager_steps_write(tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"question": word}) + "\n" for word in ("one", "and two", "or three")))
    out = tmp_path / "new" / "out.json"
    words = ["decode.py", str(tmp_path / "tokenizer"), str(questions), str(out), "--tiny"]
    monkeypatch.setattr(sys, "argv", words)
    decode.main()
    runs = json.loads(out.read_text())["runs"]
    assert len(runs) == 24
    assert {found["error"] for found in runs} == {None}
    assert {found["same_texts"] for found in runs} == {1.0}
    assert min(found["different_texts"] for found in runs if found["rows"] > 1) > 1
    compiled = [found for found in runs if found["way"] == "compiled steps" and not found["exact"]]
    # In it is what compiling takes, which is many steps also where all graphs come from the cache on disk.
    assert compiled
    assert all(found["warm_up_seconds"] > 20 * found["step_seconds"] for found in compiled)
