"""The commands of docs/distributed.md, docs/multi_node.md and docs/cluster are commands: bash takes them, their files
exist, they run."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from sftkit.config.load import read_config

ROOT = Path(__file__).parents[2]
BLOCKS = [
    (f"{doc}.md {i}", block)
    for doc in ("distributed", "multi_node")
    for i, block in enumerate(
        re.findall(r"```(?:bash)?\n(.*?)```", (ROOT / "docs" / f"{doc}.md").read_text(), re.DOTALL)
    )
    if re.search(
        r"^(ACCELERATE\w+=.*)?(\.venv/bin/accelerate launch|\.venv/bin/torchrun|srun|export)", block, re.MULTILINE
    )
]
NAMED = dict(BLOCKS)


def test_the_documents_have_commands_for_every_launcher() -> None:
    text = "\n".join(NAMED.values())
    for launcher in ("accelerate launch", "torchrun", "srun"):
        assert launcher in text


@pytest.mark.parametrize("name", NAMED)
def test_commands_are_bash_and_name_files_that_exist(name: str) -> None:
    subprocess.run(["bash", "-n"], input=NAMED[name], text=True, check=True)
    files = re.findall(r"(?:accelerate_configs|scripts|recipes)/[\w./-]+\.(?:yaml|py)", NAMED[name])
    assert files
    assert not [file for file in files if not (ROOT / file).is_file()]


def test_the_batch_script_gives_ranks_the_time_that_slurm_leaves() -> None:
    (script,) = [block for _, block in BLOCKS if block.startswith("#!/bin/bash")]
    (left,) = re.findall(r"--signal=TERM@(\d+)", script)
    (waits,) = re.findall(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)", script)
    assert 0.9 * int(left) <= int(waits) < int(left)
    assert "#SBATCH --requeue" in script
    assert "train.resume=auto" in script


@pytest.mark.parametrize(
    ("status", "time", "requeued", "code"),
    [
        ("preempted", 1e11, True, 0),
        ("preempted", 1.5, False, 1),
        ("finished", 1e11, False, 0),
        ("failed", 1e11, False, 1),
        (None, 0, False, 1),
    ],
)
def test_the_batch_script_starts_a_launcher_per_machine_and_queues_a_preempted_run_again(
    tmp_path: Path, status: str | None, time: float, requeued: bool, code: int
) -> None:
    (script,) = [block for _, block in BLOCKS if block.startswith("#!/bin/bash")]
    bin_dir, run_dir = tmp_path / "bin", tmp_path / "run"
    for folder in (bin_dir, run_dir, tmp_path / ".venv" / "bin"):
        folder.mkdir(parents=True)
    if status is not None:  # else it came to no step
        (run_dir / "run_status.json").write_text(json.dumps({"status": status, "time": time}))
    on_each = 'for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done'
    commands = {
        bin_dir / "scontrol": f'[ "$1" = requeue ] && echo requeued $2 >> {tmp_path}/log || printf "node7\\nnode8\\n"',
        bin_dir / "srun": f"echo $SRUN_CPUS_PER_TASK > cpus; shift; {on_each}; exit 1",
        tmp_path / ".venv" / "bin" / "accelerate": f'echo "$@" >> {tmp_path}/log',
    }
    for path, text in commands.items():
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "42", "SLURM_CPUS_PER_TASK": "64"}
    env = os.environ | slurm | {"PATH": f"{bin_dir}:{os.environ['PATH']}"}
    script = script.replace("/shared/runs/sft", str(run_dir))
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "")
    first, second, *rest = (tmp_path / "log").read_text().splitlines()
    assert (tmp_path / "cpus").read_text() == "64\n"
    assert first.replace("--machine_rank 0", "--machine_rank 1") == second
    assert "--num_machines 2 --num_processes 16" in first
    assert "--main_process_ip node7" in first
    assert first.endswith(f"run.dir={run_dir} train.global_batch_size=16 train.resume=auto")
    assert rest == (["requeued 42"] if requeued else [])


SAYS_ITS_TOPOLOGY = """
import os, sys
from sftkit.config.topology import take_topology
topology = take_topology(os.environ, int(os.environ["WORLD_SIZE"]))
from accelerate import Accelerator
accelerator = Accelerator()
accelerator.wait_for_everyone()
print(f"{accelerator.process_index}/{accelerator.num_processes}: {topology.describe()}\\n", end="")
accelerator.end_training()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "machines", "topology"),
    [
        ("multi_node.md accelerate", 2, "fsdp2, 2 replicas x 1 shards"),
        ("multi_node.md torchrun", 2, "fsdp2, 2 replicas x 1 shards"),
        ("distributed.md torchrun", 1, "fsdp2, 2 shards"),
    ],
)
def test_the_commands_form_one_run(tmp_path: Path, block: str, machines: int, topology: str) -> None:
    """With a CPU process for each machine, all of them here."""
    doc, launcher = block.split()
    (text,) = [t for name, t in BLOCKS if name.startswith(doc) and launcher in t and not t.startswith("#!")]
    lines = text.replace("\\\n", " ").splitlines()
    if machines == 1:
        lines = [line for line in lines if launcher in line]
    script = tmp_path / "topology.py"
    script.write_text(SAYS_ITS_TOPOLOGY)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = "\n".join(lines).replace("10.0.0.1", "127.0.0.1").replace("29500", str(port))
    here = here.replace("--num_processes 16", "--num_processes 2").replace("scripts/chat_sft.py", str(script))
    here = here.replace("--nproc_per_node 8", f"--nproc_per_node {2 // machines}")
    here = here.replace("--rdzv_backend", "--local_addr 127.0.0.1 --rdzv_backend")
    here = here.replace(".venv/bin/", f"{Path(sys.executable).parent}/")
    env = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    launchers = [
        subprocess.Popen(
            ["bash", "-ec", here.replace("--machine_rank 0", f"--machine_rank {machine}")],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for machine in range(machines)
    ]
    outputs = [launcher.communicate(timeout=120) for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0] * machines, outputs
    said = sorted(line for output, _ in outputs for line in output.splitlines())
    assert said == [f"0/2: {topology}", f"1/2: {topology}"]


@pytest.mark.slow
def test_a_machine_that_leaves_a_torchrun_and_returns_resumes_with_the_others(tmp_path: Path) -> None:
    """Two launchers of one CPU process, of which the second is killed with its rank, and started again."""
    (text,) = [t for name, t in BLOCKS if name.startswith("multi_node") and ".venv/bin/torchrun" in t]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = (
        "train.max_steps=100000 checkpoint.every=20 log.every=5 eval.every=null log.wandb=off compile.enabled=false"
    )
    words = f"scripts/base_train.py recipes/smoke/base.yaml run.dir={tmp_path}/run data.cache_dir={tmp_path}/cache {settings}"
    start, _, _ = text.partition("    scripts/chat_sft.py")
    here = f"{start} {words} train.resume=auto".replace("10.0.0.1:29500", f"127.0.0.1:{port}")
    here = here.replace("--nproc_per_node 8", "--nproc_per_node 1 --local_addr 127.0.0.1")
    here = here.replace(".venv/bin/torchrun", f"exec {Path(sys.executable).parent}/torchrun")
    env = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    logs = [tmp_path / f"{number}.log" for number in range(3)]

    def launch(number: int) -> subprocess.Popen[bytes]:
        with logs[number].open("wb") as log:
            return subprocess.Popen(["bash", "-ec", here], cwd=ROOT, env=env, stdout=log, stderr=log)

    def said() -> str:
        """Return all that the launchers said, first that of the one which is killed."""
        return "\n".join(logs[number].read_text() for number in (1, 0, 2) if logs[number].exists())

    def steps(text: str) -> list[int]:
        return [int(step) for step in re.findall(r"^step\s+(\d+)/", text, re.MULTILINE)]

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    def wait_for(what: Callable[[], object]) -> None:
        until = time.monotonic() + 300
        while not what():
            assert time.monotonic() < until, said()[-4000:]
            time.sleep(0.5)

    first = second = launch(0)
    try:
        wait_for(listens)  # it holds the store of the rendezvous
        second = launch(1)
        wait_for(lambda: max(steps(said()), default=0) >= 25)
        for process in (*psutil.Process(second.pid).children(recursive=True), psutil.Process(second.pid)):
            process.kill()
        second.wait()
        wait_for(lambda: "failed (exitcode" in logs[0].read_text())
        assert first.poll() is None
        second = launch(2)
        wait_for(lambda: re.search(r"resumed \S+/run/step-\d{6}: ", said()))
        wait_for(lambda: steps(said().rpartition("resumed ")[2]))
        assert steps(said().rpartition("resumed ")[2])[0] >= 25
    finally:
        for launcher in (first, second):
            if launcher.poll() is None:
                launcher.terminate()
                launcher.wait(120)


CLUSTER = {path.name: path for path in sorted((ROOT / "docs" / "cluster").glob("*.yaml"))}


@pytest.mark.parametrize("name", CLUSTER)
def test_a_task_of_a_cluster_names_files_that_exist_and_a_recipe_that_its_gpus_can_run(name: str) -> None:
    task = yaml.safe_load(CLUSTER[name].read_text())
    if name == "trainjob.yaml":
        trainer = task["spec"]["trainer"]
        (command,) = trainer["args"]
        gpus = trainer["numProcPerNode"]
        assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == gpus
        processes = trainer["numNodes"] * gpus
    else:
        command = task["run"]
        processes = task["num_nodes"] * int(task["resources"]["accelerators"].partition(":")[2])
    subprocess.run(["bash", "-n"], input=command, text=True, check=True)
    files = re.findall(r"(?:accelerate_configs|scripts|recipes)/[\w./-]+\.(?:yaml|py)", command)
    assert files
    assert not [file for file in files if not (ROOT / file).is_file()]
    words = command.replace("\\\n", " ").split()
    recipe = next(word for word in words if word.startswith("recipes/"))
    cfg = read_config(ROOT / recipe, words[words.index(recipe) + 1 :], world_size=processes)
    assert (cfg.train.resume, cfg.run.dir) == ("auto", "/shared/runs/sft")


@pytest.mark.slow
def test_the_schemas_of_their_projects_accept_the_tasks_of_clusters() -> None:
    """With kubeflow-trainer-api and skypilot, where they are installed."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    schemas = pytest.importorskip("sky.utils.schemas")
    jsonschema = pytest.importorskip("jsonschema")
    job = yaml.safe_load(CLUSTER["trainjob.yaml"].read_text())
    assert models.TrainerV1alpha1TrainJob.from_dict(job).spec.trainer.num_nodes == 2
    task = yaml.safe_load(CLUSTER["skypilot.yaml"].read_text())
    jsonschema.validate(task, schemas.get_task_schema())
