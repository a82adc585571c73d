"""Train a small transformer on one, two and four processes of this CPU in every layout, and report what each rank \
holds, sends and waits for.

python -m labs.patterns [--out FILE.json] [--processes N ...]
python -m labs.patterns --show FILE.json"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from labs.jobs import run_logged
from sftkit.config.commands import Parser, path, program_path, running
from sftkit.config.terminal import print_text
from sftkit.config.topology import Topology
from sftkit.errors import ConfigError
from sftkit.runtime.signals import exit_on_signals, starting_processes

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
"Layers and heads, divisible by two and four ranks, and into two stages on each of four ranks."
ROWS, ROW_LENGTH = 4, 128
"Rows of an optimizer step over all ranks, and their positions; a micro-batch is one row."
TRAINED_STEPS = 2


@dataclass(frozen=True)
class TopologyCase:
    """A layout, by its name in the tables."""

    name: str
    topology: Topology
    config: str
    "accelerate config, and the settings changed in it; a pipeline also has train.engine=pipeline"
    schedule: Literal["gpipe", "1f1b", "interleaved"] | None = None
    "schedule of a pipeline"
    lean: bool = False
    "whether weights are gathered for each pass and gradients exchanged after each micro-batch, as with scarce memory"

    @property
    def processes(self) -> int:
        """Return its number of processes."""
        return self.topology.world_size

    @property
    def stages(self) -> int:
        """Return its number of stages; 1 without a pipeline."""
        return self.topology.stages * (2 if self.schedule == "interleaved" else 1)

    @property
    def key(self) -> str:
        """Return its name among all cases: `2 ddp`."""
        return f"{self.processes} {self.name}"


def _pipelines(stages: int) -> tuple[TopologyCase, ...]:
    topology = Topology(stages=stages)
    return (
        TopologyCase("pp, gpipe", topology, "pp.yaml, train.pipeline_schedule=gpipe", "gpipe"),
        TopologyCase("pp, 1f1b", topology, "pp.yaml", "1f1b"),
        TopologyCase("pp, interleaved", topology, "pp.yaml, train.pipeline_schedule=interleaved", "interleaved"),
    )


TOPOLOGY_CASES: tuple[TopologyCase, ...] = (
    TopologyCase("one process", Topology(), "single_gpu.yaml, cpu.yaml"),
    TopologyCase("ddp", Topology(replicas=2), "ddp.yaml"),
    TopologyCase("fsdp2", Topology(shards=2, sharded=True), "fsdp2.yaml"),
    TopologyCase("fsdp2, lean", Topology(shards=2, sharded=True), "fsdp2.yaml, where memory is scarce", lean=True),
    TopologyCase("tp", Topology(tensor=2, sharded=True), "tp.yaml"),
    TopologyCase("cp", Topology(context=2, sharded=True), "cp.yaml"),
    *_pipelines(2),
    TopologyCase("ddp", Topology(replicas=4), "ddp.yaml"),
    TopologyCase("fsdp2", Topology(shards=4, sharded=True), "fsdp2.yaml"),
    TopologyCase("hsdp 2 x 2", Topology(replicas=2, shards=2, sharded=True), "hsdp.yaml"),
    TopologyCase("tp", Topology(tensor=4, sharded=True), "tp.yaml, parallelism_config_tp_size 4"),
    TopologyCase("fsdp2 2 x tp 2", Topology(shards=2, tensor=2, sharded=True), "tp.yaml"),
    *_pipelines(4),
    TopologyCase("pp 2 x ddp 2", Topology(stages=2, replicas=2), "pp.yaml, train.pipeline_stages=2", "1f1b"),
    TopologyCase(
        "pp 2 x fsdp2 2", Topology(stages=2, shards=2, sharded=True), "fsdp2.yaml, train.pipeline_stages=2", "1f1b"
    ),
)

PatternResults = dict[str, Any]
Table = tuple[list[str], list[list[str]]]
TimelinePass = dict[str, Any]
"Pass of a stage with a micro-batch: stage, micro_batch, forward, start and end in seconds."
HELD = ("weights", "gradients", "states", "activations", "most")
_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "send")
PICTURED = ("2 pp, gpipe", "2 pp, 1f1b", "2 pp, interleaved", "4 pp, 1f1b", "4 pp, interleaved")


def measured_cases(results: PatternResults) -> list[TopologyCase]:
    """Return the cases with results."""
    return [case for case in TOPOLOGY_CASES if case.key in results["cases"]]


def loss_difference(results: PatternResults, key: str) -> float:
    """Return the largest difference of a case's loss from that of one process, in nats."""
    (own, *_), (alone, *_) = results["cases"][key], results["cases"]["1 one process"]
    return max(abs(a - b) for a, b in zip(own["losses"], alone["losses"], strict=True))


def holds(results: PatternResults) -> Table:
    """Return a table of KiB on the rank that holds most, and the losses compared with one process."""
    cells = []
    for case in measured_cases(results):
        ranks = results["cases"][case.key]
        largest = [f"{max(rank['bytes'][name] for rank in ranks) / 1024:,.0f}" for name in HELD]
        same = f"{loss_difference(results, case.key):.1g}" if case.processes > 1 else "-"
        cells.append([str(case.processes), case.name, *largest, same])
    return ["", "layout", "weights", "gradients", "states", "saved", "peak", "loss"], cells


def exchanges(results: PatternResults) -> Table:
    """Return a table of calls and KiB of whole tensors in a step on the rank that sends most, and its sent bytes."""
    cells = []
    for case in measured_cases(results):
        if case.processes == 1:
            continue
        # Values of one rank, not the maximum of each kind: in a pipeline the ranks send different tensors.
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
    """Return a table of the ranks' waiting time in a pipeline, measured and by the formula."""
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
    """Return the share of the ranks' time spent waiting, from the first pass of any of them to the last."""
    passes = [each for rank in ranks for each in rank]
    # From the first pass of any rank: the last stage's wait for its first micro-batch is part of the bubble.
    span = max(each["end"] for each in passes) - min(each["start"] for each in passes)
    return 1.0 - sum(each["end"] - each["start"] for each in passes) / (span * len(ranks))


def bubble_by_formula(stages: int, micro_batches: int, stages_per_process: int) -> float:
    """Return the share of time that a process waits if all stages take equally long and sending takes no time."""
    return (stages - 1) / (stages_per_process * micro_batches + stages - 1)


def timeline_picture(ranks: Sequence[Sequence[TimelinePass]], columns: int = 66) -> list[str]:
    """Return a line for each rank: a digit for a micro-batch's forward pass, its letter for the backward pass, points
    while the rank waits.
    """
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
    a backward pass.
    """
    parts = []
    for case in measured_cases(results):
        if case.key in PICTURED:
            lines = timeline_picture([rank["passes"] for rank in results["cases"][case.key]])
            parts.append("\n".join([f"{case.processes} processes, {case.name}", *lines]))
    return "\n\n".join(parts)


def machine_line(results: PatternResults) -> str:
    """Return a line about the machine of the measurement."""
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


_TIMEOUT_SECONDS = 3600
"Total seconds that all layouts of one number of processes may take."
# One thread each: processes that share the cores must not wait for each other's threads.
_ENVIRONMENT = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def main() -> int:
    """Measure, or show earlier results, as the arguments request. Return the exit code: 1 if a measurement failed."""
    prog = running(f"{program_path('python')} -m labs.patterns")
    words = Parser((__doc__ or "").partition("\n")[0], prog=prog)
    words.add_argument(
        "--out", type=path, metavar="FILE.json", help="where the raw numbers go (runs/patterns-TIME.json)"
    )
    words.add_argument(
        "--processes", nargs="+", type=int, choices=(1, 2, 4), default=(1, 2, 4), metavar="N", help="1, 2, 4"
    )
    words.add_argument("--show", type=path, metavar="FILE.json", help="the tables of earlier raw numbers")
    args = words.parse_args()
    if args.show:
        print_text(terminal_tables(read_pattern_results(args.show)))
        return 0
    out = args.out or Path(f"runs/patterns-{time.strftime('%Y%m%d-%H%M%S')}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        "model": MODEL,
        "rows": ROWS,
        "row_length": ROW_LENGTH,
        "steps": TRAINED_STEPS,
        "environment": {},
        "cases": {},
    }
    failed = False
    with exit_on_signals(), tempfile.TemporaryDirectory(prefix="sftkit-patterns-") as folder:
        for processes in sorted({1, *args.processes}):  # the results of one process are the reference for the others
            cases = [case for case in TOPOLOGY_CASES if case.processes == processes]
            started = time.perf_counter()
            found, problem = _measure(cases, Path(folder))
            results["environment"] |= found.get("environment", {})
            results["cases"] |= found.get("cases", {})
            failed |= problem is not None
            plural = "es" if processes > 1 else ""
            print_text(
                f"{processes} process{plural}: "
                f"{problem or f'{len(cases)} layouts in {time.perf_counter() - started:.0f} s'}"
            )
    out.write_text(json.dumps(results, separators=(",", ":")) + "\n")
    print_text(f"\n{terminal_tables(results)}\nraw: {out}")
    return int(failed)


def read_pattern_results(file: Path) -> dict[str, Any]:
    """Read the raw numbers that `main` wrote.

    Raises:
        ConfigError: the file has none.
    """
    try:
        results: dict[str, Any] = json.loads(file.read_text())
        results["cases"]["1 one process"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"--show: {file}: no raw numbers of this command ({type(error).__name__}: {error}): name the file "
            "that --out wrote"
        ) from None
    return results


def _measure(cases: list[TopologyCase], folder: Path) -> tuple[dict[str, Any], str | None]:
    """Measure layouts with the same number of processes; return (the processes' results, the reason of a
    failure or None).
    """
    (processes,) = {case.processes for case in cases}
    out, log = folder / f"{processes}.json", folder / f"{processes}.log"
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)] if processes > 1 else []
    words = [*launcher, "-m", "labs.patterns.measure", str(out), *(case.key for case in cases)]
    # Ctrl-C reaches only this process, which then ends the ranks: ranks on the terminal would get it too, during
    # their imports.
    with starting_processes():
        problem = run_logged([sys.executable, *words], log, _ENVIRONMENT, _TIMEOUT_SECONDS)
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    return found, problem and f"{problem}\n{log.read_text()[-3000:]}"
