"""Small commands that condense the output of a run, a bench or the tests into a file of benchmarks/.

python -m labs.records traces runs/bench/NAME OUT.json         what a GPU did in the steps that log.trace_at recorded
python -m labs.records run RUN_DIR OUT_DIR                     raw files, loss curve, table, samples before and after
python -m labs.records tests RESULT.xml OUT.json [KEY=VALUE ...]    what pytest --junitxml wrote, condensed
python -m labs.records lengths RECIPE OUT.json [COUNT]         lengths of documents, for a plan's data.lengths
python -m labs.records reasoned GSM8K.jsonl.gz OUT.jsonl.gz    its steps as `reasoning_content`
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median_high
from typing import Any
from xml.etree import ElementTree

import numpy as np

from labs.tables import markdown_table
from sftkit.config.commands import install
from sftkit.config.load import read_config
from sftkit.config.terminal import print_text
from sftkit.errors import ConfigError
from sftkit.rundir.files import read_metric_rows
from sftkit.rundir.names import CONFIG, ENVIRONMENT, EVALS, METRICS_FILE, SAMPLES, SUMMARY, TRACE
from sftkit.runtime.script import script
from sftkit.tracking.trace import covered

# ---- traces ----

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
EXCERPT_US = 100_000.0


def traces(folder: Path, out: Path) -> None:
    """Write a summary of each run of a bench that recorded a trace.

    For each run and rank it has the shares in trace/rankN.json, milliseconds and kernels per step by kind and for the
    40 names with the longest time, milliseconds of communication per step by kernel with the part that does not
    overlap, the host's time in the calls that start kernels, and for rank 0 every kernel of one tenth of a second, as
    [start, length, stream, name] in microseconds, for a picture.
    """
    runs = {}
    for trace in sorted(folder.glob(f"*/{TRACE}")):
        runs[trace.parent.name] = [
            {**json.loads(summary.read_text()), **of_rank(summary, excerpt=summary.stem == "rank0")}
            for summary in sorted(trace.glob("rank*.json"))
        ]
    out.write_text(json.dumps(runs) + "\n")


def of_rank(summary: Path, *, excerpt: bool) -> dict[str, Any]:
    """Return the content of a rank's trace, per step."""
    from labs.explain.kernels import COMMUNICATION, kind_of_kernel

    first, last = json.loads(summary.read_text())["steps"]
    steps = last - first + 1
    with gzip.open(summary.with_suffix(".json.gz"), "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    kernels = [event for event in events if event.get("cat") in ON_DEVICE]
    kinds: dict[str, list[float]] = defaultdict(list)
    names: dict[str, list[float]] = defaultdict(list)
    exchanges: dict[str, list[tuple[float, float]]] = defaultdict(list)
    computing = []
    for event in kernels:
        kind, start, length = kind_of_kernel(event["name"]), event["ts"], event["dur"]
        kinds[kind].append(length)
        names[short(event["name"])].append(length)
        if kind == COMMUNICATION:
            exchanges[short(event["name"])].append((start, start + length))
        else:
            computing.append((start, start + length))
    alone = covered(computing)
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    launches = [event["dur"] for event in calls if "Launch" in event["name"]]
    waits = [event["dur"] for event in calls if "Synchronize" in event["name"]]

    def times(found: dict[str, list[float]]) -> dict[str, Any]:
        return {name: {"ms": sum(each) / 1e3 / steps, "kernels": len(each) / steps} for name, each in found.items()}

    return {
        "by_kind": times(kinds),
        "longest": times(dict(sorted(names.items(), key=lambda one: -sum(one[1]))[:40])),
        "exchanges": {
            name: {
                "ms": sum(end - start for start, end in spans) / 1e3 / steps,
                "exposed_ms": (covered([*computing, *spans]) - alone) / 1e3 / steps,
                "kernels": len(spans) / steps,
            }
            for name, spans in exchanges.items()
        },
        "host": {
            "launches": len(launches) / steps,
            "launch_ms": sum(launches) / 1e3 / steps,
            "wait_ms": sum(waits) / 1e3 / steps,
        },
        **({"excerpt": list(_excerpt(kernels))} if excerpt else {}),
    }


def _excerpt(kernels: list[dict[str, Any]]) -> Iterator[list[Any]]:
    """Yield the kernels of the excerpt, from a quarter of the trace on."""
    kernels = sorted(kernels, key=lambda event: event["ts"])
    if not kernels:
        return
    begin = kernels[0]["ts"] + (kernels[-1]["ts"] - kernels[0]["ts"]) / 4
    for event in kernels:
        if begin <= event["ts"] < begin + EXCERPT_US:
            stream = event.get("args", {}).get("stream", 0)
            yield [round(event["ts"] - begin, 1), round(event["dur"], 1), stream, short(event["name"])]


def short(name: str) -> str:
    """Return a kernel's name without arguments, templates and numbers of generated code."""
    name = re.sub(r"^void ", "", name)
    name = re.sub(r"ncclDevKernel_(\w+?)(_RING.*|_Sum.*)?\(.*", r"nccl \1", name)
    return re.sub(r"[<(].*", "", name)[:60]


# ---- a run ----

RAW = (CONFIG, ENVIRONMENT, METRICS_FILE, EVALS, SAMPLES, SUMMARY)


def run(run_dir: Path, out: Path) -> None:
    """Copy the raw files of a run, and write the page about it."""
    if find_spec("matplotlib") is None:
        raise ConfigError(f"the loss curve needs matplotlib: {install('sftkit[plot]')}")
    raw = out / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for name in RAW:
        shutil.copyfile(run_dir / name, raw / name)
    metrics, evals, samples = (read_metric_rows(raw / name) for name in (METRICS_FILE, EVALS, SAMPLES))
    draw(metrics, evals, out / "loss.png")
    summary, environment = (json.loads((raw / name).read_text()) for name in (SUMMARY, ENVIRONMENT))
    result = f"![training and validation loss](loss.png)\n\n{run_table(metrics, evals, summary, environment)}\n"
    (out / "result.md").write_text(f"# Result\n\n{result}\n## Answers before and after\n\n{answers(samples)}")


def draw(metrics: list[dict[str, Any]], evals: list[dict[str, Any]], out: Path) -> None:
    """Draw the training and the validation loss."""
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    left.plot([r["step"] for r in metrics], [r["train/loss"] for r in metrics], color="tab:blue")
    left.set(title="training loss", xlabel="step", ylabel="nats per target token")
    for name in sorted(key for key in evals[0] if key.endswith("/loss")):
        label = name.removeprefix("val/").removesuffix("/loss")
        if label != "loss":
            right.plot([r["step"] for r in evals], [r[name] for r in evals], marker="o", label=label)
    right.set(title="validation loss", xlabel="step", ylabel="nats per target token", ylim=(0, None))
    right.legend()
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.savefig(out, dpi=110)


def run_table(
    metrics: list[dict[str, Any]], evals: list[dict[str, Any]], summary: dict[str, Any], environment: dict[str, Any]
) -> str:
    """Return machine, speeds and losses of a run as Markdown."""
    steady = metrics[2:-1]  # the first two lines include first-launch costs, the last a partial window
    first, last, packages = metrics[0], metrics[-1], environment["packages"]

    def middle(name: str) -> Any:
        return median_high([line[name] for line in steady])

    counts = (f"{last[f'compile/{name}']:.0f}" for name in ("graphs", "graph_breaks", "recompiles"))
    lines = [
        ("hardware", f"{environment['world_size']} x {environment['device']}"),
        ("versions", ", ".join(f"{name} {packages[name]}" for name in ("torch", "transformers", "accelerate"))),
        ("steps, tokens", f"{summary['step']:,} steps, {summary['tokens']:,} useful tokens"),
        ("seconds in steps", f"{summary['train_seconds']:.0f}"),
        ("useful tokens/s, median of logged windows", f"{middle('perf/tok_per_sec'):,.0f}"),
        ("target tokens/s, median", f"{middle('perf/target_tok_per_sec'):,.0f}"),
        ("MFU over the datasheet peak, median", f"{100 * middle('perf/mfu'):.1f} %"),
        ("peak memory", f"{max(r['mem/peak_gib'] for r in metrics):.1f} GiB"),
        ("padding, data wait (medians)", f"{middle('data/padding_pct'):.1f} %, {middle('perf/data_wait_pct'):.1f} %"),
        ("graphs, graph breaks, recompiles", " / ".join(counts)),
        ("seconds in the compiler, warm-up", f"{last['compile/seconds']:.1f}, {summary['warm_up_seconds']:.1f}"),
        ("training loss, first and last logged", f"{first['train/loss']:.3f}, {last['train/loss']:.3f}"),
    ]
    for name in sorted(key for key in evals[0] if key.endswith(("/loss", "/bpb"))):
        lines.append((f"{name}, before and after", f"{evals[0][name]:.3f}, {evals[-1][name]:.3f}"))
    return markdown_table(("what", "value"), lines)


def answers(samples: list[dict[str, Any]]) -> str:
    """Return the answers of the first and of the last evaluation, one below the other."""
    first, last = min(s["step"] for s in samples), max(s["step"] for s in samples)
    before = {s["prompt"]: s for s in samples if s["step"] == first}
    after = {s["prompt"]: s for s in samples if s["step"] == last}
    parts = []
    for prompt, sample in before.items():
        texts = {"Prompt": prompt[-700:], "Before": sample["answer"], "After": after[prompt]["answer"]}
        quoted = {
            title: "\n".join(f"> {line}" for line in text.splitlines()) or "> (nothing)"
            for title, text in (texts | {"Reference": sample["reference"][:700]}).items()
        }
        parts.append("\n\n".join(f"**{title}**\n\n{text}" for title, text in quoted.items()) + "\n")
    return "\n---\n\n".join(parts)


# ---- tests, lengths, records with reasoning ----


def tests(file: Path, out: Path, *words: str) -> None:
    """Write counts, failures, the reasons of skipped tests and the slowest tests; seconds are those of the whole run.

    Args:
        words: KEY=VALUE facts that the file lacks, such as command, hardware, commit and versions.
    """
    suite = ElementTree.parse(file).getroot().find("testsuite")
    if suite is None:
        raise ConfigError(f"{file}: no results of pytest")
    count = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    cases = list(suite.iter("testcase"))
    bad = [(case, part) for case in cases for part in case if part.tag in ("failure", "error")]
    skipped = Counter(str(part.get("message")) for case in cases for part in case if part.tag == "skipped")
    named = {id(case): f"{case.attrib['classname']}::{case.attrib['name']}" for case in cases}
    longest = sorted(cases, key=lambda case: -float(case.attrib["time"]))[:10]
    found = {
        **dict(word.split("=", 1) for word in words),
        "started": suite.attrib["timestamp"],
        "seconds": round(float(suite.attrib["time"])),
        "passed": count["tests"] - count["failures"] - count["errors"] - count["skipped"],
        "skipped": count["skipped"],
        "failed": {named[id(case)]: str(part.get("message")).partition("\n")[0] for case, part in bad},
        "skipped_because": dict(skipped.most_common()),
        "longest": {named[id(case)]: round(float(case.attrib["time"]), 1) for case in longest},
    }
    out.write_text(json.dumps(found, indent=1) + "\n")


def lengths(recipe: Path, out: Path, count: str = "8000") -> None:
    """Write the lengths of a random sample of a recipe's documents in random order, tokenized as in its stage."""
    from sftkit.data.batches.loader import load_examples
    from sftkit.data.tokens.sources import stage_rule
    from sftkit.preflight.analysis import tokenizer_of

    cfg = read_config(recipe, [], world_size=1)
    tokenizer = tokenizer_of(cfg.model, cfg.data)
    if cfg.data.max_length is None:
        raise ConfigError(f"{recipe}: data.max_length: set it, since it decides where documents are cut")
    tokenize = stage_rule(cfg.run.stage or "sft")(cfg.data, tokenizer, cfg.data.max_length)
    examples, _ = load_examples(cfg.data, tokenize)
    chosen = np.random.default_rng(0).permutation(len(examples))[: int(count)]
    positions = examples.lengths[chosen].tolist()
    found = {
        "sources": [source.path for source in cfg.data.train],
        "tokenizer": cfg.model.tokenizer,
        "documents": len(examples),
        "positions": positions,
        "targets": examples.num_targets[chosen].tolist(),
    }
    out.write_text(json.dumps(found) + "\n")
    print_text(f"{out}: {len(chosen)} of {len(examples)} documents, mean {np.mean(positions):.0f} positions")


def reasoned(source: Path, out: Path) -> None:
    """Write a conversation for each row, without the calculator marks <<...>>."""
    with gzip.open(source, "rt") as read, gzip.open(out, "wt") as write:
        for row in map(json.loads, read):
            steps, number = re.sub(r"<<.*?>>", "", row["answer"]).split("\n#### ")
            answer = {"role": "assistant", "content": f"The answer is {number}.", "reasoning_content": steps}
            write.write(json.dumps({"messages": [{"role": "user", "content": row["question"]}, answer]}) + "\n")


COMMANDS: dict[str, Callable[..., None]] = {
    command.__name__: command for command in (traces, run, tests, lengths, reasoned)
}


def main() -> None:
    """Run the named command."""
    word, *words = sys.argv[1:] or ["--help"]
    if word in ("-h", "--help"):
        print_text((__doc__ or "").strip())
        return
    if word not in COMMANDS or len(words) < 2:
        raise ConfigError((__doc__ or "").strip())
    COMMANDS[word](Path(words[0]), Path(words[1]), *words[2:])


if __name__ == "__main__":
    script(main)
