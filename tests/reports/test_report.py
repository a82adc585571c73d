"""The report of a run: from its files alone, whatever state they are in, to a page, data and a model card."""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import ROOT
from huggingface_hub import ModelCard
from made_run import CHECKS, TASKS, make_run, metrics, write_rows

from sftkit.errors import ConfigError
from sftkit.reports.card import model_card
from sftkit.reports.collect import gather_report, hub_datasets, newest_run_under, origin
from sftkit.reports.page import SECTIONS, report_of_folder, try_report, write_report
from sftkit.reports.values import Series, line_chart, read_rows

FILES = (
    "config.yaml",
    "run_status.json",
    "environment.json",
    "summary.json",
    "proof.json",
    "preflight.json",
    "metrics.jsonl",
    "evals.jsonl",
    "samples.jsonl",
    "events.jsonl",
    "evals/step-000100/results.json",
)
EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"


class Page(HTMLParser):
    """What a browser would see: elements, their attributes, and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    @property
    def ids(self) -> set[str | None]:
        return {attributes.get("id") for _, attributes in self.elements}


def read(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "chat" / "sft", steps=300)


def test_page_and_data_hold_what_the_files_say(run: Path) -> None:
    path = write_report(run)
    assert path == run / "report.html"
    page, report = read(path), json.loads((run / "report.json").read_text())
    assert page.ids >= set(SECTIONS)
    order = [page.text.index(text) for text in ("Gradient norm", "Which month comes after February?", "95 % interval")]
    first = min(page.text.rindex(title) for title in ("Shapes", "Mask coverage"))
    assert sorted(order) == order
    assert order[-1] < first
    for name, _, found, expected, how in CHECKS:
        assert all(text in page.text for text in (name, found, expected, how))
    assert page.text.count("PASS") == 5
    assert page.text.count("FAIL") == 2
    assert page.text.count("1 failed: Mask coverage; 5 passed, 1 not made") == 1
    assert report["headline"][0]["value"] == pytest.approx(metrics(300, 300, 0.0)["train/loss"])
    assert report["run"]["parameters"] == 494_000
    assert report["command"] == "python -m sftkit.launch scripts/chat_sft.py recipes/x/sft.yaml run.dir=runs/chat/sft"
    assert {row["task"] for row in report["evaluations"]} >= set(TASKS)
    assert report["evaluations"][-1]["step"] == 300
    assert "expected 2048, actual 1920" in page.text
    assert "c3ab8ff13720e8ad" in page.text


def test_page_says_in_which_mode_the_step_was_compiled_and_why(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"compile_mode": "reduce-overhead (CUDA graphs), as <why>"}))
    assert "modereduce-overhead (CUDA graphs), as <why>" in read(write_report(run)).text


def test_page_and_card_say_what_was_trained_of_a_partly_frozen_model(run: Path) -> None:
    checkpoint = run / "step-000300"
    header = {
        "model.embed_tokens.weight": {"dtype": "BF16", "shape": [1000, 494], "data_offsets": [0, 988_000]},
        "model.norm.weight": {"dtype": "BF16", "shape": [6000], "data_offsets": [988_000, 1_000_000]},
    }
    text = json.dumps(header).encode()
    (checkpoint / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(1_000_000))
    recipe = (run / "config.yaml").read_text()
    assert recipe.count("freeze: []") == 1
    (run / "config.yaml").write_text(recipe.replace("freeze: []", "freeze: [lm_head.*]"))
    page = read(write_report(run))
    assert "(trains 6 k of 500 k parameters)" in page.text
    card = (checkpoint / "README.md").read_text()
    assert "with 500 k parameters, trained with sftkit, 6 k of them: the others are as in the start model." in card


def test_page_and_card_have_several_adapters_side_by_side(run: Path) -> None:
    for name in ("a", "lr-1e-3"):
        folder = run / "step-000300" / "adapters" / name
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
    rows = read_rows(run / "metrics.jsonl", [])
    values = {"train/loss/a": 1.25, "train/loss/lr-1e-3": 2.5, "health/skipped_steps/lr-1e-3": 7.0}
    write_rows(run / "metrics.jsonl", [row | values for row in rows])
    text = read(write_report(run)).text
    table = text[text.index("Adapters, newest values") :]
    assert "adaptertraining lossskipped steps\n\na1.25–\nlr-1e-32.57" in table
    # With the facts of the analysis before the run, and evaluations.
    preflight = json.loads((run / "preflight.json").read_text())
    shared = {"alpha": 32, "data": "rows", "steps": 300}
    of_each = [{"name": "a", "rank": 8, "lr": 1e-3, **shared}, {"name": "lr-1e-3", "rank": 4, "lr": 1e-4, **shared}]
    (run / "preflight.json").write_text(json.dumps(preflight | {"adapters": of_each}))
    losses = [(200, 2.0, 1.5), (300, 2.25, 1.25)]
    write_rows(run / "evals.jsonl", [{"step": n, "val/a/loss": a, "val/lr-1e-3/loss": b} for n, a, b in losses])
    for folder in (run / "step-000300" / "adapters").iterdir():
        header = json.dumps({"w": {"dtype": "BF16", "shape": [500], "data_offsets": [0, 1000]}}).encode()
        (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(1000))
    (run / "step-000300" / "model.safetensors").unlink()
    page = read(write_report(run))
    table = page.text[page.text.index("Adapters, newest values") :]
    assert "a8320.001rows3001.252.252200–" in table  # the lowest at step 200
    assert "lr-1e-34320.0001rows3002.51.251.253007" in table
    assert table.index("lr-1e-3432") < table.index("a832"), "the lowest validation loss is not first"
    assert "(2 adapters, 1 k parameters: a, lr-1e-3)" in page.text
    assert "validation loss1.25lr-1e-3, the lowest of 2 adapters, last evaluation" in page.text
    card = (run / "step-000300" / "README.md").read_text()
    assert "2 low-rank adapters" in card
    assert "for a language model, each a separate model in `adapters/`, trained with sftkit" in card
    assert "library_name: peft" in card
    assert "from_pretrained" not in card


def test_page_and_card_name_the_settings_of_an_adapter_and_its_share_of_the_model(run: Path, tmp_path: Path) -> None:
    checkpoint = run / "step-000300"
    base = tmp_path / "base"
    base.mkdir()
    for folder, name, size in ((checkpoint, "adapter_model", 1000), (base, "model", 99_000)):
        header = json.dumps({"w": {"dtype": "BF16", "shape": [size], "data_offsets": [0, 2 * size]}}).encode()
        content = len(header).to_bytes(8, "little") + header + bytes(2 * size)
        (folder / f"{name}.safetensors").write_bytes(content)
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    recipe = (run / "config.yaml").read_text()
    assert recipe.count("adapter: null") == 1
    (run / "config.yaml").write_text(recipe.replace("adapter: null", "adapter: {rank: 8, targets: [mlp, q_proj]}"))
    page = read(write_report(run))
    words = "lora adapter, rank 8, alpha 32 (standard), on mlp, q_proj"
    assert f"({words}: 1 k parameters, 1.00% of the model's)" in page.text
    assert f"for a language model ({words}), trained with sftkit" in (checkpoint / "README.md").read_text()


def test_page_says_why_rows_were_skipped_or_are_odd_with_the_first_of_each(run: Path) -> None:
    page = write_report(run).read_text()
    for expected in (
        "How rows are read, left out or odd, and columns not used",
        "empty answer",
        "tool result without a call",
        "812",
        ":71: messages[2]",
    ):
        assert expected in page
    found = json.loads((run / "preflight.json").read_text())
    for source in found["sources"]:
        source.pop("findings", None)  # as earlier versions wrote it
    (run / "preflight.json").write_text(json.dumps(found))
    assert "by reason" not in write_report(run).read_text()


def test_page_says_which_files_of_a_folder_were_left_out(run: Path) -> None:
    assert "Files of folders" not in write_report(run).read_text()
    found = json.loads((run / "preflight.json").read_text())
    found["sources"][0]["files"] = "train: 2 files; left out: old.jsonl.zst"
    (run / "preflight.json").write_text(json.dumps(found))
    page = write_report(run).read_text()
    assert "Files of folders" in page
    assert "train: 2 files; left out: old.jsonl.zst" in page


def test_page_needs_nothing_from_elsewhere_and_runs_no_script(run: Path) -> None:
    page = read(write_report(run))
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'")
    assert "script-src" not in policy
    assert not {tag for tag, _ in page.elements} & {"script", "link", "iframe", "img", "object"}
    for _, attributes in page.elements:
        assert not {name for name in attributes if name.startswith("on") or name in ("src", "srcset")}
        assert (attributes.get("href") or "#").startswith("#")
    assert "url(" not in (run / "report.html").read_text()


def test_tables_have_headers_and_charts_have_labels(run: Path) -> None:
    page = read(write_report(run))
    for tag, attributes in page.elements:
        if tag == "th":
            assert attributes.get("scope") in ("row", "col")
        if tag == "svg":
            assert attributes.get("aria-hidden") == "true" or len(attributes.get("aria-label") or "") > 10


def replaced(value: Any, text: str) -> Any:
    """Every text and every key of a value made `text`."""
    if isinstance(value, dict):
        return {f"{key}{text}": replaced(item, text) for key, item in value.items()} | {
            key: replaced(item, text) for key, item in value.items()
        }
    if isinstance(value, list):
        return [replaced(item, text) for item in value]
    return text if isinstance(value, str) else value


def test_nothing_in_the_files_becomes_markup(run: Path) -> None:
    for name in FILES:
        path = run / name
        if name.endswith(".yaml"):
            path.write_text(yaml.safe_dump(replaced(yaml.safe_load(path.read_text()), EVIL)))
        elif name.endswith(".jsonl"):
            write_rows(path, [replaced(json.loads(line), EVIL) for line in path.read_text().splitlines()])
        else:
            path.write_text(json.dumps(replaced(json.loads(path.read_text()), EVIL)))
    page = read(write_report(run))
    assert not {tag for tag, _ in page.elements} & {"script", "img"}
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert page.text.count(EVIL) > 100
    assert f"train/loss{EVIL}" in page.text
    card = ModelCard.load(run / "step-000300" / "README.md")
    assert "AutoImageProcessor" not in card.text, "a model of texts has no pictures"
    assert card.data.library_name == "transformers"
    assert "&lt;script&gt;" in card.text
    assert not re.search("<script|<img", card.text)


def test_any_file_may_be_missing_or_cut_short_or_something_else(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=100)
    others = (b"[1, 2]", b'"text"', b'{"rows": 3}', b"\xff\xfe\x00{", b"[" * 5000)
    for index, name in enumerate(FILES):
        content = (run / name).read_bytes()
        for other in (None, content[: len(content) // 2], others[index % len(others)]):
            (run / name).unlink()
            if other is not None:
                (run / name).write_bytes(other)
            assert read(write_report(run)).ids >= set(SECTIONS), (name, other)
            (run / name).write_bytes(content)


def test_what_cannot_be_read_is_said(run: Path) -> None:
    (run / "proof.json").unlink()
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text()[:-40])
    report = gather_report(run)
    assert report["notes"] == ["proof.json is not there", "metrics.jsonl: 1 lines cannot be read and are left out"]
    assert "none made: the run ended before" in read(write_report(run)).text


def mutated(value: Any, chance: float, draw: random.Random) -> Any:
    """A value some parts of which are of another type."""
    if draw.random() < chance:
        others = [None, "text", -1, 0, 1e308, 10**400, [], {}, [1, "a"], {"a": {"b": 1}}, True, math.nan, math.inf]
        return draw.choice(others)
    if isinstance(value, dict):
        return {key: mutated(item, chance, draw) for key, item in value.items()}
    if isinstance(value, list):
        return [mutated(item, chance, draw) for item in value]
    return value


def test_values_of_any_type_are_shown_or_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=100)
    kept = {name: (run / name).read_text() for name in FILES if not name.endswith(".yaml")}
    settings = yaml.safe_load((run / "config.yaml").read_text())
    for seed in range(30):
        draw, chance = random.Random(seed), (0.02, 0.1, 0.3)[seed % 3]
        for name, text in kept.items():
            if name.endswith(".jsonl"):
                write_rows(run / name, [mutated(json.loads(line), chance, draw) for line in text.splitlines()])
            else:
                (run / name).write_text(json.dumps(mutated(json.loads(text), chance, draw)))
        (run / "config.yaml").write_text(yaml.safe_dump(mutated(settings, chance, draw)))
        assert read(write_report(run)).ids >= set(SECTIONS), seed
        json.loads((run / "report.json").read_text(), parse_constant=pytest.fail)
        ModelCard.load(run / "step-000100" / "README.md")


def test_a_run_that_is_only_a_recipe_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run:\n  dir: runs/x\n")
    page = read(write_report(tmp_path))
    assert page.ids >= set(SECTIONS)
    assert "status not known" in page.text


def test_a_failed_run_shows_its_error_first(run: Path) -> None:
    status = json.loads((run / "run_status.json").read_text())
    (run / "run_status.json").write_text(
        json.dumps(status | {"status": "failed", "error": "rank 3 failed: out of memory"})
    )
    text = read(write_report(run)).text
    assert text.index("rank 3 failed: out of memory") < text.index("Curves")


def test_a_failed_check_stands_in_the_title_the_tiles_and_the_terminal_and_its_table_is_open(run: Path) -> None:
    said: list[str] = []
    try_report(run, said.append)
    assert said == [f"checks: 1 failed: Mask coverage; 5 passed, 1 not made\nreport: {run / 'report.html'}"]
    page = (run / "report.html").read_text()
    title = page[page.index('<div class="title">') : page.index('<ul class="facts">')]
    assert "1 check failed" in title
    assert 'class="badge pass"' not in title
    assert '<span class="bad">5 of 7</span>' in page
    assert '<details open="open"><summary><span class="badge fail">' in page[page.index('<section id="proof"') :]
    rows = json.loads((run / "proof.json").read_text())["rows"]
    passed = [row | {"ok": True} for row in rows if row["ok"] is not None]
    (run / "proof.json").write_text(json.dumps({"rows": passed}))
    try_report(run, said.append)
    assert said[1].startswith("checks: 6 passed, 0 failed, 0 not made\n")
    page = (run / "report.html").read_text()
    title = page[page.index('<div class="title">') : page.index('<ul class="facts">')]
    assert 'class="badge pass"' in title
    assert "failed" not in title
    assert '<details><summary><span class="badge pass">' in page[page.index('<section id="proof"') :]
    (run / "proof.json").unlink()
    try_report(run, said.append)
    assert said[2].startswith("checks: none made")


def test_a_value_that_is_not_finite_is_null_in_the_data_and_a_gap_in_the_line(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    row = json.loads(lines[14])
    lines[14] = json.dumps(row | {"train/loss": math.nan})
    (run / "metrics.jsonl").write_text("\n".join(lines))
    write_report(run)
    report = json.loads((run / "report.json").read_text(), parse_constant=pytest.fail)
    assert [row["step"], None] in report["curves"]["train/loss"]
    whole = line_chart([Series("loss", [(1, 2.0), (2, 1.5), (3, 1.2), (4, 1.0)])], "loss")
    broken = line_chart([Series("loss", [(1, 2.0), (2, 1.5), (3, None), (4, 1.0), (5, 0.9)])], "loss")
    assert str(whole).count("<polyline") == 1
    assert str(broken).count("<polyline") == 2


def test_only_settings_that_differ_from_their_defaults_are_listed(run: Path) -> None:
    rows = {row["key"]: row for row in gather_report(run)["config_changed"]}
    assert rows["train.max_steps"] == {"key": "train.max_steps", "value": 300, "default": None}
    assert rows["optim.lr"]["default"] == 2e-5
    assert rows["data.train.0.path"]["value"] == "HuggingFaceTB/smoltalk2"
    assert not {"optim.schedule", "data.train.0.repeat", "compile.enabled"} & set(rows)


def test_two_runs_are_compared_in_curves_settings_and_results(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "chat" / "other", steps=300, shift=0.1)
    before = sorted(path.name for path in run.iterdir())
    path = write_report(run, other, tmp_path / "both.html")
    page, report = read(path), json.loads((tmp_path / "both.json").read_text())
    assert [row["key"] for row in report["against"]["config_diff"]] == ["optim.lr"]
    assert "training, chat/sft" in page.text
    assert "training, chat/other" in page.text
    assert "Compared with chat/other" in page.text
    mine, its = report["curves"]["train/loss"], report["against"]["curves"]["train/loss"]
    assert its[5][1] - mine[5][1] == pytest.approx(0.1)
    assert sorted(path.name for path in run.iterdir()) == before  # --out leaves the run as it is


def test_model_card_is_read_by_the_hub_client(run: Path) -> None:
    write_report(run)
    card = ModelCard.load(run / "step-000300" / "README.md")
    assert card.data.base_model == "Qwen/Qwen3-0.6B"
    assert card.data.datasets == ["HuggingFaceTB/smoltalk2"]
    assert card.data.pipeline_tag == "text-generation"
    assert card.data.license is None
    results = {(result.dataset_name, result.metric_type): result.metric_value for result in card.data.eval_results}
    newest = {row["task"]: row["value"] for row in json.loads((run / "evals/step-000300/results.json").read_text())}
    assert results["arc_easy", "acc_norm"] == newest["arc_easy"]
    for part in ("## Training data", "smoltalk2", "**FAIL**", "Mask coverage", "AutoTokenizer"):
        assert part in card.text
    assert re.search(r"\| arc\\_easy \| acc\\_norm \| 0\.\d+ \| 0\.\d+ to 0\.\d+ \| 0\.25 \| 600 \| 300 \|", card.text)


def test_a_card_names_the_weights_that_were_trained_and_their_original_model(run: Path) -> None:
    report = gather_report(run)
    base = {"path": "runs/mid/step-000020", "sha256": "ab" * 32}
    report["run"].update(base_model=None, model="runs/mid", start={"model": "runs/base"}, adapter_base=base)
    table = model_card(report, {}).partition("## Start")[2].partition("##")[0]
    assert re.search(
        r"\| model \| <code>runs/mid</code> \|.*\| original model \| <code>runs/base</code> \|.*abab", table, re.DOTALL
    ), table


def test_model_card_without_evaluations_has_no_results(run: Path) -> None:
    (run / "evals.jsonl").unlink()
    for path in run.glob("evals/*/results.json"):
        path.unlink()
    write_report(run)
    card = ModelCard.load(run / "step-000300" / "README.md")
    assert card.data.eval_results is None
    assert "## Results" not in card.text


def test_page_and_card_say_which_evaluation_tasks_the_data_was_compared_with(run: Path) -> None:
    card = run / "step-000300" / "README.md"
    write_report(run)
    assert "The training data was not compared with evaluation tasks." in card.read_text()
    path = run / "preflight.json"
    preflight = json.loads(path.read_text())
    preflight["contamination"] = {"said": "compared with questions and answers of gsm8k: one in 3 of 70 documents"}
    preflight["sources"][0] |= {"left_out": 17, "held_out": 23}
    path.write_text(json.dumps(preflight))
    page = write_report(run).read_text()
    assert (
        "The training data was compared with questions and answers of gsm8k: one in 3 of 70 documents."
        in card.read_text()
    )
    assert "compared with questions and answers of gsm8k" in page
    for text in (page, card.read_text()):
        assert "left out" in text
        assert "held out" in text


def test_a_card_that_is_written_again_keeps_the_licence_that_was_put_there(run: Path) -> None:
    write_report(run)
    path = run / "step-000300" / "README.md"
    assert "None is stated here" in path.read_text()
    mine = "license: other\nlicense_name: my-own\nlicense_link: https://example.org/licence\nauthor: me\n"
    path.write_text(path.read_text().replace("---\n", f"---\n{mine}", 1))
    write_report(run)
    write_report(run)
    card = ModelCard.load(path)
    assert (card.data.license, card.data.license_name) == ("other", "my-own")
    assert card.data.license_link == "https://example.org/licence"
    assert "my-own" in card.text
    assert "None is stated here" not in card.text
    path.write_text("---\nlicense: [broken\n---\n")
    write_report(run)
    assert ModelCard.load(path).data.license is None


def final(run: Path, value: float, model: str | None = None) -> Path:
    """What scripts/evaluate.py leaves in a run: one task with two parts."""
    folder = run / "evals" / "final"
    folder.mkdir(exist_ok=True)
    numbers = {"value": value, "stderr": 0.01, "low": value - 0.02, "high": value + 0.02, "chance": 0.25}
    metrics = {"acc_norm": value, "acc": value - 0.1, "acc_norm/maths": 0.125, "acc_norm/words": 0.875}
    row = {"task": "arc_easy", "metric": "acc_norm", **numbers, "examples": 2376, "metrics": metrics}
    (folder / "results.json").write_text(json.dumps([row | {"settings": {"model": model}}]))
    return folder


def test_the_final_evaluation_stands_for_the_model_on_page_and_card(run: Path) -> None:
    write_report(run)
    said: list[str] = []
    report_of_folder(final(run, 0.777, f"{run}/step-000300"), said.append)
    assert said == [f"checks: 1 failed: Mask coverage; 5 passed, 1 not made\nreport: {run}/report.html"]
    report = json.loads((run / "report.json").read_text())
    assert [(row["task"], row["value"]) for row in report["final"]] == [
        ("arc_easy", 0.777),
        ("maths", 0.125),
        ("words", 0.875),
    ]
    text = read(run / "report.html").text
    assert "arc_easyacc_norm0.77700.757 to 0.7970.252,376300, final" in text
    assert text.count("300, final") == 3
    card = ModelCard.load(run / "step-000300" / "README.md")
    assert [(result.dataset_name, result.metric_value) for result in card.data.eval_results] == [("arc_easy", 0.777)]


def test_a_final_evaluation_of_an_earlier_checkpoint_is_left_out_and_said(run: Path) -> None:
    final(run, 0.777, "runs/x/sft/step-000200")
    report = gather_report(run)
    assert report["final"] == []
    assert report["notes"] == ["evals/final: arc_easy is of runs/x/sft/step-000200, not of step 300, and is left out"]


def test_results_outside_of_a_run_write_no_report(tmp_path: Path) -> None:
    said: list[str] = []
    report_of_folder(tmp_path / "evals", said.append)
    assert (said, list(tmp_path.iterdir())) == ([], [])


def test_a_report_that_cannot_be_written_or_takes_long_only_says_so(tmp_path: Path, monkeypatch) -> None:
    said: list[str] = []
    try_report(tmp_path, said.append)
    assert said[0].startswith("no report: ConfigError")
    monkeypatch.setattr("sftkit.reports.page.write_report", lambda _: time.sleep(1))
    started = time.monotonic()
    try_report(tmp_path, said.append, max_seconds=0.1)
    assert time.monotonic() - started < 0.6
    assert "takes more than" in said[1]


def test_further_metrics_of_a_task_are_no_evaluations_of_their_own(run: Path) -> None:
    found = {(row["task"], row["metric"]) for row in gather_report(run)["evaluations"] if row["step"] == 300}
    assert ("arc_easy", "acc_norm") in found
    assert ("centred_mean", "mean") in found
    assert ("arc_easy", "acc") not in found
    text = read(write_report(run)).text
    assert "acc 0." in text  # folded away, with the settings
    assert "centred mean" in text
    assert "centred_mean" not in {
        r.dataset_name for r in ModelCard.load(run / "step-000300/README.md").data.eval_results
    }


def test_rows_with_line_separators_in_a_text_are_read_whole(tmp_path: Path) -> None:
    texts = ["one\u2028two", "three\u2029four\x85five", "six\x0c\x1cseven"]
    path, notes = tmp_path / "samples.jsonl", []
    path.write_text("".join(json.dumps({"answer": text}, ensure_ascii=False) + "\n" for text in texts))
    assert [row["answer"] for row in read_rows(path, notes)] == texts
    assert notes == []


def test_the_newest_run_is_none_of_a_dashboard_and_none_that_was_set_aside(run: Path, tmp_path: Path) -> None:
    for name in ("wandb/offline-run-1/files/config.yaml", "wandb/offline-run-1/files/run_status.json"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("{}")
    aside = run.with_name("sft.old-1")
    aside.mkdir()
    (aside / "metrics.jsonl").touch()
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "config.yaml").touch()
    assert newest_run_under(tmp_path) == run


FAILING = """
import sys
from pathlib import Path
from sftkit.reports.page import try_report
from sftkit.rundir import status

here = status.RunStatus(Path(sys.argv[1]), int(sys.argv[2]), 1)
here.begin({})
here.at(7, "step")
try:
    raise ValueError("the cheese is <gone>")
except ValueError as error:  # as Runtime ends every run
    sys.exit(status.report(error, here, page=try_report))
"""


def test_a_run_that_fails_has_a_page_with_its_error_and_ends_with_its_own_code(run: Path) -> None:
    def fail(rank: int) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-c", FAILING, str(run), str(rank)]
        return subprocess.run(words, capture_output=True, text=True, timeout=120)

    done = fail(0)
    assert done.returncode == 1, done.stderr
    assert f"report: {run}/report.html" in done.stdout
    page = read(run / "report.html")
    assert "rank 0 failed at step 7 (step): ValueError: the cheese is <gone>" in page.text
    assert "failed" in page.text[: page.text.index("the cheese")]
    (run / "report.html").unlink()
    assert fail(1).returncode == 1
    assert not (run / "report.html").exists()  # the main rank writes it


def test_base_model_is_found_through_the_runs_before(tmp_path: Path) -> None:
    first = make_run(tmp_path / "mid", steps=100)
    assert origin({"model": {"path": str(first)}}) == "Qwen/Qwen3-0.6B"
    assert origin({"model": {"path": "runs/default/mid"}}) is None
    assert origin({"model": {"path": None, "scratch": {"model_type": "qwen3"}}}) is None
    sources = [{"path": path} for path in ("builtin:tasks", "data/x.jsonl.gz", "openai/gsm8k", "/a/b", "./c", "imdb")]
    assert hub_datasets({"data": {"train": sources}}) == ["openai/gsm8k", "imdb"]


def test_the_head_names_the_run_that_it_started_from_and_leads_to_its_report(tmp_path: Path) -> None:
    parent, run = make_run(tmp_path / "mid # 1", steps=100), make_run(tmp_path / "sft", steps=100)
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["model"]["path"] = str(parent)
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    assert "from <a" not in write_report(run).read_text(), "there is no page to lead to"
    write_report(parent)
    page = write_report(run).read_text()
    assert f'from <a href="../mid%20%23%201/report.html">{parent}</a>' in page


def test_a_name_in_latest_never_leads_out_of_the_run(run: Path, tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    for name in ("../../step-1", str(tmp_path / "step-1"), "step-000300/../..", ".", "evals"):
        (run / "LATEST").write_text(name)
        assert gather_report(run)["run"]["checkpoint"] is None
        write_report(run)
    assert not list(tmp_path.glob("**/README.md"))


def test_writing_again_replaces_and_leaves_no_other_file(run: Path) -> None:
    write_report(run)
    before = {path.name: path.stat().st_ino for path in run.iterdir()}
    write_report(run)
    after = {path.name: path.stat().st_ino for path in run.iterdir()}
    assert set(after) == set(before)
    assert after["report.html"] != before["report.html"]  # a new file under the old name: readers see one or the other


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no such folder.*run directory such as"):
        write_report(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"no run: it holds neither config.yaml"):
        write_report(tmp_path)
    with pytest.raises(ConfigError, match=r"no run there; make one"):
        newest_run_under(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_run_is_refused_with_the_runs_that_are_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for i in range(7):
        folder = tmp_path / "runs" / f"r{i}" / "sft"
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").touch()
        os.utime(folder / "metrics.jsonl", (i, i))
    with pytest.raises(ConfigError, match=r"^runs/r3: no run: .*\. Runs in runs/r3, the newest first: runs/r3/sft$"):
        write_report(Path("runs/r3"))
    newest = ", ".join(f"runs/r{i}/sft" for i in (6, 5, 4, 3, 2))
    for gone in ("runs/r9/sft", "elsewhere/sft", str(tmp_path)):
        with pytest.raises(ConfigError, match=rf"Runs in runs, the newest first: {newest} and 2 more$"):
            write_report(Path(gone))
    with pytest.raises(ConfigError, match=rf"Runs in {tmp_path}/runs, the newest first: {tmp_path}/runs/r6/sft, "):
        write_report(tmp_path / "runs" / "gone")


def script(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    code = (
        "import runpy, sys; sys.argv[0] = 'report.py'\n"
        f"try: runpy.run_path({str(ROOT / 'scripts' / 'report.py')!r}, run_name='__main__')\n"
        "finally: assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    return subprocess.run([sys.executable, "-c", code, *words], cwd=cwd, capture_output=True, text=True, timeout=60)


def test_script_reports_the_newest_run_without_torch_and_explains_wrong_folders(tmp_path: Path) -> None:
    empty = script(cwd=tmp_path)
    assert (empty.returncode, empty.stdout) == (2, "")
    assert "error: runs/: no run there" in empty.stderr
    make_run(tmp_path / "runs" / "a" / "sft", steps=100)
    newest = script(cwd=tmp_path)
    assert (newest.returncode, newest.stdout.strip()) == (0, "runs/a/sft/report.html"), newest.stderr
    assert newest.stderr.strip() == "checks: 1 failed: Mask coverage; 5 passed, 1 not made"
    wrong = script("runs/a/sft", "--out", "no/folder.html", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "--out no/folder.html: must be" in wrong.stderr
