"""What was measured as tables, for a terminal and for a page, and when each rank of a pipeline computes and when it
waits, from the raw numbers alone. No torch in this file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labs.patterns.cases import TOPOLOGY_CASES, TopologyCase

PatternResults = dict[str, Any]
Table = tuple[list[str], list[list[str]]]
TimelinePass = dict[str, Any]
"Of a stage with a micro-batch: stage, micro_batch, forward, start and end in seconds."
HELD = ("weights", "gradients", "states", "activations", "most")
_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "send")
PICTURED = ("2 pp, gpipe", "2 pp, 1f1b", "2 pp, interleaved", "4 pp, 1f1b", "4 pp, interleaved")


def measured_cases(results: PatternResults) -> list[TopologyCase]:
    """Return the cases of which there are numbers."""
    return [case for case in TOPOLOGY_CASES if case.key in results["cases"]]


def loss_difference(results: PatternResults, key: str) -> float:
    """Return the most that a loss of a case differs from that of one process, in nats."""
    (own, *_), (alone, *_) = results["cases"][key], results["cases"]["1 one process"]
    return max(abs(a - b) for a, b in zip(own["losses"], alone["losses"], strict=True))


def holds(results: PatternResults) -> Table:
    """Return a table of KiB on the rank that has most of it, and the losses beside those of one process."""
    cells = []
    for case in measured_cases(results):
        ranks = results["cases"][case.key]
        largest = [f"{max(rank['bytes'][name] for rank in ranks) / 1024:,.0f}" for name in HELD]
        same = f"{loss_difference(results, case.key):.1g}" if case.processes > 1 else "-"
        cells.append([str(case.processes), case.name, *largest, same])
    return ["", "layout", "weights", "gradients", "states", "saved", "peak", "loss"], cells


def exchanges(results: PatternResults) -> Table:
    """Return a table of calls and KiB of whole tensors in a step, on the rank that sends most, and what it sends."""
    cells = []
    for case in measured_cases(results):
        if case.processes == 1:
            continue
        # Of one rank, not the most of each kind: in a pipeline the ranks send different things.
        exchanged = max((rank["exchanged"] for rank in results["cases"][case.key]), key=sent)
        by_kind = []
        for kind in _KINDS:
            found = [each for each in exchanged if each["kind"] == kind]
            calls, size = (sum(each[what] for each in found) for what in ("calls", "bytes"))
            by_kind.append(f"{calls}: {size / 1024:,.0f}" if found else "")
        cells.append([str(case.processes), case.name, *by_kind, f"{sent(exchanged) / 1024:,.0f}"])
    return ["", "layout", "all_reduce", "all_gather", "reduce_scatter", "send", "sent"], cells


def sent(exchanged: Sequence[dict[str, Any]]) -> float:
    """Return the bytes that a rank sends in a step."""
    return float(sum(each["sent"] for each in exchanged))


def bubbles(results: PatternResults) -> Table:
    """Return a table of how long ranks of a pipeline wait, and by the formula."""
    cells = []
    for case in measured_cases(results):
        if case.schedule is None:
            continue
        passes = [rank["passes"] for rank in results["cases"][case.key]]
        per_process = case.stages // case.topology.stages
        micro_batches = results["rows"] // case.topology.row_ranks
        formula = bubble_by_formula(case.topology.stages, micro_batches, per_process)
        saved = max(rank["bytes"]["activations"] for rank in results["cases"][case.key])
        waits = [f"{measured_bubble(passes):.1%}", f"{formula:.1%}"]
        cells.append([str(case.processes), case.name, str(micro_batches), *waits, f"{saved / 1024:,.0f}"])
    return ["", "layout", "micro-batches", "waits", "by formula", "saved"], cells


def measured_bubble(ranks: Sequence[Sequence[TimelinePass]]) -> float:
    """Return the share of the ranks' time in which they wait, from the first pass of any of them to the last."""
    passes = [each for rank in ranks for each in rank]
    # From the first pass of any rank: the wait of the last stage for its first micro-batch is a part of the bubble.
    span = max(each["end"] for each in passes) - min(each["start"] for each in passes)
    return 1.0 - sum(each["end"] - each["start"] for each in passes) / (span * len(ranks))


def bubble_by_formula(stages: int, micro_batches: int, stages_per_process: int) -> float:
    """Return the share that a process waits where all stages take equally long and sending takes no time."""
    return (stages - 1) / (stages_per_process * micro_batches + stages - 1)


def timeline_picture(ranks: Sequence[Sequence[TimelinePass]], columns: int = 66) -> list[str]:
    """Return a line for each rank: digits where a micro-batch goes forward, its letter where it goes back, points where
    the rank waits."""
    passes = [each for rank in ranks for each in rank]
    first = min(each["start"] for each in passes)
    span = max(each["end"] for each in passes) - first
    lines = []
    for number, rank in enumerate(ranks):
        line = ["."] * columns
        for each in rank:
            begin, end = (round((each[key] - first) / span * columns) for key in ("start", "end"))
            name = str(each["micro_batch"]) if each["forward"] else "abcdefghij"[each["micro_batch"]]
            line[begin:end] = name * (end - begin)
        lines.append(f"rank {number}  {''.join(line)}")
    return lines


def timeline_pictures(results: PatternResults) -> str:
    """Return when the ranks of some pipelines compute: a digit is the micro-batch of a forward pass, a letter that of
    a backward pass."""
    parts = []
    for case in measured_cases(results):
        if case.key in PICTURED:
            lines = timeline_picture([rank["passes"] for rank in results["cases"][case.key]])
            parts.append("\n".join([f"{case.processes} processes, {case.name}", *lines]))
    return "\n\n".join(parts)


def machine_line(results: PatternResults) -> str:
    """Return what it was measured on."""
    found = results["environment"]
    packages = ", ".join(f"{name} {found['packages'][name]}" for name in ("torch", "transformers"))
    return f"{found['device']}, {packages}, commit {found['git']}, {results['started']}"


def terminal_tables(results: PatternResults) -> str:
    """Return all tables, at most 80 columns wide."""
    config = [f"  {case.processes}  {case.name:<16}{case.config}" for case in measured_cases(results)]
    parts = [
        "What each layout is, of accelerate_configs/ (pp: with train.engine=pipeline):\n" + "\n".join(config),
        "What a rank holds, KiB, most of any rank; loss: difference to one process, nats\n" + _plain(holds(results)),
        "What a rank exchanges in a step, calls: KiB of whole tensors; sent: KiB it sends\n"
        + _plain(exchanges(results)),
        "Pipelines: the share of the time that ranks wait; saved: KiB of activations\n" + _plain(bubbles(results)),
        timeline_pictures(results),
        machine_line(results).replace(", commit", "\ncommit"),
    ]
    return "\n\n".join(part for part in parts if part)


def _plain(content: Table) -> str:
    """Return the table in columns: names left, numbers right."""
    header, cells = content
    widths = [max(len(row[i]) for row in (header, *cells)) for i in range(len(header))]
    lines = []
    for row in (header, *cells):
        names = [text.ljust(width) for text, width in zip(row[:2], widths, strict=False)]
        numbers = [text.rjust(width) for text, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join([*names, *numbers]).rstrip())
    return "\n".join(lines)
