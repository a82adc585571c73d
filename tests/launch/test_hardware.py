"""What a launch finds of the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sftkit.launch import launch
from sftkit.launch.launch import Hardware, count_visible

LISTING = [f"GPU {i}: NVIDIA H200 (UUID: GPU-{i}{i}aa-bb)" for i in range(8)]


def test_idle_cores_are_those_whose_cpus_have_no_work(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch.psutil, "cpu_percent", lambda interval, percpu: [4.0, 100.0, 0.0])
    monkeypatch.setattr(launch, "read_text", lambda path: "")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert launch.idle_cores() == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set())
    assert launch.idle_cores() is None


def test_a_core_is_idle_only_if_each_of_its_cpus_is(monkeypatch: pytest.MonkeyPatch):
    """Four cores of two CPUs: of the first both work, of the second one, of the third one that this process may not use."""
    busy = [100.0, 100.0, 0.0, 0.0, 100.0, 0.0, 100.0, 0.0]  # CPU n and n + 4 share a core
    siblings = {
        Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"): f"{cpu % 4},{cpu % 4 + 4}"
        for cpu in range(8)
    }
    monkeypatch.setattr(launch.psutil, "cpu_percent", lambda interval, percpu: busy)
    monkeypatch.setattr(launch, "read_text", lambda path: siblings.get(path, ""))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 4, 5, 7})
    assert launch.idle_cores() == 2
    assert launch.cpu_cores() == 4


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 8),
        ("", 0),
        ("-1", 0),
        ("0,1", 2),
        ("3", 1),
        ("0, 2 ,7", 3),
        ("0,9,1", 1),
        ("GPU-11aa,GPU-22aa-bb", 2),
        ("GPU-zz", 0),
    ],
)
def test_visible_gpus_are_counted_as_cuda_does(visible: str | None, count: int):
    assert count_visible(LISTING, visible) == count


def test_gpus_are_found_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tool = tmp_path / "nvidia-smi"
    lines = "".join(f"echo '{line}'\n" for line in LISTING)
    memory = '[ "$1" = --query-gpu=memory.total ] && { echo 143771; echo 81559; exit; }\n'
    tool.write_text(f"#!/bin/sh\n{memory}{lines}")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = launch.find_hardware({"CUDA_VISIBLE_DEVICES": "0,1"})
    assert (found.gpus, found.gpu_name, found.gpu_memory_bytes) == (2, "NVIDIA H200", 81_559 * 2**20)
    tool.write_text(f"#!/bin/sh\n{memory.replace('81559', '[N/A]')}{lines}")
    assert launch.find_hardware({}) == Hardware(8, found.cpu_cores, "NVIDIA H200", None)
    tool.write_text("#!/bin/sh\necho 'GPU 0: broken driver'; exit 9\n")
    assert launch.find_hardware({}).gpus == 0


def test_cores_are_at_least_one_and_at_most_the_affinity():
    assert 1 <= launch.cpu_cores() <= (os.cpu_count() or 1)
