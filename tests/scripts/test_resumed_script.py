"""A script is resumed with other batch sizes and another model.path as the documents say: taken, refused, or taken when named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import preloaded
import pytest
from helpers import ROOT

from sftkit.rundir.names import step_dirs


@pytest.mark.slow
def test_batch_sizes_of_a_resumed_script(tmp_path: Path) -> None:
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT / "src")}
    settings = {
        "run.dir": tmp_path / "run",
        "data.cache_dir": tmp_path / "cache",
        "data.layout": "dynamic",
        "train.epochs": 1,
        "train.max_steps": 4,
        "train.global_batch_size": 16,
        "train.micro_batch_size": 16,
        "data.train": '[{path: "builtin:docs", max_rows: 20}]',
        "checkpoint.every": 2,
        "log.every": 1,
        "data.max_length": 64,
        "compile.enabled": "false",
        "compile.fullgraph": "false",
        "compile.scope": "block",
        "eval.tasks": "[]",
        "data.val": "[]",
    }

    def started(**changed: object) -> tuple[int, str]:
        now = settings | {name.replace("__", "."): value for name, value in changed.items()}
        words = ["scripts/base_train.py", "recipes/smoke/base.yaml", *(f"{key}={value}" for key, value in now.items())]
        done = preloaded.run(words, env=env)
        return done.returncode, done.stdout + done.stderr

    code, told = started()
    assert code == 0, told[-3000:]
    settings |= {"train.resume": "auto"}
    code, told = started(train__max_steps=6, train__micro_batch_size=2)
    assert code == 0, told[-3000:]
    code, told = started(train__max_steps="null", train__global_batch_size=4, train__micro_batch_size=4)
    assert code == 2, told[-3000:]
    assert "train.global_batch_size: 16 in the checkpoint, 4 in this run" in told
    assert "train.resume_changes=[train.global_batch_size]" in told
    assert [folder.name for folder in step_dirs(tmp_path / "run")][-1] == "step-000006"
    settings |= {
        "train.global_batch_size": 4,
        "train.micro_batch_size": 4,
        "train.resume_changes": "[train.global_batch_size]",
    }
    code, told = started(train__max_steps="null")
    assert code == 0, told[-3000:]
    assert "train.global_batch_size is now 4 (was 16): the documents that this epoch still has to take" in told
    (source,) = json.loads((tmp_path / "run" / "preflight.json").read_text())["sources"]
    steps = json.loads((tmp_path / "run" / "summary.json").read_text())["step"]
    assert steps == 6 + -(-(source["documents"] - 6 * 16) // 4)
