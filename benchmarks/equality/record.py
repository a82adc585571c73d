"""Record what short runs of a tree compute, to hold a refactoring to the same numbers, bit for bit.

    .venv/bin/python benchmarks/equality/record.py TREE OUT.json [--only NAME ...] [--keep FOLDER]
    .venv/bin/python benchmarks/equality/record.py --compare A.json B.json

TREE is a checkout of the commit that is recorded, such as one before the refactoring. Numbers of two machines differ, so
both trees are recorded on one.

Runs (each process gets PYTHONPATH=TREE/src and cwd=TREE, one thread):
    base, mid, sft   recipes/smoke, 20 steps each, each from the one before, compiled as the recipe says (aot_eager)
    fsdp2            chat_sft from mid, two gloo ranks in shards, 10 steps, two micro-batches a step and rank
    ddp              the same under DDP, 6 steps
    pipeline         chat_sft from mid, two ranks, a layer each, 8 steps
    graph_base       recipes/graph/base.yaml, two ranks FSDP2, 8 steps
    graph_sft        recipes/graph/sft.yaml from graph_base, two ranks tensor parallel, 8 steps
Runs that start from another one are skipped if it failed. Takes about 4 minutes on quiet cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PYTHON = sys.executable
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
TENSOR = FSDP2 | {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"}
SMALL = ("train.global_batch_size=8", "train.micro_batch_size=2")
# name: script, recipe, ranks, environment, the run that it starts from, settings
RUNS = {
    "base": ("base_train", "smoke/base", 1, {}, None, ()),
    "mid": ("mid_train", "smoke/mid", 1, {}, "base", ()),
    "sft": ("chat_sft", "smoke/sft", 1, {}, "mid", ("checkpoint.every=10",)),
    "fsdp2": ("chat_sft", "smoke/sft", 2, FSDP2, "mid", ("train.max_steps=10", *SMALL)),
    "ddp": ("chat_sft", "smoke/sft", 2, {}, "mid", ("train.max_steps=6",)),
    "pipeline": (
        "chat_sft", "smoke/sft", 2, {}, "mid",
        ("train.max_steps=8", "train.engine=pipeline", "train.pipeline_layers=[1,1]", *SMALL),
    ),
    "graph_base": ("base_train", "graph/base", 2, FSDP2, None, ("train.max_steps=8", *SMALL)),
    "graph_sft": ("chat_sft", "graph/sft", 2, TENSOR, "graph_base", ("train.max_steps=8", *SMALL)),
}  # fmt: skip
OURS = ("log.tracker=[]", "log.every=1")
TIMES = ("perf/", "memory/", "time", "seconds", "hardware", "gpu", "compile/seconds", "eta")


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def launch(tree: Path, words: list[str], ranks: int, env: dict[str, str], log: Path) -> int:
    """Run a script on some ranks, without a launcher; return the worst exit code."""
    common = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "ACCELERATE", "FSDP"))}
    common |= {
        "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true",
        "HF_ENDPOINT": "http://127.0.0.1:9", "CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_COMPILE_THREADS": "1", **env,
    }  # fmt: skip
    port = str(free_port())
    with log.open("w") as file:
        running = []
        for rank in range(ranks):
            place = {} if ranks == 1 else {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            }  # fmt: skip
            running.append(subprocess.Popen([PYTHON, *words], cwd=tree, env=common | place, stdout=file, stderr=file))
        deadline = time.monotonic() + 540
        while any(process.poll() is None for process in running):
            failed = any(process.poll() not in (None, 0) for process in running)
            if failed:
                deadline = min(deadline, time.monotonic() + 30)
            if time.monotonic() > deadline:
                for process in running:
                    process.kill()
            time.sleep(0.1)
    return max(abs(process.wait()) for process in running)


def rows(path: Path) -> list[dict]:
    """Return the objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def timed(key: str) -> bool:
    """Return whether a metric is a time or a memory, which differ from run to run."""
    return any(word in key for word in TIMES)


def digest(path: Path) -> str:
    """Return the sha256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def numbers(folder: Path, at: Path) -> dict:
    """Return what a run computed: no times, no names of folders."""
    metrics, evals, proof = rows(folder / "metrics.jsonl"), rows(folder / "evals.jsonl"), folder / "proof.json"
    proved = json.loads(proof.read_text())["rows"] if proof.exists() else []
    last = sorted(folder.glob("step-*"))[-1:]
    kept = [path for step in last for path in sorted(step.iterdir())]
    names = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    samples = folder / "samples.jsonl"
    return {
        "steps": len(metrics),
        "metrics": [{key: value for key, value in row.items() if (key.startswith(("train/", "data/", "val/"))
                     and not timed(key)) or key == "step"} for row in metrics],
        "keys": sorted({key for row in metrics for key in row}),
        "evals": [{key: value for key, value in row.items() if not timed(key)} for row in evals],
        "proof": [[row["name"], row["ok"]] for row in proved],
        "weights": {str(p.relative_to(last[0])): digest(p) for p in kept if p.suffix == ".safetensors"},
        "files": {p.name: digest(p) for p in kept if p.name in names},
        "samples": samples.read_text().replace(str(at), "") if samples.exists() else None,
        "checkpoint": last[0].name if last else None,
    }  # fmt: skip


def record(tree: Path, only: list[str], keep: Path | None) -> dict:
    """Make the runs of a tree and return their numbers by name."""
    needed = set(only or RUNS)
    for name in reversed(RUNS):
        if name in needed and RUNS[name][4]:
            needed.add(RUNS[name][4])
    found: dict[str, dict] = {}
    with tempfile.TemporaryDirectory(prefix="record-") as temporary:
        at = keep or Path(temporary)
        at.mkdir(parents=True, exist_ok=True)
        for name, (script, recipe, ranks, env, start, settings) in RUNS.items():
            if name not in needed:
                continue
            if start and found[start].get("failed"):
                found[name] = {"failed": f"its start, {start}, failed"}
                continue
            words = [
                f"scripts/{script}.py",
                f"recipes/{recipe}.yaml",
                f"run.dir={at / name}",
                f"data.cache_dir={at / 'cache'}",
            ]
            words += [*OURS, *settings, *([f"model.path={at / start}"] if start else [])]
            begun = time.monotonic()
            code = launch(tree, words, ranks, env, at / f"{name}.log")
            found[name] = numbers(at / name, at)
            if code:
                found[name]["failed"] = f"exit code {code}\n" + (at / f"{name}.log").read_text()[-3000:]
            print(
                f"{name}: {'FAILED' if code else 'ok'}, {found[name]['steps']} steps, {time.monotonic() - begun:.0f} s",
                flush=True,
            )
            if code:
                print(found[name]["failed"], flush=True)
    return found


def flat(value, path: str = ""):
    """Yield (path, value) of all leaves."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flat(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        yield f"{path}#", len(value)
        for number, item in enumerate(value):
            yield from flat(item, f"{path}[{number}]")
    else:
        yield path, value


def compare(first: dict, second: dict, names: list[str]) -> int:
    """Print what differs; return how many things do."""
    count = 0
    for name in names or sorted(first.keys() | second.keys()):
        ours, theirs = (dict(flat(side.get(name, {"failed": "not recorded"}))) for side in (first, second))
        differing = [
            key for key in dict.fromkeys([*ours, *theirs]) if ours.get(key, "absent") != theirs.get(key, "absent")
        ]
        print(f"{name}: {'EQUAL' if not differing else f'{len(differing)} DIFFERENCES'} ({len(ours)} values)")
        for key in differing[:40]:
            print(f"    {key}: {ours.get(key, 'absent')!r} -> {theirs.get(key, 'absent')!r}"[:400])
        count += len(differing)
    return count


def main() -> int:
    """Record a tree, or compare two records; 1: a run failed, or something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--only", nargs="*", default=[], choices=RUNS)
    parser.add_argument("--keep", type=Path)
    words = parser.parse_args()
    if words.compare:
        first, second = (json.loads(path.read_text()) for path in words.paths)
        return compare(first, second, words.only) > 0
    tree = words.paths[0].resolve()
    # Keys as JSON has them, so that a comparison in memory is that of files.
    found = json.loads(json.dumps(record(tree, words.only, words.keep)))
    if len(words.paths) > 1:
        words.paths[1].write_text(json.dumps(found, indent=1))
    return any("failed" in run for run in found.values())


if __name__ == "__main__":
    sys.exit(main())
