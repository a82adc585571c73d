"""Run by test_main_first.py: a rank that tokenizes for longer than the process group's timeout.

turns_worker.py FOLDER FAULT SECONDS
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from sftkit.config.schema import DataConfig, RunConfig, SourceConfig, TrainConfig
from sftkit.data.batches.loader import load_examples
from sftkit.data.tokens import text
from sftkit.data.tokens.sources import RowTokenizer
from sftkit.data.types import Row, Tokenized
from sftkit.errors import DataError
from sftkit.runtime import start as runtime
from sftkit.runtime.script import script


def main(folder: str, fault: str, seconds: str) -> None:
    """Write what this rank has loaded, and how often it told the watchdog that it waits."""

    def tokenize_slowly(row: Row, tokenizer: Any, max_length: int) -> Tokenized:
        Path(folder, f"tokenized-by-{os.environ['RANK']}").touch()
        time.sleep(float(seconds))
        if fault == "raises":
            raise DataError(f"{row.where}: made of cheese", reason="cheese")
        return text.tokenize(row, tokenizer, max_length=max_length)

    runtime.GROUP_TIMEOUT = timedelta(seconds=float(seconds) / 2)
    data = DataConfig(train=(SourceConfig(path=f"{folder}/a.jsonl"),), cache_dir=f"{folder}/cache")
    if fault == "own disk":  # each machine fills a cache of its own
        data = replace(data, cache_dir=f"{folder}/cache-{os.environ['RANK']}")
    with runtime.start(RunConfig(dir=folder), TrainConfig()) as rt:
        status, told = rt.open_status(Path(folder)), [0]

        def progress() -> None:
            told[0] += 1

        status.progress = progress  # type: ignore[method-assign]
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json", eos_token="<|endoftext|>")
        training, _ = load_examples(data, RowTokenizer(tokenize_slowly, tokenizer, 32), rt)
        total = rt.sum(torch.tensor([float(len(training))], device=rt.device))
        found = {"documents": len(training), "total": total.item(), "told": told[0]}
        Path(folder, f"loaded-by-{rt.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    script(partial(main, *sys.argv[1:]))
