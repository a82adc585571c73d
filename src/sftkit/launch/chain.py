"""The chain base -> mid -> chat SFT -> evaluate on one folder of recipes: its stages, which of them have nothing left
to do, and the summary at its end. Reads only files.
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from sftkit.config import commands, load, schema, tables
from sftkit.config.rules import run_can_be_written
from sftkit.config.yaml import RecipeLoader
from sftkit.errors import ConfigError, config_error
from sftkit.models.files import auto_class_in
from sftkit.preflight.inputs import input_rules
from sftkit.rundir.files import current_provenance, digest, read_object, read_provenance, verify, weights_changed
from sftkit.rundir.lock import at_work
from sftkit.rundir.names import FINAL, PROOF, RECIPE, REPORT, RESULTS, SUMMARY, latest_checkpoint, step_name
from sftkit.rundir.status import read_status


def finished(cfg: schema.Config) -> str | None:
    """Return a line that says that a run is finished, if train.resume=auto would find it at its last step; None: the
    run has to be started.

    A finished run has the same recipe, a complete newest checkpoint, and the files that it recorded at its start. The
    line warns of weights that have changed since: no start would train from them.
    """
    run_dir = Path(cfg.run.dir)
    if cfg.train.resume != "auto" or read_status(run_dir).get("status") != "finished" or at_work(run_dir):
        return None
    try:
        # Cheap checks first: the last one reads every byte of the checkpoint.
        summary = json.loads((run_dir / SUMMARY).read_text())
        newest = latest_checkpoint(run_dir)
        step = summary["step"]
        total_steps = summary["total_steps"]
        if newest is None or newest.name != step_name(total_steps) or step != total_steps or summary["stopped"]:
            return None
        if _recipe(load.to_yaml(cfg)) != _recipe((newest / RECIPE).read_text()):
            return None
        began = read_provenance(run_dir)
        now = current_provenance(cfg.model, cfg.data)
        if began is None or began.inputs != now.inputs or verify(newest) is not None:
            return None
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return None  # the start itself reports the error
    warning = weights_changed(cfg.model, began, now)
    if warning is not None and "model.path" in cfg.train.resume_changes:
        return None  # the start writes them down
    line = f"finished at step {step} of {total_steps}, nothing left to train: {newest}"
    return line if warning is None else f"{line}\nwarning: {warning}"


def _recipe(text: str) -> dict[str, Any]:
    """Return the settings of a resolved recipe without those on how a run is resumed."""
    recipe = yaml.load(text, Loader=RecipeLoader)
    return {**recipe, "train": {**recipe["train"], "resume": None, "resume_changes": None}}


CHAIN_SCRIPTS = {stage: f"scripts/{tables.STAGE_SCRIPTS[stage]}" for stage in tables.CHAIN}


def read_stages(folder: Path, overrides: Sequence[str]) -> dict[str, schema.Config]:
    """Read the recipe of each stage, which may start from the run of an earlier one.

    Args:
        folder: with a recipe of the name of each stage.

    Raises:
        ConfigError: what is wrong with, and missing for, any of the three.
    """
    if folder.is_file() or Path(commands.shipped(str(folder))).is_file():
        raise ConfigError(f"{folder}: a recipe, and a chain runs those of a folder: name {folder.parent}")
    if not folder.is_dir() and not Path(commands.shipped(str(folder))).is_dir():
        # A folder counts as complete by its first stage: examples for the message, no check.
        complete = [recipe.parent for recipe in map(Path, commands.shipped_recipes()) if recipe.stem == tables.CHAIN[0]]
        words = {"meant": commands.similar_paths(str(folder)) or ".", "such": ", ".join(map(str, complete))}
        names = ", ".join(f"{stage}.yaml" for stage in CHAIN_SCRIPTS)
        raise config_error("no folder of a chain", folder=folder, names=names, **words)
    # If stages shared a directory, each would set aside the run before it, and start from an earlier chain's.
    if word := next((word for word in overrides if word.startswith("run.dir=")), None):
        files = ", ".join(str(folder / f"{stage}.yaml") for stage in CHAIN_SCRIPTS)
        raise config_error("one directory for a chain", word=word, files=files)
    recipes: dict[str, schema.Config] = {}
    problems: list[str] = []
    for stage in CHAIN_SCRIPTS:
        # Runs of earlier stages count as there. After a problem it is not known which they are.
        made = None if problems else [cfg.run.dir for cfg in recipes.values()]
        rules = [run_can_be_written, *input_rules(stage, made)]
        try:
            recipes[stage] = load.read_config(folder / f"{stage}.yaml", overrides, more=rules)
        except ConfigError as error:
            problems += re.split(r"\n(?!  )", str(error))  # bad rows are indented below their source
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return recipes


def was_stopped(run_dir: Path, earlier: str | None, code: int) -> bool:
    """Return whether a stage was stopped, by a signal or by train.max_minutes.

    Args:
        earlier: newest_start of its directory before the stage was started.
        code: its exit code, which says so before the first step alone: 128 + the signal's number.
    """
    status = read_status(run_dir)
    return code > 128 or (status.get("status") in ("stopped", "preempted") and status.get("start_id") != earlier)


def evaluate_command(run: schema.RunConfig, eval: schema.EvalConfig) -> list[str]:
    """Return the command that scores the exported checkpoint of the last stage, on as many held-out instances as its
    own evaluations."""
    limit = ["--max-examples", str(eval.max_examples)] if eval.max_examples else []
    out = str(Path(run.dir) / FINAL)
    return [sys.executable, commands.shipped("scripts/evaluate.py"), run.dir, "families", "--out", out, *limit]


def is_evaluated(run: schema.RunConfig, eval: schema.EvalConfig) -> bool:
    """Return whether evaluate_command has scored the bytes of this checkpoint before, on as many instances."""
    run_dir = Path(run.dir)
    try:
        # The manifest decides, which stands for the bytes of the checkpoint: its name alone is the same after another
        # training.
        settings = json.loads((run_dir / FINAL / RESULTS).read_text())[0]["settings"]
        manifest = digest(newest) if (newest := latest_checkpoint(run_dir)) is not None else None
        same_limit = settings["max_examples"] == eval.max_examples
        return manifest is not None and settings["manifest"] == manifest and same_limit
    except (OSError, ValueError, LookupError, TypeError):
        return False


def summary(runs: dict[str, Path], seconds: float) -> str:
    """Return what the chain did, as text for a person.

    Args:
        runs: stage -> its run directory.
        seconds: of the whole chain.
    """
    trained = {stage: json.loads((run_dir / SUMMARY).read_text()) for stage, run_dir in runs.items()}
    families = json.loads((runs["sft"] / FINAL / RESULTS).read_text())[0]
    accuracies = [name for name in families["metrics"] if name.startswith("acc/")]
    before = format(trained["sft"]["evals_at_start"].get("eval/families/acc", float("nan")), ".3f")

    def row(name: str, show: Callable[[dict[str, Any]], str]) -> str:
        return f"  {name:<28}" + "".join(f"{show(trained[stage]):>12}" for stage in CHAIN_SCRIPTS)

    def metric(section: str, key: str, form: str) -> Callable[[dict[str, Any]], str]:
        return lambda stage: "-" if (value := stage[section].get(key)) is None else format(value, form)

    # None: not made, such as that of a resume in a run that did not resume.
    proofs = [[row.get("ok") for row in read_object(run_dir / PROOF).get("rows", [])] for run_dir in runs.values()]

    questions = []
    for sample in trained["sft"]["samples"]:
        questions += [f"  {line}" for line in sample["prompt"].splitlines()]
        questions += [f"    -> {sample['answer']}", ""]

    # A table with a column for each stage, then scores and samples of the last one, and where things are.
    checkpoint = trained["sft"]["checkpoint"]
    lines = [
        "",
        f"  {'':<28}" + "".join(f"{stage:>12}" for stage in CHAIN_SCRIPTS),
        row("steps", lambda s: f"{s['step']}"),
        row("tokens", lambda s: f"{s['tokens']:,}"),
        row("training loss (nats)", metric("metrics", "train/loss", ".4f")),
        row("validation loss (nats)", metric("evals", "val/loss", ".4f")),
        row("validation bits per byte", metric("evals", "val/bpb", ".4f")),
        row("held-out accuracy", metric("evals", "eval/families/acc", ".3f")),
        row("tokens/s", metric("metrics", "perf/tok_per_sec", ",.0f")),
        row("seconds in steps", lambda s: "-" if s["train_seconds"] is None else f"{s['train_seconds']:.0f}"),
        row("seconds of warm-up", lambda s: f"{s['warm_up_seconds']:.0f}"),
        row("graphs / recompiles", lambda s: "{compile/graphs:.0f} / {compile/recompiles:.0f}".format(**s["metrics"])),
        f"  {'checks passed / failed':<28}" + "".join(f"{f'{p.count(True)} / {p.count(False)}':>12}" for p in proofs),
        f"  {'checks not made':<28}" + "".join(f"{found.count(None):>12}" for found in proofs),
        "",
        f"  held-out accuracy, mean of families, {families['examples']} instances:",
        f"    {before} before SFT, {families['value']:.3f} after (95 % interval {families['low']:.3f} to "
        f"{families['high']:.3f})",
        *(f"    {name.removeprefix('acc/'):<26}{families['metrics'][name]:6.3f}" for name in accuracies),
        *nothing_learned(families, trained["sft"]["evals_at_start"]),
        "",
        *questions,
        f"  checkpoint  {checkpoint}",
        f"              {auto_class_in(Path(checkpoint))}.from_pretrained loads it",
        f"  report      {runs['sft'] / REPORT}",
        f"  checks      {runs['sft'] / PROOF}",
        f"  chat        {commands.invocation('scripts/chat.py', str(runs['sft']))}",
        f"  total       {seconds / 60:.1f} min",
    ]
    return "\n".join(lines)


def nothing_learned(families: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Return lines that explain an accuracy that SFT has not raised; empty if it has.

    Args:
        families: the result of the evaluation: value and 95 % interval (low, high), 0-1.
        before: evaluations of the SFT run before its first step.
    """
    if families["low"] > before.get("eval/families/acc", 0.0):
        return []
    longer = commands.invocation("scripts/run_chain.py", "recipes/default")
    return [
        "  that is no more than before SFT, within the interval: all stages ran, but so",
        "  small a model learns no task in so few steps. A model that learns them, in",
        f"  some minutes: {longer}",
    ]
