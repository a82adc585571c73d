"""Results of a bench on two kinds of machine, for the tests of tables."""

from __future__ import annotations

from typing import Any

H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"


def made_results(*rows: dict[str, Any], started: str = "2026-01-01", **machine: Any) -> dict[str, Any]:
    """Return the contents of results.json of a call on a machine, by default one H200."""
    known: dict[str, Any] = {"device": H200, "gpus": 1, "versions": {"torch": "2.11", "trl": None}, "git": None}
    known |= {"driver": "580", "cuda": "13.0", "matmul_tflops": None, "datasheet_tflops": None, "copy_tb_per_sec": None}
    return {"plan": "plan.yaml", "started": started, "machine": {**known, **machine}, "runs": [*rows]}
