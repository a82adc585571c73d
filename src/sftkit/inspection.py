"""What `scripts/inspect_data.py` shows of tokenized data: lengths, padding of each layout, coloured samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from sftkit.config import DataConfig, TrainConfig
from sftkit.data.pack import PAD_MULTIPLE, GlobalBatch, Layout, make_layout, num_positions, plan_epoch
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


def layouts(data: DataConfig, train: TrainConfig, max_length: int, lengths: np.ndarray) -> list[Layout]:
    """The four layouts of this data on one device; settings that only go with one layout hold for that one."""
    asked = data.pad_multiple or PAD_MULTIPLE
    multiple = asked if max_length % asked == 0 else 1
    settings = (
        replace(data, layout="packed"),
        replace(data, layout="bucketed"),
        replace(data, layout="fixed"),
        replace(data, layout="dynamic", pad_multiple=multiple),
    )
    return [make_layout(setting, max_length, train, world_size=1, lengths=lengths) for setting in settings]


def layout_table(examples: Examples, data: DataConfig, train: TrainConfig, max_length: int) -> Table:
    """Shapes, padding, steps and positions of each layout on this data, and what compiling must gain for it to win."""
    table = Table(title="layouts on this data (one epoch)", title_justify="left", caption_justify="left")
    for column in ("layout", "declared shapes (rows x tokens)"):
        table.add_column(column)
    for column in ("padding", "steps", "positions", "x dynamic", "break-even"):
        table.add_column(column, justify="right", no_wrap=True)
    lengths = examples.lengths
    every = layouts(data, train, max_length, lengths)
    plans = [plan_epoch(lengths, layout, seed=0, epoch=0) for layout in every]
    positions = [num_positions(plan, layout) for plan, layout in zip(plans, every, strict=True)]
    eager = eager_positions(lengths, plans[-1], every[-1])
    for layout, plan, count in zip(every, plans, positions, strict=True):
        table.add_row(
            f"{layout.kind} *" if layout.kind == data.layout else layout.kind,
            shapes_text(layout),
            f"{100 * (1 - lengths.sum() / count):.1f} %",
            f"{len(plan):,}",
            f"{count:,}",
            f"{count / positions[-1]:.2f}",
            f"{count / eager:.2f}",
        )
    table.caption = (
        "* the recipe's own. x dynamic: positions over those of dynamic, whose ranks and micro-batches share the length "
        "of the longest document of the step. break-even: positions over those of an eager loop that pads each "
        "micro-batch to its own longest. So many times faster per position must the compiled step be for the layout to "
        "win; below 1 it wins without any gain from compiling."
    )
    return table


def eager_positions(lengths: np.ndarray, plan: Sequence[GlobalBatch], dynamic: Layout) -> int:
    """Positions of an epoch in which each micro-batch of the dynamic layout is padded to its own longest document."""
    micro_batches = (rows for batch in plan for rows in batch.micro_batches(dynamic, rank=0))
    documents = ([lengths[i] for row in rows for i in row] for rows in micro_batches)
    return sum(dynamic.padded(max(found)) * len(found) for found in documents if found)


def shapes_text(layout: Layout) -> str:
    """The shapes a micro-batch may have."""
    if layout.dynamic:
        step = f", multiples of {layout.pad_multiple}" if layout.pad_multiple > 1 else ""
        return f"{layout.micro_batch_size}x({layout.padded(1)} to {layout.max_length}{step})"
    return ", ".join(f"{rows}x{length}" for rows, length in layout.shapes)


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
