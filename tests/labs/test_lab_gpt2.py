"""benchmarks/lab_gpt2 and recipes/lab/gpt2_compile: one setting, and tables that are made of raw results alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from helpers import ROOT
from made_results import H100, H200, made_results

from labs import pages
from labs.bench.plan import read_jobs
from labs.tables import keep
from sftkit.config.load import read_config
from sftkit.config.schema import Config
from sftkit.optim.protocol import learning_rate
from sftkit.parallel.tensor import TENSOR_MODEL_TYPES

FOLDER, RECIPES = ROOT / "benchmarks" / "lab_gpt2", ROOT / "recipes" / "lab" / "gpt2_compile"


def recipe(name: str, world_size: int = 1) -> Config:
    return read_config(RECIPES / f"{name}.yaml", world_size=world_size)


def test_the_setting_is_that_of_the_report() -> None:
    cfg = recipe("compiled")
    optim, train = cfg.optim, cfg.train
    assert cfg.model.scratch is not None
    assert (cfg.model.scratch["initializer_range"], cfg.model.pad_vocab_to_multiple_of, cfg.run.seed) == (0.02, 128, 42)
    assert (train.micro_batch_size, train.global_batch_size, train.max_steps) == (2, 4, 20)
    assert (optim.weight_decay, optim.max_grad_norm, optim.schedule) == (0.1, 1.0, "cosine")
    rates = [learning_rate(step, 20, optim) for step in range(1, 21)]
    assert rates.index(max(rates)) == 4  # five steps of warm-up
    assert (max(rates), rates[0]) == (6e-4, 6e-4 / 5)
    assert 6e-5 <= rates[-1] < 6.8e-5


def test_the_recipes_differ_in_the_compiler_the_rows_and_the_folder_alone() -> None:
    compiled = recipe("compiled")
    for name, enabled, rows in (("eager", False, 4), ("compiled_two_gpus", True, 8), ("eager_two_gpus", False, 8)):
        cfg = recipe(name, world_size=rows // 4)
        assert cfg.run.dir.endswith(f"/{name}")
        assert (cfg.compile.enabled, cfg.train.global_batch_size) == (enabled, rows)
        same = {"compile": compiled.compile, "train": compiled.train, "run": compiled.run}
        assert dataclasses.replace(cfg, **same) == compiled  # type: ignore[arg-type]


def test_the_plan_has_the_setting_of_the_recipes() -> None:
    wanted = recipe("compiled")
    for job in read_jobs(FOLDER / "plan.yaml", Path("out")):
        assert job.config.optim == wanted.optim
        assert job.config.model.pad_vocab_to_multiple_of == 128
        assert job.config.run.seed == 42
        assert (job.config.train.micro_batch_size, job.config.train.max_steps) == (2, 20)
        assert job.config.train.global_batch_size == 4 * job.started.row_topology(job.config.train).row_ranks
        assert {k: v for k, v in job.fields.items() if k != "vocab_size"} == wanted.model.scratch


def test_what_the_tables_call_refused_is_refused() -> None:
    assert pages.REFUSED["lab_gpt2"].keys() == {"TP 2"}
    assert "gpt2" not in TENSOR_MODEL_TYPES, "it has a plan now: take it out of REFUSED and run the bench"


def row(name: str, seconds: float, **more: Any) -> dict[str, Any]:
    spread = {"median": seconds, "min": seconds / 2, "max": seconds * 2}
    speed = {"median": 4096 / seconds}
    last = {"peak_memory_gib": 4.25, "first_step_seconds": 12.34, "losses": {"19": 9.0, "20": 8.12345}, "error": None}
    last |= {"baseline": None, "same_loss_as": None}
    return {"name": name, "step_seconds": spread, "tok_per_sec": speed, **last, **more}


def lab_of(folder: Path, *calls: dict[str, Any]) -> Path:
    (folder / "plan.yaml").write_text((FOLDER / "plan.yaml").read_text())
    for call in calls:
        keep(folder, call)
    return folder


def test_a_table_says_step_times_and_what_compiling_is_worth_and_what_is_not_known(tmp_path: Path) -> None:
    rows = [
        row("1 GPU eager", 0.08),
        row("1 GPU compiled", 0.5),
        row("FSDP2 2 eager", 0.08),
        row("DDP 2 eager", 0.1, error="rank 0: E: no GPU\nhere"),
    ]
    newer = [row("1 GPU eager", 0.08), row("FSDP2 2 compiled", 0.04)]
    old = made_results(*rows, started="2026-01-01 10:00:00")
    new = made_results(row("1 GPU compiled", 0.04), *newer, started="2026-01-02 10:00:00")
    made = pages.gpt2_tables(lab_of(tmp_path, new, old))
    assert "| 1 GPU eager | 80.0 (40.0 to 160.0) | 51,200 | 4.2 | 12.3 | 8.1235 | 1 |" in made
    assert "| 1 GPU compiled | 40.0 (20.0 to 80.0) | 102,400 | 4.2 | 12.3 | 8.1235 | 2.00 |" in made
    assert "| DDP 2 eager | failed: rank 0: E: no GPU here |  |" in made
    assert "| FSDP2 2 compiled | 40.0 (20.0 to 80.0) | 102,400 | 4.2 | 12.3 | 8.1235 | another call |" in made
    assert "Not measured: DDP 2 eager, DDP 2 compiled." in made
    assert "TP 2: refused: no tensor-parallel plan for gpt2" in made


def test_a_machine_has_tables_of_its_own_and_no_ratio_to_the_eager_run_of_another(tmp_path: Path) -> None:
    here = made_results(row("1 GPU eager", 0.08), row("1 GPU compiled", 0.04), row("DDP 2 eager", 0.1))
    refused = row("TP 2 eager", 1.0, error="no plan for gpt2")
    there = made_results(row("1 GPU eager", 0.16), row("DDP 2 compiled", 0.05), refused, device=H100, gpus=2)
    made = pages.gpt2_tables(lab_of(tmp_path, here, there))
    first, second = made.split(f"Machine: 2 x {H100}")
    assert f"Machine: {H200}" in first
    assert [line.split(" |")[0] for line in first.splitlines() if " GPU " in line or "DDP" in line] == [
        "| 1 GPU eager", "| 1 GPU compiled", "| DDP 2 eager",
    ]  # fmt: skip
    assert "| 8.1235 | 2.00 |" in first
    assert "| 1 GPU eager | 160.0 (80.0 to 320.0) |" in second
    assert "| DDP 2 compiled | 50.0 (25.0 to 100.0) | 81,920 | 4.2 | 12.3 | 8.1235 | not measured |" in second
    assert "Not measured: FSDP2 2 eager, FSDP2 2 compiled." in second
    assert made.count("TP 2") == 1
    only = pages.gpt2_tables(lab_of(tmp_path, made_results(row("DDP 2 eager", 0.1), versions={"torch": "2.13"})))
    assert only.count("**One GPU**") == 2, "a machine without rows of one GPU has no table of them"
