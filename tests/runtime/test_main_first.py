"""What the main process does first may take longer than any collective: nobody waits for it in one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import preloaded
import pytest

SECONDS = 6.0


def run(folder: Path, fault: str, small_bpe: str, **env: str) -> preloaded.Process:
    (folder / "a.jsonl").write_text('{"text": "She sells sea shells."}\n')
    (folder / "tokenizer.json").write_text(small_bpe)
    words = ["tests/workers/turns_worker.py", str(folder), fault, str(SECONDS)]
    settings = {"PYTHONPATH": preloaded.PYTHONPATH, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", **env}
    return preloaded.run(words, 2, {**os.environ, **settings})


def loaded(folder: Path) -> list[dict[str, float]]:
    return [json.loads((folder / f"loaded-by-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_tokenizing_for_longer_than_the_timeout_of_collectives_ends_no_run(tmp_path: Path, small_bpe: str) -> None:
    done = run(tmp_path, "slow", small_bpe)
    assert done.returncode == 0, done.stderr
    main, other = loaded(tmp_path)
    assert (main["documents"], main["total"], other["documents"], other["total"]) == (1, 2, 1, 2)
    assert other["told"] > SECONDS / 2, "the rank that waits reports to its watchdog"
    assert [path.name for path in tmp_path.glob("tokenized-by-*")] == ["tokenized-by-0"]


@pytest.mark.slow
def test_a_rank_that_cannot_see_the_cache_tokenizes_for_itself_and_nobody_gives_up(
    tmp_path: Path, small_bpe: str
) -> None:
    done = run(tmp_path, "own disk", small_bpe)
    assert done.returncode == 0, done.stderr
    assert [one["total"] for one in loaded(tmp_path)] == [2, 2]


@pytest.mark.slow
def test_an_error_of_the_main_process_ends_every_rank_at_once_and_is_told_once(tmp_path: Path, small_bpe: str) -> None:
    done = run(tmp_path, "raises", small_bpe)
    assert done.returncode != 0
    assert done.stderr.count("made of cheese") == 1
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("loaded-by-*"))
