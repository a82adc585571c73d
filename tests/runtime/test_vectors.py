"""CPU kernels in a cache that CPUs of several kinds share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from helpers import ROOT

from sftkit.config.schema import RunConfig, TrainConfig
from sftkit.runtime.start import name_vector_width, start

TWELVE = """
import torch
from sftkit.runtime.start import name_vector_width
name_vector_width()
x, y = torch.arange(12.0), torch.ones(12)
torch.compile(lambda x, y: x.copy_(x * 2 + y))(x, y)
assert torch.equal(x, torch.arange(12.0) * 2 + 1), x
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="needs a CPU with AVX-512")
def test_a_cpu_with_narrower_vectors_takes_no_code_of_a_wider_one(tmp_path: Path) -> None:
    code = tmp_path / "twelve.py"
    code.write_text(TWELVE)
    for capability in ("avx512", "avx2"):
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "ATEN_CPU_CAPABILITY": capability}
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **cache}
        subprocess.run([sys.executable, str(code)], env=env, check=True, timeout=300)


def test_a_run_names_the_width_and_leaves_one_that_the_user_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    with torch._inductor.config.patch({"cpp.simdlen": None}):
        with start(RunConfig(dir=str(tmp_path)), TrainConfig()):
            assert torch._inductor.config.cpp.simdlen == 256
        torch._inductor.config.cpp.simdlen = 1
        name_vector_width()
        assert torch._inductor.config.cpp.simdlen == 1
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "NEON")
    with torch._inductor.config.patch({"cpp.simdlen": None}):
        name_vector_width()
        assert torch._inductor.config.cpp.simdlen is None
