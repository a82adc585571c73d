"""What `scripts/inspect_data.py` shows of tokenized data: lengths, padding of each layout, coloured samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from sftkit.config import DataConfig, TrainConfig
from sftkit.data.pack import Layout, make_layout, padding_share, plan_epoch
from sftkit.data.types import Examples

BAR_WIDTH = 40


def length_histogram(examples: Examples) -> str:
    """Documents by length in tokens, in powers of two, and the percentiles."""
    lengths = examples.lengths
    low = 2 ** int(np.log2(max(lengths.min(), 1)))
    edges = [low]
    while edges[-1] <= lengths.max():
        edges.append(edges[-1] * 2)
    counts, _ = np.histogram(lengths, bins=edges)
    lines = ["document length in tokens"]
    for start, end, count in zip(edges[:-1], edges[1:], counts, strict=True):
        bar = "█" * round(BAR_WIDTH * count / counts.max())
        lines.append(f"  {start:>7,} .. {end - 1:<7,} {count:>9,}  {bar}")
    p50, p90, p99 = np.percentile(lengths, [50, 90, 99])
    lines.append(
        f"  mean {lengths.mean():,.0f}, median {p50:,.0f}, p90 {p90:,.0f}, p99 {p99:,.0f}, max {lengths.max():,}"
    )
    return "\n".join(lines)


def power_of_two_buckets(max_length: int) -> tuple[int, ...]:
    """max_length and its halves down to 32: buckets for data whose recipe names none."""
    lengths = [max_length]
    while lengths[-1] % 2 == 0 and lengths[-1] >= 64:
        lengths.append(lengths[-1] // 2)
    return tuple(reversed(lengths))


def layouts(data: DataConfig, train: TrainConfig, max_length: int) -> list[Layout]:
    """The three layouts of this data on one device."""
    buckets = data.bucket_lengths or power_of_two_buckets(max_length)
    settings = (
        replace(data, layout="packed", bucket_lengths=None),
        replace(data, layout="bucketed", bucket_lengths=buckets),
        replace(data, layout="fixed", bucket_lengths=None),
    )
    return [make_layout(setting, max_length, train, world_size=1) for setting in settings]


def layout_table(examples: Examples, data: DataConfig, train: TrainConfig, max_length: int) -> Table:
    """Padding and steps per epoch of each layout on this data."""
    table = Table(title="layouts on this data (one epoch)", title_justify="left")
    for column in ("layout", "declared shapes (rows x tokens)", "padding", "steps"):
        table.add_column(column, justify="left" if column in ("layout", "declared shapes (rows x tokens)") else "right")
    for layout in layouts(data, train, max_length):
        shapes = ", ".join(f"{rows}x{length}" for rows, length in layout.shapes)
        name = f"{layout.kind} *" if layout.kind == data.layout else layout.kind
        steps = len(plan_epoch(examples.lengths, layout, seed=0, epoch=0))
        table.add_row(name, shapes, f"{100 * padding_share(examples.lengths, layout):.1f} %", f"{steps:,}")
    table.caption = "* the recipe's own"
    return table


def coloured(examples: Examples, tokenizer: PreTrainedTokenizerBase, count: int) -> Iterator[Text]:
    """Documents spread over the data: targets green and underlined, context dim."""
    for i in np.linspace(0, len(examples) - 1, num=min(count, len(examples)), dtype=int):
        example = examples[int(i)]
        targets = int(example.is_target.sum())
        label = examples.source_names[examples.source[i]]
        text = Text(f"\n--- {label}, document {i:,}: {len(example.ids)} tokens, {targets} targets\n", style="bold")
        for start, end in runs(example.is_target):
            piece = tokenizer.decode(example.ids[start:end].tolist())
            text.append(str(piece), style="not bold green underline" if example.is_target[start] else "not bold dim")
        yield text


def runs(flags: np.ndarray) -> Iterator[tuple[int, int]]:
    """[start, end) of each run of equal flags."""
    edges = [0, *(np.flatnonzero(np.diff(flags)) + 1).tolist(), len(flags)]
    yield from pairwise(edges)
