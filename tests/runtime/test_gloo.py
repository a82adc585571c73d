"""Collectives over gloo that overlap, as the graph engine's do on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist
from helpers import torchrun

from sftkit.runtime.start import use_one_worker_per_group


def test_gathers_in_flight_together_come_out_right_and_a_group_has_one_worker_thread(tmp_path: Path) -> None:
    torchrun(2, "gloo_worker.py", f"{tmp_path}/measured.json")
    assert json.loads((tmp_path / "measured.json").read_text()) == {"correct": True, "workers": [1, 1]}


def test_options_that_a_caller_chose_are_left_alone(tmp_path: Path, monkeypatch) -> None:
    """By position and by keyword, as torch takes them."""
    monkeypatch.setattr(dist.ProcessGroupGloo, "__init__", dist.ProcessGroupGloo.__init__)  # put back afterwards
    use_one_worker_per_group.__wrapped__()
    options = dist.ProcessGroupGloo._Options()
    options._devices, options._threads = [dist.ProcessGroupGloo.create_default_device()], 3
    for name, chosen in (("position", ((options,), {})), ("keyword", ((), {"options": options}))):
        store = dist.FileStore(str(tmp_path / name), 1)
        group = dist.ProcessGroupGloo(store, 0, 1, *chosen[0], **chosen[1])
        assert group.options._threads == 3
