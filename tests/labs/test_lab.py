"""The compile lab: its page says what the raw files say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import ROOT
from made_results import H100, H200, made_results

from labs import lab as compile_lab
from labs import pages
from labs.pages import lab_tables as tables
from labs.tables import keep, kept_results
from sftkit.errors import ConfigError


@pytest.mark.parametrize("page", pages.PAGES)
def test_every_table_of_a_page_is_made_of_the_raw_file_that_it_names(page: str) -> None:
    text = (ROOT / page).read_text()
    assert pages.TABLE.search(text)
    assert pages.rebuilt(text, pages.PAGES[page]) == text


def test_the_pages_have_every_lab_and_every_table_of_the_patterns() -> None:
    named = {page: {name for _, name, _ in pages.TABLE.findall((ROOT / page).read_text())} for page in pages.PAGES}
    assert named["labs/compile_lab.md"] == {plan.parent.name for plan in ROOT.glob("benchmarks/lab_*/plan.yaml")}
    assert named["labs/patterns/README.md"] == set(pages.PATTERNS)
    assert named["docs/parallelism.md"] == set(pages.PAPER)
    assert named["docs/adapters.md"] | named["benchmarks/h200_adapters/README.md"] == set(pages.FITS)


def test_every_picture_is_drawn_from_the_raw_files() -> None:
    drawn = {file: text for make in pages.PICTURES for file, text in make().items()}
    assert {file: file.read_text() for file in drawn} == drawn
    assert {file for file in drawn if file.suffix == ".svg"} == set(ROOT.glob("benchmarks/**/*.svg"))


def test_a_lab_for_a_gpu_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_lab, "find_hardware", lambda: SimpleNamespace(gpus=0))
    monkeypatch.setattr(sys, "argv", ["lab.py", "lab_layouts", "--only", "dynamic 1 eager"])
    with pytest.raises(ConfigError, match=r"lab_layouts: made for a GPU.* Name lab_cpu or nothing, or take in"):
        compile_lab.main()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "--take: .*gone.json: cannot be read as JSON"),
        ('{"machine": {}, "runs": []}', "--take: .*gone.json: not results of this bench.*: it lacks plan, started"),
        ("[]", "it lacks plan, started, machine, runs"),
    ],
)
def test_what_is_not_the_result_of_a_bench_is_not_taken_in(
    text: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "gone.json").write_text(text)
    monkeypatch.setattr(sys, "argv", ["lab.py", "--take", str(tmp_path / "gone.json")])
    with pytest.raises(ConfigError, match=said):
        compile_lab.main()


def row(name: str, **changes: Any) -> dict[str, Any]:
    measured: dict[str, Any] = {
        "name": name, "error": None, "baseline": None, "same_loss_as": None, "world_size": 1, "losses": {"1": 2.0, "2": 1.5},
        "tok_per_sec": {"median": 1000.0, "min": 990.0, "max": 1010.0}, "target_tok_per_sec": None, "mfu": None,
        "mfu_of_ceiling": None, "peak_memory_gib": 1.0, "reserved_memory_gib": 1.0, "first_step_seconds": 2.0,
        "compile": {"recompiles": 0.0}, "data_wait_pct": None, "padding_pct": None,
    }  # fmt: skip
    return {**measured, **changes}


def speeds(tokens: float) -> dict[str, float]:
    return {"median": tokens, "min": tokens, "max": tokens}


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    plan = {
        "data": {"documents": {"count": 50, "median": 24, "mean": 32, "cap": 64}, "row_length": 128},
        "steps": {"total": 6, "warm_up": 2, "window": 2},
        "models": {"tiny": {"model_type": "qwen3"}},
        "runs": [{"name": name, "model": "tiny"} for name in ("eager", "compiled", "two")],
    }
    (tmp_path / "plan.yaml").write_text(json.dumps(plan))
    return tmp_path


def test_a_lab_without_results_says_so_and_one_with_some_names_those_that_are_not_measured(lab: Path) -> None:
    assert "Not measured yet: none of the 3 runs" in tables(lab)
    compared = row("compiled", baseline="eager", same_loss_as="eager", losses={"1": 2.0, "2": 1.25})
    keep(lab, made_results(row("eager"), compared))
    text = tables(lab)
    assert "1.00 x eager" in text
    assert "2.50e-01 (step 2)" in text
    assert "Not measured: two." in text
    keep(lab, made_results(row("two", error="out of memory"), started="2026-01-03"))
    text = tables(lab)
    assert "Failed:\n\n- two: out of memory\n" in text
    assert "Not measured" not in text
    assert "| two |" not in text


def test_results_of_several_calls_come_together_in_the_order_of_the_plan_the_newest_row_of_each_run(lab: Path) -> None:
    keep(lab, made_results(row("two", error="no room"), row("eager"), started="2026-01-02", git="b"))
    keep(lab, made_results(row("two"), row("no longer in the plan"), started="2026-01-03", git="c"))
    keep(lab, made_results(row("eager", error="an older one"), row("compiled"), started="2026-01-01", git="a"))
    kept = json.loads((lab / "results/results.json").read_text())
    assert [(each["name"], each["error"]) for each in kept["runs"]] == [(n, None) for n in ("eager", "compiled", "two")]
    assert [each["call"] for each in kept["runs"]] == ["2026-01-02", "2026-01-01", "2026-01-03"]
    assert kept["machine"]["git"] == "a, b, c"


def test_rows_of_an_earlier_call_keep_the_baseline_of_their_call_when_a_newer_call_measures_it_again(lab: Path) -> None:
    compared = {"baseline": "eager", "same_loss_as": "eager"}
    slow = {"tok_per_sec": speeds(100.0), "losses": {"1": 3.0}}
    fast = {"tok_per_sec": speeds(200.0), "losses": {"1": 2.0}}
    keep(lab, made_results(row("eager", **slow), row("compiled", **slow, **compared), started="2026-01-01"))
    keep(lab, made_results(row("eager", **fast), row("two", **fast, **compared), started="2026-01-02"))
    text = tables(lab)
    assert text.count("1.00 x eager") == 2
    assert text.count("| 1 | 0.00e+00 (step 1) |") == 2
    kept = json.loads((lab / "results/results.json").read_text())
    assert [(each["name"], each["call"]) for each in kept["replaced"]] == [("eager", "2026-01-01")]
    keep(lab, made_results(row("eager", **slow), row("compiled", error="no room", **compared), started="2026-01-03"))
    kept = json.loads((lab / "results/results.json").read_text())
    assert [each["call"][-2:] for each in kept["runs"]] == ["03", "01", "02"], "no failed row replaces a good one"
    assert [each["call"][-2:] for each in kept["replaced"]] == ["01", "02"]
    newest = row("compiled", **fast, **compared), row("two", **fast, **compared)
    keep(lab, made_results(*newest, started="2026-01-04"))
    kept = json.loads((lab / "results/results.json").read_text())
    assert kept["replaced"] == []
    assert tables(lab).count("x eager") == 0


def test_each_kind_of_machine_has_a_file_and_tables_of_its_own_and_nothing_is_compared_across_them(lab: Path) -> None:
    compared = {"baseline": "eager", "same_loss_as": "eager"}
    keep(lab, made_results(row("eager")))
    first = (lab / "results/results.json").read_text()
    keep(lab, made_results(row("two", world_size=2, **compared), started="2026-01-02", device=H100, gpus=2))
    keep(lab, made_results(row("eager", tok_per_sec=speeds(700.0)), started="2026-01-03", device=H100, gpus=2))
    assert (lab / "results/results.json").read_text() == first
    here, there = (part.splitlines() for part in tables(lab).split(f"Machine: 2 x {H100}"))
    assert f"Machine: {H200}, driver 580, CUDA 13.0  " in here
    assert [line.split(" | ")[0] for line in here if line.startswith("| ")] == ["| run", "| ---", "| eager"]
    assert [line.split(" | ")[0] for line in there if line.startswith("| ")][2:4] == ["| eager", "| two"]
    assert "| 1,000 (990 to 1,010) |" in "".join(here)
    assert "| 700 (700 to 700) |" in "".join(there)
    assert "Not measured: compiled." in there
    raw = (
        f"[{name}](../benchmarks/{lab.name}/results/{name})" for name in ("results.json", "nvidia-h100-80gb-hbm3.json")
    )
    assert f"Raw: {', '.join(raw)}; [plan](../benchmarks/{lab.name}/plan.yaml)." in there
    # The only eager run is an H200's now.
    (lab / "results/nvidia-h100-80gb-hbm3.json").unlink()
    keep(lab, made_results(row("two", world_size=2, **compared), device=H100, gpus=2))
    assert "x eager" not in tables(lab)
    assert "reference" not in tables(lab)
    newer = {"torch": "2.13"}
    assert keep(lab, made_results(row("two"), device=H100, versions=newer)).name == "nvidia-h100-80gb-hbm3-2.json"
    assert keep(lab, made_results(row("eager"), device=H100, versions={**newer, "trl": None})).name.endswith("-2.json")
    assert len(kept_results(lab)) == 3


def test_what_lies_beside_the_results_of_a_machine_is_refused_and_what_lies_below_them_is_in_no_table(
    lab: Path,
) -> None:
    keep(lab, made_results(row("eager")))
    below = lab / "results" / "apart" / "slower_host.json"
    below.parent.mkdir()
    below.write_text(json.dumps(made_results(row("two"))))
    assert "Not measured: compiled, two." in tables(lab)
    beside = below.rename(lab / "results" / "slower_host.json")
    with pytest.raises(ConfigError, match=r"results.json and slower_host.json: both of NVIDIA H200 with torch 2\.11, "):
        tables(lab)
    beside.write_text('{"probe": 1}')
    with pytest.raises(ConfigError, match=r"slower_host.json: not results of this bench"):
        tables(lab)


def test_results_of_an_unknown_machine_are_refused(lab: Path) -> None:
    unknown = {**made_results(row("eager")), "machine": {"error": "ended with 1"}}
    with pytest.raises(
        ConfigError, match=r"results of 2026-01-01: of an unknown machine, so for no table: ended with 1"
    ):
        keep(lab, unknown)
    assert not (lab / "results").exists()


def test_a_lab_whose_results_cannot_be_kept_ends_no_other_and_what_does_not_belong_there_is_refused_before_it_runs(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = {**made_results(row("eager")), "machine": {"error": "ended with 1"}}
    ran: list[Path] = []
    monkeypatch.chdir(tmp_path)
    named = {"BENCHMARKS": lab.parent, "bench": lambda plan, *_, **__: ran.append(plan) or unknown}
    for name, value in named.items():
        monkeypatch.setattr(compile_lab, name, value)
    assert compile_lab.run(lab.name, 1, None) is True
    assert "not in the tables: results of 2026-01-01: of an unknown machine" in capsys.readouterr().out
    (lab / "results").mkdir()
    (lab / "results" / "notes.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"notes.json: not results of this bench"):
        compile_lab.run(lab.name, 1, None)
    assert len(ran) == 1


def test_calls_on_one_and_on_two_gpus_of_a_device_come_together_and_the_machine_line_says_so(lab: Path) -> None:
    eager, two = row("eager"), row("two", world_size=2)
    keep(lab, made_results(eager, row("compiled"), started="2026-01-01", cpu="Xeon", cores=16))
    keep(lab, made_results(two, started="2026-01-02", cpu="Xeon", cores=32, gpus=2))
    large, small = (f"{gpus}{H200}, driver 580, CUDA 13.0, host Xeon" for gpus in ("2 x ", ""))
    assert f"Machine: {large} (32 cores); in earlier calls: {small} (16 cores)  \n" in tables(lab)
    keep(lab, made_results(eager, started="2026-01-03", cpu="Xeon", cores=16))
    assert f"Machine: {small} (16 cores); in earlier calls: {large} (32 cores)  \n" in tables(lab)
    # Once none of their rows is left, other hosts are not named.
    keep(lab, made_results(eager, row("compiled"), two, started="2026-01-04", cpu="Xeon", cores=32, gpus=2))
    assert f"Machine: {large} (32 cores)  \n" in tables(lab)


def test_taking_in_results_of_another_device_adds_its_tables_to_the_page(
    lab: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    labs = tmp_path_factory.mktemp("benchmarks")
    lab.rename(labs / "lab_small")
    keep(labs / "lab_small", made_results(row("eager")))
    page, file = labs / "lab.md", labs / "taken.json"
    page.write_text("before\n<!-- table lab_small -->\n<!-- end -->\nafter\n")
    file.write_text(
        json.dumps({**made_results(row("two"), device=H100, gpus=2), "plan": "benchmarks/lab_small/plan.yaml"})
    )
    monkeypatch.setattr(compile_lab, "BENCHMARKS", labs)
    monkeypatch.setattr(compile_lab, "PAGES", {str(page): lambda name: tables(labs / name)})
    monkeypatch.setattr(compile_lab, "PICTURES", ())
    monkeypatch.setattr(sys, "argv", ["lab.py", "--take", str(file)])
    assert compile_lab.main() == 0
    text = page.read_text()
    assert (
        text.index(f"Machine: {H200}")
        < text.index("| eager |")
        < text.index(f"Machine: 2 x {H100}")
        < text.index("| two |")
    )
    assert sorted(each.name for each in (labs / "lab_small/results").iterdir()) == [
        "nvidia-h100-80gb-hbm3.json",
        "results.json",
    ]
