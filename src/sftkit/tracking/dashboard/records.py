"""proof.json and preflight.json as a dashboard takes them: tables, and the numbers that stand for the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sftkit.reports.files import applies
from sftkit.rundir.files import read_object
from sftkit.rundir.names import DOES_NOT_APPLY, PREFLIGHT, PROOF

TABLE_CHARACTERS = 2000
"Maximum length of a text in a table or an alert on a dashboard; the files have all of it."
VERDICTS = {True: "PASS", False: "FAIL", None: "not checked"}
PROOF_COLUMNS = ("check", "verdict", "found", "expected", "how")
SOURCE_COLUMNS = (
    *("split", "name", "rows", "documents", "tokens", "targets", "truncated"),
    *("dropped_too_long", "dropped_no_target", "skipped_bad"),
)
LAYOUT_COLUMNS = ("layout", "own", "shapes", "padding_pct", "steps", "positions", "x_dynamic", "tok_per_sec")
FINDING_COLUMNS = ("split", "name", "kind", "rows", "reason", "first")


@dataclass(frozen=True)
class LoggedTable:
    """Rows of cells, one for each column."""

    name: str
    columns: Sequence[str]
    rows: list[list[Any]]


@dataclass(frozen=True)
class RunFile:
    """A file of the run directory."""

    tables: list[LoggedTable] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)


def proof_of(run_dir: Path) -> RunFile:
    """Return the checks that a run has made of itself, those that failed first, and how many passed."""
    found = read_object(run_dir / PROOF)
    # The sort keeps the order of equals, so within both groups checks stand as in proof.json.
    checks = sorted(found.get("rows", []), key=lambda check: check.get("ok") is not False)
    if not checks:
        return RunFile()
    results = [check.get("ok") for check in checks if applies(check)]
    verdicts = [VERDICTS[check.get("ok")] if applies(check) else DOES_NOT_APPLY for check in checks]
    rows = [
        {**check, "check": check.get("name"), "verdict": verdict}
        for check, verdict in zip(checks, verdicts, strict=True)
    ]
    counts = {"passed": results.count(True), "failed": results.count(False), "not_checked": results.count(None)}
    summary = {f"proof/{name}": count for name, count in counts.items()}
    return RunFile([record_table("proof", PROOF_COLUMNS, rows)], summary)


def preflight_of(run_dir: Path) -> RunFile:
    """Return what was found of the data before training: sources, layouts, odd rows, warnings."""
    found = read_object(run_dir / PREFLIGHT)
    if not found:
        return RunFile()
    # Both splits in one table, told apart by a column: wandb joins no tables.
    splits = {"train": found.get("sources", []), "val": found.get("validation", [])}
    sources = [{"split": split, **source} for split, rows in splits.items() for source in rows]
    odd = [source | finding for source in sources for finding in source.get("findings", [])]
    warnings = [{"warning": text} for text in found.get("warnings", [])]
    tables = [
        record_table("preflight/sources", SOURCE_COLUMNS, sources),
        record_table("preflight/layouts", LAYOUT_COLUMNS, found.get("layouts", [])),
        record_table("preflight/findings", FINDING_COLUMNS, odd),
        record_table("preflight/warnings", ("warning",), warnings),
    ]
    # Only this run's layout stands for it; the table has the others for comparison.
    own: Mapping[str, Any] = next((layout for layout in found.get("layouts", []) if layout.get("own")), {})
    values = {
        **{name: sum(source.get(name, 0) for source in splits["train"]) for name in ("documents", "tokens")},
        "target_pct": found.get("target_pct"),
        "duplicate_pct": found.get("duplicate_pct"),
        "padding_pct": own.get("padding_pct"),
        "epochs": (found.get("time") or {}).get("epochs"),
        "estimated_gib": (found.get("memory") or {}).get("estimated_gib"),
        "warnings_count": len(warnings),
    }
    summary = {f"preflight/{name}": value for name, value in values.items() if value is not None}
    return RunFile([each for each in tables if each.rows], summary)


def record_table(name: str, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> LoggedTable:
    """Return a table of mappings; a cell is empty where one has no such key."""
    return LoggedTable(name, columns, [[shortened(row.get(column)) for column in columns] for row in rows])


def shortened(value: Any) -> Any:
    """Return a text as long as a table or an alert shows it; anything else as it is."""
    if isinstance(value, str) and len(value) > TABLE_CHARACTERS:
        return value[: TABLE_CHARACTERS - 1] + "…"
    return value
