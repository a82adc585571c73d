"""A handwritten run directory in the form that training leaves: input for the tests of the report."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from sftkit.config.load import to_yaml
from sftkit.config.schema import (
    Config,
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    SourceConfig,
    TrainConfig,
)

FAMILIES = ("calendar", "sort", "arithmetic", "spell", "count", "compare")
TASKS = {
    "arc_easy": ("acc_norm", 0.25, 0.30),
    "hellaswag": ("acc_norm", 0.25, 0.27),
    "gsm8k": ("exact_match", 0.0, 0.02),
}
CHECKS = (
    (
        "Shapes",
        True,
        "8x2048, declared 8x2048",
        "only declared shapes",
        "every micro-batch is compared with the layout",
    ),
    ("Recompiles after warm-up", True, "0", "0", "the framework's own records, from the end of the warm-up on"),
    ("Graph breaks", True, "0", "0", "frames that torch.compile resumed or left to eager"),
    (
        "Loss normalisation",
        True,
        "2.3e-7",
        "<= 1e-5",
        "loss of a batch of two micro-batches against one of the same rows",
    ),
    ("Document isolation", True, "0", "0", "logits of a document alone and packed with others, largest difference"),
    (
        "Mask coverage",
        False,
        "1 of 2,000 conversations has no end of turn",
        "end of turn is a target in all",
        "targets",
    ),
    ("Resume", None, "not resumed", "same hash of weights after reading back", "sha256 of the checkpoint's files"),
)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_run(folder: Path, steps: int = 600, shift: float = 0.0, name: str = "Qwen/Qwen3-0.6B") -> Path:
    """A finished run of `steps` steps with every file; `shift` moves its losses."""
    checkpoint = folder / f"step-{steps:06d}"
    checkpoint.mkdir(parents=True)
    (folder / "LATEST").write_text(checkpoint.name + "\n")
    cfg = Config(
        run=RunConfig(dir="runs/chat/sft"),
        model=ModelConfig(path=name),
        data=DataConfig(
            train=(
                SourceConfig(path="HuggingFaceTB/smoltalk2", split="train[:90%]"),
                SourceConfig(path="builtin:tasks"),
            ),
            max_length=2048,
        ),
        optim=OptimConfig(lr=1e-5 + shift * 1e-5),
        train=TrainConfig(max_steps=steps),
        eval=EvalConfig(every=100),
    )
    (folder / "config.yaml").write_text(to_yaml(cfg))
    header = json.dumps({"weight": {"dtype": "BF16", "shape": [1000, 494], "data_offsets": [0, 988000]}}).encode()
    (checkpoint / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(988_000))
    resume = "python -m sftkit.launch scripts/chat_sft.py recipes/x/sft.yaml 'run.dir=runs/chat/sft' train.resume=auto"
    status = {
        "status": "finished",
        "step": steps,
        "total_steps": steps,
        "error": None,
        "resume": resume,
        "time": 1.79e9,
    }
    (folder / "run_status.json").write_text(json.dumps(status))
    packages = {"torch": "2.13.0", "transformers": "5.17.0", "accelerate": "1.15.0", "flash-attn-4": None}
    environment = {
        "packages": packages,
        "python": "3.11.7",
        "device": "NVIDIA H200",
        "world_size": 4,
        "git": "d2ba963aa12f",
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    summary = {"step": steps, "tokens": 157_286_400, "train_seconds": 2712.4, "warm_up_seconds": 41.3, "compiled": True}
    (folder / "summary.json").write_text(json.dumps(summary))
    rows = [dict(zip(("name", "ok", "found", "expected", "how"), check, strict=True)) for check in CHECKS]
    logits = {"ids": list(range(64)), "sha256": "ab" * 32, "last": [0.25, -1.5], "norm": 812.25, "dtype": "bfloat16"}
    (folder / "proof.json").write_text(json.dumps({"rows": rows, "logits": logits, "new_key": [1]}))
    (folder / "preflight.json").write_text(json.dumps(preflight()))
    write_rows(folder / "metrics.jsonl", [metrics(step, steps, shift) for step in range(10, steps + 1, 10)])
    write_rows(folder / "evals.jsonl", [evaluation(step, steps) for step in range(100, steps + 1, 100)])
    for step in range(100, steps + 1, 100):
        details = folder / "evals" / f"step-{step:06d}"
        details.mkdir(parents=True)
        (details / "results.json").write_text(json.dumps(results(step, steps, shift)))
    write_rows(folder / "samples.jsonl", [sample for step in range(100, steps + 1, 100) for sample in samples(step)])
    events = [
        {
            "step": 220,
            "time": 1.7899e9,
            "kind": "spike",
            "text": "loss 2.91, 7.2 standard deviations above the mean 1.83",
        },
        {
            "step": 430,
            "time": 1.78995e9,
            "kind": "recompile",
            "text": "tensor 'hidden' size mismatch at index 1. expected 2048, actual 1920",
        },
    ]
    write_rows(folder / "events.jsonl", events)
    return folder


def metrics(step: int, steps: int, shift: float) -> dict[str, Any]:
    part, wave = step / steps, math.sin(step * 12.9898) * 43758.5453 % 1 - 0.5
    speed = 41_000 + 900 * wave
    return {
        "step": step,
        "time": 1.789e9 + 4.5 * step,
        "train/loss": 1.35 + shift + 1.4 * math.exp(-5 * part) + 0.08 * wave + (0.9 if step == 220 else 0),
        "train/grad_norm": 0.8 + 6 * math.exp(-9 * part) + 0.3 * wave + (31 if step == 220 else 0),
        "train/lr": 1e-5 * min(1, part / 0.05) * (1 - part),
        "train/epoch": 0,
        "perf/tok_per_sec": 4 * speed,
        "perf/tok_per_sec_per_gpu": speed if step > 10 else speed / 3,
        "perf/target_tok_per_sec_per_gpu": 0.38 * speed,
        "perf/mfu": 0.41 + 0.01 * wave,
        "perf/step_seconds": 4.5,
        "perf/data_wait_pct": 0.4 + 0.3 * wave,
        "mem/peak_gib": 88.2,
        "mem/reserved_gib": 96.5 + (2 if part > 0.4 else 0),
        "data/padding_pct": 1.9 + wave,
        "data/share/smoltalk2": 0.83,
        "shape/id": 0,
        "shape/8x2048": 8 * step,
        "shape/undeclared": 0,
        "compile/graphs": 3,
        "compile/recompiles": 0,
        "compile/graph_breaks": 0,
        "compile/cuda_graphs": 0,
        "compile/seconds": 31.5,
        "compile/cache_hits": 0,
        "compile/seconds/dynamo": 6.25,
        "compile/seconds/inductor": 25.2,
        "health/spikes": int(step == 220),
    }


def evaluation(step: int, steps: int) -> dict[str, Any]:
    part = step / steps
    values = {f"eval/{name}/acc": min(1.0, part * (0.4 + 0.1 * i)) for i, name in enumerate(FAMILIES)}
    row = {"step": step, "val/loss": 1.45 + 1.2 * math.exp(-5 * part), "val/bpb": 0.62 + 0.4 * math.exp(-5 * part)}
    row |= {"val/smoltalk2/loss": row["val/loss"] + 0.1, "val/smoltalk2/bpb": row["val/bpb"] + 0.05}
    row |= {"val/tasks/loss": row["val/loss"] - 0.4, "val/tasks/bpb": row["val/bpb"] - 0.2}
    return row | values | {"eval/families/acc": sum(values.values()) / len(values), "eval/centred_mean": 0.3 * part}


def results(step: int, steps: int, shift: float) -> list[dict[str, Any]]:
    rows = []
    for task, (metric, chance, start) in TASKS.items():
        value = start + (0.25 - shift) * (1 - math.exp(-3 * step / steps))
        rows.append(
            {
                "task": task,
                "metric": metric,
                "value": value,
                "stderr": 0.02,
                "low": value - 0.04,
                "high": value + 0.04,
                "chance": chance,
                "examples": 600,
                "settings": {"shots": 5},
                "metrics": {metric: value, "acc": value - 0.02},
            }
        )
    families = {f"acc/{name}": min(1.0, step / steps * (0.4 + 0.1 * i)) for i, name in enumerate(FAMILIES)}
    mean = sum(families.values()) / len(families)
    of_all = {
        "task": "families",
        "metric": "acc",
        "value": mean,
        "low": mean - 0.02,
        "high": mean + 0.02,
        "chance": 0.0,
    }
    return [*rows, of_all | {"examples": 600, "settings": {}, "metrics": {"acc": mean, **families}}]


def samples(step: int) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "prompt": "user: Which month comes after February?",
            "reference": "March",
            "answer": "March" if step > 200 else "February is a month of the year.",
            "stop": "end_of_turn",
        },
        {
            "step": step,
            "prompt": "system: You answer in Python.\nuser: Reverse a list in place.",
            "reference": "```python\nitems.reverse()\n```",
            "answer": "```python\ndef reverse(items):\n    items.reverse()\n    return items\n```\n"
            * (1 if step > 300 else 4),
            "stop": "length" if step <= 300 else "end_of_turn",
        },
    ]


def preflight() -> dict[str, Any]:
    edges = [0, *(2**i for i in range(5, 12))]
    counts = [420, 2210, 8120, 15033, 11208, 4403, 1290]
    shares = {"rows": 41_000, "documents": 40_822, "truncated": 911, "dropped_too_long": 0, "dropped_no_target": 12}
    where = "data/tasks.jsonl:71: messages[2]"
    found = [
        {"kind": "skipped", "reason": "empty answer", "rows": 3, "first": f"{where}: empty answer"},
        {"kind": "accepted", "reason": "tool result without a call", "rows": 812, "first": f"{where} is no result"},
    ]
    return {
        "sources": [
            {"name": "smoltalk2", **shares, "skipped_bad": 0, "tokens": 21_233_011, "targets": 8_120_334},
            {"name": "tasks", **shares, "skipped_bad": 3, "tokens": 1_233_011, "targets": 420_334, "findings": found},
        ],
        "lengths": {"edges": edges, "counts": counts, "mean": 523.4, "p50": 410, "p90": 1204, "p99": 2040, "max": 2048},
        "target_pct": 38.2,
        "end_of_turn_pct": 99.95,
        "template_sha256": "c3ab8ff13720e8ad9047dd39466b3c8974e592c2fa383d4a3960714caef0c4f2",
        "roles": {"system": 5021, "user": 60_233, "assistant": 60_231},
        "layouts": [
            {
                "layout": "packed",
                "own": True,
                "shapes": "8x2048",
                "padding_pct": 1.9,
                "steps": 343,
                "positions": 22_478_848,
            },
            {
                "layout": "fixed",
                "own": False,
                "shapes": "8x2048",
                "padding_pct": 73.1,
                "steps": 1276,
            },
        ],
        "duplicate_pct": 0.4,
        "validation_in_train": {"smoltalk2": 0},
        "memory": {
            "estimated_gib": 88.1,
            "fits": True,
            "parts_gib": {"weights": 1.2, "optimizer": 7.2},
            "remedies": [],
        },
        "disk": {"folder": "/data/runs", "free_gib": 811.2, "needed_gib": 21.5, "fits": True},
        "time": {"steps": 600},
        "warnings": [
            "911 of 41,000 rows of smoltalk2 are cut to 2,048 tokens; data.max_length=4096 would keep 870 of them"
        ],
    }
