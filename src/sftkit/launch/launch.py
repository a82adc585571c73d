"""Start a script on the hardware that is there: one CPU process, one GPU, or all GPUs. Checks the recipe first.

.venv/bin/python -m sftkit.launch SCRIPT RECIPE [key=value ...]
"""

import difflib
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import psutil

from sftkit.config import commands, load, schema, tables, terminal
from sftkit.config.rules import run_can_be_written
from sftkit.config.topology import Topology, topology_of
from sftkit.errors import ConfigError, config_error
from sftkit.launch import chain, layouts
from sftkit.memory.estimate import USABLE
from sftkit.models.files import GIB, Replica, replica_of
from sftkit.preflight.inputs import input_rules, launch_rules
from sftkit.rundir.files import read_text
from sftkit.rundir.lock import refuse_at_work
from sftkit.rundir.status import killed_by, newest_start, report_killed, stopped_by
from sftkit.runtime import launcher, signals
from sftkit.runtime.script import counted, likely_cause

_WATCH_SECONDS = 0.5
"How long the CPUs are watched for idle ones."


@dataclass(frozen=True)
class Hardware:
    """The hardware that a launch can use."""

    gpus: int
    cpu_cores: int
    "physical cores that this process may run on, at most the container's CPU quota"
    gpu_name: str | None = None
    gpu_memory_bytes: int | None = None
    "of the smallest GPU; None: unknown"
    idle_cores: int | None = None
    "physical cores without a busy CPU at the moment; None: unknown"


def find_hardware(environ: Mapping[str, str] = os.environ) -> Hardware:
    """Return this machine's visible GPUs and usable CPU cores."""
    # nvidia-smi is asked, as torch takes seconds to import, and a context on each GPU.
    listing = nvidia_smi("-L")
    names = [line.split(":", 1)[1].split("(UUID")[0].strip() for line in listing if line.startswith("GPU ")]
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    gpus = count_visible(listing, visible)
    # Only a run on cores needs to know which are idle, and waits half a second for it.
    if not gpus:
        return Hardware(0, cpu_cores(), idle_cores=idle_cores())
    in_parts = "MIG-" in (visible or "")  # the query knows whole GPUs only
    mebibytes = [] if in_parts else nvidia_smi("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    # A GPU whose memory is the host's answers [N/A].
    known = mebibytes and all(line.isdecimal() for line in mebibytes)
    memory = min(map(int, mebibytes)) * 2**20 if known else None
    return Hardware(gpus, cpu_cores(), names[0] if len(set(names)) == 1 else None, memory)


def count_visible(listing: Sequence[str], visible: str | None) -> int:
    """Return how many GPUs CUDA will show. It stops at the first entry of CUDA_VISIBLE_DEVICES that does not exist.

    Args:
        listing: lines of `nvidia-smi -L`.
        visible: CUDA_VISIBLE_DEVICES; None: not set.
    """
    gpus = sum(line.startswith("GPU ") for line in listing)
    if visible is None:
        return gpus

    def exists(entry: str) -> bool:
        by_uuid = entry.startswith(("GPU-", "MIG-")) and any(f"(UUID: {entry}" in line for line in listing)
        return by_uuid or (entry.isdecimal() and int(entry) < gpus)

    return len(list(takewhile(exists, map(str.strip, visible.split(",")))))


def nvidia_smi(*options: str) -> list[str]:
    """Return lines of output; none if the tool is missing or fails."""
    try:
        done = subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines()] if done.returncode == 0 else []


def cpu_cores() -> int:
    """Return the physical cores among the CPUs that this process may use, at most a container's quota, at least 1."""
    cpus = _usable()
    if not cpus:
        return os.cpu_count() or 1
    cores = len({_core_of(cpu) for cpu in cpus})
    quota, _, period = read_text(Path("/sys/fs/cgroup/cpu.max")).strip().partition(" ")
    if quota.isdecimal() and period.isdecimal():
        cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def idle_cores() -> int | None:
    """Return how many of the physical cores that this process may use have been idle for half a second; None: the
    system does not say which cores it may use.

    A core works as much as the busiest of its CPUs: one thread on each of them gets no core of its own.
    """
    busy: dict[str, float] = {}
    own = _usable()
    for cpu, percent in enumerate(psutil.cpu_percent(_WATCH_SECONDS, percpu=True)):
        if cpu in own:
            busy[_core_of(cpu)] = max(percent, busy.get(_core_of(cpu), 0.0))
    return round(sum(1 - percent / 100 for percent in busy.values())) if busy else None


def _usable() -> set[int]:
    """Return the CPUs that this process may run on; none if the system does not tell."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _core_of(cpu: int) -> str:
    """Return the name of a CPU's physical core: the list of the CPUs that share it."""
    return read_text(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")) or str(cpu)


CONFIGS = Path(commands.shipped("accelerate_configs/")).absolute()
"This folder's, if it has one, else those that came with sftkit."


@dataclass(frozen=True)
class Launch:
    """How to start: an Accelerate config, a number of processes, environment variables, and a line with the reason."""

    config_file: Path
    num_processes: int
    summary: str
    env: dict[str, str] = field(default_factory=dict)


class Needs(NamedTuple):
    """The needs of a run that decide how many GPUs it takes, and how."""

    replica: Replica | None = None
    "what a copy of the model takes; None: unknown, taken to fit"
    rows_fit: Callable[[Topology], bool | None] = lambda _: None
    "whether a layout has room for the rows; None: unknown, taken to have it"
    whole: bool = True
    "whether its engine can train whole replicas"


_UNKNOWN = Needs()


def needs_of(cfg: schema.Config, hardware: Hardware) -> Needs:
    """Return what a recipe needs of these GPUs."""
    replica = replica_of(cfg.model, cfg.optim, cfg.train, cfg.adapter, cfg.adapters)
    if cfg.adapter is not None and cfg.adapter.base == "nf4":  # is not sharded, so its rows decide nothing
        return Needs(replica)
    rows_fit = partial(layouts.has_room, cfg, memory_bytes=hardware.gpu_memory_bytes)
    return Needs(replica, rows_fit, whole=cfg.train.engine != "graph")


def choose(
    hardware: Hardware,
    global_batch_size: int,
    environ: Mapping[str, str],
    needs: Needs = _UNKNOWN,
    stages: int | None = 1,
) -> Launch:
    """Choose how to start: the most GPUs that share the global batch equally; without a GPU one CPU process with a
    thread for each core that is free, as threads that share cores with others wait for each other.

    Several GPUs get replicas (DDP), or shards of the model (FSDP2) where a replica, or the rows next to it, do not fit
    one of them.

    Args:
        global_batch_size: rows of an optimizer step, over all processes.
        needs: what is known of them.
        stages: of a pipeline; None: all GPUs.

    Raises:
        ConfigError: the GPUs together have no room for it, or they are fewer than the stages.
    """
    # Without the first, tokenizers warns and uses one thread once the process has forked. The second: seconds to save
    # after SIGTERM, in place of 30 (pytorch/pytorch#119856).
    env = {"TOKENIZERS_PARALLELISM": "true", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300"}
    cores = counted(hardware.cpu_cores, "CPU core")
    if (stages or 1) > max(hardware.gpus, 1):
        found = f"this machine has {hardware.gpus or 'no'} GPU{'s' * (hardware.gpus > 1)}"
        start = commands.typed(".venv/bin/accelerate launch --config_file accelerate_configs/cpu_ddp.yaml")
        raise config_error("more stages than GPUs", stages=stages, found=found, start=start)
    if hardware.gpus == 0:
        name = "cpu.yaml"
        processes = 1
        found = "no GPU"
        free = hardware.cpu_cores if hardware.idle_cores is None else min(hardware.cpu_cores, hardware.idle_cores)
        env["OMP_NUM_THREADS"] = str(max(1, free))  # accelerate launch would set 1
        cores += f" ({hardware.cpu_cores - free} busy)" if free < hardware.cpu_cores else ""
        threads = environ.get("OMP_NUM_THREADS", env["OMP_NUM_THREADS"])
        note = f", {threads} thread" + "s" * (threads != "1")
    else:
        # The most GPUs that leave each the same number of rows; some stay idle if no more of them divide the batch.
        numbers = [n for n in range(1, hardware.gpus + 1) if n % (stages or n) == 0]
        shared = [n for n in numbers if global_batch_size % (n // (stages or n)) == 0]
        processes = max(shared)
        found = counted(hardware.gpus, "GPU") + (f" ({hardware.gpu_name})" if hardware.gpu_name else "")
        note = f", {processes} processes" if processes > 1 else ""
        if processes < hardware.gpus:
            pipelines = f"are pipelines of {stages} stages and " * (stages != 1)
            note = f", {processes} of {hardware.gpus} GPUs: the most that {pipelines}"
            note += f"divide train.global_batch_size {global_batch_size}"
        # Shards only if a replica has no room: replicas exchange less.
        reason = _sharding_reason(hardware, processes, needs)
        several = "pp.yaml" if stages != 1 else "fsdp2.yaml" if reason else "ddp.yaml"
        name = "single_gpu.yaml" if processes == 1 else several
        if name == "fsdp2.yaml":
            note += f"{': ' if processes == hardware.gpus else '; '}{reason}"
    summary = f"hardware: {found}, {cores} -> accelerate_configs/{name}{note}"
    return Launch(CONFIGS / name, processes, summary, {key: env[key] for key in env if key not in environ})


def _sharding_reason(hardware: Hardware, processes: int, needs: Needs) -> str | None:
    """Return why the model has to be sharded over the GPUs; None: a GPU has room for a replica and its rows, as far as
    is known, and the engine trains replicas.

    Raises:
        ConfigError: weights, gradients and optimizer states are more than the GPUs that are taken hold together; with
            how many it would take.
    """
    memory = hardware.gpu_memory_bytes
    replica, rows_fit, whole = needs
    if replica is None or memory is None or replica.num_bytes <= USABLE * memory:
        if not whole:
            return "train.engine=graph shards weights"
        if rows_fit(Topology(replicas=processes)) is False and rows_fit(Topology(shards=processes, sharded=True)):
            return "beside a replica its rows do not fit a GPU (docs/parallelism.md)"
        return None
    if replica.held_bytes > processes * memory:
        words = {"gpus": counted(processes, "GPU"), "each": memory / GIB, "needed": -(-replica.held_bytes // memory)}
        raise config_error("no room even in shards", replica=replica.describe(), held=replica.held_bytes / GIB, **words)
    return f"{replica.describe()}, a GPU has {memory / GIB:.0f} GiB"


def command(launch: Launch, script: str, arguments: Sequence[str]) -> list[str]:
    """Return the argument list of the process to start: `accelerate launch ...`, see accelerate_launch."""
    code = (
        "import os, signal; "
        # Until accelerate_launch passes signals on: a Ctrl-C in the middle of its imports would print a traceback.
        "signal.signal(signal.SIGINT, lambda *_: (os.write(2, b'\\nSIGINT: ended\\n'), os._exit(130))); "
        "from sftkit.launch.launch import accelerate_launch; accelerate_launch()"
    )
    options = ["--config_file", str(launch.config_file), "--num_processes", str(launch.num_processes)]
    return [sys.executable, "-c", code, *options, script, *arguments]


def accelerate_launch() -> None:
    """Run `accelerate launch`, except that it passes signals on and waits while an interrupted script saves.

    By itself, with a single process, it ends at a signal and leaves the script running (huggingface/accelerate#929).
    Torch's elastic agent passes signals on to several processes, see torch_passes_on_once. If a signal has ended a
    process, the exit code says which.
    """
    from accelerate.commands.launch import main as accelerate_main
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    def pass_on(signum: int, _frame: object) -> None:
        terminal.leave_lost_terminal()
        children = psutil.Process().children()
        for child in children:
            child.send_signal(signum)
        if not children:  # the script has not started
            with suppress(OSError):
                os.write(2, f"\n{signal.Signals(signum).name}: ended\n".encode())
            os._exit(128 + signum)

    numbers = signals.heeded()
    for number in numbers:
        signal.signal(number, pass_on)
    try:
        with signals.torch_passes_on_once(numbers):
            accelerate_main()
    except subprocess.CalledProcessError as error:  # the only process
        sys.exit(exit_code([error.returncode]))
    except ChildFailedError as error:
        traceback.print_exc()
        # The first failures count: later processes were ended by the launcher, or lost a connection.
        first = min(failure.timestamp for failure in error.failures.values())
        sys.exit(exit_code([failure.exitcode for failure in error.failures.values() if failure.timestamp == first]))


def exit_code(codes: Sequence[int]) -> int:
    """Return one exit code for the processes that ended first: 128 + the number of the signal that killed one of them,
    else 2, a mistake of the user's, which is the cause of what the others saw, else the largest.

    Args:
        codes: of each process; negative: killed by that signal.
    """
    if min(codes) < 0:
        return 128 - min(codes)
    return 2 if 2 in codes else max(codes)


def run_script(script: str, recipe: str, overrides: Sequence[str] = ()) -> int:
    """Check the recipe and what it starts from, start the script on this machine, wait for it. A run that is resumed
    and has nothing left to do is not started.

    Returns:
        its exit code; 128 + the signal's number if a signal has stopped it.

    Raises:
        ConfigError: the recipe or what it starts from is wrong, there is no such script, or the processes that this
            machine has room for cannot run it.
    """
    if not Path(commands.shipped(script)).is_file():
        known = [f"scripts/{name}" for name in tables.STAGE_SCRIPTS.values()]
        near = difflib.get_close_matches(script, known, n=1)
        hint = f'Did you mean "{near[0]}"?' if near else f"Those that train: {', '.join(known)}"
        raise ConfigError(f"{script}: no such script. {hint}")
    # All that can be rejected without a GPU or torch's seconds of import: recipe, data, model, a run at work.
    stage = next((stage for stage, name in tables.STAGE_SCRIPTS.items() if Path(script).name == name), None)
    rules = [run_can_be_written, *input_rules(stage)]  # None: not a script of sftkit
    cfg = load.read_config(recipe, overrides, world_size=1, more=rules)
    script = commands.shipped(script)
    refuse_at_work(Path(cfg.run.dir))
    if line := chain.finished(cfg):
        terminal.print_text(line)
        return 0
    # The machine decides the Accelerate config and the number of processes.
    hardware = find_hardware()
    stages = schema.num_stages(cfg.train)
    launch = choose(hardware, cfg.train.global_batch_size, os.environ, needs_of(cfg, hardware), stages)
    if not launch.config_file.is_file():
        raise config_error("no Accelerate config", file=launch.config_file)
    terminal.print_text(launch.summary)
    topology = topology_of(launch.config_file, launch.num_processes, stages)
    load.read_config(recipe, overrides, lambda _: topology, launch_rules())  # again, as now the processes are known
    if line := layouts.advice(cfg, topology, hardware.gpu_memory_bytes, launch.config_file.name):
        terminal.print_text(line)
    # A stopped run has recorded that itself; a killed run shows only in its files.
    earlier = newest_start(Path(cfg.run.dir))
    code = call(command(launch, script, [recipe, *overrides]), launch.env | launcher.signal_env(os.environ))
    if code == 0 and (number := stopped_by(Path(cfg.run.dir), earlier)) is not None:
        return 128 + number  # several ranks end with 0: torch's launcher takes all else for a failure
    if (number := killed_by(code)) is not None:
        text = report_killed(Path(cfg.run.dir), number, likely_cause(number), earlier, [script, recipe, *overrides])
        terminal.print_text(f"\n{text}", error=True, level="error")
    return code


def call(words: Sequence[str], env: Mapping[str, str] | None = None) -> int:
    """Run a command with these variables added to the environment, wait for it through signals, and return its exit
    code: 128 + the number of the signal that killed it, if one did. A Ctrl-C reaches it twice, from the terminal too,
    and counts as one."""
    child: subprocess.Popen | None = None

    def pass_on(signum: int, _frame: object) -> None:
        terminal.leave_lost_terminal()
        if child is not None:
            child.send_signal(signum)

    with signals.handled_by(pass_on):
        child = subprocess.Popen(words, env=os.environ | dict(env or {}))
        code = child.wait()
    return 128 - code if code < 0 else code


def main() -> int:
    """Launch what the words of the command line name, and return the exit code."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        other = "Settings: .venv/bin/python SCRIPT --help. Other layouts: .venv/bin/accelerate launch --config_file ..."
        terminal.print_text(commands.typed(f"{__doc__}\n{other}"))
        return 0
    if words[0].startswith("-"):
        load.fail(f"{words[0]}: no such option. To train: SCRIPT RECIPE [key=value ...]")
    if len(words) < 2 or "=" in words[1]:
        load.fail(f"usage: {commands.running(commands.invocation(words[0], launcher=True))} RECIPE [key=value ...]")
    if {"--help", "-h", "--print-config"} & set(words[1:]):  # answered by the script, without a launcher
        return subprocess.run([sys.executable, *words], check=False).returncode
    return run_script(words[0], words[1], words[2:])
