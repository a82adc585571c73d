"""Compare how fast rows are tokenized with the tokenizer alone, on one core.

python -m labs.tokenize TOKENIZER FILE... [--template FILE] [--rows 2000] [--chunk 512] [--out JSON]

For each file: the processor time of all that makes documents of rows in memory (parsed, checked, rendered, tokenized,
masked), against that of the tokenizer's encode_batch for the texts of these documents. `one by one` calls the rule row
by row, `together` calls RowTokenizer.many for chunks, after as many other rows of the file: what is learned from rows
is known from the first thousands on. `stored` is `together` and a shard of a store on disk, as `sftkit data prepare`
writes it.

Measured if TRL can be imported: `TRL's function` is the tokenize function of its SFTTrainer with assistant_only_loss,
row by row, for parsed rows. `TRL prepared` is what the trainer does with a dataset of these rows in memory, until it
has columns of ids and labels in memory (`SFTTrainer._prepare_dataset`, neither packed nor cut), which is `stored`
there. Each share is the median of three rounds, in which all are measured one after the other.

The share is that of the tokens that encode_batch makes in the same time.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")

from transformers import AutoTokenizer

from labs.tables import markdown_table
from sftkit.config.commands import Parser
from sftkit.config.schema import SourceConfig
from sftkit.config.terminal import print_text
from sftkit.data.reading import rows
from sftkit.data.reading.origin import find_source
from sftkit.data.store import writing
from sftkit.data.store.shards import RowSpan, Store
from sftkit.data.tokens import chat, text
from sftkit.data.tokens.processes import tokenize_chunk
from sftkit.data.tokens.sources import RowTokenizer
from sftkit.data.types import Row
from sftkit.errors import DataError
from sftkit.runtime.script import script

COLUMNS = ["file", "rows", "tokens a document", "tokenizer, M tokens/s", "one by one", "together", "stored"]
TRL_COLUMNS = ["TRL's function", "TRL prepared"]


def seconds(work: Callable[[], object]) -> float:
    """Return the processor seconds of a piece of work."""
    gc.collect()
    started = time.process_time()
    work()
    return time.process_time() - started


def of_trl(tokenizer: Any, given: list[Row]) -> list[Callable[[], object]]:
    """Return what TRL's SFTTrainer does with conversations: its function for each, and all that it does with a dataset
    of them; nothing without TRL."""
    try:
        from trl.trainer.sft_trainer import SFTTrainer, _tokenize  # type: ignore[import-not-found]
    except ImportError:
        return []
    from accelerate import PartialState
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    PartialState()
    settings = {"chat_template": tokenizer.chat_template, "return_assistant_tokens_mask": True}
    trainer = SimpleNamespace(_tokenizer=tokenizer, chat_template=tokenizer.chat_template, completion_only_loss=False)
    args = SimpleNamespace(
        dataset_num_proc=None,
        dataset_text_field="text",
        assistant_only_loss=True,
        max_length=None,
        shuffle_dataset=False,
    )
    columns = [{"messages": row.messages, **({"tools": json.dumps(row.tools)} if row.tools else {})} for row in given]
    dataset = Dataset.from_list(columns, on_mixed_types="use_json")

    def function() -> object:
        found = [_tokenize(tokenizer, row.messages, tools=row.tools, **settings) for row in given]
        return [{name: one[name] for name in ("input_ids", "assistant_masks")} for one in found]

    def prepared() -> object:
        return SFTTrainer._prepare_dataset(
            trainer, dataset, tokenizer, args, packing=False, formatting_func=None, dataset_name="train"
        )

    return [function, prepared]


def measured(tokenizer: Any, path: str, args: Any) -> list[str]:
    """Return the row of the table for a file."""
    every = list(islice(find_source(SourceConfig(path=path)).rows(), 2 * args.rows))
    before = every[: len(every) // 2]
    raw = every[len(before) :]
    rule = text.tokenize_any if args.targets == "all" else chat.tokenize
    settings: dict[str, Any] = {"max_length": 2**20, "learning": chat.Learning(targets=args.targets)}
    tokenize = RowTokenizer(rule, tokenizer, **settings)
    documents: list[Any] = []

    def parsed(chunk: list[Any]) -> list[Row]:
        found = []
        for one in chunk:
            try:
                found.append(rows.parse(one))
            except DataError:
                continue
        return found

    def one_by_one() -> None:
        documents.clear()
        for row in parsed(raw):
            try:
                documents.extend(tokenize(row).examples)
            except DataError:
                continue

    def together(given: list[Any]) -> None:
        for i in range(0, len(given), args.chunk):
            tokenize.many(parsed(given[i : i + args.chunk]))

    def stored() -> None:
        chunks = ((i, raw[i : i + args.chunk]) for i in range(0, len(raw), args.chunk))
        with tempfile.TemporaryDirectory() as folder:
            store = Store(Path(folder), len(tokenizer))
            parts = (tokenize_chunk(tokenize, "skip", store.dtype, chunk) for chunk in chunks)
            writing.write_shard(store, RowSpan(0, len(raw)), parts, path, on_disk=True)

    def learn() -> None:
        nonlocal tokenize
        tokenize = RowTokenizer(rule, tokenizer, **settings)
        together(before)

    one_by_one()
    texts = [tokenizer.decode(one.ids) for one in documents]
    tokens = sum(len(one.ids) for one in documents)
    encode_batch = tokenizer.backend_tokenizer.encode_batch
    trl = of_trl(tokenizer, [row for row in parsed(raw) if row.messages])
    ways = [one_by_one, lambda: together(raw), stored, *trl]
    alone, quick, shares = [], [], []
    for _ in range(3):  # one after the other in each round: a machine that others use changes its speed
        alone.append(seconds(lambda: [one.ids for one in encode_batch(texts, add_special_tokens=False)]))
        taken = []
        for way in ways:
            learn()  # from other rows: a way before has met these
            taken.append(seconds(way))
        quick.append(taken[2])
        shares.append([alone[-1] / one for one in taken])
    found = [f"{statistics.median(share):.2f}" for share in zip(*shares, strict=True)]
    speeds = tokens / statistics.median(alone) / 1e6, len(raw) / statistics.median(quick)
    sizes = [f"{len(raw):,}", f"{tokens / max(len(texts), 1):,.0f}", f"{speeds[0]:.2f}"]
    return [Path(path).name, *sizes, *found, f"{speeds[1]:,.0f}"]


def main() -> None:
    """Measure each file and print the table."""
    parser = Parser(description=__doc__)
    parser.add_argument("tokenizer")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--template", type=Path)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--out", type=Path, help="file for the table as JSON")
    parser.add_argument("--targets", choices=["assistant", "last_turn", "all"], default="assistant")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    if args.template:
        tokenizer.chat_template = args.template.read_text()
    table = [measured(tokenizer, path, args) for path in args.files]
    with_trl = TRL_COLUMNS if len(table[0]) > len(COLUMNS) + 1 else []
    columns = [*COLUMNS, *with_trl, "rows/s stored"]
    if args.out:
        args.out.write_text(json.dumps([dict(zip(columns, row, strict=True)) for row in table], indent=1))
    print_text(markdown_table(columns, table))


if __name__ == "__main__":
    script(main)
