"""What compiling costs in time: worked by hand, and what a run can say that has no eager one beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from made_run import make_run

from sftkit.reports.collect import RESUMED, gather_report
from sftkit.reports.compare import own_words, pays, pays_from
from sftkit.reports.page import write_report
from sftkit.verify.rows import resume_check


def test_savings_and_break_even_are_those_worked_by_hand() -> None:
    found = pays(0.5, 0.25, 10.0)
    assert (found.saved_seconds_per_1000_steps, found.steps, found.minutes) == (240.0, 40, 40 * 0.5 / 60)
    assert found.words == (
        "1,000 steps take 4 min 00 s less with 10 s of compiling; compiling pays from 40 steps on (20 s): "
        "0.25 against 0.5 s a step"
    )


def test_a_short_run_takes_longer_though_a_long_one_pays() -> None:
    found = pays(0.011, 0.010, 60.0)
    assert found.saved_seconds_per_1000_steps == pytest.approx(-59.0)
    assert found.words.startswith(
        "1,000 steps take 59 s longer with 1 min 00 s of compiling; compiling pays from 60,000"
    )


@pytest.mark.parametrize("compiled", [0.5, 0.6])
def test_a_compiled_step_that_is_no_shorter_never_pays(compiled: float) -> None:
    found = pays(0.5, compiled, 10.0)
    assert (found.steps, found.minutes) == (None, None)
    assert "compiling never pays" in found.words


@pytest.mark.parametrize("seconds", [(0.5, 0.25, 10.0), (0.3, 0.2, 0.7), (1.0, 0.7, 0.3), (2.0, 1.9, 1e-9)])
def test_at_the_break_even_compiled_has_caught_up_and_a_step_before_it_has_not(
    seconds: tuple[float, float, float],
) -> None:
    eager, compiled, spent = seconds
    steps = pays_from(*seconds)
    assert steps is not None
    assert spent + steps * compiled <= steps * eager + 1e-9
    assert steps == 1 or spent + (steps - 1) * compiled > (steps - 1) * eager


def test_a_run_says_what_its_compile_costs_in_its_own_steps() -> None:
    words = own_words(11.3, [9.0, 0.886, 0.886, 0.886], cache_hits=0, resumed=False)
    assert words == (
        "Compiling took 11.3 s, as long as 13 of its steps of 0.886 s: it pays after 13 steps where an eager step takes twice as "
        "long, after 43 where it takes 1.3 times as long (validate_compile.py measures that)."
    )
    resumed = own_words(11.3, [0.886], cache_hits=4, resumed=True)
    assert resumed is not None
    assert resumed.startswith("Compiling took 11.3 s when the run was resumed with 4 hits in caches, as long as 13 of")
    assert own_words(None, [0.886], 0, resumed=False) is None
    assert own_words(11.3, [], 0, resumed=False) is None


def test_the_report_of_a_compiled_run_says_it_and_that_of_an_eager_one_does_not(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=100)
    words = "Compiling took 31.5 s, as long as 7 of its steps of 4.5 s"
    assert words in write_report(run).read_text()
    assert json.loads((run / "report.json").read_text())["compiling"].startswith(words)
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"compiled": False}))
    assert "Compiling took" not in write_report(run).read_text()
    (run / "summary.json").unlink()
    assert gather_report(run)["compiling"].startswith(words), "it has not ended"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for name, value, expected in (
        ("compile/seconds", 0.0, None),  # eager
        ("compile/seconds", None, None),
        ("step", None, None),
    ):
        made = "".join(json.dumps(line | {name: value}) + "\n" for line in lines)
        (run / "metrics.jsonl").write_text(made)
        assert gather_report(run)["compiling"] is expected


def test_a_run_that_logged_no_second_in_the_compiler_says_what_its_warm_up_took(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=100)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{name: value for name, value in line.items() if name != "compile/seconds"} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    assert gather_report(run)["compiling"].startswith("Compiling took 41.3 s, as long as 10 of its steps")


def test_the_report_of_a_resumed_run_speaks_of_its_newest_start(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=100)
    proof = json.loads((run / "proof.json").read_text())
    proof["rows"].append({"name": RESUMED, "ok": True, "found": "step 50", "expected": "verified", "how": "sha256"})
    (run / "proof.json").write_text(json.dumps(proof))
    assert "Compiling took 31.5 s when the run was resumed, as long as" in gather_report(run)["compiling"]
    assert resume_check(0, None).name == RESUMED


def test_a_backend_that_makes_no_faster_code_is_not_said_to_pay(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=100)
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["compile"]["backend"] = "aot_eager"
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    assert gather_report(run)["compiling"] is None
