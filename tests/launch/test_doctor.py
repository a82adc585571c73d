"""A look at the machine before a run: what is a fault, what is only slow, and what each line says to do."""

from __future__ import annotations

import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import ROOT

from sftkit.launch import doctor
from sftkit.models.files import GIB


def run(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> tuple[int, str]:
    """(exit code, output) of scripts/doctor.py."""
    monkeypatch.setattr(sys, "argv", ["scripts/doctor.py"])
    monkeypatch.setattr(doctor, "idle_cores", lambda: 2)
    code = runpy.run_path(str(ROOT / "scripts" / "doctor.py"))["main"]()
    return code, capsys.readouterr().out


def of(state: str, found: Any) -> list[str]:
    return [f"{one.text}. {one.todo}" for one in found if one.state == state]


def disk_of(monkeypatch: pytest.MonkeyPatch, gib: float, kind: str = "ext4") -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=int(gib * GIB)))
    monkeypatch.setattr(doctor, "file_system", lambda _: kind)


def test_a_machine_that_can_train_has_no_fault_and_every_other_line_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    disk_of(monkeypatch, 500)
    code, out = run(monkeypatch, capsys)
    assert code == 0
    lines = out.strip().splitlines()
    assert lines[-1].startswith("faults 0, ")
    assert {line.split()[1] for line in lines[:4]} == {"python", "torch", "accelerate", "transformers"}
    assert all(". " in line for line in lines[:-2] if line.split()[0] in ("slow", "note", "fault"))


def test_a_full_disk_is_a_fault_with_the_settings_that_take_another(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    disk_of(monkeypatch, 0.5)
    code, out = run(monkeypatch, capsys)
    assert code == 1
    assert "faults 4, " in out
    for setting in ("run.dir", "data.cache_dir", "HF_HOME", "TMPDIR"):
        assert f"Free some. Set {setting} to a folder of another disk" in out


def test_disks_that_are_slow_or_small_are_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    disk_of(monkeypatch, 500, "nfs4")
    slow = of("slow", doctor.disks())
    assert len(slow) == 3, "a run writes in the background: its folder may be on the network"
    assert "over the network (nfs4). Set data.cache_dir to a folder of another disk" in slow[0]
    disk_of(monkeypatch, 10)
    assert [one.state for one in doctor.disks()] == ["note"] * 4


def test_packages_that_are_missing_or_of_a_wrong_version_are_faults_and_untested_ones_are_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {"torch": "2.10.0", "transformers": "5.99.0"}

    def version(name: str) -> str:
        if name == "accelerate":
            raise doctor.PackageNotFoundError(name)
        return known.get(name, "99.0")

    monkeypatch.setattr(doctor, "requires", lambda _: ["torch>=2.11", "accelerate<2,>=1.15", "transformers<6,>=5.17"])
    monkeypatch.setattr(doctor, "version", version)
    torch, accelerate = of("fault", doctor.versions())
    assert torch.startswith("2.10.0, and sftkit needs >=2.11. ")
    assert torch.endswith("pip install 'torch>=2.11'")
    assert accelerate.startswith("not installed. ")
    assert "newer than any tested version" in of("note", doctor.versions())[0]


def test_sources_that_are_not_installed_have_the_requirements_of_their_clone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed = {*map(str, [*doctor.extras(), *doctor.versions()])}

    def requires(name: str) -> list[str]:
        raise doctor.PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "requires", requires)
    assert {*map(str, [*doctor.extras(), *doctor.versions()])} == installed
    assert any(one.state == "ok" for one in doctor.extras())
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    (unknown,) = doctor.extras()
    assert str(unknown).startswith("note  extra         not known: sftkit is not installed. ")


def test_a_gpu_that_torch_cannot_use_is_a_fault_and_none_is_only_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    from sftkit.runtime import hardware

    monkeypatch.setattr(hardware, "gpu_unavailable_reason", lambda: "the driver is too old")
    monkeypatch.setattr(doctor, "may_have_gpu", lambda: False)
    monkeypatch.setattr(doctor, "nvidia_smi", lambda *_: [])
    assert of("slow", doctor.gpus()) == [
        "none: runs compute on the CPU. Take a machine with one for more than a first look"
    ]
    monkeypatch.setattr(doctor, "nvidia_smi", lambda *_: ["GPU 0: NVIDIA H200 (UUID: GPU-1)"])
    (fault,) = of("fault", doctor.gpus())
    assert fault.startswith("1 in this machine, and torch ")
    assert "can use none: the driver is too old. " in fault


def test_what_slows_a_run_down_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setattr(doctor, "cpu_cores", lambda: 8)
    monkeypatch.setattr(doctor, "idle_cores", lambda: 1)
    cores, variable = of("slow", doctor.host())
    assert cores == "8 cores, 1 of them idle. Other programs use them: top lists these"
    assert variable == "CUDA_LAUNCH_BLOCKING=1: every kernel waits for the one before. unset CUDA_LAUNCH_BLOCKING"
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    assert of("slow", doctor.compiler())[0].startswith("no C++ compiler, so steps run uncompiled. Install one")
