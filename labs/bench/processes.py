"""The processes of a run: one, or several that `accelerate launch` starts in a topology; how they end. No torch
in this file."""

from __future__ import annotations

import difflib
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil  # comes with accelerate
import yaml

from sftkit.config.schema import Positive, TrainConfig, num_stages, settings
from sftkit.config.topology import Topology
from sftkit.launch.hardware import cpu_cores
from sftkit.launch.launch import CONFIGS, Launch, command
from sftkit.runtime.signals import exit_on_signals

_ABOVE_LABS = Path(__file__).resolve().parents[2]
SHUTDOWN_SECONDS = 5
"After one rank has failed, how long the launcher waits for the others: they have nothing to save."
FIRST_ERROR = re.compile(r"^(?:\[rank\d+\]: ?)?([A-Za-z_][\w.]*(?:Error|Exception)\b.*)$", re.MULTILINE)
_KILLED = re.compile(r"Root Cause \(first observed failure\):.*?rank +: (\d+).*?exitcode +: -(\d+)", re.DOTALL)


@settings
class Parallelism:
    """Sizes of the mesh of processes in place of those that the topology's file names; their product is `processes`."""

    dp_replicate_size: Positive = 1
    dp_shard_size: Positive = 1
    tp_size: Positive = 1
    cp_size: Positive = 1


@settings
class Processes:
    """How the processes of a run are started."""

    count: Positive = 1
    topology: str | None = None
    "name of a file of accelerate_configs; null: one process, without a launcher"
    parallelism: Parallelism | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes of the mesh that are named anywhere: those here, else the topology's own; {}: none are."""
        if self.parallelism is not None:
            return asdict(self.parallelism)
        named = accelerate_config(self.topology).get("parallelism_config", {}) if self.topology else {}
        keys = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size")
        return {key: named[f"parallelism_config_{key}"] for key in keys if f"parallelism_config_{key}" in named}

    def row_topology(self, train: TrainConfig) -> Topology:
        """Return the topology as far as rows are shared: those of tensor and context parallelism and the stages of a
        pipeline share theirs; whatever else there is counts as copies."""
        stages, sizes = num_stages(train) or self.count, self.sizes
        tensor, context = sizes.get("tp_size", 1), sizes.get("cp_size", 1)
        copies = max(1, self.count // (stages * tensor * context))
        return Topology(stages=stages, replicas=copies, tensor=tensor, context=context)


def accelerate_config(topology: str) -> dict[str, Any]:
    """Return the Accelerate config of a topology, as it lies in accelerate_configs."""
    return yaml.safe_load((CONFIGS / f"{topology}.yaml").read_text())


def wrong_processes(processes: Processes) -> Iterator[str]:
    """Yield what is wrong with a run's processes, topology and parallelism, each with its key."""
    topologies = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
    if processes.topology is None:
        if processes.count > 1:
            yield f"processes: {processes.count} need a topology: one of {', '.join(topologies)}"
        if processes.parallelism is not None:
            yield "parallelism: needs a topology whose distributed_type is FSDP"
        return
    if processes.topology not in topologies:
        near = difflib.get_close_matches(processes.topology, topologies, n=1)
        hint = f'Did you mean "{near[0]}"?' if near else f"Files there: {', '.join(topologies)}"
        yield f'topology: "{processes.topology}" is not a file of accelerate_configs. {hint}'
        return
    kind = accelerate_config(processes.topology)["distributed_type"]
    if processes.parallelism is not None and kind != "FSDP":
        yield (
            f"parallelism: {processes.topology} has no sizes: name a topology whose distributed_type is FSDP, not "
            f"{kind}"
        )
    elif processes.sizes and math.prod(processes.sizes.values()) != processes.count:
        sizes = " x ".join(f"{key} {size}" for key, size in processes.sizes.items())
        yield f"parallelism: {sizes} is {math.prod(processes.sizes.values())}, but processes is {processes.count}"


def bench_command(
    processes: Processes, worker: str | None, job_file: Path, hold: Path | None = None
) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts a run and the environment variables that it needs.

    A launched run's Accelerate config is written beside its job file, with what the run changes of the topology's.

    Args:
        worker: the script that trains; None: sftkit.
        hold: what sftkit's processes wait for, once they have imported; None: they begin at once.
    """
    if worker is not None:
        words = [worker, str(job_file)]
    elif hold is None:
        words = ["-m", "labs.bench.worker", str(job_file)]
    else:
        words = ["-m", "labs.bench.ahead", str(job_file), str(hold)]
    if processes.topology is None:
        return [sys.executable, *words], {}
    config = accelerate_config(processes.topology) | {"num_processes": processes.count}
    if processes.count > 1:
        config["main_process_port"] = 0  # a free one
    if processes.parallelism is not None:
        named = {f"parallelism_config_{key}": size for key, size in processes.sizes.items()}
        config["parallelism_config"] = config.get("parallelism_config", {}) | named
    path = job_file.with_name("accelerate.yaml")
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    launch = Launch(path, processes.count, summary="")
    # Variables that the user has set stay as they are.
    environment = {
        # Ranks share the cores: as many threads each as all cores have would wait for one another.
        "OMP_NUM_THREADS": str(max(1, cpu_cores() // processes.count)),  # accelerate launch would set 1
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_SECONDS),
        **({"ACCELERATE_USE_CPU": "true"} if config.get("use_cpu") else {}),
    }
    kept = {key: value for key, value in environment.items() if key not in os.environ}
    return command(launch, words[0], words[1:]), kept


def own_caches(folder: Path) -> dict[str, str]:
    """Return the environment variables of a run whose compiler caches are in a folder of its own: empty, so that its
    first compile is one."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "XDG_CACHE_HOME": str(folder),
    }


@dataclass(frozen=True)
class Logged:
    """A command that was started, its output into a file."""

    process: subprocess.Popen[bytes]
    log: Path


def start_logged(words: list[str], log: Path, environment: dict[str, str]) -> Logged:
    """Start a command, its output into `log`. Whoever starts it sees to its end: `finish_logged`, or `kill_tree`."""
    # Workers import labs, which is not installed as a module, in whatever folder they are started.
    path = {"PYTHONPATH": os.pathsep.join(filter(None, (str(_ABOVE_LABS), os.environ.get("PYTHONPATH"))))}
    with log.open("w") as file:
        env = os.environ | path | environment
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=env)
    return Logged(process, log)


def finish_logged(command: Logged, timeout_seconds: int) -> str | None:
    """Wait for a command. Return how it ended and its last line; None: it ended well.

    It is over when this returns: what it has started is killed with it if the time is up or this
    process is interrupted.
    """
    try:
        with exit_on_signals():
            code = command.process.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        return f"not done after {timeout_seconds} s"
    finally:
        kill_tree(command.process)
    if code == 0:
        return None
    said = [text for text in command.log.read_text(errors="replace").splitlines() if text.strip()]
    return f"ended with code {code}" + (f": {said[-1].strip()}" if said else "")


def run_logged(words: list[str], log: Path, environment: dict[str, str], timeout_seconds: int) -> str | None:
    """Run a command, its output into `log`, and return what `finish_logged` does."""
    return finish_logged(start_logged(words, log, environment), timeout_seconds)


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that still runs and all that descends from it; ranks have process groups of their own."""
    if process.poll() is not None:
        return
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        # Suspended before its children are listed, so that it starts none meanwhile; ranks have process groups of their
        # own, so a signal to the launcher's would miss them.
        root.suspend()  # a launcher that sees a rank die would act on it
        tree = [*root.children(recursive=True), root]
        for member in tree:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(tree[:-1], timeout=10)
    process.wait()


def first_failure(log: Path, error: str | None) -> str:
    """Return why a launched run failed: the rank that a signal killed, if one was, then the first error.

    Args:
        error: what a rank wrote of itself; None: no rank came to that, so the log's first error is taken.
    """
    text = log.read_text(errors="replace")
    found = FIRST_ERROR.search(text)
    error = error or (found.group(1).strip() if found else None)
    killed = _KILLED.search(text)
    if killed is None or int(killed.group(2)) == signal.SIGTERM:  # SIGTERM is how the launcher ends the other ranks
        return error or "it wrote no row"
    how = f"rank {killed.group(1)} was killed by signal {killed.group(2)}"
    return f"{how}; {error}" if error and "ChildFailedError" not in error else how
