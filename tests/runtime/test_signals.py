"""A run that is told to stop, at any moment: all ranks agree, save once, say so and are gone. Real launchers and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from launched import ROOT, LaunchedRun, Launcher, Terminal, launching

from sftkit.config.commands import program_path
from sftkit.rundir.lock import Holder, pid_scope, process_start
from sftkit.rundir.names import LATEST, step_dirs
from sftkit.rundir.status import killed_by, launch_id, resume_command
from sftkit.runtime.launcher import check_launcher, signal_env
from sftkit.runtime.signals import Deadline, Stopping, heeded


@pytest.fixture
def start(tmp_path: Path, small_bpe: str) -> Iterator[Launcher]:
    with launching(tmp_path, small_bpe) as launcher:
        yield launcher


def test_sigusr1_to_one_rank_stops_all_at_one_step_with_a_checkpoint_that_resumes(start) -> None:
    run = start("slow", "train.max_steps=1000", "data.num_workers=1", forked=True)
    run.until_step(2)
    os.kill(run.rank(1), signal.SIGUSR1)
    assert run.end() == 0, run.output[-3000:]
    step = run.check_stopped("preempted", "SIGUSR1")
    weights = run.weights()
    assert weights[0] == weights[1]
    assert run.status()["resume"].endswith("train.resume=auto")
    again = start("none", f"train.max_steps={step + 2}", "train.resume=auto", processes=1, forked=True)
    assert again.end() == 0, again.output[-3000:]
    assert again.status()["status"] == "finished"
    assert run.steps() == list(range(1, step + 3))


@pytest.mark.slow
def test_a_signal_in_the_middle_of_a_save_completes_it_and_saves_the_last_step_too(start) -> None:
    run = start("saving", "train.max_steps=1000", "checkpoint.every=3", forked=True)
    run.until_marked("saving0", "saving1")
    os.killpg(run.process.pid, signal.SIGTERM)
    run.end()
    assert run.check_stopped("preempted", "SIGTERM", checkpoints=2) > 3
    assert (run.dir / "step-000003").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to", "number", "status"),
    [
        ("the launcher", "SIGTERM", "preempted"),
        ("the process group", "SIGINT", "stopped"),
        ("the launcher", "SIGUSR2", "preempted"),
    ],
)
def test_a_signal_to_the_launcher_or_to_everything_saves_once_and_leaves_no_process(start, to, number, status) -> None:
    run = start("slow", "train.max_steps=1000", "data.num_workers=1")
    run.until_step(2)
    (os.kill if to == "the launcher" else os.killpg)(run.process.pid, getattr(signal, number))
    assert run.end() == 128 + getattr(signal, number)
    run.check_stopped(status, number)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["evaluating", "generating"])
def test_a_signal_in_an_evaluation_or_generation_ends_it_and_saves_the_step_once(start, phase: str) -> None:
    run = start(phase, "train.max_steps=1000", "eval.every=2", forked=True)
    run.until_marked(f"{phase}0", f"{phase}1")
    os.kill(run.process.pid, signal.SIGTERM)
    run.end()
    assert run.check_stopped("preempted", "SIGTERM") == 2


@pytest.mark.slow
def test_a_signal_in_the_last_save_completes_it_and_skips_the_last_evaluation(start) -> None:
    run = start("saving", "train.max_steps=3", "eval.every=3", "checkpoint.every=null", forked=True)
    run.until_marked("saving0", "saving1")
    os.kill(run.process.pid, signal.SIGTERM)
    run.end()
    assert (run.dir / "step-000003").is_dir()
    assert run.check_ended(run.status()["status"], run.status()["signal"])["step"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_while_the_model_is_loaded_ends_the_run_at_once_and_says_so(start, number: str) -> None:
    run = start("loading", forked=True)
    run.until_marked("pid0", "pid1")
    time.sleep(0.5)
    os.kill(run.rank(1) if number == "SIGUSR1" else run.process.pid, getattr(signal, number))
    began = time.monotonic()
    assert run.end() != 0
    assert time.monotonic() - began < 15
    run.check_left_nothing(number)


@pytest.mark.slow
def test_a_signal_while_documents_are_tokenized_leaves_no_worker_process(start, tmp_path: Path) -> None:
    run = start("tokenizing", "data.num_proc=2", f"data.cache_dir={tmp_path}/cache", forked=True)
    run.until(lambda: len(list(tmp_path.glob("run.tokenizing*"))) == 2)
    os.killpg(run.process.pid, signal.SIGTERM)
    began = time.monotonic()
    assert run.end() != 0
    assert time.monotonic() - began < 15
    run.check_left_nothing("SIGTERM")


@pytest.mark.slow
def test_a_signal_while_the_step_is_compiled_ends_the_run_at_once_with_its_compilers(start, tmp_path) -> None:
    run = start("none", "compile.enabled=true", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"))
    run.until(lambda: any("cc1plus" in words for _, words in run.alive()))
    os.killpg(run.process.pid, signal.SIGINT)
    began = time.monotonic()
    assert run.end() != 0
    assert time.monotonic() - began < 15
    run.check_left_nothing("SIGINT")
    assert "Traceback" not in run.output, run.output[-3000:]


@pytest.mark.slow
def test_a_second_ctrl_c_exits_at_once(start) -> None:
    run = start("slow", "train.max_steps=1000")
    run.until_step(1)
    os.kill(run.rank(0), signal.SIGSTOP)  # so that the first one cannot be heeded: rank 1 waits for rank 0
    os.kill(run.rank(1), signal.SIGINT)
    time.sleep(1.5)
    os.kill(run.rank(1), signal.SIGINT)
    pid = run.rank(1)
    run.until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    os.kill(run.rank(0), signal.SIGCONT)
    assert run.end() != 0
    assert "exitcode  : 130" in run.output or "exitcode: 130" in run.output, run.output[-3000:]


def test_a_terminal_that_is_closed_stops_the_run_with_a_checkpoint(start) -> None:
    terminal = Terminal()
    run = start("slow", "train.max_steps=1000", processes=1, forked=True, terminal=terminal)
    run.until_step(2)
    assert "eta" in terminal.text
    terminal.close()
    assert run.end() == 128 + signal.SIGHUP
    run.check_stopped("preempted", "SIGHUP")


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "how"), [(1, "ours"), (2, "torchrun")])
def test_a_terminal_that_is_closed_stops_a_run_under_its_launcher(start, processes: int, how: str) -> None:
    terminal = Terminal()
    torchrun = ("--standalone", "--nproc_per_node", str(processes)) if how == "torchrun" else ()
    run = start("slow", "train.max_steps=1000", processes=processes, torchrun=torchrun, terminal=terminal)
    run.until_step(2)
    terminal.close()
    assert run.end() == (1 if how == "torchrun" else 128 + signal.SIGHUP)
    run.check_stopped("preempted", "SIGHUP")


@pytest.mark.slow
def test_under_nohup_a_run_outlives_its_terminal(start) -> None:
    terminal = Terminal()
    nohup = ("sh", "-c", 'exec nohup "$@" > /dev/null 2>&1', "-")
    passed_on = {"PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGQUIT,SIGUSR1"}  # as signal_env says under nohup
    run = start("slow", "train.max_steps=12", before=nohup, terminal=terminal, **passed_on)
    run.until_step(2)
    terminal.close()
    assert run.end() == 0
    run.check_ended("finished", None)
    assert run.steps()[-1] == 12


@pytest.mark.slow
def test_a_terminal_that_is_closed_ends_the_chain_of_stages(start, tmp_path: Path) -> None:
    terminal = Terminal()
    chain = start.watch(chain_of_stages(tmp_path, terminal))
    chain.until(lambda: (chain.dir / "run_status.json").exists())
    terminal.close()
    assert chain.end() == 128 + signal.SIGHUP
    chain.check_ended("preempted", "SIGHUP")
    assert not (tmp_path / "mid").exists()


def test_sigquit_writes_the_stacks_of_all_threads_and_is_a_stop(start) -> None:
    run = start("slow", "train.max_steps=1000", processes=1, forked=True)
    run.until_step(2)
    os.kill(run.rank(0), signal.SIGQUIT)
    assert run.end() == 128 + signal.SIGQUIT, run.output[-3000:]
    run.check_stopped("preempted", "SIGQUIT")
    assert "most recent call first" in run.output
    assert "loop.py" in run.output


def test_a_signal_that_was_ignored_at_the_start_is_a_stop_only_where_a_launcher_passes_it_on(monkeypatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        assert signal.SIGHUP not in heeded({})
        assert "SIGHUP" not in signal_env({})["PET_SIGNALS_TO_HANDLE"].split(",")
        assert signal.SIGHUP in heeded({"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGHUP"})
        stopping = Stopping()
        stopping.save_first()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        stopping.close()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert "SIGHUP" in signal_env({})["PET_SIGNALS_TO_HANDLE"].split(",")
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_is_written_to_a_terminal_that_was_closed_is_lost_and_no_error() -> None:
    script = (
        "import sys, time\n"
        "from sftkit.config.terminal import print_text\n"
        "print_text('here'); time.sleep(0.1); sys.stdin.readline()\n"
        "print_text('lost'); print_text('lost', error=True); print('a library', flush=True); print('lost', file=sys.stderr)\n"
        "sys.exit(7)\n"
    )
    terminal = Terminal()
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=terminal.device, stderr=terminal.device
    )
    deadline = time.monotonic() + 60
    while "here" not in terminal.text and time.monotonic() < deadline:
        time.sleep(0.05)
    terminal.close()
    process.communicate(b"go on\n", timeout=60)
    assert process.returncode == 7


@pytest.mark.slow
def test_the_time_limit_ends_the_run_with_a_checkpoint_before_it(start) -> None:
    run = start("slow", "train.max_steps=100000", "train.max_minutes=0.5", forked=True)
    assert run.end() == 0, run.output[-3000:]
    started = Path(f"{run.dir}.pid0").stat().st_mtime
    assert (run.dir / LATEST).stat().st_mtime < started + 30
    found = run.status()
    assert (found["status"], found["signal"]) == ("preempted", None)
    assert [folder.name for folder in step_dirs(run.dir)] == [f"step-{found['step']:06d}"]


@pytest.mark.slow
def test_a_signal_to_the_chain_of_stages_ends_it_although_the_launcher_reports_a_failure(start, tmp_path) -> None:
    chain = start.watch(chain_of_stages(tmp_path))
    chain.until(lambda: (chain.dir / "run_status.json").exists())
    os.kill(chain.process.pid, signal.SIGTERM)
    assert chain.end() == 128 + signal.SIGTERM, chain.output[-3000:]
    chain.check_ended("preempted", "SIGTERM")
    words = f"scripts/run_chain.py {tmp_path} data.cache_dir={tmp_path}/cache train.resume=auto\n"
    assert f"stopped; resume with: {program_path('python')} {words}" in chain.output
    assert not (tmp_path / "mid").exists()


def chain_of_stages(folder: Path, terminal: Terminal | None = None) -> LaunchedRun:
    for stage, before in (("base", None), ("mid", "base"), ("sft", "mid")):
        recipe = f"extends: {ROOT}/recipes/smoke/{stage}.yaml\nrun: {{dir: {folder}/{stage}}}\n"
        recipe += f"model: {{path: {folder}/{before}}}\n" if before else ""
        (folder / f"{stage}.yaml").write_text(recipe)
    words = [sys.executable, "scripts/run_chain.py", str(folder), f"data.cache_dir={folder}/cache"]
    return LaunchedRun(folder / "base", words, terminal=terminal)


def test_the_time_limit_keeps_room_for_the_steps_on_their_way_and_a_checkpoint() -> None:
    deadline = Deadline(60, started=0.0)
    assert not deadline.due(now=3600 - 1.1 * 120 - 1)
    assert deadline.due(now=3600 - 1.1 * 120 + 1), "the first checkpoint's time is not known: 120 s"
    deadline.add_step(10.0, {"block_seconds": 1.0, "write_seconds": 9.0, "bytes": 1e9})
    assert not deadline.due(now=3600 - 1.1 * 40 - 1)
    assert deadline.due(now=3600 - 1.1 * 40 + 1)


def test_a_clock_that_is_set_neither_ends_a_run_nor_prolongs_it(monkeypatch) -> None:
    before = launch_id({"TORCHELASTIC_RUN_ID": "none"})
    holder = Holder(*pid_scope(), os.getpid(), process_start(os.getpid()), time.time())
    for jump in (-1e6, 1e6):
        monkeypatch.setattr(time, "time", lambda jump=jump, now=time.time: now() + jump)
        monkeypatch.setattr(psutil._pslinux, "boot_time", lambda jump=jump, at=psutil.boot_time: at() + jump)
        assert not Deadline(600.0, save_seconds=0.0).due(), "this process was started minutes ago"
        assert Deadline(0.001, save_seconds=0.0).due()
        assert holder.lives()
        assert launch_id({"TORCHELASTIC_RUN_ID": "none"}) == before
        monkeypatch.undo()


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGXCPU])
def test_every_signal_that_queues_send_asks_for_a_stop_and_is_passed_on_by_launchers(number) -> None:
    stopping = Stopping()
    stopping.save_first()
    try:
        os.kill(os.getpid(), number)
        end = time.monotonic() + 10
        while not stopping.stop_requested() and time.monotonic() < end:
            time.sleep(0.01)
        assert stopping.signal == number
    finally:
        stopping.close()
    assert number.name in signal_env({})["PET_SIGNALS_TO_HANDLE"].split(",")
    assert killed_by(128 + number) is None


def test_the_command_that_continues_a_run_replaces_an_earlier_resume() -> None:
    words = ["scripts/chat_sft.py", "a recipe.yaml", "optim.lr=1", "train.resume=runs/x"]
    expected = (
        f"{program_path('python')} -m sftkit.launch scripts/chat_sft.py 'a recipe.yaml' optim.lr=1 train.resume=auto"
    )
    assert resume_command(words) == expected


def test_the_command_that_continues_a_run_names_the_launcher_and_its_topology(tmp_path: Path) -> None:
    script, launcher = tmp_path / "train.py", tmp_path / "accelerate"
    script.write_text("import sys\nfrom sftkit.rundir.status import resume_command\nprint(resume_command(sys.argv))\n")
    launcher.write_text("import subprocess, sys\nsubprocess.run([sys.executable, *sys.argv[4:]], check=True)\n")
    options = ["launch", "--config_file", "a folder/fsdp2.yaml"]
    words = [sys.executable, str(launcher), *options, str(script), "recipe.yaml", "train.resume=runs/x"]
    environ = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    told = subprocess.run(words, env=environ, capture_output=True, text=True, check=True).stdout
    assert told == (
        f"ACCELERATE_USE_CPU=true {program_path('accelerate')} launch --config_file 'a folder/fsdp2.yaml' {script} "
        "recipe.yaml train.resume=auto\n"
    )


def test_a_launcher_that_would_cut_a_save_short_or_restart_in_vain_is_warned_of() -> None:
    assert check_launcher({}) is None
    ready = {"TORCHELASTIC_RUN_ID": "x", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300", "TORCHELASTIC_MAX_RESTARTS": "0"}
    assert check_launcher({**ready, "TORCHELASTIC_USE_AGENT_STORE": "True"}) is None
    assert "30 s" in (check_launcher({"TORCHELASTIC_RUN_ID": "x"}) or "")
    restarts = {**ready, "TORCHELASTIC_MAX_RESTARTS": "2"}
    assert check_launcher({**restarts, "TORCHELASTIC_USE_AGENT_STORE": "False"}) is None
    warning = check_launcher({**restarts, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in (warning or "")
