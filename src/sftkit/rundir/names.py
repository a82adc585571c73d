"""A run directory: the name of every file in it, who writes it, and where its checkpoints are. No torch."""

import json
import os
import re
from pathlib import Path
from typing import Literal

from sftkit.config.commands import first_run, similar_paths
from sftkit.errors import ConfigError, hint

# ---- the run itself: runtime, train, preflight, compile and reports --------------------------------------------------

CONFIG = "config.yaml"
"The resolved recipe; runtime/open.py writes it before anything starts."
ENVIRONMENT = "environment.json"
"Versions, hardware and git state: runtime/open.py; a step directory has one of its own, in STATE."
MADE_FROM = "made_from.json"
"Which files it was made from, with size and time or hash: rundir/files.py."
STATUS = "run_status.json"
"The state of the run, or how it ended, for people and requeue scripts: rundir/status.py."
ERRORS = "rank-errors"
"Folder with the error of each rank that failed: rundir/status.py."
LOCK = ".lock"
"Which process writes here; there while a run is at work: rundir/lock.py."
HEARTBEATS = ".heartbeat"
"Folder with the place of each of several ranks: runtime/watchdog.py."
PREFLIGHT = "preflight.json"
"What will be learned and what it will cost: preflight/analysis.py."
PROOF = "proof.json"
"Checks that the run made of itself: train/end.py."
DOES_NOT_APPLY = "does not apply"
"Beginning of what a check of proof.json has found that has nothing to check in its run."
SUMMARY = "summary.json"
"How training ended: train/end.py."
REPORT = "report.html"
"The page of the run: reports/page.py."
REPORT_DATA = "report.json"
"What the page shows, as data: reports/page.py."
TOKENIZER = "tokenizer"
"Folder with the tokenizer that a base run has trained: models/tokenizer.py."
GRAPHS = "captured_graphs"
"Folder with the graphs of each captured shape before and after every pass, of graph.dump: graph/capture.py."
TRACE = "trace"
"Folder with what log.trace_at has recorded of each rank: tracking/meter.py."
EVENT_FILES = "tensorboard"
"Folder with TensorBoard's event files, of log.tracker: tracking/dashboard/remote.py."
ARCHIVED = ".old-"
"In the name of a run or step directory that was renamed to make room for another; a number follows: rundir/files.py."

ATTEMPT = ".attempt"
"Folder inside a run directory, in which a start writes until it has done a step: rundir/attempt.py."

# ---- lines and results: tracking and evals ---------------------------------------------------------------------------

METRICS_FILE = "metrics.jsonl"
"A line for every log.every steps: tracking/tracker.py."
EVALS = "evals.jsonl"
"A line for each evaluation: tracking/tracker.py."
EXPERTS = "expert_load.json"
"Share of the positions that each expert of each layer got, as of the last logged line: tracking/health.py."
SAMPLES = "samples.jsonl"
"The sample answers of each evaluation: tracking/tracker.py."
EVENTS = "events.jsonl"
"Events that a person should know at once: tracking/tracker.py."
EVALUATIONS = "evals"
"Folder with a folder for each evaluation that had tasks: evals/suite.py."
FINAL = f"{EVALUATIONS}/final"
"Folder with what scripts/evaluate.py has found of the last checkpoint."
RESULTS = "results.json"
"""In the folder of an evaluation, the value of each task: evals/results.py; a file of examples for each task is
next to it."""
VALIDATION = "validation.json"
"In a folder that scripts/evaluate.py is given, the losses of its --val: evals/results.py."

# ---- checkpoints -----------------------------------------------------------------------------------------------------

LATEST = "LATEST"
"The name of the newest complete checkpoint: checkpoint/save.py."
BEST = "BEST"
"The name of the best evaluated checkpoint, then metric and value: checkpoint/save.py."
PINNED = "PINNED"
"A file of this name in a step directory keeps it from being pruned; people write it."
MANIFEST = "manifest.json"
"In a step directory, size and hash of all its other files: checkpoint/save.py."
RECIPE = "recipe.yaml"
"In a step directory, the resolved recipe that it was trained with: checkpoint/checkpoint.py."
ADAPTER_CONFIG = "adapter_config.json"
"In a folder with an adapter, as peft writes it: its settings, and which model it belongs to."
ADAPTER_FOLDERS = "adapters"
"In a step directory of a run with several adapters: a folder for each, by its name."
ADAPTER_WEIGHTS = "adapter_model.safetensors"
"Its factors."
CARD = "README.md"
"In a step directory, the model card: reports/page.py."
STATE = "training_state"
"In a step directory, the folder with all that plain transformers does not need: checkpoint/save.py."
TRAINING_STATE = f"{STATE}/state.json"
"In a step directory, step, tokens and the rest of the loop's state: checkpoint/save.py."
OPTIMIZER = f"{STATE}/optimizer"
"In a step directory, the folder with the optimizer's states: checkpoint/states.py."

_STEP = "step-"
WRITTEN_OVER = (
    *(CONFIG, ENVIRONMENT, MADE_FROM, STATUS, ERRORS, HEARTBEATS, PREFLIGHT, PROOF, REPORT, REPORT_DATA, TOKENIZER),
    *(TRACE, EVENT_FILES, SAMPLES, EVENTS, BEST, f"{EVALUATIONS}/{_STEP}*"),
)
"""Glob patterns of what a run writes or writes over. Where they are found without one of OF_STEPS, no run has written
them."""
OF_STEPS = (METRICS_FILE, EVALS, SUMMARY, LATEST, f"nonfinite-{_STEP}*", f"spike-{_STEP}*")
"""Glob patterns of what a run has written that has done a step, its checkpoints aside. METRICS_FILE is there from the
first one on."""
STEP_DIRS = f"{_STEP}*"
"Glob pattern of step directories, and of the folders of evaluations in EVALUATIONS."
UNFINISHED = (f".{_STEP}*.tmp", f".{_STEP}*.del")
"Glob patterns of step directories that a killed process left half-written or half-deleted."
_STEP_DIR = re.compile(rf"{_STEP}(\d{{6,}})")
_STEP_NAME = re.compile(rf"{_STEP}(\d{{1,12}})")


def step_name(step: int) -> str:
    """Return the name of a step's directory, which its evaluation's folder has too."""
    return f"{_STEP}{step:06d}"


def step_dir(run_dir: Path, step: int) -> Path:
    """Return the directory of a step's checkpoint."""
    return run_dir / step_name(step)


def step_dirs(run_dir: Path) -> list[Path]:
    """Return the published step directories, oldest first.

    Raises:
        OSError: a run directory that is there cannot be read.
    """
    try:
        names = os.listdir(run_dir)  # glob would find nothing in a folder that it may not read
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((run_dir / name for name in names if _STEP_DIR.fullmatch(name)), key=step_number)


def step_number(folder: Path) -> int:
    """Return the step of a step directory."""
    return int(folder.name.split("-")[1])


def step_of(name: str) -> int | None:
    """Return the step in a name that anybody may have written; None: it is no step directory's."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


def being_written(folder: Path, token: str) -> Path:
    """Return what a step directory is called until it is whole, by the run of this token; UNFINISHED finds it."""
    return folder.with_name(f".{folder.name}.{token}.tmp")


def evaluation_dir(run_dir: Path, step: int) -> Path:
    """Return the folder with every example of a step's evaluation."""
    return run_dir / EVALUATIONS / step_name(step)


def random_state_file(folder: Path, rank: int) -> Path:
    """Return the file of a step directory with a rank's random states."""
    return folder / STATE / f"rng-{_rank(rank)}.pt"


def error_file(run_dir: Path, rank: int) -> Path:
    """Return the file with the error of a rank that failed."""
    return run_dir / ERRORS / f"{_rank(rank)}.json"


def heartbeat_file(beats: Path, rank: int) -> Path:
    """Return the file in HEARTBEATS with the place of a rank."""
    return beats / _rank(rank)


def skipped_documents_file(run_dir: Path, kind: Literal["nonfinite", "spike"], step: int, rank: int | None) -> Path:
    """Return the file in which a rank has written the documents of a step that was skipped; rank None: the pattern of
    all ranks' files."""
    return run_dir / f"{kind}-{step_name(step)}-{'rank*' if rank is None else _rank(rank)}.json"


def graph_file(run_dir: Path, shape: tuple[int, int], number: int, graph: str, after: str) -> Path:
    """Return the file with a graph of a captured shape as it was after a pass, the `number`-th that was recorded.

    `shape`: (rows, row length).
    """
    rows, row_length = shape
    return run_dir / GRAPHS / f"{rows}x{row_length}" / f"{number:02d}-{graph}-{after}.txt"


def _rank(rank: int) -> str:
    return f"rank{rank:03d}"


def is_archived(path: Path) -> bool:
    """Return whether a path is of, or in, a directory that made room for another of its name."""
    return any(ARCHIVED in part for part in path.parts)


def latest_checkpoint(run_dir: Path) -> Path | None:
    """Return the checkpoint that LATEST names; None without one."""
    named = run_dir / LATEST
    return run_dir / named.read_text().strip() if named.is_file() else None


def adapter_dir(folder: Path, name: str) -> Path:
    """Return the folder of one of several adapters in a step directory."""
    return folder / ADAPTER_FOLDERS / name


def resolve(path: str) -> str:
    """Return a loadable folder or hub id: a run directory stands for its latest checkpoint.

    Raises:
        ConfigError: a local path that does not exist or holds no model.
    """
    folder = Path(path)
    if (folder / "config.json").is_file() or (folder / ADAPTER_CONFIG).is_file():
        return str(folder)
    if (newest := latest_checkpoint(folder)) is not None:
        return resolve(str(newest))
    if several := sorted(folder.glob(f"{ADAPTER_FOLDERS}/*/{ADAPTER_CONFIG}")):
        names = ", ".join(str(one.parent) for one in several)
        raise ConfigError(f"{path}: it holds {len(several)} adapters, each a separate model: name one of {names}")
    if folder.is_dir():
        problem = f"{path}: no config.json and no {LATEST} in it, so neither a model nor a run with a checkpoint"
        raise ConfigError(problem)
    if path.startswith((".", "/", "runs/")) or path.count("/") > 1:
        meant = similar_paths(path)
        unmade = f"{'' if meant else '.'} {hint('run not made yet', path=path)}" if path.startswith("runs/") else ""
        raise ConfigError(f"{path}: no such folder{meant}{unmade}")
    return path


def trained_length(folder: Path) -> int | None:
    """Return the data.max_length of the run that wrote a step directory; None: no run has written this folder."""
    state = folder / TRAINING_STATE
    return json.loads(state.read_text()).get("max_length") if state.is_file() else None


def unresolved_reason(path: str | None) -> str:
    """Return why a recipe must set data.max_length: it starts from a path, or from scratch (None), without an earlier
    run that has one."""
    return f"{path or 'a new model'} has no earlier run to inherit it from; set it, say 2048"


def newest_run(root: str = "runs") -> str:
    """Return the run directory under `root` whose checkpoint was written last.

    Raises:
        ConfigError: there is none.
    """
    markers = [path for path in Path(root).glob(f"**/{LATEST}") if ARCHIVED not in str(path)]
    if not markers:
        raise ConfigError(f"{root}/: no run with a checkpoint; {first_run()}, or name a model")
    return str(max(markers, key=lambda path: path.stat().st_mtime).parent)
