"""A script goes on from a checkpoint of another run as a new one, that mixes with none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import preloaded
import pytest
from helpers import ROOT

from sftkit.rundir.names import METRICS_FILE, step_dirs


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / METRICS_FILE).read_text().splitlines()]


@pytest.fixture
def started(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """started(name, last step, *words): exit code and output of a short run of base_train."""
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT / "src")}
    settings = [f"data.cache_dir={tmp_path}/cache", 'data.train=[{path: "builtin:docs", max_rows: 20}]', "data.val=[]"]
    settings += ["eval.tasks=[]", "eval.every=null", "data.max_length=64", "checkpoint.every=2"]
    settings += ["log.every=1", "checkpoint.best=null"]

    def start(name: str, last: int, *words: str) -> tuple[int, str]:
        own = [f"run.dir={tmp_path}/{name}", f"train.max_steps={last}", *words]
        done = preloaded.run(["scripts/base_train.py", "recipes/smoke/base.yaml", *settings, *own], env=env)
        return done.returncode, done.stdout + done.stderr

    return start


@pytest.mark.slow
def test_a_script_goes_on_from_the_checkpoint_of_another_run_in_a_run_of_its_own(tmp_path: Path, started) -> None:
    words = ("data.row_length=64", "compile.enabled=false")
    for name, last in (("one", 4), ("other", 3)):
        code, told = started(name, last, *words)
        assert code == 0, told[-3000:]
    named = f"train.resume={tmp_path}/one/step-000004"
    code, told = started("other", 4, named, *words)
    assert code == 2, told[-3000:]
    assert "there is nothing left to train" in told
    assert steps(tmp_path / "other") == [1, 2, 3]
    code, told = started("other", 6, named, *words)
    assert code == 0, told[-3000:]
    assert f"{tmp_path}/other held an earlier run: it is now {tmp_path}/other.old-1" in told
    assert steps(tmp_path / "other") == [5, 6]
    assert steps(tmp_path / "other.old-1") == [1, 2, 3]
    assert steps(tmp_path / "one") == [1, 2, 3, 4]
    assert [folder.name for folder in step_dirs(tmp_path / "other")] == ["step-000006"]
    assert len(step_dirs(tmp_path / "other.old-1")) == 2


@pytest.mark.slow
def test_what_files_do_not_tell_of_a_checkpoint_is_reported_in_one_error_before_anything_is_compiled(
    tmp_path: Path, started
) -> None:
    rows = [{"text": f"Text {i} of some words that are learned."} for i in range(40)]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (f"data.train=[{{path: {path}}}]", "data.row_length=64", "compile.enabled=false")
    code, told = started("one", 2, *words)
    assert code == 0, told[-3000:]
    path.write_text("".join(json.dumps(row) + "\n" for row in [rows[1], *rows[1:], {"text": "One more."}]))
    code, told = started("one", 4, "train.resume=auto", *words, "train.resume_changes=[run.seed]", "run.seed=3")
    assert code == 2, told[-3000:]
    assert "source texts has 1 documents more than the checkpoint knows" in told
    assert "resume_changes=[run.seed,data.train]" in told
    assert (
        "source texts does not begin with the 40 documents that the checkpoint knows (others are in their places)"
        in told
    )
    code, told = started("one", 4, "train.resume=auto", *words, "optim.lr=0.5")
    assert code == 2
    assert "in this run" in told
    assert "making a new model" not in told, "before torch"
