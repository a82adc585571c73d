"""Collectives over gloo that overlap, as the graph engine's do on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

from helpers import torchrun


def test_gathers_in_flight_together_come_out_right_and_a_group_has_one_worker_thread(tmp_path: Path) -> None:
    torchrun(2, "gloo_worker.py", f"{tmp_path}/measured.json")
    assert json.loads((tmp_path / "measured.json").read_text()) == {"correct": True, "workers": [1, 1]}
