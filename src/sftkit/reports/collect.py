"""Everything that report.html shows, as one dictionary: report.json."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sftkit.config.commands import first_run
from sftkit.errors import ConfigError
from sftkit.models.auto_classes import auto_class
from sftkit.reports.compare import compare_curves, incomparable, known, steady
from sftkit.reports.evaluated import evaluations, final_evaluation, newest_samples
from sftkit.reports.experts import load_of
from sftkit.reports.files import (
    Rows,
    checkpoint,
    dicts,
    drawable_number,
    mapping,
    on_cpu,
    read_json,
    read_rows,
    stored_parameters,
)
from sftkit.reports.numbers import format_value
from sftkit.reports.pays import own_words
from sftkit.reports.settings import changed, differences, hub_datasets, origin, read_settings
from sftkit.rundir import names
from sftkit.rundir.killed import as_killed

Curve = list[list[float | None]]
"""[step, value or null] in order of the steps."""
MARKS_OF_A_RUN = (names.CONFIG, names.STATUS, names.METRICS_FILE)
"Files of which a run directory has at least one."
MAX_RUNS = 5
"Maximum number of runs that a message names."
_LEVELS = ("*/", "*/*/", "*/*/*/")
"Depths at which runs are looked for below a folder that may hold anything."
RESUMED = "Resumed from a verified checkpoint"
"Name of the check in proof.json that passes where the newest start was a resume."
_BUCKETS = 160
"Number of stretches that a thinned curve is divided into."


def gather_report(run_dir: Path, against: Path | None = None) -> dict[str, Any]:
    """Return what a run's files say, ready to show; `against` is a second run to compare with.

    Raises:
        ConfigError: a folder is not there or holds no run.
    """
    report, curves = read_run(run_dir)
    if against is not None:
        other, its_curves = read_run(against)
        # Two runs of the same name, such as default/sft in two folders, are told apart by their paths.
        if report["run"]["name"] == other["run"]["name"]:
            report["run"]["name"], other["run"]["name"] = str(run_dir), str(against)
        kept = ("run", "headline", "curves", "last", "evaluations", "final", "config")
        report["against"] = {key: other[key] for key in kept}
        report["against"]["config_diff"] = differences(report["config"], other["config"])
        machines = machine_name(report["environment"]), machine_name(other["environment"])
        # Curves are compared with all their steps, not with the thinned ones that the page draws.
        reasons = incomparable(report, other)
        report["against"]["comparison"] = compare_curves(curves, its_curves, machines, reasons)
    return report


def machine_name(environment: Mapping[str, Any]) -> str:
    """Return what a run ran on, from its environment.json: how many of which device."""
    return f"{environment.get('world_size') or '?'} x {environment.get('device') or 'unknown device'}"


def check_run(run_dir: Path) -> None:
    """Refuse a folder that holds no run.

    Raises:
        ConfigError: it names runs nearby.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such folder{_runs_near(run_dir)}")
    if not any((run_dir / name).is_file() for name in MARKS_OF_A_RUN):
        raise ConfigError(f"{run_dir}: no run: it holds neither {' nor '.join(MARKS_OF_A_RUN)}{_runs_near(run_dir)}")


def _runs_near(run_dir: Path) -> str:
    """Return words on runs that may be meant in place of a folder that holds none, the newest first.

    They are those in the folder, or in the first folder above it that exists, else those in runs/.
    """
    # Bounded by _LEVELS: a folder such as a home directory would be searched for minutes.
    nearest = next(folder for folder in (run_dir, *run_dir.parents) if folder.is_dir())
    is_around = Path.cwd().is_relative_to(nearest.absolute())  # a folder around the current one may hold anything
    for folder in (*(() if is_around else (nearest,)), Path("runs")):
        if found := runs_in(folder, _LEVELS):
            more = f" and {len(found) - MAX_RUNS} more" if len(found) > MAX_RUNS else ""
            return f". Runs in {folder}, the newest first: {', '.join(map(str, found[:MAX_RUNS]))}{more}"
    return f"; name a run directory such as runs/default/sft, or {first_run()}"


def runs_in(root: Path, levels: Sequence[str] = ("**/",)) -> list[Path]:
    """Return the runs under a folder, the last written first; `levels` are glob patterns of where."""
    marks = [f"{level}{name}" for level in levels for name in MARKS_OF_A_RUN[1:]]  # wandb writes config.yaml too
    paths = [path for mark in marks for path in root.glob(mark) if not _is_left_over(path.relative_to(root))]
    return list(dict.fromkeys(path.parent for path in sorted(paths, key=lambda path: -path.stat().st_mtime)))


def newest_run_under(root: Path) -> Path:
    """Return the run under `root` that was written to last.

    Raises:
        ConfigError: there is none.
    """
    if found := runs_in(root):
        return found[0]
    raise ConfigError(f"{root}/: no run there; {first_run()}, or name a run directory")


def _is_left_over(path: Path) -> bool:
    """Return whether a file is of an archived run, or in a dashboard's own folder."""
    return names.is_archived(path) or "wandb" in path.parts


def run_of(folder: Path) -> Path | None:
    """Return the run that a folder such as evals/final is in; None if it is in none."""
    parents = folder.absolute().parents
    return next((path for path in parents if any((path / name).is_file() for name in MARKS_OF_A_RUN[1:])), None)


def read_run(run_dir: Path) -> tuple[dict[str, Any], dict[str, Curve]]:
    """Return what is shown of a run, and its curves with every logged step."""
    check_run(run_dir)
    # Every file of the run; `notes` says what cannot be read.
    notes: list[str] = []
    settings = read_settings(run_dir / names.CONFIG, notes)
    status = as_killed(run_dir, mapping(read_json(run_dir / names.STATUS, notes)))
    environment = mapping(read_json(run_dir / names.ENVIRONMENT, notes))
    summary = mapping(read_json(run_dir / names.SUMMARY, notes))
    proof = mapping(read_json(run_dir / names.PROOF, notes))
    preflight = mapping(read_json(run_dir / names.PREFLIGHT, notes))
    metrics = read_rows(run_dir / names.METRICS_FILE, notes)
    evals = read_rows(run_dir / names.EVALS, notes, optional=True)
    samples = read_rows(run_dir / names.SAMPLES, notes, optional=True)
    events = read_rows(run_dir / names.EVENTS, notes, optional=True)
    # What follows from them.
    folder = checkpoint(run_dir)
    full = curves_of(metrics) | curves_of(evals)
    last = {name: points[-1][1] for name, points in full.items()}
    world_size = drawable_number(environment.get("world_size"))
    saved = names.step_of(folder.name) if folder else None
    last_step = float(saved) if saved is not None else drawable_number(status.get("step")) or 0.0
    report = {
        "run": {
            "name": "/".join(run_dir.resolve().parts[-2:]),
            "model": model_name(settings),
            "parent_report": parent_report(run_dir, settings),
            "base_model": origin(settings),
            "datasets": hub_datasets(settings),
            "parameters": stored_parameters(folder) if folder else None,
            "checkpoint": folder.name if folder else None,
            "auto_class": auto_class(mapping(read_json(folder / "config.json", []))) if folder else None,
            "device": environment.get("device"),
            "world_size": int(world_size) if world_size else None,
        },
        "status": status,
        "identity": saved_identity(folder),
        "summary": _sums(summary, full, last),
        "compiling": compiling(summary, full, dicts(proof.get("rows")), settings),
        "command": _command(status.get("resume")),
        "headline": _headline(full, last, cpu=on_cpu(environment.get("device"))),
        "proof": dicts(proof.get("rows")),
        "logits": mapping(proof.get("logits")),
        "curves": {name: thin(points) for name, points in full.items()},
        "last": last,
        "evaluations": evaluations(run_dir, evals, notes),
        "final": final_evaluation(run_dir, last_step, notes),
        "samples": newest_samples(samples),
        "experts": load_of(mapping(read_json(run_dir / names.EXPERTS, notes, optional=True))),
        "preflight": preflight,
        "events": events,
        "config": settings,
        "config_changed": changed(settings),
        "environment": environment,
        "against": None,
        "notes": notes,
    }
    return report, full


def _sums(summary: dict[str, Any], curves: Mapping[str, Curve], last: Mapping[str, float | None]) -> dict[str, Any]:
    """Return the numbers of summary.json; tokens and time are those of the whole run, over all its starts.

    The newest line has them. summary.json is of the newest start that ended: a run that continues, or was killed, has
    done more since. Versions before wrote the time of that start alone.
    """
    found = {key: value for key, value in summary.items() if not isinstance(value, dict | list)}
    logged = {"tokens": last.get("train/tokens"), "train_seconds": last.get("train/seconds")}
    ended, newest = drawable_number(summary.get("step")), max(known(curves, "train/tokens"), default=-1.0)
    if ended is None or newest >= ended:
        found |= {key: value for key, value in logged.items() if value is not None}
    return found


def saved_identity(folder: Path | None) -> dict[str, Any]:
    """Return what the checkpoint of a run says of its model, tokenizer and data; empty without one."""
    state = mapping(read_json(folder / names.TRAINING_STATE, [], optional=True)) if folder else {}
    return mapping(state.get("identity"))


def parent_report(run_dir: Path, settings: dict[str, Any]) -> str | None:
    """Return where the report of the run that this one started from lies, relative to this one's;
    None: there is none here."""
    path = mapping(settings.get("model")).get("path")
    # By resolved paths on both sides, so that the link also holds where runs/ is a link to another disk.
    page = Path(path) / names.REPORT if isinstance(path, str) else None
    return os.path.relpath(page.resolve(), run_dir.resolve()) if page is not None and page.is_file() else None


def model_name(settings: dict[str, Any]) -> str | None:
    """Return what was trained: a path or hub id, or the type of a model from scratch."""
    model = mapping(settings.get("model"))
    if scratch := mapping(model.get("scratch")):
        return f"{scratch.get('model_type', 'model')} from scratch"
    return str(model["path"]) if model.get("path") else None


def compiling(summary: dict[str, Any], curves: dict[str, Curve], checks: Rows, settings: dict[str, Any]) -> str | None:
    """Return what the compile of the run's newest start costs, in steps.

    None for a run that is not compiled, or that has not ended and has logged no second in the compiler, and for a
    backend that makes no faster code, as those for debugging.
    """
    metrics = ("perf/step_seconds", "compile/cache_hits", "compile/seconds")
    windows, hits, inside = (list(known(curves, metric).values()) for metric in metrics)
    # Where no line has seconds in the compiler, the whole warm-up counts, with its checks and eager passes.
    spent = inside[-1] if inside else drawable_number(summary.get("warm_up_seconds"))
    # Only Inductor makes faster code; nothing that an eager or debugging backend spends can pay.
    generated = mapping(settings.get("compile")).get("backend", "inductor") == "inductor"
    if summary.get("compiled", bool(inside)) is not True or not generated:
        return None
    resumed = any(row.get("name") == RESUMED and row.get("ok") is True for row in checks)
    return own_words(spent, windows, hits[-1] if hits else 0, resumed=resumed)


def _command(resume: Any) -> str | None:
    """Return the command that started the run: the one that resumes it, without its last word."""
    # A command of another version, or typed by hand, may have quotes that do not close.
    try:
        words = shlex.split(resume) if isinstance(resume, str) else []
    except ValueError:
        return None
    return shlex.join(word for word in words if word != "train.resume=auto") or None


# ---- numbers over steps ----


def curves_of(rows: Rows) -> dict[str, Curve]:
    """Return every metric by name over the steps; where a step comes twice, the later line counts."""
    curves: dict[str, dict[float, float | None]] = {}
    for row in rows:
        step = drawable_number(row.get("step"))
        if step is None:
            continue
        for name, value in row.items():
            # A null is kept as a gap of the line: it stands for a value that was not finite.
            if name not in ("step", "time") and (value is None or drawable_number(value) is not None):
                curves.setdefault(name, {})[step] = drawable_number(value)
    return {name: [[step, points[step]] for step in sorted(points)] for name, points in curves.items()}


def thin(points: Curve) -> Curve:
    """Return at most about 500 points that look the same: of each stretch its lowest, its highest,
    and a gap if it has one."""
    if len(points) <= 3 * _BUCKETS:
        return points
    kept = {0, len(points) - 1}
    for bucket in range(_BUCKETS):
        stretch = range(bucket * len(points) // _BUCKETS, (bucket + 1) * len(points) // _BUCKETS)
        # Lowest and highest, not means: a spike of one step has to stay visible.
        values = [(value, i) for i in stretch if (value := points[i][1]) is not None]
        kept |= {min(values)[1], max(values)[1]} if values else set()
        kept |= {next(i for i in stretch if points[i][1] is None)} if len(values) < len(stretch) else set()
    return [points[i] for i in sorted(kept)]


def _headline(curves: dict[str, Curve], last: dict[str, float | None], *, cpu: bool) -> Rows:
    """Return the numbers that people ask for first, as {"name", "value", "text", "how"}."""
    each, memory = ("process", "most of the process, resident") if cpu else ("GPU", "most that tensors took")
    mfu, speed = steady(curves, "perf/mfu"), steady(curves, "perf/tok_per_sec_per_gpu")
    percent = round(100 * mfu, 1) if mfu is not None else None
    peak = max(known(curves, "mem/peak_gib").values(), default=None)
    rows = [
        ("training loss", last.get("train/loss"), "", "nats per target, last logged line"),
        ("validation loss", last.get("val/loss"), "", "nats per target, last evaluation"),
        (f"tokens/s per {each}", speed, "", "useful tokens, median without the first line"),
        ("MFU", percent, "%", "of the bf16 peak, median without the first line"),
        ("peak memory", peak, "GiB", memory),
        ("recompiles", last.get("compile/recompiles"), "", "after the warm-up; 0 is right"),
    ]
    return [{"name": n, "value": v, "text": format_value(v, u), "how": how} for n, v, u, how in rows]
