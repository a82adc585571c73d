"""A run that is killed again and again, against the same run left alone: every file and line of the two must be the same.

python benchmarks/reliability/kill_loop.py --kills 100 --out runs/kill_loop --result benchmarks/reliability/kill_loop.json

Each start is scripts/base_train.py on recipes/smoke/base.yaml with train.resume=auto, in a process group of its own with a
data worker, and the whole group gets SIGKILL: at a random moment from its start on, or, two times of three, while it writes a
checkpoint. After each kill every published checkpoint has to verify and LATEST must not have gone back; of what was half
written nothing may be there when the next start writes. The starts are forks of a process that has imported torch, so they
differ from `python scripts/base_train.py` in the seconds of its imports alone. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import importlib
import json
import os
import random
import runpy
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from sftkit.rundir.files import verify
from sftkit.rundir.names import (
    ENVIRONMENT,
    EVALS,
    LATEST,
    MANIFEST,
    METRICS_FILE,
    OPTIMIZER,
    RECIPE,
    STATE,
    STATUS,
    TRAINING_STATE,
    UNFINISHED,
    step_dir,
    step_dirs,
    step_number,
)
from sftkit.tracking.names import PROGRESS

SCRIPT, RECIPE_FILE = "scripts/base_train.py", "recipes/smoke/base.yaml"
SETTINGS = {
    "train.resume": "auto",
    "train.global_batch_size": 2,
    "train.micro_batch_size": 2,
    "data.max_length": 64,
    "data.num_workers": 1,
    "checkpoint.every": 4,
    "log.every": 10,  # checkpoints between two lines keep an open window
    "log.wandb": "off",
    "eval.tasks": [],  # loading them takes longer than the rest of a start
    "compile.enabled": False,  # a start without compilation is twice as fast
}
IMPORTED = (
    *("sftkit.train.assemble", "sftkit.engine.blocks", "sftkit.evals.suite", "sftkit.verify.proof"),
    *("transformers.models.qwen3.modeling_qwen3", "torch._functorch.aot_autograd"),
)
ENV = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
DIFFER = (RECIPE, TRAINING_STATE, f"{STATE}/{ENVIRONMENT}", f"{OPTIMIZER}/.metadata")
"Files that name the folder, hold clocks or a random id; TRAINING_STATE is compared by its values."
CLOCKS = ("time", "train/seconds", "perf/", "mem/", "ckpt/", "compile/")
"Values of a line that are measured, or counted anew by each start."
LONGEST_SECONDS = 1800.0


class Life:
    """One start of the run, from its fork to its end."""

    def __init__(self, run_dir: Path, steps: int) -> None:
        self.run_dir, self.began = run_dir, time.monotonic()
        self.log = run_dir.with_name(f"{run_dir.name}.log")
        self.earlier = unfinished(run_dir)
        "what starts before it have left"
        self.saves: set[str] = set()
        "temporary folders of its own that were seen"
        self.first_save_seconds: float | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, 0)
            _train(run_dir, steps, self.log)
        with suppress(OSError):  # whoever of the two comes first
            os.setpgid(self.pid, self.pid)

    @property
    def seconds(self) -> float:
        """Return the seconds since its start."""
        return time.monotonic() - self.began

    def until(self, ready: Callable[[], bool]) -> bool:
        """Wait; False: it came to its end before.

        Raises:
            SystemExit: it failed. TimeoutError: it takes too long, and was killed.
        """
        try:
            while not ready():
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                if ended and status:
                    raise SystemExit(f"the run ended with {os.waitstatus_to_exitcode(status)}:\n{self._told()}")
                if ended:
                    return False
                if self.seconds > LONGEST_SECONDS:
                    raise TimeoutError(f"no end in {LONGEST_SECONDS:.0f} s:\n{self._told()}")
                time.sleep(0.001)
                self._look()
        except (KeyboardInterrupt, TimeoutError):
            self.kill()
            raise
        return True

    def _look(self) -> None:
        self.saves |= {name for name in unfinished(self.run_dir) - self.earlier if name.endswith(".tmp")}
        if self.saves and self.first_save_seconds is None:
            self.first_save_seconds = self.seconds

    def kill(self) -> None:
        """Kill all of its processes at once."""
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def _told(self) -> str:
        return self.log.read_text()[-3000:]


def _train(run_dir: Path, steps: int, log: Path) -> None:
    """Be `python scripts/base_train.py`, and end."""
    code = 1
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        own = {"run.dir": run_dir, "data.cache_dir": run_dir.parent / "cache", "train.max_steps": steps}
        words = [f"{key}={json.dumps(value, default=str)}" for key, value in (own | SETTINGS).items()]
        sys.argv = [SCRIPT, RECIPE_FILE, *words]
        runpy.run_path(SCRIPT, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def unfinished(run_dir: Path) -> set[str]:
    """Names of checkpoints that are half written or half deleted."""
    names = os.listdir(run_dir) if run_dir.is_dir() else []
    return {name for pattern in UNFINISHED for name in fnmatch.filter(names, pattern)}


def latest_step(run_dir: Path) -> int:
    """Of the checkpoint that LATEST names; 0 without one."""
    file = run_dir / LATEST
    return step_number(run_dir / file.read_text().strip()) if file.exists() else 0


def faults_in(run_dir: Path, before: int) -> list[str]:
    """Return what a kill must not have done; `before`: the step of LATEST at the kill before."""
    now = latest_step(run_dir)
    found = [problem for folder in step_dirs(run_dir) if (problem := verify(folder))]
    if now < before:
        found.append(f"LATEST went back from step {before} to {now}")
    if now and not step_dir(run_dir, now).is_dir():
        found.append(f"LATEST names step {now}, which is not there")
    return found


def moment(life: Life, left: set[str]) -> str:
    """Where in its work the run was killed, from what it has left."""
    written = [name for name in left - life.earlier if name.endswith(".tmp")]
    if any((life.run_dir / name / MANIFEST).exists() for name in written):
        return "all files written, not renamed"
    if written:
        return "writing files"
    if step_dirs(life.run_dir) and step_number(step_dirs(life.run_dir)[-1]) > latest_step(life.run_dir):
        return "renamed, LATEST not yet"
    if left - life.earlier:
        return "pruning"
    return "between two saves" if life.saves else "before its first save"


def kill_once(life: Life, longest_seconds: float, rng: random.Random, *, aimed: bool) -> bool:
    """Kill at a random moment of so many seconds, from the start on or from one of the first two saves on; False: the run came
    to its end before."""
    if aimed:
        save = rng.randint(1, 2)
        if not life.until(lambda: len(life.saves) >= save):
            return False
    end = time.monotonic() + rng.uniform(0, longest_seconds)
    if not life.until(lambda: time.monotonic() >= end):
        return False
    life.kill()
    return True


def killed(run_dir: Path, steps: int, kills: int, rng: random.Random, save_seconds: float) -> Iterator[dict[str, Any]]:
    """Start the run and kill it, so many times unless it comes to its end before; a record of each kill."""
    latest, start_seconds = 0, LONGEST_SECONDS
    for number in range(kills):
        life, aimed = Life(run_dir, steps), number % 3 != 2
        longest_seconds = 1.2 * save_seconds if aimed else 1.5 * start_seconds
        if not kill_once(life, longest_seconds, rng, aimed=aimed):
            return
        seconds, left = life.seconds, unfinished(run_dir)
        start_seconds = min(start_seconds, life.first_save_seconds or start_seconds)
        faults = faults_in(run_dir, latest)
        if life.saves and (stale := life.earlier & left):
            faults.append(f"left of an earlier start: {sorted(stale)}")
        latest = latest_step(run_dir)
        at = moment(life, left)
        yield {"aimed": aimed, "seconds": round(seconds, 2), "at": at, "latest": latest, "faults": faults}


def alone(run_dir: Path, steps: int) -> float:
    """Run to the end. Returns the seconds of a save, the median."""
    Life(run_dir, steps).until(lambda: False)
    saves = [row["ckpt/write_seconds"] for row in rows(run_dir / METRICS_FILE) if row.get("ckpt/write_seconds")]
    return sorted(saves)[len(saves) // 2]


def rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def unmeasured(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file without what a clock has measured."""
    return [{key: value for key, value in row.items() if not key.startswith(CLOCKS)} for row in rows(path)]


def differences(uninterrupted: Path, other: Path, steps: int) -> list[str]:
    """Return what of the ends of two runs is not the same."""
    there, here = (step_dir(run_dir, steps) for run_dir in (uninterrupted, other))
    hashes = [json.loads((folder / MANIFEST).read_text())["files"] for folder in (there, here)]
    changed = [name for name in hashes[0] if name not in DIFFER and hashes[0][name] != hashes[1].get(name)]
    found = [f"{name}: not the same bytes" for name in changed]
    found += [f"{name}: only in one" for name in hashes[0].keys() ^ hashes[1].keys()]
    states = [json.loads((folder / TRAINING_STATE).read_text()) for folder in (there, here)]
    for state in states:
        del state[PROGRESS]["seconds"]
    compared = [key for key in states[0] if key not in ("save_seconds", "window")]
    found += [f"{TRAINING_STATE}: {key}" for key in compared if states[0][key] != states[1].get(key)]
    for name in (METRICS_FILE, EVALS):
        same = unmeasured(uninterrupted / name) == unmeasured(other / name)
        found += [] if same else [f"{name}: not the same lines"]
    left = sorted(unfinished(other)) + sorted(path.name for path in other.glob("*.tmp"))
    return [*found, *(f"{name}: left" for name in left)]


def main() -> None:
    """Kill a run again and again, and compare its end with that of one that was left alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="how many")
    parser.add_argument("--steps", type=int, default=1000, help="length of the run; some 40 for each of a few kills")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--out", type=Path, default=Path("runs/kill_loop"), help="folder for both runs; a new one")
    parser.add_argument("--result", type=Path, help="JSON file to write")
    args = parser.parse_args()
    args.out.mkdir(parents=True)  # the runs of an earlier loop stay
    os.environ.update(ENV)
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # what is shared with the forks stays where it is
    began = time.monotonic()
    whole, other = args.out / "whole", args.out / "killed"
    save_seconds = alone(whole, args.steps)
    print(f"left alone: a save takes {save_seconds:.3f} s", flush=True)
    records = []
    for record in killed(other, args.steps, args.kills, random.Random(args.seed), save_seconds):
        records.append(record)
        print(f"kill {len(records)}: {json.dumps(record)}", flush=True)
    if len(records) == args.kills:
        Life(other, args.steps).until(lambda: False)
    different = differences(whole, other, args.steps)
    versions = json.loads((other / ENVIRONMENT).read_text())
    faults = [fault for record in records for fault in record["faults"]]
    result = {
        "kills": len(records),
        "kills_asked": args.kills,
        "aimed_at_saves": sum(record["aimed"] for record in records),
        "moments": dict(Counter(record["at"] for record in records)),
        "faults": faults,
        "differences_from_the_run_left_alone": different,
        "steps": args.steps,
        "settings": SETTINGS,
        "seed": args.seed,
        "save_seconds": save_seconds,
        "total_seconds": round(time.monotonic() - began),
        "status": json.loads((other / STATUS).read_text())["status"],
        "commit": versions["git"],
        "environment": {name: versions[name] for name in ("packages", "python", "platform", "device")},
    }
    text = json.dumps(result, indent=1)
    lines = ",\n".join(f"  {json.dumps(record)}" for record in records)
    if args.result:
        args.result.write_text(f'{text[:-2]},\n "records": [\n{lines}\n ]\n}}\n')
    print(text)
    sys.exit(1 if faults or different or len(records) < args.kills else 0)


if __name__ == "__main__":
    main()
