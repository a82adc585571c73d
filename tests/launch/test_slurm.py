"""The batch script that `sftkit launch --slurm` prints: it is the one of the docs, and a real Slurm runs it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from helpers import ROOT

from sftkit.errors import ConfigError
from sftkit.launch.slurm import batch_script, print_script

RECIPE = "recipes/qwen3_0_6b/sft.yaml"
SHARED = ["run.dir=/shared/runs/sft", "train.global_batch_size=16"]


def test_the_script_of_the_docs_is_the_one_that_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "multi_node.md").read_text()
    (command,) = re.findall(r"^\.venv/bin/sftkit launch (.*) > sft\.sh$", text, re.MULTILINE)
    print_script(command.split())
    printed = re.sub(r"exec \S+/accelerate ", "exec .venv/bin/accelerate ", capsys.readouterr().out)
    assert f"```bash\n{printed}```" in text


@pytest.mark.parametrize(
    ("overrides", "config"),
    [
        ([], "multi_node.yaml"),
        (["train.engine=pipeline", "train.pipeline_stages=2"], "pp.yaml"),
        (["adapter={base: nf4}"], "ddp.yaml"),
    ],
)
def test_the_layout_of_the_script_is_one_that_the_recipe_can_run(overrides: list[str], config: str) -> None:
    script = batch_script("sft", RECIPE, [*SHARED, *overrides], nodes=2, gpus=8)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert f"--config_file accelerate_configs/{config}" in script
    assert ("--parallelism_config_dp_replicate_size $SLURM_NNODES" in script) == (config == "multi_node.yaml")


def test_words_reach_the_script_whole() -> None:
    script = batch_script("sft", RECIPE, [*SHARED, "train.resume=null", "data.cache_dir=it's mine"], nodes=2, gpus=8)
    (line,) = re.findall(r"^WORDS=.*$", script, re.MULTILINE)
    shown = subprocess.run(
        ["bash", "-c", f'{line}; printf "%s\\n" "${{WORDS[@]}}"'], capture_output=True, text=True, check=True
    )
    assert shown.stdout.splitlines() == [RECIPE, *SHARED, "data.cache_dir=it's mine", "train.resume=auto"]


def test_a_recipe_that_the_machines_cannot_run_is_rejected_before_it_is_queued() -> None:
    with pytest.raises(ConfigError, match="8 cannot be shared equally by 24 processes"):
        batch_script("sft", RECIPE, [], nodes=3, gpus=8)
    with pytest.raises(ConfigError, match="nf4 needs a GPU"):
        batch_script("sft", RECIPE, ["adapter={base: nf4}"], nodes=2, gpus=0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "usage: sftkit launch --slurm N"),
        (["--slurm", "two", "sft", RECIPE], "--slurm: how many? Take 1 or more"),
        (["--slurm", "2", "--time", "2:00", "sft", RECIPE], "--time: no such option. Options of Slurm are for sbatch"),
        (["--slurm", "2", RECIPE], "sft.yaml: which stage? Take base, mid, sft, caption, then the recipe"),
        (["--slurm", "2", "--gpus", "1", "mid", RECIPE], "run.stage: sft is trained by chat_sft.py, not mid_train.py"),
        (["sft", RECIPE], "usage: sftkit launch --slurm N"),
        (["--slurm", "2", "sft", "recipes/none.yaml"], "recipes/none.yaml: no such file"),
    ],
)
def test_a_mistake_says_what_to_type(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        print_script(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


CONF = """\
ClusterName=loopback
SlurmctldHost=localhost
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
SwitchType=switch/none
SlurmdTimeout=10
KillWait=5
ReturnToService=2
NodeName={here} NodeAddr=127.0.0.1 Port={first} CPUs=1 State=UNKNOWN
NodeName=worker NodeAddr=127.0.0.1 Port={second} CPUs=1 State=UNKNOWN
PartitionName=all Nodes={here},worker Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """One slurmctld and two slurmd on the loopback interface, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        here = socket.gethostname()
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        ports = [each.getsockname()[1] for each in sockets]
        for each in sockets:
            each.close()
        user = psutil.Process().username()
        numbers = {"port": ports[0], "first": ports[1], "second": ports[2]}
        (folder / "state").mkdir()
        (folder / "slurm.conf").write_text(CONF.format(folder=folder, user=user, here=here, **numbers))
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        self.env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={folder}/munge.{suffix}" for option, suffix in files.items()]
        self.start("munged", "munged", "--foreground", "--force", *options)
        wait_for(lambda: (folder / "munge.socket").exists(), 30)
        self.start("slurmctld", "slurmctld", "-D")
        self.start(here, "slurmd", "-D", "-N", here)
        self.start("worker", "slurmd", "-D", "-N", "worker")
        wait_for(lambda: self.ask("sinfo", "-h", "-N", "-o", "%T").split() == ["idle", "idle"], 60)

    def start(self, name: str, *words: str) -> None:
        """Start a daemon."""
        path = shutil.which(words[0]) or words[0]
        with (self.folder / f"{name}.out").open("ab") as out:
            self.daemons[name] = subprocess.Popen([path, *words[1:]], env=self.env, stdout=out, stderr=out)

    def ask(self, *words: str) -> str:
        """Run a command of Slurm, and return its output."""
        return subprocess.run(words, env=self.env, cwd=ROOT, capture_output=True, text=True, check=False).stdout

    def state(self, job: str) -> str:
        """Return the state of a job, as scontrol names it."""
        found = re.search(r"JobState=(\w+)", self.ask("scontrol", "show", "job", job))
        return found[1] if found else ""

    def kill_worker(self) -> None:
        """End the second node at once, as a power cut would: its daemon, launcher and rank."""
        doomed = {self.daemons["worker"].pid}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("SLURMD_NODENAME") == "worker":
                    doomed.add(process.pid)
                    parent = process.parent()
                    doomed |= {parent.pid} if parent and parent.name() == "slurmstepd" else set()
        for number in doomed:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        self.daemons["worker"].wait()

    def stop(self) -> None:
        """End all jobs and daemons."""
        self.ask("scancel", "--signal=KILL", "--full", "--user", psutil.Process().username())
        self.ask("scancel", "--user", psutil.Process().username())
        with suppress(TimeoutError):
            wait_for(lambda: not self.ask("squeue", "-h").strip(), 30)
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
        for daemon in self.daemons.values():
            daemon.wait(30)


def wait_for(what: Callable[[], object], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not what():
        if time.monotonic() > until:
            raise TimeoutError(f"{seconds} s are over")
        time.sleep(0.5)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed (Debian: slurm-wlm, munge)")
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # the path of a socket has 107 bytes at most
    found = Cluster(folder)
    try:
        yield found
    finally:
        found.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_slurm_signals_requeues_and_resumes_the_run_also_after_a_node_is_lost(cluster: Cluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    log = tmp_path / "job.log"
    settings = ["train.max_steps=100000", "checkpoint.every=20", "log.every=5", "eval.every=null", "log.wandb=off"]
    folders = [f"run.dir={run_dir}", f"data.cache_dir={tmp_path / 'cache'}"]
    words = ["--slurm", "2", "--gpus", "0", "base", "recipes/smoke/base.yaml", *folders, *settings]
    printed = subprocess.run(
        [sys.executable, "-m", "sftkit", "launch", *words, "compile.enabled=false"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # 300 s before the limit would be a test of many minutes: 60 s, as Slurm counts limits in minutes.
    script = tmp_path / "job.sh"
    script.write_text(printed.stdout.replace("TIMEOUT=280", "TIMEOUT=50").replace("29500", str(port)))
    job = cluster.ask("sbatch", "--parsable", "--time=60", "--signal=TERM@60", f"--output={log}", str(script)).strip()

    def steps() -> list[int]:
        """Return the steps of the lines since the job was started the last time."""
        text = log.read_text() if log.exists() else ""
        newest = text.rpartition("running on 2 x CPU")[2] if "running on" in text else ""
        return [int(step) for step in re.findall(r"^step\s+(\d+)/", newest, re.MULTILINE)]

    def status() -> dict[str, object]:
        return json.loads((run_dir / "run_status.json").read_text())

    def start_now() -> None:
        """Start a job that waits to be started again."""
        wait_for(lambda: cluster.state(job) == "PENDING", 120)
        started = log.read_text().count("running on 2 x CPU")
        cluster.ask("scontrol", "update", f"JobId={job}", "StartTime=now", "TimeLimit=60")
        wait_for(lambda: log.read_text().count("running on 2 x CPU") > started, 240)

    wait_for(lambda: steps() and steps()[-1] >= 25, 240)

    # The limit comes near: all ranks save the same step, and the job waits to be started again.
    minutes = int(cluster.ask("squeue", "-h", "-j", job, "-o", "%M").split(":")[0])
    cluster.ask("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes + 2}")
    wait_for(lambda: "run: preempted" in log.read_text(), 240)
    stopped_at = status()["step"]
    assert (status()["status"], status()["signal"]) == ("preempted", "SIGTERM")
    start_now()
    wait_for(lambda: len(steps()) >= 6, 240)
    assert f"resumed {run_dir}/step-{stopped_at:06d}" in log.read_text()

    # A node is lost: Slurm itself queues the job again, and it resumes from a checkpoint when the node is back.
    newest = max(run_dir.glob("step-*[0-9]")).name
    cluster.kill_worker()
    wait_for(lambda: cluster.state(job) == "PENDING", 120)
    assert status()["status"] == "failed"
    assert status()["first_failing_rank"] == 1
    cluster.start("worker", "slurmd", "-D", "-N", "worker")
    wait_for(lambda: cluster.ask("sinfo", "-h", "-N", "-o", "%T").split() == ["idle", "idle"], 60)
    time.sleep(5)  # a job that is started while a node registers would lose the node again
    start_now()
    wait_for(lambda: len(steps()) >= 2, 240)
    (resumed,) = re.findall(r"resumed \S+/(step-\d+)", log.read_text())[1:]
    assert resumed >= newest
    cluster.ask("scancel", "--signal=INT", job)
    wait_for(lambda: cluster.state(job) == "COMPLETED", 60)
    assert status()["status"] == "stopped"
