"""Time a cold and a cached start of chat data: from the start of a process until all documents of a run are there.

python -m labs.cold_start TOKENIZER FILE... [--rows 1000000] [--num-proc N] [--template FILE] --out FOLDER

The rows are those of the files, over and over, each with a different number in its first text, so that none is a copy.
A cold start tokenizes them into a store; a cached start, the median of three, finds it. Each is a new process;
`data s` leaves out what it imports. Memory is the most that the process held, and the most of one of its workers. The
folder gets results.json; rows and store are removed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

from labs.tables import markdown_table
from sftkit.config.commands import Parser
from sftkit.config.schema import DataConfig, SourceConfig
from sftkit.config.terminal import print_text
from sftkit.data.reading.origin import find_source
from sftkit.data.reading.readers import parsed
from sftkit.runtime.script import script

COLUMNS = ["start", "seconds", "data s", "first shard s", "rows/s", "M tokens/s", "process GiB", "largest worker GiB"]
TEXTS = ("instruction", "question", "prompt", "query")
"Columns in which a row gets its number."


def numbered(row: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a row with a number in its first text."""
    if name := next((name for name in TEXTS if isinstance(row.get(name), str)), None):
        return {**row, name: f"{number}. {row[name]}"}
    name = "messages" if "messages" in row else "conversations"
    text = "content" if "messages" in row else "value"
    first, *rest = row[name]
    return {**row, name: [{**first, text: f"{number}. {first[text]}"}, *rest]}


def write_rows(files: list[str], number: int, path: Path) -> None:
    """Write the rows that are tokenized."""
    known: list[Any] = [
        parsed(raw) for raw in chain.from_iterable(find_source(SourceConfig(path=one)).rows() for one in files)
    ]
    again = chain.from_iterable(known for _ in count())
    with path.open("w") as file:
        for i, row in enumerate(islice(again, number)):
            file.write(json.dumps(numbered(row, i), ensure_ascii=False) + "\n")


def measure(tokenizer: str, template: str, folder: Path, num_proc: int | None, started: float) -> None:
    """Load the documents as a run does, and print what it took as JSON."""
    from transformers import AutoTokenizer

    from sftkit.data.batches.loader import load_examples
    from sftkit.data.tokens import chat
    from sftkit.data.tokens.sources import RowTokenizer

    first: list[float] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            if not first and next(folder.glob("cache/stores/*/manifest.jsonl"), None):
                first.append(time.time() - started)

    imported = time.time()
    threading.Thread(target=watch, daemon=True).start()
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    if template:
        loaded.chat_template = Path(template).read_text()
    source = SourceConfig(path=str(folder / "rows.jsonl"), name="rows")
    data = DataConfig(train=(source,), max_length=2048, num_proc=num_proc, cache_dir=str(folder / "cache"))
    examples, _ = load_examples(data, RowTokenizer(chat.tokenize, loaded, 2048, data.too_long, chat.ANSWERS))
    seconds = time.time() - started
    done.set()
    own, workers = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    found = {
        "seconds": seconds,
        "data_seconds": seconds + started - imported,
        "first_shard_seconds": first[0] if first else seconds,
        "documents": len(examples),
        "tokens": int(examples.lengths.sum()) + len(examples),
        "process_gib": own / 2**20,
        "largest_worker_gib": workers / 2**20,
        "store_bytes": sum(one.stat().st_size for one in folder.glob("cache/stores/*/*")),
    }
    print_text(json.dumps(found))


def in_process(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure one start in a new process."""
    settings = {"tokenizer": args.tokenizer, "template": args.template, "num_proc": args.num_proc}
    command = [sys.executable, "-m", "labs.cold_start", json.dumps({**settings, "started": time.time()}), str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Measure a cold start, then three cached ones."""
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        settings = json.loads(sys.argv[1])
        measure(folder=Path(sys.argv[2]), **settings)
        return
    parser = Parser(description=__doc__)
    parser.add_argument("tokenizer")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--num-proc", type=int)
    parser.add_argument("--template", default="")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    work = args.out / "work"
    work.mkdir(parents=True)
    try:
        write_rows(args.files, args.rows, work / "rows.jsonl")
        cold = in_process(args, work)
        cached = sorted((in_process(args, work) for _ in range(3)), key=lambda one: float(one["seconds"]))
    finally:
        shutil.rmtree(work)
    middle = cached[len(cached) // 2]
    machine = {"cores": os.cpu_count(), "rows": args.rows, "num_proc": args.num_proc}
    (args.out / "results.json").write_text(json.dumps({**machine, "cold": cold, "cached": cached}, indent=1))
    table = []
    for name, one in (("cold", cold), ("cached", middle)):
        speeds = [f"{args.rows / one['seconds']:,.0f}", f"{one['tokens'] / one['seconds'] / 1e6:.2f}"]
        shard = "" if name == "cached" else f"{one['first_shard_seconds']:.1f}"
        memory = [f"{one['process_gib']:.2f}", f"{one['largest_worker_gib']:.2f}"]
        table.append([name, f"{one['seconds']:.1f}", f"{one['data_seconds']:.1f}", shard, *speeds, *memory])
    print_text(markdown_table(COLUMNS, table))
    per_token = cold["store_bytes"] / cold["tokens"]
    print_text(f"{machine['cores']} cores, {cold['tokens']:,} tokens, {per_token:.2f} bytes a token on disk")


if __name__ == "__main__":
    script(main)
