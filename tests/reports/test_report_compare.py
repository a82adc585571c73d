"""A second run on the page: equal steps, or the reason why not; and pages of runs on a CPU."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from made_run import make_run
from safetensors.torch import save_file

from sftkit.reports.card import model_card
from sftkit.reports.collect import compare_curves, gather_report, speed_words
from sftkit.reports.page import render_report
from sftkit.reports.values import duration


def curves(metric: str, values: dict[int, float]) -> dict[str, list[list[float | None]]]:
    return {metric: [[float(step), value] for step, value in values.items()]}


def test_losses_are_those_of_the_last_step_that_both_runs_have() -> None:
    found = compare_curves(curves("train/loss", {10: 3.0, 20: 2.0}), curves("train/loss", {10: 2.5, 20: 1.6, 30: 1.0}))
    (row,) = found["rows"]
    assert (row["name"], row["step"], row["value"], row["other"]) == ("training loss", 20, 2.0, 1.6)
    assert row["change"] == pytest.approx(0.25)
    assert found["notes"] == ["training loss: at step 20; the runs go on to step 20 and 30"]


def test_without_a_step_in_common_losses_are_not_compared_and_the_page_says_so() -> None:
    found = compare_curves(
        curves("val/loss", {100: 3.0, 200: 2.0}), curves("val/loss", {75: 2.5, 150: 2.2, 225: 2.1, 300: 2})
    )
    assert found["rows"] == []
    assert found["notes"] == [
        "validation loss: not compared, no step was evaluated by both (here 100, 200; there 75, 150, 225, ...)"
    ]


def test_a_run_that_has_logged_nothing_is_not_compared_and_the_page_says_so() -> None:
    assert compare_curves({}, curves("train/loss", {10: 2.0}))["notes"] == [
        "training loss: not compared, no step was logged here"
    ]
    assert compare_curves(curves("val/loss", {10: 2.0}), {})["notes"] == [
        "validation loss: not compared, no step was evaluated there"
    ]


def test_runs_of_the_same_name_are_told_apart_by_their_directories(tmp_path: Path) -> None:
    run, other = (make_run(tmp_path / place / "a" / "sft", steps=100) for place in ("here", "there"))
    report = gather_report(run, other)
    assert (report["run"]["name"], report["against"]["run"]["name"]) == (str(run), str(other))


def test_equal_steps_of_other_batch_sizes_are_said_to_be_other_numbers_of_tokens() -> None:
    mine, other = (
        {**curves("train/loss", {10: 2.0}), **curves("train/tokens", {10: tokens})} for tokens in (4096, 8192)
    )
    assert compare_curves(mine, other)["notes"] == [
        "equal steps are not equal tokens: 4,096 here and 8,192 there at step 10"
    ]
    assert compare_curves(mine, mine)["notes"] == []


def test_the_speed_up_leaves_out_first_lines_and_names_other_machines() -> None:
    mine, other = (
        curves("perf/tok_per_sec", speeds) for speeds in ({10: 1.0, 20: 300.0, 30: 300.0}, {10: 900, 20: 100})
    )
    found = compare_curves(mine, other, ("1 x H200", "1 x CPU (2 cores)"))
    assert found["speed_up"] == 3.0
    assert speed_words(found, "a", "b") == "a makes 3.00 times the tokens/s of b."
    assert found["notes"] == ["speeds are of different machines: 1 x H200 here, 1 x CPU (2 cores) there"]
    assert speed_words(compare_curves(mine, {}), "a", "b") == "No speed-up: a or b has logged no tokens/s."


def test_the_page_of_a_longer_run_compares_at_the_end_of_the_shorter_one(tmp_path: Path) -> None:
    run, other = make_run(tmp_path / "a" / "long", steps=300), make_run(tmp_path / "b" / "short", steps=200, shift=0.1)
    report = gather_report(run, other)
    training, validation = report["against"]["comparison"]["rows"][:2]
    at_200 = dict(map(tuple, report["curves"]["train/loss"]))[200]
    assert (training["step"], training["value"], validation["step"]) == (200, at_200, 200)
    page = render_report(report)
    assert "long makes 1.00 times the tokens/s of b/short" in page
    assert "the runs go on to step 300 and 200" in page
    assert " at step 200</td>" in page, "evaluations of step 300 have none beside them"


def changed(run: Path, name: str, **values: Any) -> None:
    found = json.loads((run / name).read_text())
    (run / name).write_text(json.dumps({**found, **values}))


def config_with(run: Path, old: str, new: str) -> None:
    text = (run / "config.yaml").read_text()
    assert old in text
    (run / "config.yaml").write_text(text.replace(old, new, 1))


def with_identity(run: Path, **values: str) -> None:
    (run / "step-000100" / "training_state").mkdir()
    (run / "step-000100" / "training_state" / "state.json").write_text(json.dumps({"identity": values}))


VALIDATION = [{"name": "held out", "documents": 100}]
OTHERS = {
    "other targets (chat_sft.py here, mid_train.py there)": (
        lambda run: changed(run, "run_status.json", resume="python scripts/mid_train.py r.yaml train.resume=auto"),
        {"training loss", "validation loss"},
    ),
    "other targets (data.targets)": (
        lambda run: config_with(run, "targets: null", "targets: last_turn"),
        {"training loss", "validation loss"},
    ),
    "another tokenizer": (lambda run: with_identity(run, tokenizer="b"), {"training loss", "validation loss"}),
    "other validation data": (
        lambda run: changed(run, "preflight.json", validation=[{"name": "held out", "documents": 99}]),
        {"validation loss"},
    ),
    "other training data": (
        lambda run: config_with(run, "train[:90%]", "train[:80%]"),
        {"training loss"},
    ),
}


@pytest.mark.parametrize("why", OTHERS)
def test_losses_of_other_targets_tokenizers_or_data_stand_without_a_change_and_with_the_reason(tmp_path, why) -> None:
    run, other = (make_run(tmp_path / place / "sft", steps=100) for place in ("here", "there"))
    for folder in (run, other):
        changed(folder, "preflight.json", validation=VALIDATION)
    change, names = OTHERS[why]
    if why == "another tokenizer":
        with_identity(run, tokenizer="a")
    rows = gather_report(run, other)["against"]["comparison"]["rows"]
    assert all(row["change"] == 0.0 for row in rows)
    change(other)
    report = gather_report(run, other)
    rows = {row["name"]: row for row in report["against"]["comparison"]["rows"]}
    assert {name for name, row in rows.items() if row["change"] is None} == names
    assert all(rows[name]["how"] == f"not comparable: {why}" for name in names)
    assert f"not comparable: {why}" in html.unescape(render_report(report))


def test_another_stage_in_the_recipe_another_loss_and_another_size_of_model_are_said(tmp_path: Path) -> None:
    run, other = (make_run(tmp_path / place / "sft", steps=100) for place in ("here", "there"))
    assert gather_report(run, other)["against"]["comparison"]["notes"] == []
    config_with(run, "stage: null", "stage: mid")
    config_with(other, "stage: null", "stage: sft")
    config_with(other, "label_smoothing: 0.0", "label_smoothing: 0.1")
    for folder, width in ((run, 64), (other, 32)):
        save_file({"w": torch.zeros(width, 100)}, folder / "step-000100" / "model.safetensors")
    comparison = gather_report(run, other)["against"]["comparison"]
    losses = [row for row in comparison["rows"] if row["name"].endswith("loss")]
    assert [row["change"] for row in losses] == [None, None]
    assert all("other targets (mid_train.py here, chat_sft.py there)" in row["how"] for row in losses)
    loss, size = comparison["notes"]
    assert loss.startswith("another loss was minimised (loss.label_smoothing)")
    assert size == "speeds and memory are of models of different size: 6.4 k parameters here, 3.2 k there"


def test_an_evaluation_of_the_other_run_in_another_way_says_so_next_to_its_value(tmp_path: Path) -> None:
    run, other = (make_run(tmp_path / place / "sft", steps=300) for place in ("here", "there"))
    for folder, form in ((run, "chat"), (other, "completion")):
        for file in (folder / "evals").glob("step-*/results.json"):
            rows = json.loads(file.read_text())
            file.write_text(json.dumps([row | {"settings": {"format": form, "shots": 0}} for row in rows]))
    page = html.unescape(render_report(gather_report(run, other)))
    assert "format completion, here chat" in page
    assert "shots 0, here" not in page


def test_time_and_tokens_are_those_of_the_whole_run_over_all_its_starts(tmp_path: Path) -> None:
    """70 steps in 63 s, of which the newest start has done the last ones in 11 s."""
    run = make_run(tmp_path / "sft", steps=100)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    whole = [{**line, "train/tokens": 10 * line["step"], "train/seconds": 0.63 * line["step"]} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in whole))
    for step, tokens in (
        (100, 1000),
        (60, 600),
    ):  # of a start that ended, and of an earlier one if the newest is killed
        changed(run, "summary.json", step=step, tokens=tokens, train_seconds=11.0)
        report = gather_report(run)
        assert (report["summary"]["tokens"], report["summary"]["train_seconds"]) == (1000, pytest.approx(63.0))
        for page in (model_card(report, {}), render_report(report)):
            assert duration(63.0) in page
            assert duration(11.0) not in page


def test_a_page_of_a_run_on_a_cpu_says_nothing_per_gpu(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a" / "sft", steps=100)
    environment = json.loads((run / "environment.json").read_text())
    assert "per GPU" in render_report(gather_report(run))
    (run / "environment.json").write_text(json.dumps({**environment, "device": "CPU (2 cores)"}))
    page = render_report(gather_report(run))
    assert "per GPU" not in page
    assert "tokens/s per process" in page
    other = make_run(tmp_path / "b" / "sft", steps=100)
    assert "per GPU" not in render_report(gather_report(run, other)).replace("tokens/s per GPU, b", "")
