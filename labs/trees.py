"""Measure what the documents of conversations share: the factor that rows of prefix trees save.

python -m labs.trees TOKENIZER FILE... --templates FILE=END... [--rows N] [--length 16384] [--cache DIR] [--out JSON]

Each file of conversations is tokenized with each chat template (data.split_turns on); a template's marks are added to
the tokenizer, and END ends a turn. Trees of answers are taken with all of their paths. `FILE@calls` reads each answer
of a conversation as a row of its own, as the log of an agent's requests has it, of which the last answer is learned.

Expanded: positions of the documents by themselves. Unique: those of their trees, none longer than a row. Speed:
expanded positions a second of processor time for finding the trees of documents in the cache, and for laying them out.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")

from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from labs.tables import markdown_table
from sftkit.config.commands import Parser
from sftkit.config.schema import DataConfig, SourceConfig, TrainConfig
from sftkit.config.terminal import print_text
from sftkit.data.batches.loader import Batches, StepDataset, load_examples
from sftkit.data.batches.pack import make_layout
from sftkit.data.batches.tree import trees_of
from sftkit.data.reading.columns import without_logging
from sftkit.data.tokens import chat
from sftkit.data.tokens.sources import RowTokenizer
from sftkit.errors import DataError
from sftkit.preflight.data import tree_facts
from sftkit.runtime.script import script

COLUMNS = ["source", "template", "rows", "documents", "trees", "expanded", "unique", "factor", "found", "laid out"]


def with_template(folder: str, given: str) -> PreTrainedTokenizerBase:
    """Return a tokenizer with a chat template, FILE=END, and its marks."""
    path, _, end = given.partition("=")
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = Path(path).read_text()
    marks = re.findall(r"<\|\w+\|>|\[gMASK\]|<sop>", tokenizer.chat_template)
    marks = [one for one in dict.fromkeys([*marks, end]) if one not in tokenizer.get_vocab()]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tags = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    tokenizer.eos_token = end
    return tokenizer


def calls(path: str) -> Iterator[str]:
    """Yield a row for each answer of the conversations in a file."""
    with gzip.open(path, "rt") as file:
        for line in file:
            row = json.loads(line)
            for i, message in enumerate(row["messages"], 1):
                if message["role"] == "assistant":
                    yield json.dumps({**row, "messages": row["messages"][:i]}) + "\n"


def measured(tokenizer: PreTrainedTokenizerBase, given: str, args: Any) -> dict[str, Any]:
    """Return the counts and speeds of a file."""
    path, _, shape = given.partition("@")
    if shape == "calls":
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl", delete=False) as file:
            file.writelines(calls(path))
        path = file.name
    source = SourceConfig(path=path, max_rows=args.rows, tree="all" if "trees" in Path(path).name else None)
    settings: dict[str, Any] = {"max_length": args.length, "on_bad_row": "skip", "cache_dir": args.cache, "num_proc": 1}
    data = DataConfig(train=(source,), layout="tree", **settings)
    learning = replace(chat.ANSWERS, targets="last_turn") if shape == "calls" else chat.ANSWERS
    with without_logging():
        examples, _ = load_examples(data, RowTokenizer(chat.tokenize, tokenizer, args.length, learning=learning))
    if shape == "calls":
        os.unlink(path)
    started = time.process_time()
    trees = trees_of(examples, data, args.length)
    found = time.process_time() - started
    train = TrainConfig(global_batch_size=8, micro_batch_size=8, max_steps=1)
    layout = make_layout(data, train, trees.lengths, args.length)
    batches = Batches(StepDataset(examples, layout, trees=trees), 0)
    steps = min(batches.num_steps(epochs=1), 4)
    started = time.process_time()
    positions = sum(one.num_tokens for one in batches.steps(0, steps))
    laid_out = time.process_time() - started
    (facts,) = tree_facts(trees)
    (counts,) = examples.counts.values()
    return {
        **facts,
        "rows": counts["rows"],
        "documents": len(examples),
        "cut": trees.cut,
        "found_per_second": facts["expanded"] / found,
        "laid_out_per_second": positions / laid_out,
    }


def main() -> None:
    """Run the command line."""
    parser = Parser(description=__doc__)
    parser.add_argument("tokenizer", help="hub id or folder of the tokenizer")
    parser.add_argument("files", nargs="+", help="files of conversations")
    parser.add_argument("--templates", nargs="+", required=True, help="chat templates, FILE=END")
    parser.add_argument("--rows", type=int, help="most rows of a file (all)")
    parser.add_argument("--length", type=int, default=16384, help="positions of a row and of a document (16384)")
    parser.add_argument("--cache", default=".cache/sftkit", help="folder of tokenized rows (.cache/sftkit)")
    parser.add_argument("--out", type=Path, help="also write JSON")
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    for template in args.templates:
        tokenizer = with_template(args.tokenizer, template)
        for file in args.files:
            name = Path(file).name.replace(".gz", "").replace(".jsonl", "").replace("@", " @")
            try:
                found = measured(tokenizer, file, args)
            except DataError as error:  # such as a template without tools, for calls of tools
                print_text(str(error), error=True, level="warning")
                continue
            one = {"source": name, "template": Path(template.partition("=")[0]).stem, **found}
            print_text(json.dumps(one))
            results.append(one)
            if args.out:
                args.out.write_text(json.dumps(results, indent=1) + "\n")
    print_text(table(results))


def table(results: list[dict[str, Any]]) -> str:
    """Return the results as a Markdown table."""
    rows = []
    for one in results:
        numbers = [f"{one[key]:,}" for key in ("rows", "documents", "trees", "expanded", "unique")]
        speeds = [f"{one[f'{key}_per_second'] / 1e6:.1f} M/s" for key in ("found", "laid_out")]
        rows.append([one["source"], one["template"], *numbers, f"{one['factor']:.2f}", *speeds])
    return markdown_table(COLUMNS, rows)


if __name__ == "__main__":
    script(main)
