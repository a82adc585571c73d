"""Look at this machine before a run: versions, GPUs, compiler, extras, disks, and what would be slow. Each finding says
what to do. torch is imported by the functions that ask it, so that a broken installation is a finding too.
"""

import os
import re
import shutil
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import NamedTuple

import psutil
from packaging.requirements import Requirement
from packaging.version import Version

from sftkit.config.commands import ROOT, install
from sftkit.config.schema import DataConfig
from sftkit.launch.launch import cpu_cores, idle_cores, nvidia_smi
from sftkit.models.files import GIB
from sftkit.runtime.launcher import may_have_gpu


class Diagnosis(NamedTuple):
    """A line of the output."""

    state: str
    "ok; note: nothing to do for most; slow: it works, slower than it could; fault: a run would fail"
    about: str
    text: str
    todo: str = ""

    def __str__(self) -> str:
        return f"{self.state:<6}{self.about:<14}{self.text}{f'. {self.todo}' if self.todo else ''}"


OLDEST_PYTHON = (3, 11)
NEWEST = {"torch": "2.15", "transformers": "5.23", "accelerate": "1.15"}
"Package -> the newest version that tests ran with (docs/engineering/compatibility.md)."
EXTRAS = {
    "attention-fa4": "faster attention on H100, H200 and B200",
    "fp8": "adamw8bit and matrix products in float8",
    "hybrid": "faster recurrent layers of hybrid models",
    "eval": "tasks of lm-evaluation-harness",
    "dedup": "near duplicates in data",
    "dashboard": "workspaces on wandb",
    "tensorboard": "event files",
}
"Extra -> what it brings."
OF_GPUS = {"attention-fa4": (9, 0), "fp8": (8, 9), "hybrid": (8, 0)}
"Extras whose lack makes GPUs of at least this compute capability slower."
SLOW_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": "every kernel waits for the one before",
    "TORCHDYNAMO_DISABLE": "nothing is compiled",
    "TORCH_COMPILE_DISABLE": "nothing is compiled",
    "NCCL_P2P_DISABLE": "GPUs exchange through the memory of the host",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor asks the driver for memory",
}
"Environment variable -> what it does if it is set and not 0."
FULL_GIB = 2.0
"Free space below which a run is likely to end with a full disk, and below which checkpoints of large models do."
SMALL_GIB = 30.0
SLOW_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smbfs", "fuse.sshfs", "9p", "lustre")


def findings() -> Iterator[Diagnosis]:
    """Yield what was found, one subject after the other."""
    for subject in (versions, gpus, compiler, extras, disks, host):
        yield from subject()


def _required() -> list[str]:
    """Return the requirements of sftkit and its extras, of its sources if it is not installed; none if these are not in
    a clone."""
    try:
        return requires("sftkit") or []
    except PackageNotFoundError:
        if not (ROOT / "pyproject.toml").exists():
            return []
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = about["optional-dependencies"].items()
    return [*about["dependencies"], *(f"{text}; extra == '{name}'" for name, texts in extras for text in texts)]


def versions() -> Iterator[Diagnosis]:
    """Yield Python and the packages that sftkit requires."""
    python = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        yield Diagnosis("fault", "python", python, f"Make an environment with Python {oldest} or newer")
    else:
        yield Diagnosis("ok", "python", python)
    for requirement in map(Requirement, _required()):
        if requirement.marker is not None:  # an extra's
            continue
        name = requirement.name
        try:
            found = version(name)
        except PackageNotFoundError:
            yield Diagnosis("fault", name, "not installed", install(str(requirement)))
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            text = f"{found}, and sftkit needs {requirement.specifier}"
            yield Diagnosis("fault", name, text, install(str(requirement)))
        elif name in NEWEST:
            if Version(found).release[:2] > Version(NEWEST[name]).release[:2]:
                todo = f"If something breaks: {install(f'{name}=={NEWEST[name]}.*')}"
                yield Diagnosis("note", name, f"{found}, newer than any tested version", todo)
            else:
                yield Diagnosis("ok", name, found)


def gpus() -> Iterator[Diagnosis]:
    """Yield each GPU that torch finds, or why it finds none."""
    try:
        import torch

        from sftkit.runtime.hardware import gpu_unavailable_reason
    except Exception as error:  # whatever a broken installation raises
        yield Diagnosis("fault", "torch", f"cannot be imported: {error}", install("torch --force-reinstall"))
        return
    if (reason := gpu_unavailable_reason()) is not None:
        listed = [line for line in nvidia_smi("-L") if line.startswith("GPU ")]
        if not listed and not may_have_gpu():
            yield Diagnosis(
                "slow", "gpu", "none: runs compute on the CPU", "Take a machine with one for more than a first look"
            )
            return
        here = f"{len(listed)} in this machine" if listed else "a driver is in this machine"
        if torch.version.cuda is None and torch.version.hip is None:
            todo = "Install torch for CUDA: https://pytorch.org/get-started/locally"
        else:
            todo = "Compare the driver of nvidia-smi with torch.version.cuda, and look at CUDA_VISIBLE_DEVICES"
        yield Diagnosis("fault", "gpu", f"{here}, and torch {torch.__version__} can use none: {reason}", todo)
        return
    count = torch.cuda.device_count()
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        text = f"{index}: {torch.cuda.get_device_name(index)}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        if major < 8 and torch.version.hip is None:
            yield Diagnosis(
                "slow", "gpu", f"{text}, no bf16 (compute capability {major}.{minor})", "Set train.precision=fp32"
            )
        elif free < 0.9 * total:
            yield Diagnosis("slow", "gpu", text, "Another process holds the rest: nvidia-smi lists it")
        else:
            yield Diagnosis("ok", "gpu", text)
    apart = [(a, b) for a in range(count) for b in range(a) if not torch.cuda.can_device_access_peer(a, b)]
    if apart:
        text = f"{len(apart)} of {count * (count - 1) // 2} pairs of GPUs exchange through the memory of the host"
        yield Diagnosis("slow", "links", text, "Prefer accelerate_configs/ddp.yaml and large global batches")


def compiler() -> Iterator[Diagnosis]:
    """Yield whether torch.compile finds what it calls."""
    names = [name for name in (os.environ.get("CXX"), os.environ.get("CC"), "g++", "clang++", "gcc", "clang") if name]
    found = next((name for name in names if shutil.which(name)), None)
    if found is None:
        todo = "Install one, on Debian and Ubuntu: apt install build-essential"
        yield Diagnosis("slow", "compiler", "no C++ compiler, so steps run uncompiled", todo)
    elif not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        todo = f"Install them, on Debian and Ubuntu: apt install python{sys.version_info[0]}.{sys.version_info[1]}-dev"
        yield Diagnosis("slow", "compiler", f"{found}, but not the headers of Python, so steps run uncompiled", todo)
    else:
        yield Diagnosis("ok", "compiler", found)


def extras() -> Iterator[Diagnosis]:
    """Yield which extras are installed."""
    if not _required():
        yield Diagnosis("note", "extra", "not known: sftkit is not installed", install("sftkit"))
        return
    capability = _capability()
    for extra in EXTRAS:
        texts = [text for text in _required() if re.search(rf"""extra == ['"]{extra}['"]""", text)]
        about = f"sftkit[{extra}]"
        if texts and all(map(_has, map(Requirement, texts))):
            yield Diagnosis("ok", "extra", f"{about}: {EXTRAS[extra]}")
            continue
        least = OF_GPUS.get(extra)
        slower = least is not None and capability is not None and capability >= least
        text = f"{about} not installed: {EXTRAS[extra]}"
        yield Diagnosis("slow" if slower else "note", "extra", text, install(about))


def _capability() -> tuple[int, int] | None:
    try:
        import torch
    except Exception:  # reported by gpus
        return None
    return torch.cuda.get_device_capability() if torch.cuda.is_available() and torch.version.hip is None else None


def _has(requirement: Requirement) -> bool:
    try:
        return requirement.specifier.contains(version(requirement.name), prereleases=True)
    except PackageNotFoundError:
        return False


def disks() -> Iterator[Diagnosis]:
    """Yield free space and kind of the disks that runs, tokenized data, the hub's files and temporary ones are on."""
    from huggingface_hub import constants

    places = {
        "runs": ("run.dir", Path("runs")),
        "tokenized data": ("data.cache_dir", Path(DataConfig.cache_dir)),
        "files of the hub": ("HF_HOME", Path(constants.HF_HUB_CACHE)),
        "temporary files": ("TMPDIR", Path(tempfile.gettempdir())),
    }
    for name, (setting, place) in places.items():
        absolute = place.expanduser().absolute()
        folder = next(each for each in (absolute, *absolute.parents) if each.exists())
        free = shutil.disk_usage(folder).free / GIB
        kind = file_system(folder)
        text = f"{free:,.1f} GiB free for {name} in {absolute}"
        elsewhere = f"Set {setting} to a folder of another disk"
        if not os.access(folder, os.W_OK):
            yield Diagnosis("fault", "disk", f"{folder} is not writable, for {name}", elsewhere)
        elif free < FULL_GIB:
            yield Diagnosis("fault", "disk", text, f"Free some. {elsewhere}")
        elif kind in SLOW_FILE_SYSTEMS and name != "runs":
            yield Diagnosis("slow", "disk", f"{text}, over the network ({kind})", elsewhere)
        elif free < SMALL_GIB:
            todo = f"A checkpoint of 1 billion parameters takes up to 12 GiB. {elsewhere} for those"
            yield Diagnosis("note", "disk", text, todo)
        else:
            yield Diagnosis("ok", "disk", text)


def file_system(folder: Path) -> str:
    """Return the kind of file system that a folder is on, such as ext4; empty if it is unknown."""
    inside = [part for part in psutil.disk_partitions(all=True) if folder.is_relative_to(part.mountpoint)]
    return max(inside, key=lambda part: len(part.mountpoint)).fstype if inside else ""


def host() -> Iterator[Diagnosis]:
    """Yield cores, memory and variables of the environment that slow a run down."""
    cores = cpu_cores()
    idle = idle_cores()
    text = f"{cores} cores" if idle is None else f"{cores} cores, {idle} of them idle"
    if idle is not None and idle < cores / 2:
        yield Diagnosis("slow", "cpu", text, "Other programs use them: top lists these")
    elif cores < 4:
        yield Diagnosis("note", "cpu", text, "Tokenizing takes its time: data.num_proc stays 1")
    else:
        yield Diagnosis("ok", "cpu", text)
    free = psutil.virtual_memory().available / GIB
    text = f"{free:.1f} GiB of the host's memory available"
    if free < FULL_GIB:
        yield Diagnosis(
            "fault", "memory", text, "End other programs: loading a model would end in one's death by the kernel"
        )
    else:
        yield Diagnosis("ok", "memory", text)
    for name, what in SLOW_VARIABLES.items():
        if os.environ.get(name, "0") not in ("", "0"):
            yield Diagnosis("slow", "variable", f"{name}={os.environ[name]}: {what}", f"unset {name}")
    if re.fullmatch("1|true|yes|on", os.environ.get("HF_HUB_OFFLINE", ""), re.IGNORECASE):
        text = "HF_HUB_OFFLINE is set: only models and data of the cache are found"
        yield Diagnosis("note", "variable", text, "unset HF_HUB_OFFLINE to download")
