"""Compare how fast rows are tokenized with the tokenizer alone, on one core.

python -m labs.tokenize TOKENIZER FILE... [--template FILE] [--rows 2000] [--chunk 512] [--targets assistant]

For each file: the processor time of all that makes documents of rows in memory (parsed, checked, rendered, tokenized,
masked), against that of the tokenizer's encode_batch for the texts of these documents. `one by one` calls the rule row
by row, `together` calls RowTokenizer.many for chunks. Each number is the median of three measurements.

The share is that of the tokens that encode_batch makes in the same time.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")

from transformers import AutoTokenizer

from labs.tables import markdown_table
from sftkit.config.commands import Parser
from sftkit.config.schema import SourceConfig
from sftkit.config.terminal import print_text
from sftkit.data.reading import rows
from sftkit.data.reading.origin import find_source
from sftkit.data.tokens import chat, text
from sftkit.data.tokens.sources import RowTokenizer
from sftkit.data.types import Row
from sftkit.errors import DataError
from sftkit.runtime.script import script

COLUMNS = ["file", "rows", "tokens a document", "tokenizer, M tokens/s", "one by one", "together", "rows/s"]


def seconds(work: Callable[[], object]) -> float:
    """Return the processor seconds of a piece of work, the median of three."""
    found = []
    for _ in range(3):
        gc.collect()
        started = time.process_time()
        work()
        found.append(time.process_time() - started)
    return statistics.median(found)


def measured(tokenizer: Any, path: str, args: Any) -> list[str]:
    """Return the row of the table for a file."""
    raw = list(islice(find_source(SourceConfig(path=path)).rows(), args.rows))
    rule = text.tokenize_any if args.targets == "all" else chat.tokenize
    tokenize = RowTokenizer(rule, tokenizer, max_length=2**20, learning=chat.Learning(targets=args.targets))
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

    def together() -> None:
        for i in range(0, len(raw), args.chunk):
            tokenize.many(parsed(raw[i : i + args.chunk]))

    slow = seconds(one_by_one)
    texts = [tokenizer.decode(one.ids) for one in documents]
    tokens = sum(len(one.ids) for one in documents)
    documents.clear()
    encode_batch = tokenizer.backend_tokenizer.encode_batch
    alone = seconds(lambda: [one.ids for one in encode_batch(texts, add_special_tokens=False)])
    quick = seconds(together)
    sizes = [f"{len(raw):,}", f"{tokens / max(len(texts), 1):,.0f}", f"{tokens / alone / 1e6:.2f}"]
    return [Path(path).name, *sizes, f"{alone / slow:.2f}", f"{alone / quick:.2f}", f"{len(raw) / quick:,.0f}"]


def main() -> None:
    """Measure each file and print the table."""
    parser = Parser(description=__doc__)
    parser.add_argument("tokenizer")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--template", type=Path)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--targets", choices=["assistant", "last_turn", "all"], default="assistant")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    if args.template:
        tokenizer.chat_template = args.template.read_text()
    print_text(markdown_table(COLUMNS, [measured(tokenizer, path, args) for path in args.files]))


if __name__ == "__main__":
    script(main)
