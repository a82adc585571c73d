"""Checks of the launcher: the variables that a run needs, from any launcher. No torch."""

import ctypes
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from sftkit.config.topology import check_numbers
from sftkit.errors import ConfigError, hint
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
        absent = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'}"
        raise ConfigError(hint("process without others", size=environ["WORLD_SIZE"], absent=absent, how=_HOW))
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if not named and tasks != "1":
        raise ConfigError(hint("srun", tasks=tasks))


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
        cause = hint("no GPU", reason=reason)
    else:
        cause = "start all processes with one launcher: torchrun or accelerate launch"
    group = f"this process is in a group of {processes}" if processes > 1 else "this process has found no others"
    raise ConfigError(hint("no group", name=name, size=environ[name], group=group, cause=cause))


def check_launcher(environ: Mapping[str, str]) -> str | None:
    """Return warnings about a launcher that was started by hand: it would cut a save short, would not start a run again
    as it was, or has started one process of several. None: there is nothing to warn about."""
    # Not started by torch's elastic launcher, which sets it.
    if "TORCHELASTIC_RUN_ID" not in environ:
        if "MASTER_ADDR" not in environ or any(name in environ for name in GROUP_SIZES):
            return None
        return hint("one process of several")
    lines = []
    # 30 s is its default, and can be changed since pytorch/pytorch#172596.
    if "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" not in environ:
        lines.append(hint("short shutdown", variable=f"{HANDLED}={signal_env({})[HANDLED]}"))
    # pytorch/pytorch#135712: the store that launcher and ranks share keeps the addresses of the ranks before the
    # restart.
    if int(environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        lines.append(hint("addresses after a restart"))
    return "\n".join(lines) or None
