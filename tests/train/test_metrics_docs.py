"""docs/metrics.md, the table of names and what a run writes are the same names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import pytest
from helpers import ROOT
from looped import run

from sftkit.config.schema import CompileConfig, LossConfig
from sftkit.tracking.names import METRICS, RUN_VALUES, TABLES, find_metric
from sftkit.tracking.tracker import ALERTS, EventKind

DOCS = (ROOT / "docs" / "metrics.md").read_text()
_NAMES = r"^\| (`[a-z]+/[^`]+`(?:, `[a-z]+/[^`]+`)*) \|"
"the first cell of a row: a name, or several that share what follows"


def rows(cells: str) -> list[tuple[str, ...]]:
    """Each documented name with the groups of a pattern for the other cells of its row."""
    found = re.findall(_NAMES + cells, DOCS, re.MULTILINE)
    return [(name, *others) for names, *others in found for name in re.findall(r"`([^`]+)`", names)]


def documented() -> dict[str, tuple[str, str]]:
    """Name -> (unit, value that stands for the run), as docs/metrics.md has them."""
    found = rows(r"([^|]*)\|([^|]*)\|.+\|$")
    assert len(found) == len({name for name, _, _ in found})
    return {name: (unit.strip(), run.strip() or "last") for name, unit, run in found}


def test_every_name_is_documented_with_the_unit_and_summary_that_the_dashboard_uses() -> None:
    assert documented() == {metric.name: (metric.unit, metric.summary) for metric in METRICS}


def test_every_value_of_a_run_and_every_table_is_documented() -> None:
    values = dict(rows(r" ([a-zA-Z%]+) \| [^|]*\|$"))
    assert values == RUN_VALUES
    assert [name for name in TABLES if f"`{name}`" not in DOCS] == []


def test_what_a_resumed_run_counts_anew_is_named_beside_what_it_writes_again() -> None:
    sentence = re.search(r"resumed writes the same lines as an uninterrupted one(.*?)\.\n", DOCS, re.DOTALL)
    assert sentence
    texts = rows(r"[^|]*\|[^|]*\|(.*)\|$")
    anew = {name for name, text in texts if re.search(r"since the start(?! of the run)|after the warm-up", text)}
    anew |= {name for name in documented() if name.startswith("compile/") and name.count("/") == 1}
    assert {"compile/graphs", "compile/recompiles", "perf/host_syncs"} <= anew
    assert {name for name in anew if not name.startswith("mem/")} == set(re.findall(r"`([a-z]+/\w+)`", sentence[1]))
    assert "memory" in sentence[1]


def test_every_kind_of_event_is_documented_with_its_level() -> None:
    found = dict(re.findall(r"^\| `([a-z_]+)` \| .* \| (WARN|ERROR) \|$", DOCS, re.MULTILINE))
    assert found == {kind: level for kind, (_, level) in ALERTS.items()}
    assert set(found) == set(get_args(EventKind))


def test_every_name_that_a_run_writes_is_documented(tmp_path: Path, tokenizer) -> None:
    loss = LossConfig(z_loss=1e-4, token_metrics=True)
    run(tmp_path / "run", compile=CompileConfig(enabled=False), loss=loss, tokenizer=tokenizer)
    for file in ("metrics.jsonl", "evals.jsonl"):
        lines = [json.loads(line) for line in (tmp_path / "run" / file).read_text().splitlines()]
        names = {name for line in lines for name in line} - {"step", "time"}
        assert len(names) > 3
        assert sorted(name for name in names if find_metric(name) is None) == []


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("shape/8x2048", "shape/<rows>x<length>"),
        ("shape/undeclared", "shape/undeclared"),
        ("compile/seconds/inductor", "compile/seconds/<phase>"),
        ("data/share/HuggingFaceH4/no_robots", "data/share/<source>"),
        ("val/held out/bpb", "val/<source>/bpb"),
        ("eval/arc_easy/acc_norm", "eval/<task>/<metric>"),
        ("eval/arc_easy/low", "eval/<task>/low"),
        ("eval/families/acc", "eval/families/acc"),
        ("perf/peak_memory_gib", None),
        ("shape/8xmany", None),
        ("loss", None),
    ],
)
def test_a_name_is_found_under_the_pattern_that_it_is_documented_by(name: str, pattern: str | None) -> None:
    found = find_metric(name)
    assert (found.name if found else None) == pattern
