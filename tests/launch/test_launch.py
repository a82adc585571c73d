"""The launcher takes the hardware that is there, says so, and neither loses a signal nor a script."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sftkit.config.commands import program_path
from sftkit.errors import ConfigError
from sftkit.launch import launch
from sftkit.launch.launch import Hardware, Needs, choose
from sftkit.models.files import GIB, Replica
from sftkit.rundir import lock
from sftkit.runtime.launcher import signal_env

RECIPE = """
run: {dir: x}
model: {scratch: {model_type: llama}, train_tokenizer: {}}
data: {train: [{path: 'builtin:tasks'}], max_length: 64}
train: {max_steps: 1}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "sft.yaml"
    path.write_text(RECIPE)
    return path


def test_without_a_gpu_one_process_gets_all_cores():
    chosen = choose(Hardware(gpus=0, cpu_cores=2), 32, {})
    assert (chosen.config_file.name, chosen.num_processes) == ("cpu.yaml", 1)
    assert chosen.env["OMP_NUM_THREADS"] == "2"
    assert chosen.env["TOKENIZERS_PARALLELISM"] == "true"
    assert chosen.summary == "hardware: no GPU, 2 CPU cores -> accelerate_configs/cpu.yaml, 2 threads"


@pytest.mark.parametrize(
    ("cores", "idle", "threads", "said"),
    [
        (2, 2, 2, "2 CPU cores -> accelerate_configs/cpu.yaml, 2 threads"),
        (2, 1, 1, "2 CPU cores (1 busy) -> accelerate_configs/cpu.yaml, 1 thread"),
        (2, 0, 1, "2 CPU cores (2 busy) -> accelerate_configs/cpu.yaml, 1 thread"),
        (8, 7, 7, "8 CPU cores (1 busy) -> accelerate_configs/cpu.yaml, 7 threads"),
        (8, None, 8, "8 CPU cores -> accelerate_configs/cpu.yaml, 8 threads"),
    ],
)
def test_a_core_that_others_keep_busy_gets_no_thread(cores: int, idle: int | None, threads: int, said: str):
    chosen = choose(Hardware(0, cores, idle_cores=idle), 32, {})
    assert chosen.env["OMP_NUM_THREADS"] == str(threads)
    assert chosen.summary == f"hardware: no GPU, {said}"


@pytest.mark.parametrize(
    ("given", "spins"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")]
)
def test_waiting_threads_sleep_soon_unless_the_user_says_otherwise(given: dict[str, str], spins: str):
    code = (
        "import os; from sftkit.runtime.script import script; script(lambda: print(os.environ.get('GOMP_SPINCOUNT')))"
    )
    plain = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", code], env=plain | given, capture_output=True, text=True, check=True)
    assert done.stdout == f"{spins}\n"


def test_the_environment_wins():
    chosen = choose(Hardware(0, 2), 32, {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})
    assert not {"OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM"} & set(chosen.env)


@pytest.mark.parametrize(
    ("gpus", "batch", "name", "processes"),
    [
        (1, 32, "single_gpu.yaml", 1),
        (8, 32, "ddp.yaml", 8),
        (8, 30, "ddp.yaml", 6),
        (3, 32, "ddp.yaml", 2),
        (2, 1, "single_gpu.yaml", 1),
    ],
)
def test_the_most_gpus_that_divide_the_global_batch(gpus: int, batch: int, name: str, processes: int):
    chosen = choose(Hardware(gpus, 16, "NVIDIA H200"), batch, {})
    assert (chosen.config_file.name, chosen.num_processes) == (name, processes)
    assert chosen.config_file.is_file()
    assert (f"{processes} of {gpus} GPUs: the most that divide" in chosen.summary) == (processes < gpus)


def test_stages_of_a_pipeline_need_as_many_gpus() -> None:
    assert choose(Hardware(4, 16), 8, {}, stages=None).num_processes == 4
    three = choose(Hardware(4, 16), 8, {}, stages=3)
    assert (three.config_file.name, three.num_processes) == ("pp.yaml", 3)
    assert "3 of 4 GPUs: the most that are pipelines of 3 stages and divide train.global_batch_size 8" in three.summary
    for gpus, found in ((0, "no GPU"), (1, "1 GPU")):  # without a GPU one process is started
        with pytest.raises(
            ConfigError, match=rf"pipeline_stages=2: this machine has {found}: .*cpu_ddp\.yaml --num_proc"
        ):
            choose(Hardware(gpus, 16), 8, {}, stages=2)


BIG = Replica(32_800_000_000, "auto", 328_000_000_000)
H200_BYTES = 143_771 * 2**20


def test_a_model_that_does_not_fit_one_of_several_gpus_is_cut_over_them_and_the_summary_says_why():
    chosen = choose(Hardware(8, 96, "NVIDIA H200", H200_BYTES), 32, {}, Needs(BIG))
    assert (chosen.config_file.name, chosen.num_processes) == ("fsdp2.yaml", 8)
    assert chosen.config_file.is_file()
    assert chosen.summary == (
        "hardware: 8 GPUs (NVIDIA H200), 96 CPU cores -> accelerate_configs/fsdp2.yaml, 8 processes: "
        "32.8 billion parameters need about 305 GiB as a replica (optim.name auto), a GPU has 140 GiB"
    )
    six = choose(Hardware(8, 96, "NVIDIA H200", H200_BYTES), 30, {}, Needs(BIG))
    assert (six.config_file.name, six.num_processes) == ("fsdp2.yaml", 6)
    assert "the most that divide train.global_batch_size 30; 32.8 billion" in six.summary


def test_what_all_gpus_together_cannot_hold_is_refused() -> None:
    model = Replica(8_000_000_000, "auto", 80 * GIB, 64 * GIB)
    for gpus in (1, 2):
        with pytest.raises(
            ConfigError, match=rf"64 GiB of it .* {gpus} GPUs? of 24 GiB cannot .* take at least 3 of them"
        ):
            choose(Hardware(gpus, 16, None, 24 * GIB), 32, {}, Needs(model))
    assert choose(Hardware(4, 16, None, 24 * GIB), 32, {}, Needs(model)).config_file.name == "fsdp2.yaml"
    assert choose(Hardware(0, 16), 32, {}, Needs(model)).config_file.name == "cpu.yaml"


@pytest.mark.parametrize(
    ("gpus", "memory", "replica", "name"),
    [
        (1, H200_BYTES, BIG, "single_gpu.yaml"),  # the memory plan says what to change
        (8, None, BIG, "ddp.yaml"),
        (8, H200_BYTES, None, "ddp.yaml"),
        (2, 100, Replica(1, "auto", 92), "ddp.yaml"),
        (2, 100, Replica(1, "auto", 93), "fsdp2.yaml"),
    ],
)
def test_replicas_stay_where_they_fit_or_nothing_is_known(
    gpus: int, memory: int | None, replica: Replica | None, name: str
):
    assert choose(Hardware(gpus, 16, None, memory), 32, {}, Needs(replica)).config_file.name == name


@pytest.mark.parametrize(("fits", "name"), [({1: False, 4: True}, "fsdp2.yaml"), ({1: False, 4: False}, "ddp.yaml")])
def test_shards_are_taken_where_rows_do_not_fit_beside_a_replica_and_do_beside_a_shard(
    fits: dict[int, bool], name: str
) -> None:
    needs = Needs(Replica(1, "auto", 1), lambda topology: fits[topology.shards])
    chosen = choose(Hardware(4, 16, None, H200_BYTES), 32, {}, needs)
    assert chosen.config_file.name == name
    assert ("beside a replica its rows do not fit a GPU" in chosen.summary) == (name == "fsdp2.yaml")
    unknown = Needs(Replica(1, "auto", 1))
    assert choose(Hardware(4, 16, None, H200_BYTES), 32, {}, unknown).config_file.name == "ddp.yaml"


def test_the_recipe_and_the_hardware_decide_together(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    started = []
    monkeypatch.setattr(launch, "call", lambda words, env: started.append(words) or 0)
    monkeypatch.setattr(launch, "find_hardware", lambda: Hardware(4, 16, None, 20 * 2**30))
    sizes = "hidden_size: 4096, intermediate_size: 12288, num_hidden_layers: 36, num_attention_heads: 32"
    big = f"model.scratch={{model_type: qwen3, vocab_size: 151936, {sizes}, num_key_value_heads: 8, head_dim: 128}}"
    launch.run_script(__file__, str(recipe), [big])
    assert str(launch.CONFIGS / "fsdp2.yaml") in started[0]
    assert "fsdp2.yaml, 4 processes: 8.2 billion parameters need about 76 GiB" in capsys.readouterr().out
    launch.run_script(__file__, str(recipe))
    assert str(launch.CONFIGS / "ddp.yaml") in started[1]
    capsys.readouterr()
    launch.run_script(__file__, str(recipe), ["train.engine=graph"])
    assert str(launch.CONFIGS / "fsdp2.yaml") in started[2], "which cannot train whole replicas"
    assert "fsdp2.yaml, 4 processes: train.engine=graph shards weights" in capsys.readouterr().out


def test_a_bad_recipe_stops_before_anything_starts(recipe: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "call", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(ConfigError, match=r"optim\.lr"):
        launch.run_script(__file__, str(recipe), ["optim.lr=x"])
    with pytest.raises(ConfigError, match=r'chat_stf\.py: no such script\. Did you mean "scripts/chat_sft\.py"\?$'):
        launch.run_script("scripts/chat_stf.py", str(recipe))
    with pytest.raises(
        ConfigError, match=r"no such script\. Those that train: scripts/base_train\.py, .*caption_train\.py$"
    ):
        launch.run_script("lost.py", str(recipe))


@pytest.mark.parametrize(
    ("gpus", "words", "message"),
    [
        (0, ["train.engine=graph", "graph.passes=[cuda_graphs]"], "cuda_graphs needs a GPU"),
        (
            2,
            ["train.engine=pipeline", "train.micro_batch_size=1", "train.pipeline_layers=[7,7,7]"],
            "must be 2 numbers",
        ),
    ],
)
def test_what_cannot_run_on_the_processes_that_are_chosen_is_refused_before_they_start(
    gpus: int, words: list[str], message: str, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "call", lambda *_, **__: pytest.fail("started"))
    monkeypatch.setattr(launch, "find_hardware", lambda: Hardware(gpus, 16))
    with pytest.raises(ConfigError, match=message):
        launch.run_script(__file__, str(recipe), words)


def start(*words: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "sftkit.launch", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_the_command_line_reports_problems_with_code_2(recipe: Path):
    process = start(__file__, recipe, "optim.lr=x", "lr=3")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert output.count("command line: ") == 2


def test_help_needs_no_arguments():
    output, _ = (process := start()).communicate(timeout=60)
    assert process.returncode == 0
    assert " -m sftkit.launch SCRIPT RECIPE" in output


SAVES_ON_A_SIGNAL = """
import os, signal, sys, time
got = set()
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda s, f: got.add(int(s)))
print("started", sys.argv[2:], os.environ.get("WORLD_SIZE"), os.environ["ACCELERATE_USE_CPU"], flush=True)
for _ in range(300):
    if got: break
    time.sleep(0.1)
time.sleep(1)
print("saved", *got, flush=True)
sys.exit(0 if got else 5)
"""


@pytest.mark.parametrize(
    "how", ["SIGTERM", *(pytest.param(name, marks=pytest.mark.slow) for name in ("SIGUSR1", "Ctrl-C"))]
)
def test_a_script_that_is_told_to_stop_can_save_and_the_launcher_waits(tmp_path: Path, recipe: Path, how: str):
    script = tmp_path / "script.py"
    script.write_text(SAVES_ON_A_SIGNAL)
    stopped_by = signal.SIGINT if how == "Ctrl-C" else getattr(signal, how)
    lines = []
    with start(script, recipe, "optim.lr=1e-3") as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            if line.startswith("started"):
                if how == "Ctrl-C":  # a terminal sends it to every process of the group
                    os.killpg(process.pid, stopped_by)
                else:
                    process.send_signal(stopped_by)
        assert process.wait(timeout=60) == 0
    assert lines[0].startswith("hardware: ")
    assert lines[1:] == ["started ['optim.lr=1e-3'] None True", f"saved {int(stopped_by)}"]


def test_torchs_launcher_is_told_to_pass_sigusr1_on_unless_the_user_says_otherwise():
    assert "SIGUSR1" in signal_env({})["PET_SIGNALS_TO_HANDLE"].split(",")
    assert signal_env({"PET_SIGNALS_TO_HANDLE": "SIGTERM"}) == {}


@pytest.mark.slow
def test_the_launcher_ends_with_the_exit_code_of_its_script(tmp_path: Path, recipe: Path):
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(2)")
    process = start(script, recipe)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("codes", "code"),
    [([2], 2), ([1, 2], 2), ([1, 1], 1), ([1, -9, 2], 137), ([-15, -9], 143), ([143], 143)],
)
def test_of_several_processes_a_kill_is_told_first_then_a_mistake_then_a_failure(codes: list[int], code: int):
    assert launch.exit_code(codes) == code


KILLED = """
import os, signal, sys
from pathlib import Path
from sftkit.rundir import lock
from sftkit.rundir.status import RunStatus
folder = Path(sys.argv[2].removeprefix("run.dir="))
if "optim.lr=0.5" not in sys.argv:
    lock.take_lock(folder)
    RunStatus(folder, 0, 1).begin({})
    (folder / "metrics.jsonl").write_text('{"step": 4}\\n')
    (folder / "step-000003").mkdir()
    (folder / "LATEST").write_text("step-000003\\n")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("begins", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_of_a_script_that_is_killed_the_launcher_says_signal_likely_cause_newest_step_and_how_to_go_on(
    tmp_path: Path, recipe: Path, begins: bool
):
    script, folder = tmp_path / "script.py", tmp_path / "run"
    script.write_text(KILLED)
    words = [f"run.dir={folder}", *(["optim.lr=0.5"] if not begins else [])]
    process = start(script, recipe, *words)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGKILL
    assert "Traceback" not in output
    assert "error: the run was killed by SIGKILL: likely the kernel's OOM killer" in output
    command = f"{program_path('python')} -m sftkit.launch {script} {recipe} {' '.join(words)}"
    if not begins:
        assert f"It had not begun to train. Start it again: {command}\n" in output
        assert not folder.exists()
        return
    where = f"{folder}: newest logged step 4, newest checkpoint {folder}/step-000003"
    assert f"{where}; resume from there: {command} train.resume=auto" in output
    status = json.loads((folder / "run_status.json").read_text())
    assert (status["status"], status["step"]) == ("failed", 4)
    assert status["error"].startswith("killed by SIGKILL: ")


def test_a_directory_in_which_a_run_is_at_work_is_refused_before_anything_is_started(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "call", lambda *_, **__: pytest.fail("started"))
    (tmp_path / "run").mkdir()
    held = lock.take_lock(tmp_path / "run")
    with pytest.raises(ConfigError, match=f"a run is at work there .*{os.getpid()}"):
        launch.run_script(__file__, str(recipe), [f"run.dir={tmp_path}/run"])
    held.release()
