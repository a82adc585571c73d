"""benchmarks/lab_captioning: the recipe's setting, rows that the bench measures, and tables that are made of raw results alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ROOT
from made_captioners import CAPTIONER
from made_results import H100, made_results

from labs import pages
from labs.bench.plan import Job, read_jobs, save_job
from labs.bench.run import spread
from labs.bench.worker import ModelSpec, new_model, train_job
from labs.tables import keep
from sftkit.config.load import read_config
from sftkit.errors import ConfigError

FOLDER = ROOT / "benchmarks" / "lab_captioning"


@pytest.fixture(scope="module")
def jobs() -> dict[str, Job]:
    return {job.name: job for job in read_jobs(FOLDER / "plan.yaml", Path("out"))}


def test_the_setting_is_that_of_the_recipe(jobs: dict[str, Job]) -> None:
    recipe = read_config(ROOT / "recipes" / "captioning" / "caption.yaml")
    assert recipe.model.scratch is not None
    assert recipe.model.train_tokenizer is not None
    for job in jobs.values():
        cfg = job.config
        assert (job.fields, cfg.model.scratch) == (recipe.model.scratch, recipe.model.scratch)
        assert cfg.model.train_tokenizer == recipe.model.train_tokenizer
        assert [source.path for source in cfg.data.train] == [source.path for source in recipe.data.train]
        assert (cfg.data.max_length, cfg.optim.lr) == (recipe.data.max_length, recipe.optim.lr)
        if cfg.data.layout in ("fixed", "dynamic"):
            captions = cfg.train.global_batch_size // job.processes
            assert captions == cfg.train.micro_batch_size == recipe.train.global_batch_size
        if cfg.compile.enabled:
            assert job.same_loss_as is not None
            reference = jobs[job.same_loss_as].config
            assert not reference.compile.enabled
            assert (reference.data.layout, reference.data.bucket_lengths) == (cfg.data.layout, cfg.data.bucket_lengths)
            assert reference.train == cfg.train


def test_what_was_published_are_rows_of_the_plan(jobs: dict[str, Job]) -> None:
    published = pages.PUBLISHED.keys() - pages.REMOVED
    assert jobs.keys() >= published | {pages.BASELINE}


def row(name: str, captions: float, **more: Any) -> dict[str, Any]:
    values = {
        "documents_per_sec": spread([captions]),
        "step_seconds": spread([0.25]),
        "tok_per_sec": spread([23 * captions]),
    }
    values |= {"first_steps_seconds": 40.0, "compile": {"recompiles": 0, "graph_breaks": 1}}
    values |= {"peak_memory_gib": 12.0, "reserved_memory_gib": 13.5}
    return {"name": name, "error": None, "same_loss_as": None, "losses": {"20": 6.0, "40": 4.0}, **values, **more}


def plan_with_removed() -> str:
    """The plan, with the runs that it had before their settings were removed."""
    made = "{name: dynamic marked %s, model: vit-gpt2, set: {data.layout: dynamic}}"
    return (FOLDER / "plan.yaml").read_text() + "".join(f"  - {made % name}\n" for name in ("blocks", "full graph"))


def test_a_table_says_what_was_measured_beside_what_was_published_and_what_is_not_known(tmp_path: Path) -> None:
    rows = [
        row("dynamic eager", 100.0, same_loss_as="static eager"),
        row("dynamic marked blocks", 172.0, same_loss_as="dynamic eager", losses={"20": 6.0, "40": 4.02}),
        row("packed", 1.0, error="RuntimeError: no\nroom"),
    ]
    rows += [row("bucketed", 150.0, call="of another day")]
    (tmp_path / "plan.yaml").write_text(plan_with_removed())
    keep(tmp_path, made_results(*rows))
    made = pages.caption_tables(tmp_path)
    assert "| dynamic eager | 4.73 | 4.00 | 100 | 2,300 | 40 | 0 | 1 | 12.0 | 13.5 | not measured | 1.00 x |" in made
    assert "| 7.61 | 4.00 | 172 | 3,956 | 40 | 0 | 1 | 12.0 | 13.5 | 2.0e-02 in 2 losses | 1.72 x |" in made
    assert "| bucketed | - | 4.00 | 150 | 3,450 | 40 | 0 | 1 | 12.0 | 13.5 | - | another call |" in made
    assert "| packed | - | failed: RuntimeError: no room |  |" in made
    assert "| regional | dynamic marked blocks | 80 | 40 |" in made
    missing = made.splitlines()[-1]
    assert missing.startswith(
        "Not measured: static eager (published: 3.1 (derived)), static full graph (published: 5.17), "
    )
    assert "static DDP 2 eager, static DDP 2 (published: 4.59 per GPU), " in missing
    assert "dynamic marked blocks" not in missing


def test_a_machine_has_tables_of_its_own_and_nothing_of_it_is_compared_with_another(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(plan_with_removed())
    keep(tmp_path, made_results(row("dynamic eager", 100.0), row("static DDP 2 eager", 9.0)))
    two = row("static DDP 2", 300.0, same_loss_as="static DDP 2 eager")
    cold = row("dynamic marked full graph", 200.0, first_steps_seconds=70.0)
    keep(tmp_path, made_results(two, cold, device=H100, gpus=2))
    first, second = pages.caption_tables(tmp_path).split(f"Machine: 2 x {H100}")
    assert ("| dynamic eager | 4.73 |" in first, "dynamic eager | 4.73 " in second) == (True, False)
    assert (
        "| static DDP 2 | 4.59 per GPU | 4.00 | 300 | 6,900 | 40 | 0 | 1 | 12.0 | 13.5 | not measured | not measured |"
        in second
    )
    assert ("warm-up" in first, "| cold | dynamic marked full graph | 196 | 70 |" in second) == (False, True)
    missing = second.splitlines()[-1]
    assert missing.startswith("Not measured: static eager (")
    assert ("dynamic eager," in missing, "DDP" in missing) == (False, False)


@pytest.mark.slow
def test_a_captioner_is_measured_on_its_pictures_eager_and_compiled(tmp_path: Path) -> None:
    model = {**CAPTIONER, "decoder": {**CAPTIONER["decoder"], "vocab_size": 512, "n_positions": 256}}
    pictures = {"path": "builtin:pictures", "max_rows": 64}
    plan = {
        "data": {
            "stage": {"name": "caption", "train": [pictures], "train_tokenizer": {"vocab_size": 400}, "max_length": 32},
            "row_length": 32,
        },
        "steps": {"total": 3, "warm_up": 2, "window": 1},
        "models": {"tiny": model},
        "defaults": {
            "data": {"layout": "dynamic", "cache_dir": str(tmp_path / "cache"), "num_workers": 0},
            "train": {"global_batch_size": 4, "micro_batch_size": 4, "precision": "fp32"},
            "compile": {"backend": "eager", "on_failure": "error"},
        },
        "runs": [
            {"name": "eager", "model": "tiny", "set": {"compile.enabled": False}},
            {"name": "compiled", "model": "tiny", "set": {"data.layout": "dynamic"}},
        ],
    }
    path = tmp_path / "plan.yaml"
    path.write_text(json.dumps(plan))
    made = []
    for job in read_jobs(path, tmp_path / "out"):
        save_job(job)
        made.append(train_job(job))
    eager, compiled = made
    assert (eager["compiled"], compiled["compiled"]) == (False, True)
    assert compiled["losses"] == pytest.approx(eager["losses"], abs=1e-5)
    assert (compiled["compile"]["recompiles"], compiled["compile"]["graph_breaks"]) == (0, 0)
    for each in made:
        assert each["documents_per_sec"]["median"] == pytest.approx(4 / each["step_seconds"]["median"])
        assert each["first_steps_seconds"] > each["first_step_seconds"] > each["warm_up_seconds"]
    assert (tmp_path / "out" / "tokenizer").is_dir(), "trained once for all runs"
    assert len(list((tmp_path / "cache").glob("images-*/pictures.npy"))) == 1


def test_a_model_with_an_encoder_is_refused_on_made_up_texts() -> None:
    with pytest.raises(ConfigError, match=r"name data\.stage"):
        new_model(ModelSpec(CAPTIONER, 0, "fp32"), torch.device("cpu"))
