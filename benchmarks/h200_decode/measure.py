"""Decoding speed of evaluation, answers of a causal model and captions of pictures: transformers' own generate, eager steps,
steps replayed as a CUDA graph, and steps and encoder compiled with reduce-overhead.

python benchmarks/h200_decode/measure.py TOKENIZER_FOLDER QUESTIONS.jsonl[.gz] OUT.json [--seconds 300] [--tiny]

The models are the Qwen3 0.6B shape, asked questions of GSM8K through the chat template, and ViT-base with GPT-2 small, which
describe pictures of data/demo/builtin.py; their weights are random (speed does not depend on them; no text ends by itself).
Speeds are of bf16, where two best tokens that are nearly equal may change places from kernel to kernel. Whether texts are the
same is asked of the same shapes with fewer layers in fp32 (`exact`), and of the speeds' own texts for information.

Every step is timed by itself. `warm_up_seconds` is what the first call took longer than later ones, compiling included;
`recording_seconds` what the first two steps of a batch took longer than two others; `pays_from_steps` how many steps of a
batch win that back, `pays_from_tokens` how many tokens in all win back the warm-up. Parts that fail leave their error behind,
and all end within --seconds. --tiny: two small layers, to try the
script, however long it takes.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tables import table
from tasks import TINY, Sizes, Task, Texts, build
from transformers import AutoTokenizer
from ways import COMPILE, COMPILED, DEVICE, EAGER, PLAIN, Way

from sftkit.runtime.hardware import environment

SHOWN = 80
"Characters of an error."
MAX_RUNS, RUN_SECONDS = 3, 2.0
"Later calls of each way that are timed, and the seconds after which none begins."


def written(task: Task, way: Way, rows: int, new_tokens: int) -> tuple[Texts, list[float]]:
    """Write texts in this way; return (the texts, the times at the start and after each step)."""
    return task.theirs(rows, new_tokens) if way.transformers else task.ours(way, rows, new_tokens)


def speed(task: Task, way: Way, rows: int, new_tokens: int) -> tuple[Texts, dict[str, Any]]:
    """Return (the texts, what was measured) of a first call and of later ones, the first of which may still record."""
    (texts, first), later = written(task, way, rows, new_tokens), list[tuple[Texts, list[float]]]()
    began = time.perf_counter()
    while len(later) < MAX_RUNS and (not later or time.perf_counter() - began < RUN_SECONDS):
        later.append(written(task, way, rows, new_tokens))
    seconds = sorted(times[-1] - times[0] for _, times in later)
    steps = [np.diff(times).tolist() for _, times in later]
    step = statistics.median(second for run in steps for second in run[3:])
    return texts, {
        "tok_per_sec": rows * new_tokens / statistics.median(seconds),
        "seconds": seconds,
        "first_token_seconds": statistics.median(run[0] for run in steps),
        "step_seconds": step,
        "recording_seconds": max(statistics.median(run[1] + run[2] for run in steps) - 2 * step, 0.0),
        "warm_up_seconds": max(first[-1] - first[0] - statistics.median(seconds), 0.0),
    }


def pays(eager: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """Return what a way needs to win back what it costs at first; None: it never does."""
    step, token = eager["step_seconds"] - run["step_seconds"], 1 / eager["tok_per_sec"] - 1 / run["tok_per_sec"]
    return {
        "pays_from_steps": run["recording_seconds"] / step if step > 0 else None,
        "pays_from_tokens": run["warm_up_seconds"] / token if token > 0 else None,
    }


def jobs(sizes: Sizes) -> list[tuple[str, int, Way, bool]]:
    """(task, rows, way, exact), what may fail or take long last."""
    small = [(name, sizes.exact_rows, way, True) for name in COMPILED for way in PLAIN]
    fast = [(name, rows, way, False) for name in COMPILED for rows in sizes.rows for way in PLAIN]
    captions, answers = ([(name, sizes.rows[-1], way, False) for way in COMPILED[name]] for name in COMPILED)
    exact = [(name, sizes.exact_rows, COMPILED[name][-1], True) for name in COMPILED]
    return [*small, *fast, *captions, *exact, *answers]


def measure(tokenizer: Any, questions: Path, sizes: Sizes, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """All parts, each kept as soon as it is there: a call may be cut short."""
    began = time.perf_counter()
    results: dict[str, Any] = {"environment": environment(DEVICE, 1), "compile": COMPILE, **asdict(sizes), "runs": []}
    built = cache(lambda name, exact: build(name, tokenizer, questions, sizes, exact=exact))
    eager: dict[tuple[str, int], dict[str, Any]] = {}
    texts: dict[tuple[str, int, bool], Texts] = {}
    for name, rows, way, exact in jobs(sizes):
        started = time.perf_counter()
        run: dict[str, Any] = {"task": name, "rows": rows, "way": way.name, "exact": exact, "error": None}
        try:
            if started - began > sizes.seconds and not sizes.tiny:
                raise TimeoutError(f"left out: {sizes.seconds} s were over")
            if exact:
                found, _ = written(built(name, exact), way, rows, sizes.exact_tokens)
            else:
                found, measured = speed(built(name, exact), way, rows, sizes.new_tokens)
                run |= measured
                if way == EAGER:
                    eager[name, rows] = measured
                elif (name, rows) in eager:
                    run["times_eager"] = measured["tok_per_sec"] / eager[name, rows]["tok_per_sec"]
                    run |= {} if way.transformers else pays(eager[name, rows], measured)
            expected = texts.setdefault((name, rows, exact), found)
            run["same_texts"] = sum(a == b for a, b in zip(found, expected, strict=True)) / rows
            run["different_texts"] = len(set(found))
        except Exception as error:
            run["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:SHOWN]}"
        run["part_seconds"] = time.perf_counter() - started
        results["runs"].append(run)
        results["seconds"] = time.perf_counter() - began
        keep(results)
        what = f"{name}, {rows} rows, {way.name}{' (exact)' * exact}"
        print(f"{what}: {run['part_seconds']:.1f} s {run['error'] or ''}", flush=True)
    return results


def break_off_after(seconds: int) -> None:
    """End what is under way when so many seconds are over."""

    def break_off(*_: Any) -> None:
        raise TimeoutError(f"broken off: {seconds} s were over")

    signal.signal(signal.SIGALRM, break_off)
    signal.alarm(seconds)


def main() -> None:
    """Measure every job of every task, and write results.json."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("tokenizer")
    words.add_argument("questions", type=Path)
    words.add_argument("out", type=Path)
    words.add_argument("--seconds", type=int, default=Sizes.seconds)
    words.add_argument("--tiny", action="store_true")
    args = words.parse_args()
    torch.backends.cudnn.allow_tf32 = False
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    sizes = TINY if args.tiny else Sizes(seconds=args.seconds)
    args.out.parent.mkdir(parents=True, exist_ok=True)

    def keep(results: dict[str, Any]) -> None:
        args.out.write_text(json.dumps(results, indent=1))

    if not args.tiny:
        break_off_after(args.seconds)
    results = measure(tokenizer, args.questions, sizes, keep)
    print(table(results))


if __name__ == "__main__":
    main()
