"""The machine: peak FLOP/s by device name, and the environment snapshot saved with every run."""

import logging
import os
import platform
import re
import resource
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

log = logging.getLogger(__name__)

# Dense bf16 tensor-core peak in FLOP/s from the vendors' datasheets (no sparsity), by whole words, longer names first.
PEAK_BF16_FLOPS = (
    ("B200", 2250e12),
    ("GH200", 989.5e12),
    ("H200", 989.5e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989.5e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("L4", 121e12),
    ("RTX 5090", 209.5e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
    ("MI300X", 1307e12),
)
_RESULTS = ("benchmarks/ledger.jsonl", "benchmarks/*/results/*", "labs/compile_lab.md", "labs/patterns/README.md")
"Files of this repository that runs write: a new result there changes no later run."


def peak_flops(device: torch.device) -> float | None:
    """Return the datasheet's dense bf16 FLOP/s of the device; None: an unknown device has no MFU rather than
    a guessed one."""
    if device.type != "cuda":
        return None
    return peak_flops_by_name(torch.cuda.get_device_name(device))


@cache
def peak_flops_by_name(name: str) -> float | None:
    """Return the dense bf16 FLOP/s of a device of that name; None, after one warning, for a name that is not
    in the table."""
    known = (flops for part, flops in PEAK_BF16_FLOPS if re.search(rf"\b{part}\b", name))
    # A laptop's GPU has the name of a faster desktop card in its own.
    flops = None if "Laptop" in name else next(known, None)
    if flops is None:
        log.warning("%s: peak FLOP/s unknown, so no MFU; add it to PEAK_BF16_FLOPS in runtime/hardware.py", name)
    return flops


def gpu_unavailable_reason() -> str | None:
    """Return why torch can use no GPU, in its own words; None: it can."""
    if torch.cuda.is_available():
        return None
    try:
        # is_available() only returns False; this raises the reason.
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return "torch finds none"


def gpu_here() -> str | None:
    """Return the name of this machine's first GPU; None: torch finds none."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def device_name(device: torch.device) -> str:
    """Return 'NVIDIA H200', or 'CPU (2 cores)'."""
    return (
        torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type.upper()} ({num_cores()} cores)"
    )


def user_cache() -> Path:
    """Return this user's folder for what can be computed again."""
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "sftkit"


def num_cores() -> int:
    """Return the number of CPUs (hardware threads) that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def uses_cuda_graphs() -> bool:
    """Return whether this process has compiled in a mode with CUDA graphs: inductor imports their module only then."""
    # Private: nothing public tells (pytorch/pytorch#124506 asks for it), and to import the module that knows would
    # itself make the answer yes (torch 2.13).
    return "torch._inductor.cudagraph_trees" in sys.modules


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory in GiB. GPU: the most that tensors had allocated since the last call; with CUDA graphs the
    most that torch had reserved, as their tensors are in memory that it counts as free between replays. CPU: the most
    resident memory of the process so far."""
    if device.type == "cuda":
        peak = (torch.cuda.max_memory_reserved if uses_cuda_graphs() else torch.cuda.max_memory_allocated)(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak / 2**30
    # ru_maxrss is in bytes on macOS and in KiB elsewhere.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def memory_counters(device: torch.device) -> dict[str, float | None]:
    """Return mem/reserved_gib, mem/alloc_retries and mem/ooms of the caching allocator of this rank's GPU; None
    on other devices."""
    if device.type != "cuda":
        return {"mem/reserved_gib": None, "mem/alloc_retries": None, "mem/ooms": None}
    stats = torch.cuda.memory_stats(device)
    return {
        "mem/reserved_gib": stats["reserved_bytes.all.current"] / 2**30,
        "mem/alloc_retries": stats["num_alloc_retries"],
        "mem/ooms": stats["num_ooms"],
    }


def environment(device: torch.device, world_size: int) -> dict[str, object]:
    """Return versions, hardware and git state: what someone else needs to repeat the run."""
    # torch's own word has the build in it (2.15.0+cu132); that of its package, on the index, has not.
    packages: dict[str, str | None] = {"torch": str(torch.__version__)}
    packages |= {p: installed_version(p) for p in ("transformers", "accelerate", "datasets", "tokenizers", "sftkit")}
    packages |= {p: found for p in ("triton", "flash-attn-4", "torchao") if (found := installed_version(p)) is not None}
    return {
        "packages": packages,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device_name(device),
        "world_size": world_size,
        "git": git_state(),
    }


def installed_version(package: str) -> str | None:
    """Return the installed version of a package; None: it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git_state() -> str | None:
    """Return the commit of the working directory's repository, with -dirty for uncommitted changes of anything but
    `_RESULTS`; None outside one."""
    try:
        commit = _git("describe", "--always", "--abbrev=12")
        commit.check_returncode()
        changed = _git("diff", "--quiet", "HEAD", "--", ":(top)", *(f":(top,exclude){path}" for path in _RESULTS))
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.stdout.strip() + "-dirty" * (changed.returncode != 0)


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=False, timeout=5)
