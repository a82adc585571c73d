"""Checks of the launcher: the variables that a run needs, from any launcher. No torch."""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from sftkit.config.topology import check_numbers
from sftkit.errors import ConfigError
from sftkit.rundir.files import read_text
from sftkit.runtime.signals import heeded

HANDLED = "PET_SIGNALS_TO_HANDLE"
"torchrun's --signals-to-handle as a variable, which accelerate launch honours too"
GROUP_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"Variables with the number of processes that a launcher has started; the first that is set counts, as for Accelerate."


def signal_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what torch's elastic launcher, which starts several processes, needs to pass every signal on."""
    # Its default leaves SIGUSR1 out, by which queues announce that a job will be preempted:
    # pytorch/pytorch#154849.
    return {} if HANDLED in environ else {HANDLED: ",".join(number.name for number in heeded())}


_PLACES = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"Variables that a process needs next to WORLD_SIZE to find the others."
_HOW = "Start the processes with make, sftkit, python -m sftkit.launch, torchrun or accelerate launch"


def check_variables(environ: Mapping[str, str]) -> None:
    """Check that this process can be distinguished from those started with it, before they look for one another.

    Raises:
        ConfigError: it cannot, with what is missing.
    """
    check_numbers(environ)
    named = [name for name in GROUP_SIZES if name in environ]
    missing = [name for name in _PLACES if name not in environ]
    if named == ["WORLD_SIZE"] and environ["WORLD_SIZE"] != "1" and missing:
        raise ConfigError(
            f"WORLD_SIZE={environ['WORLD_SIZE']}, but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not "
            f"set, so this process cannot find the others. {_HOW}; for one process alone unset WORLD_SIZE"
        )
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if not named and tasks != "1":
        raise ConfigError(
            f"srun has started {tasks} processes (SLURM_STEP_NUM_TASKS) that do not know of each other: each would "
            "train alone and write over the others' run. Let srun start one launcher on each machine (srun "
            "--ntasks-per-node=1 torchrun ..., docs/multi_node.md)"
        )


def config_file_of_launcher() -> Path | None:
    """Return the accelerate config that `accelerate launch`, which has started this process, was given; None: it was
    given none, or the system does not show it."""
    # Accelerate passes on the content of the file, not its name.
    words = read_text(Path(f"/proc/{os.getppid()}/cmdline")).split("\0")
    for option, value in itertools.zip_longest(words, words[1:]):
        name, equals, given = option.partition("=")
        if name == "--config_file" and (given or value):
            return Path(given if equals else value)
    return None


def may_have_gpu() -> bool:
    """Return whether torch may find a GPU here; without a driver's library, or with all hidden, it computes on the
    CPU."""
    if sys.platform != "linux" or Path("/dev/kfd").exists():  # a library of another name
        return True
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def check_group(environ: Mapping[str, str], processes: int, gpu_unavailable_reason: Callable[[], str | None]) -> None:
    """Check that the launcher's processes form one group: else each would train alone and write over the others' files.

    Args:
        processes: in the group that was formed; 1: none was.
        gpu_unavailable_reason: returns why torch can use no GPU; None: it can.

    Raises:
        ConfigError: with the cause, as far as it is known.
    """
    name = next((name for name in GROUP_SIZES if name in environ), None)
    if name is None or int(environ[name]) == processes:
        return
    if "LOCAL_RANK" not in environ:
        cause = f"LOCAL_RANK is not set. {_HOW}"
    elif processes == 1 and (reason := gpu_unavailable_reason()) is not None:
        cause = (
            f"no GPU can be used ({reason}). Fix the driver or CUDA_VISIBLE_DEVICES; to train on CPUs set "
            "ACCELERATE_USE_CPU=true"
        )
    else:
        cause = "start all processes with one launcher: torchrun or accelerate launch"
    group = f"this process is in a group of {processes}" if processes > 1 else "this process has found no others"
    raise ConfigError(
        f"{name}={environ[name]}, but {group}: each would train by itself and write over the others' run. Cause: "
        f"{cause}"
    )


def check_launcher(environ: Mapping[str, str]) -> str | None:
    """Return warnings about a launcher that was started by hand: it would cut a save short, would not start a run again
    as it was, or has started one process of several. None: there is nothing to warn about."""
    # Not started by torch's elastic launcher, which sets it.
    if "TORCHELASTIC_RUN_ID" not in environ:
        if "MASTER_ADDR" not in environ or any(name in environ for name in GROUP_SIZES):
            return None
        return (
            "warning: MASTER_ADDR is set as for several processes, but no launcher says how many: this one trains "
            "alone. With --cpu --num_processes N accelerate launch starts one process; several on CPUs: torchrun, or "
            "--config_file accelerate_configs/cpu_ddp.yaml"
        )
    lines = []
    # 30 s is its default, and can be changed since pytorch/pytorch#172596.
    if "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" not in environ:
        lines.append(
            "warning: the launcher kills this run 30 s after a signal, saved or not, and does not pass SIGUSR1 on: "
            f"start it with TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300 {HANDLED}={signal_env({})[HANDLED]} (make and "
            "sftkit.launch do)"
        )
    # pytorch/pytorch#135712: the store that launcher and ranks share keeps the addresses of the ranks before the
    # restart.
    if int(environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        lines.append(
            "warning: after a restart by the launcher the ranks may be given addresses of those that are gone, and "
            "fail: start it with --rdzv_backend c10d (torchrun: --standalone) and "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        )
    return "\n".join(lines) or None
