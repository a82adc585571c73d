"""The criteria, each with its number: pure functions of the contents of the runs' files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any, cast

import yaml

from sftkit.config.yaml import RecipeLoader
from sftkit.reports.values import duration, format_value
from sftkit.rundir.files import MetricsLine, read_metric_rows, read_object, read_results
from sftkit.rundir.names import (
    CONFIG,
    ENVIRONMENT,
    ERRORS,
    EVALS,
    EVALUATIONS,
    METRICS_FILE,
    PROOF,
    RESULTS,
    STATUS,
    STEP_DIRS,
    SUMMARY,
)


@dataclass(frozen=True)
class Pays:
    """The savings of a compiled run over the same run without the compiler."""

    eager_step_seconds: float
    compiled_step_seconds: float
    compile_seconds: float
    saved_seconds_per_1000_steps: float
    "compile already subtracted; below 0: compiled steps take longer in all"
    steps: int | None
    "number of steps from which on compiling pays; None: never"
    minutes: float | None
    "duration of a run of `steps` steps, which is the same either way"

    @property
    def words(self) -> str:
        """Return the result in words."""
        saved = self.saved_seconds_per_1000_steps
        total = f"1,000 steps take {duration(abs(saved))} {'less' if saved >= 0 else 'longer'}"
        total += f" with {duration(self.compile_seconds)} of compiling"
        each = f"{format_value(self.compiled_step_seconds)} against {format_value(self.eager_step_seconds)} s a step"
        if self.steps is None or self.minutes is None:
            return f"{total}; compiling never pays: {each}"
        return f"{total}; compiling pays from {self.steps:,} steps on ({duration(60 * self.minutes)}): {each}"


def pays(eager_step_seconds: float, compiled_step_seconds: float, compile_seconds: float) -> Pays:
    """Return what compiling saves over 1,000 steps, and how long a run must be to pay for it."""
    saved = 1000 * (eager_step_seconds - compiled_step_seconds) - compile_seconds
    steps = pays_from(eager_step_seconds, compiled_step_seconds, compile_seconds)
    minutes = None if steps is None else steps * eager_step_seconds / 60
    return Pays(eager_step_seconds, compiled_step_seconds, compile_seconds, saved, steps, minutes)


def pays_from(eager_step_seconds: float, compiled_step_seconds: float, compile_seconds: float) -> int | None:
    """Return the fewest steps (1 or more) that take no longer compiled, compile included, than eager; None: never."""
    gain = eager_step_seconds - compiled_step_seconds
    steps = compile_seconds / gain if gain > 0 else math.inf
    # Rounded first, so that 100.0000001 is 100 steps and not 101.
    return max(1, math.ceil(round(steps, 6))) if math.isfinite(steps) else None


@dataclass(frozen=True)
class Measured:
    """One run, as recorded in its own files."""

    error: str | None
    "why it did not finish; then other fields may be missing"
    lines: list[MetricsLine] = field(default_factory=list)
    "lines of metrics.jsonl"
    evals: MetricsLine = field(default_factory=dict)
    "the last evaluation, without step and time"
    results: list[dict[str, Any]] = field(default_factory=list)
    "tasks of that evaluation: value, low and high of its 95 % interval"
    summary: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    proof: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    rank_errors: list[str] = field(default_factory=list)
    backend: str | None = None
    "compile.backend of its recipe; None: unknown, as in results of earlier versions"

    def timed(self, warm_up: int) -> list[MetricsLine]:
        """Return the windows after this many steps."""
        return [line for line in self.lines if line["step"] > warm_up]

    def speeds(self, warm_up: int) -> list[float]:
        """Return the useful tokens/s of each timed window."""
        return [line["perf/tok_per_sec"] for line in self.timed(warm_up)]

    def step_seconds(self, warm_up: int) -> list[float]:
        """Return the seconds per step of each timed window."""
        return [found for line in self.timed(warm_up) if (found := line.get("perf/step_seconds")) is not None]

    def losses(self, warm_up: int) -> dict[int, float]:
        """Return step -> training loss of the window that ends there, after the warm-up, in nats per target token."""
        return {line["step"]: line["train/loss"] for line in self.timed(warm_up) if line["train/loss"] is not None}

    def last(self, name: str) -> float | None:
        """Return the last logged value."""
        return self.lines[-1].get(name) if self.lines else None

    def largest(self, name: str) -> float | None:
        """Return the largest logged value."""
        return max((line[name] for line in self.lines if line.get(name) is not None), default=None)

    def proof_row(self, name: str) -> dict[str, Any] | None:
        """Return a row of proof.json by its name."""
        return next((row for row in self.proof.get("rows", []) if row["name"] == name), None)


def measure(folder: Path, error: str | None) -> Measured:
    """Read the results that a run left in its folder.

    Args:
        error: how its process ended; None: success.
    """
    evals = read_metric_rows(folder / EVALS)
    newest = max((folder / EVALUATIONS).glob(f"{STEP_DIRS}/{RESULTS}"), default=None)
    return Measured(
        error=error,
        lines=read_metric_rows(folder / METRICS_FILE),
        results=read_results(newest) if newest else [],
        evals={k: v for k, v in (evals[-1] if evals else {}).items() if k not in ("step", "time")},
        summary=read_object(folder / SUMMARY),
        status=read_object(folder / STATUS),
        proof=read_object(folder / PROOF),
        environment=read_object(folder / ENVIRONMENT),
        rank_errors=sorted(path.name for path in (folder / ERRORS).glob("*")),
        backend=_backend(folder / CONFIG),
    )


def _backend(config: Path) -> str | None:
    """Return compile.backend of a run's config.yaml; None if it cannot be read."""
    try:
        return cast(str, yaml.load(config.read_text(), Loader=RecipeLoader)["compile"]["backend"])
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return None


def format_spread(values: list[float], form: str) -> str:
    """Return the median, and the extremes in brackets."""
    if not values:
        return "-"
    return f"{format(median(values), form)} ({format(min(values), form)} to {format(max(values), form)})"


# Limits of the criteria; labs/validate/README.md explains each.
SPEEDUP = 1.3
NO_CODE = ("eager", "aot_eager")
"Backends that capture graphs and call the same operators: no speed is expected of them."
COMPILE_SECONDS = 60.0
MEMORY = 1.1
_LOSS = 0.05
EVALUATION = 0.005
"Allowed relative difference of validation losses if the two baseline seeds are closer than that."
SCALING = 0.85


@dataclass(frozen=True)
class Verdict:
    """One criterion of one layout on a number of processes."""

    layout: str
    processes: int
    criterion: str
    ok: bool | None
    "None: not checked, which fails nothing"
    found: str
    wanted: str


@dataclass(frozen=True)
class Trio:
    """The runs of one layout and number of processes that are judged together: eager, compiled, and
    their references.
    """

    layout: str
    processes: int
    eager: Measured
    compiled: Measured
    other_seed: Measured
    "run on the fewest processes"
    reference: Measured | None
    """reference for the losses: the reference engine, each document alone in plain fp32, on the fewest processes;
    None: it was not run, and the eager run replaces it
    """
    logits: Mapping[str, Any]
    "result of loading the compiled run's checkpoint in another process, in the form of a row of proof.json"
    warm_up: int

    @property
    def plain(self) -> tuple[str, Measured]:
        """Return (name, run) of the reference for the compiled run's losses."""
        return ("eager", self.eager) if self.reference is None else ("reference", self.reference)


def trios(result: Mapping[str, Any]) -> list[list[Trio]]:
    """Return the compared runs, layout by layout, the fewest processes first."""
    plan = result["plan"]
    fewest = plan["processes"][0]
    runs = {(run["layout"], run["processes"], run["kind"]): run for run in result["runs"]}

    def measured(*key: Any) -> Measured:
        return Measured(**runs[key]["measured"]) if key in runs else Measured(error="it was not run")

    return [
        [
            Trio(
                layout,
                count,
                eager=measured(layout, count, "eager"),
                compiled=measured(layout, count, "compiled"),
                other_seed=measured(layout, fewest, "eager, other seed"),
                # Results of earlier versions have none, and neither has a recipe with an unsupported optimizer.
                reference=measured(layout, fewest, "reference") if (layout, fewest, "reference") in runs else None,
                logits=runs.get((layout, count, "compiled"), {}).get("logits", {}),
                warm_up=plan["warm_up"],
            )
            for count in plan["processes"]
        ]
        for layout in plan["layouts"]
    ]


def judge(trio: Trio) -> list[Verdict]:
    """Return the verdicts on all criteria; an unfinished run fails those that need it."""
    finished, found = _finished(trio)
    wanted = f"{trio.processes} of {trio.processes} ranks, no errors"
    verdicts = [trio_verdict(trio, "runs finish on all ranks", found, wanted, ok=finished)]
    failed = trio.eager.error or trio.compiled.error or trio.other_seed.error
    for name, check, wanted in CRITERIA:
        ok, found = (False, "not measured: a run failed") if failed else check(trio)
        verdicts.append(trio_verdict(trio, name, found, wanted, ok=ok))
    return verdicts


def trio_verdict(trio: Trio, criterion: str, actual: str, wanted: str, *, ok: bool | None) -> Verdict:
    """Return a verdict on this trio."""
    return Verdict(trio.layout, trio.processes, criterion, ok, actual, wanted)


def _finished(trio: Trio) -> tuple[bool, str]:
    """Check that every process joined and ended successfully, and that no rank reported an error."""
    for name, run in (("eager", trio.eager), ("compiled", trio.compiled)):
        status, ranks = run.status.get("status"), run.environment.get("world_size")
        if run.error or status != "finished" or run.rank_errors or ranks != trio.processes:
            problem = run.error or ", ".join(run.rank_errors) or f"status {status}, {ranks} ranks"
            return False, f"{name}: {problem}"
    return True, f"{trio.processes} of {trio.processes}, status finished, no rank errors"


def constant_shapes(trio: Trio) -> tuple[bool, str]:
    """Check, in the compiled run's proof, that all batches had declared shapes. Return (ok, finding), as every
    criterion does.
    """
    row = trio.compiled.proof_row("Only declared shapes")
    return bool(row and row["ok"]), f"{row['found']} (declared {row['expected']})" if row else "no proof.json"


def compiled_model(trio: Trio) -> tuple[bool, str]:
    """Check that the compiled run has compiled graphs, and the eager run none."""
    graphs, eager = trio.compiled.last("compile/graphs"), trio.eager.last("compile/graphs")
    ok = bool(trio.compiled.summary.get("compiled") and graphs and not trio.eager.summary.get("compiled") and not eager)
    return ok, f"{graphs or 0:.0f} graphs compiled, {eager or 0:.0f} in the baseline"


def recompiles_in_training(trio: Trio) -> tuple[bool, str]:
    """Check, by the proof and the logged counter, that nothing was compiled after the warm-up."""
    # Both: the counter covers logged steps, the proof the whole run.
    row = trio.compiled.proof_row("No recompiles after the warm-up")
    count = trio.compiled.last("compile/recompiles")
    return count == 0 and bool(row and row["ok"]), row["found"] if row and not row["ok"] else f"{count or 0:.0f}"


def recompiles_in_evaluation(trio: Trio) -> tuple[bool, str]:
    """Check, in the compiled run's proof, that evaluations compile nothing."""
    row = trio.compiled.proof_row("Evaluation compiles nothing")
    return bool(row and row["ok"]), row["found"] if row else "no proof.json"


def proof_passes(trio: Trio) -> tuple[bool, str]:
    """Check that none of the runs' own checks failed; unchecked rows do not count. Failed rows are named."""
    failed, missing, count = [], [], 0
    for kind, run in (("eager", trio.eager), ("compiled", trio.compiled)):
        rows = run.proof.get("rows", [])
        count += len(rows)
        missing += [] if rows else [f"{kind}: no proof.json"]
        failed += [f"{kind}: {row['name']} ({row['found']})" for row in rows if row["ok"] is False]
    return not failed and not missing, "; ".join([*missing, *failed]) or f"none of {count} rows failed"


def speedup(trio: Trio) -> float:
    """Return the median useful tokens/s of the compiled run over that of the eager run."""
    return median(trio.compiled.speeds(trio.warm_up)) / median(trio.eager.speeds(trio.warm_up))


def faster(trio: Trio) -> tuple[bool | None, str]:
    """Check that the compiled run is faster by SPEEDUP; None with a backend that generates no code."""
    ratio = speedup(trio)
    eager, compiled = (format_spread(run.speeds(trio.warm_up), ",.0f") for run in (trio.eager, trio.compiled))
    found, time = f"{ratio:.2f}: {compiled} against {eager} tokens/s", in_time(trio)
    found = f"{found}; {time.words}" if time else found
    if trio.compiled.backend in NO_CODE:
        return None, f"{found}; not judged: compile.backend {trio.compiled.backend} generates no code"
    return ratio >= SPEEDUP, found


def in_time(trio: Trio) -> Pays | None:
    """Convert the ratio to time, from the medians of the windows and the extra time of the compiled warm-up over the
    eager one, which makes the same checks; None if a run failed or logged no seconds.
    """
    eager, compiled = (run.step_seconds(trio.warm_up) for run in (trio.eager, trio.compiled))
    spent = trio.compiled.summary.get("warm_up_seconds")
    if trio.eager.error or trio.compiled.error or not eager or not compiled or spent is None:
        return None
    # The eager warm-up makes the same checks; only the additional time belongs to the compiler.
    without = trio.eager.summary.get("warm_up_seconds") or 0.0
    return pays(median(eager), median(compiled), max(spent - without, 0.0))


def first_compile(trio: Trio) -> tuple[bool, str]:
    """Check that the warm-up, from empty caches, takes COMPILE_SECONDS at most."""
    seconds = trio.compiled.summary["warm_up_seconds"]
    inside = trio.compiled.last("compile/seconds") or 0.0
    return seconds <= COMPILE_SECONDS, f"{seconds:.1f} s, {inside:.1f} s of them in the compiler"


def memory(trio: Trio) -> tuple[bool, str]:
    """Check that the compiled run's peak is at most MEMORY times the eager run's."""
    eager, compiled = trio.eager.largest("mem/peak_gib"), trio.compiled.largest("mem/peak_gib")
    if not eager or not compiled:
        return False, "not measured"
    return compiled <= MEMORY * eager, f"{compiled:.2f} against {eager:.2f} GiB"


def loss_at_the_end(trio: Trio) -> tuple[bool, str]:
    """Check that the last losses are close to each other."""
    name, plain = trio.plain
    expected, compiled = plain.losses(trio.warm_up), trio.compiled.losses(trio.warm_up)
    step = max(expected, default=0)
    if plain.error or step not in compiled:
        return False, f"not measured: {name}: {plain.error}" if plain.error else "no loss was logged"
    off = abs(compiled[step] - expected[step]) / abs(expected[step])
    found = f"step {step}: {compiled[step]:.4f} against {expected[step]:.4f} ({name}), {100 * off:.3f} % apart"
    return off <= _LOSS, found


def loss_within_noise(trio: Trio) -> tuple[bool, str]:
    """Check that the losses of the compiled run are no further from the reference than those of two eager seeds from
    each other.
    """
    name, plain = trio.plain
    noise = distances(trio.eager.losses(trio.warm_up), trio.other_seed.losses(trio.warm_up))
    found = distances(plain.losses(trio.warm_up), trio.compiled.losses(trio.warm_up))
    if plain.error or not noise or not found:
        return False, f"not measured: {name}: {plain.error}" if plain.error else "the runs logged no common steps"
    # The mean shows a drift, the maximum a single wrong step.
    ok = mean(found) <= mean(noise) and max(found) <= max(noise)
    words = [f"{100 * mean(some):.3f} % apart on average, {100 * max(some):.3f} % at most" for some in (found, noise)]
    return ok, f"from {name} {words[0]}; two baseline seeds {words[1]}"


def distances(a: Mapping[int, float], b: Mapping[int, float]) -> list[float]:
    """Return the relative difference at each step; empty unless both have the same steps."""
    return [abs(b[step] - a[step]) / abs(a[step]) for step in a] if a.keys() == b.keys() else []


def _evaluations(trio: Trio) -> tuple[bool, str]:
    """Check that validation losses are within the difference of two seeds, and task scores within the eager run's 95
    % interval.
    """
    values = {name: value for name, value in trio.eager.evals.items() if name.startswith("val/") and value is not None}
    wanted = {name: around(value, name, trio) for name, value in values.items()}
    got = dict(trio.compiled.evals)
    for result in trio.eager.results:
        wanted[result["task"]] = (result["value"], result["low"], result["high"])
    got |= {result["task"]: result["value"] for result in trio.compiled.results}
    return within_tolerance(wanted, got)


def within_tolerance(
    wanted: Mapping[str, tuple[float, float, float]], got: Mapping[str, float | None]
) -> tuple[bool, str]:
    """Return whether each named value is within its bounds, and the finding.

    Args:
        wanted: name -> (the expected value, the lowest, the highest).
    """
    problems, shown = [], []
    for name, (value, low, high) in wanted.items():
        found = got.get(name)
        text = f"{name} {found:.4f} against {value:.4f}" if found is not None else f"{name} is missing"
        shown.append(text)
        if found is None or not low <= found <= high:
            problems.append(f"{text}, allowed {low:.4f} to {high:.4f}")
    return bool(shown) and not problems, "; ".join(problems or shown) or "nothing was evaluated"


def around(value: float, name: str, trio: Trio) -> tuple[float, float, float]:
    """Return (a validation loss, the lowest, the highest allowed for the compiled run): as far off as the two eager
    seeds differ.
    """
    first, other = trio.eager.evals.get(name), trio.other_seed.evals.get(name)
    seeds = abs(other - first) if first is not None and other is not None else 0.0
    room = max(seeds, EVALUATION * abs(value))
    return value, value - room, value + room


def checkpoint_logits(trio: Trio) -> tuple[bool, str]:
    """Check that the checkpoint gave the same logits in another process."""
    return bool(trio.logits.get("ok")), str(trio.logits.get("found", "not run"))


CRITERIA = (
    ("constant batch shapes", constant_shapes, "0 undeclared"),
    ("compiled model detected", compiled_model, "graphs in the compiled run only"),
    ("no recompiles in training", recompiles_in_training, "0"),
    ("no recompiles in evaluation", recompiles_in_evaluation, "0"),
    ("no row of proof.json failed", proof_passes, "none, of the eager run and of the compiled one"),
    ("tokens/s ratio", faster, f"{SPEEDUP} or more"),
    ("first compile", first_compile, f"{COMPILE_SECONDS:.0f} s at most, from empty caches"),
    ("peak memory", memory, f"{100 * (MEMORY - 1):.0f} % above the baseline at most"),
    ("loss at the last step", loss_at_the_end, f"{100 * _LOSS:.0f} % apart at most"),
    ("loss trajectory", loss_within_noise, "no further apart than two baseline seeds"),
    (
        "evaluation",
        _evaluations,
        f"tasks within the baseline's 95 % interval; losses within two seeds, or {100 * EVALUATION:.1f} %",
    ),
    ("checkpoint loads", checkpoint_logits, "the same bits as the logits in the run"),
)


def scaling(trios: list[Trio]) -> Iterator[Verdict]:
    """Yield verdicts on whether compiling pays off on several processes as much as on the fewest."""
    first = trios[0]
    for trio in trios[1:]:
        ok: bool | None = False
        found = "not measured: a run failed"
        if not any(run.error for run in (first.eager, first.compiled, trio.eager, trio.compiled)):
            alone = speedup(first)
            several = speedup(trio)
            ok = None if trio.compiled.backend in NO_CODE else several >= SCALING * alone
            found = f"{several:.2f} on {trio.processes}, {alone:.2f} on {first.processes}"
        wanted = f"{SCALING} of the ratio on {first.processes} or more"
        yield trio_verdict(trio, "ratio on several processes", found, wanted, ok=ok)
