"""Everything that report.html shows, as one dictionary: report.json. It is read from a run's files: settings, and how
they differ from the defaults or another run's; evaluations and samples; curves; where the model comes from; and two
runs compared: losses at steps that both have, speeds, peak memory.
"""

import json
import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from sftkit.config.commands import first_run
from sftkit.config.keys import key_table
from sftkit.config.tables import STAGE_SCRIPTS
from sftkit.config.yaml import parse
from sftkit.errors import ConfigError, hint
from sftkit.models.adapter_files import adapter_words
from sftkit.models.files import whole_class
from sftkit.reports import values
from sftkit.reports.values import Rows, checkpoint, dicts, drawable_number, mapping, read_json, read_rows
from sftkit.rundir import names
from sftkit.rundir.files import BASE, clean, read_object
from sftkit.rundir.status import as_killed

Curves = Mapping[str, list[list[float | None]]]
"Name -> [[step, value or null], ...], of every logged step."
TOKENS_APART = 0.01
"Tokens at the same step that differ by a smaller share differ only by the packing of rows."
LOSSES = (("training loss", "train/loss", "logged"), ("validation loss", "val/loss", "evaluated"))

SPEEDS = (
    ("tokens/s", "perf/tok_per_sec", "useful tokens of all processes, median without the first line"),
    ("s/step", "perf/step_seconds", "median without the first line"),
    ("MFU", "perf/mfu", "0 to 1, median without the first line"),
)


_TARGETS = ("targets", "thinking", "split_turns", "too_long", "max_length")
"Keys of the recipe's data section that decide which tokens are targets."
_NO_LOSS = ("chunk_tokens", "token_metrics")
"Keys of its loss section that do not change what is minimised."


def incomparable(mine: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return why the losses of two runs are not of the same thing, by metric; an empty list: nothing is known against
    it.

    Losses are nats per target without z-loss and label smoothing, so no setting of the loss is a reason.

    Args:
        mine, other: as collect.read_run returns them.
    """
    ours, its = mapping(mine["config"].get("data")), mapping(other["config"].get("data"))
    # The script says what a run learns; the recipe may name its stage, and the command that resumes the run has it.
    commands = [str(run["status"].get("resume") or "").split() for run in (mine, other)]
    named = [STAGE_SCRIPTS.get(str(mapping(run["config"].get("run")).get("stage"))) for run in (mine, other)]
    scripts = [
        name or next((w.rpartition("/")[2] for w in words if w.endswith(".py")), None)
        for name, words in zip(named, commands, strict=True)
    ]
    both = []
    data = {"train/loss": "training", "val/loss": "validation"}
    # Another tokenizer makes other targets of the same text; bits per byte could be compared.
    for name, words in (("tokenizer", "another tokenizer"), ("chat_template", "another chat template")):
        if mine["identity"].get(name, 0) != other["identity"].get(name, 0) and mine["identity"] and other["identity"]:
            both.append(words)
    if all(scripts) and scripts[0] != scripts[1]:
        both.append(f"other targets ({scripts[0]} here, {scripts[1]} there)")
    for name in _TARGETS:
        default = "assistant" if name == "targets" else None
        if (ours.get(name) or default) != (its.get(name) or default):
            both.append(f"other targets (data.{name})")
    reasons = {metric: list(both) for metric in data}
    for metric, kind in data.items():
        section, part = ("train", "sources") if kind == "training" else ("val", "validation")
        counts = [
            [(row.get("name"), row.get("documents")) for row in dicts(run["preflight"].get(part))]
            for run in (mine, other)
        ]
        if ours.get(section) != its.get(section) or (all(counts) and counts[0] != counts[1]):
            reasons[metric].append(f"other {kind} data")
    return reasons


def compare_curves(
    mine: Curves,
    other: Curves,
    machines: Sequence[str | None] = (None, None),
    reasons: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """Return {"rows": [{"name", "step", "value", "other", "change", "how"}], "speed_up": a number or null, "notes":
    [...]}.

    Args:
        machines: what each run ran on, by which speeds are told apart.
        reasons: what `incomparable` returned: such losses are shown without a change.
    """
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for name, metric, done in LOSSES:
        a, b = known(mine, metric), known(other, metric)
        if not a or not b:
            if a or b:
                notes.append(f"{name}: not compared, no step was {done} {'there' if a else 'here'}")
            continue
        # The last step that both have, not the last of each: a longer run would look better for its length.
        step = max(a.keys() & b.keys(), default=None)
        if step is None:
            notes.append(f"{name}: not compared, no step was {done} by both (here {_steps(a)}; there {_steps(b)})")
            continue
        row = _row(name, step, a[step], b[step], f"nats per target, the last step that both have {done}")
        if why := (reasons or {}).get(metric):
            row |= {"change": None, "how": f"not comparable: {', '.join(why)}"}
        rows.append(row)
        last = max(a), max(b)
        if last != (step, step):
            ends = " and ".join(map(values.format_value, last))
            notes.append(f"{name}: at step {values.format_value(step)}; the runs go on to step {ends}")
        notes += [text] if (text := _apart(mine, other, step)) and text not in notes else []
    for name, metric, how in SPEEDS:
        rows += _both(name, steady(mine, metric), steady(other, metric), how)
    peaks = [max(known(curves, "mem/peak_gib").values(), default=None) for curves in (mine, other)]
    rows += _both("peak memory", peaks[0], peaks[1], "GiB, the most of any line")
    # Speeds are of all ranks. Speeds of two machines are divided too: a note names the machines.
    speeds = [steady(curves, "perf/tok_per_sec") for curves in (mine, other)]
    here, there = (machine or "unknown" for machine in machines)
    if speeds[0] and speeds[1] and here != there:
        notes.append(f"speeds are of different machines: {here} here, {there} there")
    return {"rows": rows, "speed_up": speeds[0] / speeds[1] if speeds[0] and speeds[1] else None, "notes": notes}


def steady(curves: Curves, metric: str) -> float | None:
    """Return the median over the logged lines without the first, which holds one-time costs;
    of a single line that one."""
    values = list(known(curves, metric).values())
    return median(values[1:] or values) if values else None


def speed_words(comparison: Mapping[str, Any], mine: str, other: str) -> str:
    """Return the speed-up in words, or that a speed is not known."""
    found = comparison["speed_up"]
    if found is None:
        return f"No speed-up: {mine} or {other} has logged no tokens/s."
    return f"{mine} makes {found:.2f} times the tokens/s of {other}."


def known(curves: Curves, metric: str) -> dict[float, float]:
    """Return the points of a curve that have a value, step -> value."""
    return {step: value for step, value in curves.get(metric, []) if step is not None and value is not None}


def _steps(curve: Mapping[float, float]) -> str:
    """Return the first three steps as text."""
    first = ", ".join(f"{step:.0f}" for step in sorted(curve)[:3])
    return f"{first}{', ...' if len(curve) > 3 else ''}"


def _apart(mine: Curves, other: Curves, step: float) -> str | None:
    """Return a note if the same step means other numbers of tokens in the two runs."""
    a, b = known(mine, "train/tokens").get(step), known(other, "train/tokens").get(step)
    if not a or not b or abs(a / b - 1) < TOKENS_APART:
        return None
    here, there, at = map(values.format_value, (a, b, step))
    return f"equal steps are not equal tokens: {here} here and {there} there at step {at}"


def _both(name: str, value: float | None, other: float | None, how: str) -> list[dict[str, Any]]:
    """Return the row of a number that belongs to no step; none if a run lacks it."""
    return [] if value is None or other is None else [_row(name, None, value, other, how)]


def _row(name: str, step: float | None, value: float, other: float, how: str) -> dict[str, Any]:
    """Return a row of the comparison."""
    change = value / other - 1 if other else None
    return {"name": name, "step": step, "value": value, "other": other, "change": change, "how": how}


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_DATA_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_DATA_FILE = re.compile(r"\.(jsonl|json|parquet|csv|txt)(\.gz)?$")


def read_settings(path: Path, notes: list[str]) -> dict[str, Any]:
    """Return config.yaml as a nested dictionary; problems are added to `notes`, never raised."""
    try:
        # The parser of recipes has limits, and a config.yaml may come from anybody.
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        notes.append(f"{path.name} is not there")
        return {}
    problems: list[str] = []
    settings = {}
    try:
        settings = mapping(clean(parse(text, path.name, problems).plain()))
    except RecursionError:
        problems = ["nested too deeply"]
    notes.extend(f"{path.name}: {problem}" for problem in problems[:3])
    return settings


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and their values.

    A list of plain values is one value; a list of mappings has a number for each.
    """
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _flat(item, f"{key}.{name}" if key else str(name))
    elif dicts(value):
        for index, item in enumerate(value):
            yield from _flat(item, f"{key}.{index}")
    else:
        yield key, value


def changed(settings: dict[str, Any]) -> Rows:
    """Return the settings that differ from their default, as {"key", "value", "default"}; default null also where there
    is none."""
    rows = []
    for key, value in _flat(settings):
        # Lists of mappings are numbered in a recipe; the table of keys has one entry, N, for all of them.
        known = key_table().get(re.sub(r"\.\d+(?=\.|$)", ".N", key))
        default = known.default if known is not None else None
        if known is None and value is None:  # a section that is not set
            continue
        if known is None or known.required or _text(value) != _text(default):
            rows.append({"key": key, "value": value, "default": default})
    return rows


def differences(settings: dict[str, Any], other: dict[str, Any]) -> Rows:
    """Return the settings of two runs that differ, as {"key", "value", "other"}; run.dir is left out."""
    mine = dict(_flat(settings))
    its = dict(_flat(other))
    keys = [key for key in dict.fromkeys([*mine, *its]) if key != "run.dir"]
    return [
        {"key": key, "value": mine.get(key), "other": its.get(key)}
        for key in keys
        if key not in mine or key not in its or _text(mine[key]) != _text(its[key])
    ]


def _text(value: Any) -> str:
    """Return a value as text that is the same for equal values."""
    return json.dumps(value, sort_keys=True, default=str)


def origin(settings: dict[str, Any]) -> str | None:
    """Return the hub model that this run, or the run that it continues, started with; None: it was made from scratch or
    from a local folder."""
    # A run may continue another one, which continues another: ten at most, because a folder may name itself.
    for _ in range(10):
        path = mapping(settings.get("model")).get("path")
        if not isinstance(path, str):
            return None
        folder = os.path.expanduser(path)  # os.path, not pathlib: it takes any text, however long or odd
        files = (os.path.join(folder, name) for name in (names.CONFIG, names.RECIPE))
        recipe = next((file for file in files if os.path.isfile(file)), None)
        if recipe is None:
            local = os.path.exists(folder) or path.startswith(("runs/", ".", "~", "/"))
            return path if not local and _HUB_ID.fullmatch(path) else None
        settings = read_settings(Path(recipe), [])
    return None


def hub_datasets(settings: dict[str, Any]) -> list[str]:
    """Return the hub ids of the training data."""
    paths = [source.get("path") for source in dicts(mapping(settings.get("data")).get("train"))]
    ids = [path for path in paths if isinstance(path, str) and _DATA_ID.fullmatch(path) and not _DATA_FILE.search(path)]
    return list(dict.fromkeys(path for path in ids if not os.path.exists(path)))


EvaluationTable = dict[tuple[float, str, str], dict[str, Any]]
"""(step, task, metric) -> an evaluation."""
_MAX_EVALUATIONS, _MAX_SAMPLES, _MAX_TEXT = 20, 10, 4000
_MEANS = ("centred_mean", "families")
EVALUATION_COLUMNS = ["task", "metric", "value", "95 % interval", "chance", "examples", "step"]


def evaluations(run_dir: Path, rows: Rows, notes: list[str]) -> Rows:
    """Return every evaluation of every task, by step, from evals/step-*/results.json; and the mean over tasks, which
    evals.jsonl has."""
    table: EvaluationTable = {}
    for path in sorted((run_dir / names.EVALUATIONS).glob(f"{names.STEP_DIRS}/{names.RESULTS}")):
        of_step = names.step_of(path.parent.name)
        for row in dicts(read_json(path, notes)) if of_step is not None else []:
            _keep_task(table, float(of_step or 0), row)
    for row in rows:
        step = drawable_number(row.get("step"))
        value = drawable_number(row.get("eval/centred_mean"))
        if step is not None and value is not None:
            _keep(table, step, {"task": "centred_mean", "metric": "mean", "value": value})
    return [table[key] for key in sorted(table)]


def final_evaluation(run_dir: Path, last_step: float, notes: list[str]) -> Rows:
    """Return what scripts/evaluate.py has found of the run's last checkpoint; nothing, with a note, if it was of an
    earlier one."""
    table: EvaluationTable = {}
    for row in dicts(read_json(run_dir / names.FINAL / names.RESULTS, notes, optional=True)):
        model = str(mapping(row.get("settings")).get("model") or names.step_name(round(last_step)))
        if names.step_of(Path(model).name) == last_step:
            _keep_task(table, last_step, row)
        else:
            notes.append(
                hint("result of another step", file=names.FINAL, task=row.get("task"), model=model, step=last_step)
            )
    return [row | {"final": True} for _, row in sorted(table.items())]


def _keep_task(evaluations: EvaluationTable, step: float, row: dict[str, Any]) -> None:
    """Keep a task and its parts."""
    task, metric = str(row.get("task", "?")), str(row.get("metric", "?"))
    # The task itself counts more than a part of another one that has its name.
    evaluations.pop((step, task, metric), None)
    _keep(evaluations, step, row)
    for name, value in mapping(row.get("metrics")).items():
        kind, _, part = name.partition("/")
        if part and kind == metric:
            _keep(evaluations, step, {"task": part, "metric": kind, "value": value})


def _keep(evaluations: EvaluationTable, step: float, row: dict[str, Any]) -> None:
    """Add an evaluation, unless there is one of this step, task and metric."""
    task, metric = str(row.get("task", "?")), str(row.get("metric", "?"))
    numbers = {key: drawable_number(row.get(key)) for key in ("value", "stderr", "low", "high", "chance", "examples")}
    others = {"settings": mapping(row.get("settings")), "metrics": mapping(row.get("metrics"))}
    made = {"step": int(step), "task": task, "metric": metric} | numbers | others
    evaluations.setdefault((step, task, metric), made)


def latest_evaluations(evaluation_rows: Rows) -> Rows:
    """Return the newest evaluation of each task and metric: means first, then tasks, then
    what is only a part of one."""
    newest = {(row["task"], row["metric"]): row for row in evaluation_rows}
    return [newest[key] for key in sorted(newest, key=lambda key: (is_part(newest[key]), key[0] not in _MEANS, key))]


def is_part(row: dict[str, Any]) -> bool:
    """Return whether an evaluation is a part of another, such as one family: it has no interval and no chance."""
    return row["low"] is None and row["chance"] is None and row["task"] not in _MEANS


def newest_samples(rows: Rows) -> Rows:
    """Return [{"step", "samples": [...]}], newest first: the last evaluations, the first samples of each, texts cut to
    a length."""
    by_step: dict[float, Rows] = {}
    keys = ("adapter", "prompt", "reference", "answer", "stop")
    for row in rows:
        step = drawable_number(row.get("step"))
        if step is not None:
            texts = {key: str(row[key])[:_MAX_TEXT] for key in keys if row.get(key)}
            by_step.setdefault(step, []).append(texts)
    steps = sorted(by_step, reverse=True)[:_MAX_EVALUATIONS]
    return [{"step": int(step), "samples": by_step[step][:_MAX_SAMPLES]} for step in steps]


Curve = list[list[float | None]]
"""[step, value or null] in order of the steps."""
MARKS_OF_A_RUN = (names.CONFIG, names.STATUS, names.METRICS_FILE)
"Files of which a run directory has at least one."
MAX_RUNS = 5
"Maximum number of runs that a message names."
_LEVELS = ("*/", "*/*/", "*/*/*/")
"Depths at which runs are looked for below a folder that may hold anything."
_BUCKETS = 160
"Number of stretches that a thinned curve is divided into."


def gather_report(run_dir: Path, against: Path | None = None) -> dict[str, Any]:
    """Return the content of a run's files, ready to show; `against` is a second run to compare with.

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
        report["against"]["comparison"]["notes"] += _unlike(report, other)
    return report


def _unlike(mine: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return notes on what differs between two runs and makes their numbers answers to different questions."""
    notes = []
    ours, its = (mapping(run["config"].get("loss")) for run in (mine, other))
    if keys := [f"loss.{key}" for key in ours if key in its and key not in _NO_LOSS and ours[key] != its[key]]:
        notes.append(hint("runs of other losses", keys=", ".join(keys)))
    sizes = [run["run"]["adapter_base_parameters"] or run["run"]["parameters"] for run in (mine, other)]
    if all(sizes) and abs(sizes[0] / sizes[1] - 1) > TOKENS_APART:
        here, there = map(values.parameters, sizes)
        notes.append(f"speeds and memory are of models of different size: {here} parameters here, {there} there")
    return notes


def machine_name(environment: Mapping[str, Any]) -> str:
    """Return what a run ran on, from its environment.json: how many of which device."""
    return f"{environment.get('world_size') or '?'} x {environment.get('device') or 'unknown device'}"


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
    """Return the runs under a folder, the last written first; `levels` are glob patterns of folders."""
    marks = [f"{level}{name}" for level in levels for name in MARKS_OF_A_RUN[1:]]  # wandb writes config.yaml too
    # Not those of archived runs, nor of a dashboard's own folder.
    found = [(path, path.relative_to(root)) for mark in marks for path in root.glob(mark)]
    paths = [path for path, inside in found if not (names.is_archived(inside) or "wandb" in inside.parts)]
    return list(dict.fromkeys(path.parent for path in sorted(paths, key=lambda path: -path.stat().st_mtime)))


def newest_run_under(root: Path) -> Path:
    """Return the run under `root` that was written to last.

    Raises:
        ConfigError: there is none.
    """
    if found := runs_in(root):
        return found[0]
    raise ConfigError(f"{root}/: no run there; {first_run()}, or name a run directory")


def run_of(folder: Path) -> Path | None:
    """Return the run that a folder such as evals/final is in; None if it is in none."""
    parents = folder.absolute().parents
    return next((path for path in parents if any((path / name).is_file() for name in MARKS_OF_A_RUN[1:])), None)


def read_run(run_dir: Path) -> tuple[dict[str, Any], dict[str, Curve]]:
    """Return what is shown of a run, and its curves with every logged step.

    Raises:
        ConfigError: the folder holds no run; it names runs nearby.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such folder{_runs_near(run_dir)}")
    if not any((run_dir / name).is_file() for name in MARKS_OF_A_RUN):
        raise ConfigError(f"{run_dir}: no run: it holds neither {' nor '.join(MARKS_OF_A_RUN)}{_runs_near(run_dir)}")
    # Every file of the run; `notes` lists those that cannot be read.
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
    # Derived from the files.
    folder = checkpoint(run_dir)
    full = curves_of(metrics) | curves_of(evals)
    last = {name: points[-1][1] for name, points in full.items()}
    side_by_side = adapter_rows(preflight, full)
    state = mapping(read_json(folder / names.TRAINING_STATE, [], optional=True)) if folder else {}
    world_size = drawable_number(environment.get("world_size"))
    saved = names.step_of(folder.name) if folder else None
    # Each of several is a separate model.
    adapters = sorted(one.name for one in folder.glob(f"{names.ADAPTER_FOLDERS}/*")) if folder else []
    last_step = float(saved) if saved is not None else drawable_number(status.get("step")) or 0.0
    report = {
        "run": {
            "name": "/".join(run_dir.resolve().parts[-2:]),
            "model": model_name(settings),
            "parent_report": parent_report(run_dir, settings),
            "base_model": origin(settings),
            "start": mapping(preflight.get("start")),
            "chat": bool(folder and (folder / "chat_template.jinja").is_file()),
            "datasets": hub_datasets(settings),
            "parameters": values.stored_parameters(folder) if folder else None,
            "trained_parameters": values.trained_parameters(folder, settings) if folder else None,
            "checkpoint": folder.name if folder else None,
            "adapter": bool(folder and (folder / names.ADAPTER_CONFIG).is_file()),
            "adapters": adapters,
            "adapter_settings": adapter_words(mapping(settings["adapter"])) if settings.get("adapter") else None,
            "adapter_base": mapping(read_object(folder / names.MANIFEST).get(BASE)) if folder else {},
            "adapter_base_parameters": values.base_parameters(folder) if folder else None,
            "auto_class": None
            if adapters or not folder
            else whole_class(mapping(read_json(folder / "config.json", []))),
            "unchanged_parameters": values.unchanged_parameters(folder) if folder else 0,
            "device": environment.get("device"),
            "world_size": int(world_size) if world_size else None,
        },
        "status": status,
        "identity": mapping(state.get("identity")),
        "summary": _sums(summary, full, last),
        "command": _command(status.get("resume")),
        "headline": _headline(full, last, side_by_side, cpu=values.on_cpu(environment.get("device"))),
        "adapters": side_by_side,
        "proof": dicts(proof.get("rows")),
        "logits": mapping(proof.get("logits")),
        "curves": {name: thin(points) for name, points in full.items()},
        "last": last,
        "evaluations": evaluations(run_dir, evals, notes),
        "final": final_evaluation(run_dir, last_step, notes),
        "samples": newest_samples(samples),
        "preflight": preflight,
        "events": events,
        "config": settings,
        "config_changed": changed(settings),
        "environment": environment,
        "against": None,
        "notes": notes,
    }
    return report, full


ADAPTER_COLUMNS = {
    "rank": None,
    "alpha": None,
    "lr": None,
    "data": None,
    "steps": None,
    "training loss": "train/loss/{}",
    "validation loss": "val/{}/loss",
    "best": "val/{}/loss",
    "at step": "val/{}/loss",
    "tasks": "eval/{}/centred_mean",
    "gradient norm": "train/grad_norm/{}",
    "skipped steps": "health/skipped_steps/{}",
}
"Column of the table of several adapters -> its metric; None: a fact in preflight.json."


def adapter_rows(preflight: Mapping[str, Any], curves: Curves) -> Rows:
    """Return several adapters side by side: settings, data, newest and lowest losses; none for a run without. The
    lowest validation loss comes first, adapters without one last."""
    named = [name.removeprefix("train/loss/") for name in curves if name.startswith("train/loss/")]
    rows = []
    for one in dicts(preflight.get("adapters")) or [{"name": name} for name in named]:
        row: dict[str, Any] = {"adapter": one.get("name")}
        for column, metric in ADAPTER_COLUMNS.items():
            row[column] = one.get(column)
            if metric is not None and (points := known(curves, metric.format(one.get("name")))):
                lowest = min(points, key=lambda step: points[step])
                row[column] = {"best": points[lowest], "at step": lowest}.get(column, points[max(points)])
        rows.append(row)
    return sorted(rows, key=lambda row: math.inf if row["validation loss"] is None else row["validation loss"])


def adapter_table(rows: Rows) -> tuple[list[str], list[list[str]]]:
    """Return the columns with a value of what `adapter_rows` returned, and the cells of each row as text."""
    columns = [name for name in ("adapter", *ADAPTER_COLUMNS) if any(row[name] is not None for row in rows)]
    return columns, [[values.format_value(row[name]) for name in columns] for row in rows]


def newest_adapter_rows(run_dir: Path) -> Rows:
    """Return what `adapter_rows` finds in the files of a run."""
    preflight = mapping(read_json(run_dir / names.PREFLIGHT, [], optional=True))
    if not dicts(preflight.get("adapters")):
        return []
    lines = [row for file in (names.METRICS_FILE, names.EVALS) for row in read_rows(run_dir / file, [], optional=True)]
    return adapter_rows(preflight, curves_of(lines))


def _sums(summary: dict[str, Any], curves: Mapping[str, Curve], last: Mapping[str, float | None]) -> dict[str, Any]:
    """Return the numbers of summary.json; tokens and time are those of the whole run, over all its starts.

    The newest line has them. summary.json is of the newest start that ended: a run that continues, or was killed, has
    done more since. Versions before wrote the time of that start alone.
    """
    found = {key: value for key, value in summary.items() if not isinstance(value, dict | list)}
    logged = {"tokens": last.get("train/tokens"), "train_seconds": last.get("train/seconds")}
    ended = drawable_number(summary.get("step"))
    newest = max(known(curves, "train/tokens"), default=-1.0)
    if ended is None or newest >= ended:
        found |= {key: value for key, value in logged.items() if value is not None}
    return found


def parent_report(run_dir: Path, settings: dict[str, Any]) -> str | None:
    """Return where the report of the run that this one started from lies, relative to this one's; None: there is none
    here."""
    path = mapping(settings.get("model")).get("path")
    # Both paths are resolved, so the link also holds if runs/ is a link to another disk.
    page = Path(path) / names.REPORT if isinstance(path, str) else None
    return os.path.relpath(page.resolve(), run_dir.resolve()) if page is not None and page.is_file() else None


def model_name(settings: dict[str, Any]) -> str | None:
    """Return what was trained: a path or hub id, or the type of a model from scratch."""
    model = mapping(settings.get("model"))
    if scratch := mapping(model.get("scratch")):
        return f"{scratch.get('model_type', 'model')} from scratch"
    return str(model["path"]) if model.get("path") else None


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
    """Return every metric by name over the steps; if a step comes twice, the later line counts."""
    curves: dict[str, dict[float, float | None]] = {}
    for row in rows:
        step = drawable_number(row.get("step"))
        if step is None:
            continue
        for name, value in row.items():
            # A null, which replaced a value that was not finite, is kept as a gap of the line.
            if name not in ("step", "time") and (value is None or drawable_number(value) is not None):
                curves.setdefault(name, {})[step] = drawable_number(value)
    return {name: [[step, points[step]] for step in sorted(points)] for name, points in curves.items()}


def thin(points: Curve) -> Curve:
    """Return at most about 500 points that look the same: of each stretch its lowest, its highest, and a gap if it has
    one."""
    if len(points) <= 3 * _BUCKETS:
        return points
    kept = {0, len(points) - 1}
    for bucket in range(_BUCKETS):
        stretch = range(bucket * len(points) // _BUCKETS, (bucket + 1) * len(points) // _BUCKETS)
        # Lowest and highest, not means: a spike of one step has to stay visible.
        known_values = [(value, i) for i in stretch if (value := points[i][1]) is not None]
        kept |= {min(known_values)[1], max(known_values)[1]} if known_values else set()
        kept |= {next(i for i in stretch if points[i][1] is None)} if len(known_values) < len(stretch) else set()
    return [points[i] for i in sorted(kept)]


def _headline(curves: dict[str, Curve], last: dict[str, float | None], adapters: Rows, *, cpu: bool) -> Rows:
    """Return the numbers that people ask for first, as {"name", "value", "text", "how"}.

    Args:
        adapters: what adapter_rows returned.
    """
    each, memory = ("process", "most of the process, resident") if cpu else ("GPU", "most that tensors took")
    mfu = steady(curves, "perf/mfu")
    speed = steady(curves, "perf/tok_per_sec_per_gpu")
    percent = round(100 * mfu, 1) if mfu is not None else None
    peak = max(known(curves, "mem/peak_gib").values(), default=None)
    validation = ("validation loss", last.get("val/loss"), "", "nats per target, last evaluation")
    if found := [row for row in adapters if row["validation loss"] is not None]:
        best = min(found, key=lambda row: row["validation loss"])
        how = f"{best['adapter']}, the lowest of {len(found)} adapters, last evaluation"
        validation = ("validation loss", best["validation loss"], "", how)
    rows = [
        ("training loss", last.get("train/loss"), "", "nats per target, last logged line"),
        validation,
        (f"tokens/s per {each}", speed, "", "useful tokens, median without the first line"),
        ("MFU", percent, "%", "of the bf16 peak, median without the first line"),
        ("peak memory", peak, "GiB", memory),
        ("recompiles", last.get("compile/recompiles"), "", "after the warm-up; 0 is right"),
    ]
    return [{"name": n, "value": v, "text": values.format_value(v, u), "how": how} for n, v, u, how in rows]
