"""The assembler of Triton's kernels: one for the process and for torch's compile workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from helpers import ROOT
from torch._inductor.runtime import compile_tasks

from sftkit.config.schema import RunConfig, TrainConfig
from sftkit.runtime.start import start

NAME = "TRITON_PTXAS_PATH"


def test_a_run_takes_the_assembler_that_compile_workers_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions of torch look in torch/bin or in torch/_inductor/bin: both are there."""
    folder = tmp_path / "torch" / "_inductor" / "runtime"
    for place in (tmp_path / "torch", tmp_path / "torch" / "_inductor"):
        (place / "bin").mkdir(parents=True)
        (place / "bin" / "ptxas").touch(mode=0o755)
    monkeypatch.setattr(compile_tasks, "__file__", str(folder / "compile_tasks.py"))
    monkeypatch.setenv(NAME, "")  # so that it is put back
    monkeypatch.delenv(NAME)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    compile_tasks._set_triton_ptxas_path.cache_clear()
    with start(RunConfig(dir=str(tmp_path)), TrainConfig()):
        assert os.environ[NAME].startswith(str(tmp_path))


TUNED = """
import torch
from torch._inductor import async_compile
from sftkit.runtime.start import use_ptxas_of_workers
use_ptxas_of_workers()
async_compile.AsyncCompile.wait_pool_ready()
multiply = torch.compile(lambda a, b: (a @ b).relu(), mode="max-autotune-no-cudagraphs")
multiply(*torch.randn(2, 512, 512, device="cuda", dtype=torch.bfloat16))
"""


@pytest.mark.gpu
def test_max_autotune_compiles_each_kernel_once(tmp_path: Path) -> None:
    """Triton's cache has a folder for each kernel and version of the assembler."""
    code = tmp_path / "tuned.py"
    code.write_text(TUNED)
    # Of both caches, since torch writes Triton's into the environment of a process that has compiled.
    caches = {name: str(tmp_path / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **caches}
    subprocess.run([sys.executable, str(code)], env=env, check=True, timeout=300)
    kernels: Counter[tuple[str, int, int]] = Counter()
    for path in (tmp_path / "TRITON_CACHE_DIR").rglob("triton_mm*.ttir"):
        asked = json.loads(path.with_suffix(".json").read_text())
        kernels[path.read_text(), asked["num_warps"], asked["num_stages"]] += 1
    assert kernels
    assert set(kernels.values()) == {1}
