"""What a run does when it is told to stop, or something breaks: two ranks, real launchers, real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sftkit.agreement import compare
from sftkit.checkpoint import step_dirs, verify
from sftkit.launch import CONFIGS, Launch, check_launcher, command, signal_env
from sftkit.status import RunStatus, effective_resume, is_symptom, resume_command
from sftkit.stopping import Deadline
from sftkit.watchdog import compare as compare_places

ROOT = Path(__file__).parents[1]
WORKER = "tests/faults_worker.py"


class Run:
    """A launched run of faults_worker.py with two ranks."""

    def __init__(self, dir: Path, fault: str, *settings: str, torchrun: tuple[str, ...] = (), **env: str) -> None:
        self.dir, self.output = dir, ""
        if torchrun:
            words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", *torchrun, WORKER]
            words += [str(dir), fault, *settings]
        else:
            words = command(Launch(CONFIGS / "cpu_ddp.yaml", 2, ""), WORKER, [str(dir), fault, *settings])
        inherited = {**os.environ, **signal_env({}), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60", "PYTHONPATH": "tests"}
        self.process = subprocess.Popen(
            words, cwd=ROOT, env={**inherited, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", **env},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def until(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 100
        while not ready():
            assert self.process.poll() is None, self.process.communicate()[0][-3000:]
            assert time.monotonic() < deadline, "not ready in time"
            time.sleep(0.1)

    def until_step(self, step: int) -> None:
        metrics = self.dir / "metrics.jsonl"
        self.until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= step)

    def rank(self, rank: int) -> int:
        return int(Path(f"{self.dir}.pid{rank}").read_text())

    def end(self, timeout: float = 100) -> int:
        """Wait for the launcher and check that nothing of the session is left. Returns its exit code."""
        self.output = self.process.communicate(timeout=timeout)[0]
        deadline = time.monotonic() + 10
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert left == [], f"left behind: {left}\n{self.output[-3000:]}"
        return self.process.returncode

    def alive(self) -> list[tuple[int, str]]:
        found = []
        for process in psutil.process_iter(["pid", "status", "cmdline"]):
            try:
                mine = os.getsid(process.pid) == self.process.pid and process.info["status"] != psutil.STATUS_ZOMBIE
            except OSError:
                continue
            if mine:
                found.append((process.pid, " ".join(process.info["cmdline"] or [])[:100]))
        return found

    def status(self) -> dict[str, Any]:
        assert (self.dir / "run_status.json").exists(), self.output[-3000:]
        return json.loads((self.dir / "run_status.json").read_text())

    def check_stopped(self, status: str, number: str) -> int:
        """The run has ended as told, with one whole checkpoint at its last step. Returns the step."""
        found = self.status()
        assert (found["status"], found["signal"], found["error"]) == (status, number, None), self.output[-3000:]
        (folder,) = step_dirs(self.dir)
        assert folder.name == f"step-{found['step']:06d}"
        assert verify(folder) is None
        summary = json.loads((self.dir / "summary.json").read_text())
        assert (summary["step"], summary["stopped"]) == (found["step"], True)
        return found["step"]


@pytest.fixture
def start(tmp_path: Path, small_bpe: str) -> Iterator[Callable[..., Run]]:
    (tmp_path / "tokenizer.json").write_text(small_bpe)
    runs: list[Run] = []

    def make(fault: str, *settings: str, name: str = "run", **more: Any) -> Run:
        runs.append(Run(tmp_path / name, fault, *settings, FAULT_TOKENIZER=str(tmp_path / "tokenizer.json"), **more))
        return runs[-1]

    yield make
    for run in runs:
        if run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGKILL)


# ---- signals ---------------------------------------------------------------------------------------------------------


def test_sigusr1_to_one_rank_stops_all_at_one_step_with_a_checkpoint_that_resumes(start) -> None:
    run = start("slow", "train.max_steps=1000", "data.num_workers=1")
    run.until_step(2)
    os.kill(run.rank(1), signal.SIGUSR1)
    assert run.end() == 0, run.output[-3000:]
    step = run.check_stopped("preempted", "SIGUSR1")
    weights = [json.loads(Path(f"{run.dir}.weights{rank}").read_text()) for rank in (0, 1)]
    assert weights[0] == weights[1]
    assert run.status()["resume"].endswith("train.resume=auto")
    again = start("none", f"train.max_steps={step + 2}", "train.resume=auto")
    assert again.end() == 0, again.output[-3000:]
    assert again.status()["status"] == "finished"
    steps = [json.loads(line)["step"] for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, step + 3))


@pytest.mark.slow
@pytest.mark.parametrize("to", ["the launcher", "the process group"])
@pytest.mark.parametrize(
    ("number", "status"), [("SIGTERM", "preempted"), ("SIGINT", "stopped"), ("SIGUSR1", "preempted")]
)
def test_a_signal_to_the_launcher_or_to_everything_saves_once_and_leaves_no_process(start, to, number, status) -> None:
    run = start("slow", "train.max_steps=1000", "data.num_workers=1")
    run.until_step(2)
    (os.kill if to == "the launcher" else os.killpg)(run.process.pid, getattr(signal, number))
    run.end()
    run.check_stopped(status, number)


@pytest.mark.slow
def test_a_signal_in_an_evaluation_ends_it_and_saves_the_step_once(start) -> None:
    run = start("evaluating", "train.max_steps=1000", "eval.every=2")
    run.until(lambda: Path(f"{run.dir}.evaluating1").exists())
    os.kill(run.process.pid, signal.SIGTERM)
    run.end()
    assert run.check_stopped("preempted", "SIGTERM") == 2


@pytest.mark.slow
def test_a_signal_while_the_model_is_loaded_ends_the_run_at_once_and_says_so(start) -> None:
    run = start("loading")
    run.until(lambda: Path(f"{run.dir}.pid1").exists() and Path(f"{run.dir}.pid0").exists())
    os.kill(run.process.pid, signal.SIGTERM)
    began = time.monotonic()
    run.end()
    assert time.monotonic() - began < 15
    found = run.status()
    assert (found["status"], found["signal"], found["step"]) == ("preempted", "SIGTERM", 0)


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


@pytest.mark.slow
def test_the_time_limit_ends_the_run_with_a_checkpoint_before_it(start) -> None:
    began = time.monotonic()
    run = start("slow", "train.max_steps=100000", "train.max_minutes=0.5")
    assert run.end() == 0, run.output[-3000:]
    assert time.monotonic() - began < 40
    found = run.status()
    assert (found["status"], found["signal"]) == ("preempted", None)
    assert [folder.name for folder in step_dirs(run.dir)] == [f"step-{found['step']:06d}"]


def test_the_time_limit_keeps_room_for_the_steps_on_their_way_and_a_checkpoint() -> None:
    deadline = Deadline(60, started=0.0)
    assert not deadline.due(now=3600 - 1.1 * 120 - 1)
    assert deadline.due(now=3600 - 1.1 * 120 + 1), "the first checkpoint's time is not known: 120 s"
    deadline.stepped(10.0, {"block_seconds": 1.0, "write_seconds": 9.0, "bytes": 1e9})
    assert not deadline.due(now=3600 - 1.1 * 40 - 1)
    assert deadline.due(now=3600 - 1.1 * 40 + 1)


# ---- failures --------------------------------------------------------------------------------------------------------


def test_a_rank_that_raises_ends_all_within_seconds_and_is_named_with_step_and_cause(start) -> None:
    run = start("raise")
    assert run.end() != 0
    found = run.status()
    assert (found["status"], found["first_failing_rank"], found["step"]) == ("failed", 1, 4), run.output[-3000:]
    assert found["error"] == "rank 1 failed at step 4 (data): ValueError: row 17 is made of cheese"
    assert f"error: {found['error']}" in run.output
    assert step_dirs(run.dir) == []


def test_ranks_with_different_recipes_are_refused_by_key_value_and_rank(start) -> None:
    run = start("differs")
    assert run.end() != 0
    assert "optim.lr: 2e-05 on rank 0; 0.5 on rank 1" in run.output
    assert not (run.dir / "config.yaml").exists()


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_by_those_that_lose_it(start) -> None:
    run = start("kill")
    assert run.end() != 0
    found = run.status()
    assert (found["status"], found["first_failing_rank"]) == ("failed", 1), run.output[-3000:]
    assert "ended without a word" in found["error"]


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_and_is_named_with_phase_and_stack(start) -> None:
    run = start("hang", "run.step_timeout_seconds=6", "train.max_steps=20")
    assert run.end() != 0
    found = run.status()
    assert (found["status"], found["first_failing_rank"]) == ("failed", 1), run.output[-3000:]
    assert "rank 1 at step 4 (in data); rank 0 at step 4 (in step)" in found["error"]
    errors = "".join(path.read_text() for path in (run.dir / "rank-errors").iterdir())
    assert "time.sleep(1000)" in errors, errors


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_training_and_names_step_rank_and_documents(start) -> None:
    run = start("nan")
    assert run.end() != 0
    found = run.status()
    assert (found["status"], found["step"]) == ("failed", 3), run.output[-3000:]
    assert "step 3: the loss of rank 1 is not finite" in found["error"]
    for rank in (0, 1):
        dump = json.loads((run.dir / f"nonfinite-step-000003-rank{rank:03d}.json").read_text())
        assert dump["step"] == 3
        assert dump["documents"][0]["source"] == "test"
        assert len(dump["documents"][0]["ids"]) > 2
    assert step_dirs(run.dir) == []


@pytest.mark.slow
def test_a_step_that_is_not_finite_can_be_left_out_and_counted(start) -> None:
    run = start("nan", "numerics.on_nonfinite=skip")
    assert run.end() == 0, run.output[-3000:]
    rows = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/loss"] is None for row in rows] == [row["step"] == 3 for row in rows]
    assert [row["health/skipped_steps"] for row in rows] == [row["step"] == 3 for row in rows]
    assert rows[-1]["health/nonfinite_steps"] == 1
    weights = [json.loads(Path(f"{run.dir}.weights{rank}").read_text()) for rank in (0, 1)]
    assert weights[0] == weights[1]
    assert all(value == value for value in weights[0].values())


@pytest.mark.slow
def test_a_run_that_the_launcher_starts_again_resumes_by_itself(start, tmp_path: Path) -> None:
    once = str(tmp_path / "struck")
    restarts = ("--standalone", "--max-restarts", "1", "--monitor-interval", "1")
    fresh = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else gloo may read addresses of the ranks that are gone
    run = start("raise", "checkpoint.every=2", "train.max_steps=6", torchrun=restarts, FAULT_ONCE=once, **fresh)
    assert run.end() == 0, run.output[-3000:]
    assert "restart 1 of this launch: train.resume=auto" in run.output
    assert "resumed" in run.output
    assert run.status()["status"] == "finished"
    steps = [json.loads(line)["step"] for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]


# ---- the parts -------------------------------------------------------------------------------------------------------


def test_only_a_restart_of_the_same_launch_resumes_by_itself(tmp_path: Path) -> None:
    again = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "a", "RANK": "0"}
    assert effective_resume(None, str(tmp_path), again) is None, "nothing there"
    RunStatus(tmp_path, 0, 1).begin(again)
    assert effective_resume(None, str(tmp_path), again) == "auto"
    assert effective_resume("runs/x/step-000002", str(tmp_path), again) == "runs/x/step-000002"
    assert effective_resume(None, str(tmp_path), {**again, "TORCHELASTIC_RUN_ID": "b"}) is None
    assert effective_resume(None, str(tmp_path), {**again, "TORCHELASTIC_RESTART_COUNT": "0"}) is None
    assert effective_resume(None, str(tmp_path), {}) is None


def test_the_status_of_a_failed_run_names_the_cause_and_not_the_first_symptom(tmp_path: Path) -> None:
    ranks = [RunStatus(tmp_path, rank, 2, step=7, phase="step") for rank in (0, 1)]
    ranks[0].failed(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242"))
    ranks[1].failed(ValueError("cheese"))
    first = ranks[0].write_failed()
    assert str(first) == "rank 1 failed at step 7 (step): ValueError: cheese"
    found = json.loads((tmp_path / "run_status.json").read_text())
    assert (found["status"], found["step"], found["first_failing_rank"]) == ("failed", 7, 1)
    assert not is_symptom(ValueError("the connection of cheese and wine"))


def test_the_command_that_continues_a_run_replaces_an_earlier_resume() -> None:
    words = ["scripts/chat_sft.py", "a recipe.yaml", "optim.lr=1", "train.resume=runs/x"]
    expected = "python -m sftkit.launch scripts/chat_sft.py 'a recipe.yaml' optim.lr=1 train.resume=auto"
    assert resume_command(words) == expected


def test_differences_between_ranks_are_listed_by_name() -> None:
    values = [{"torch": "2.13", "optim.lr": "1"}, {"torch": "2.13", "optim.lr": "2"}, {"torch": "2.13"}]
    assert compare(values) == ["optim.lr: 1 on rank 0; 2 on rank 1; not there on rank 2"]
    assert compare([values[0]] * 3) == []


def test_the_ranks_that_are_behind_are_found_by_step_and_phase(tmp_path: Path) -> None:
    for rank, (step, phase) in enumerate([(7, "step"), (6, "data"), (7, "step")]):
        (tmp_path / f"rank{rank:03d}").write_text(json.dumps({"step": step, "phase": phase}))
    behind, where = compare_places(tmp_path, 3)
    assert behind == [1]
    assert where == "rank 1 at step 6 (in data); ranks 0, 2 at step 7 (in step)"


def test_a_launcher_that_would_cut_a_save_short_is_warned_of() -> None:
    assert check_launcher({}) is None
    assert check_launcher({"TORCHELASTIC_RUN_ID": "x", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300"}) is None
    assert "30 s" in (check_launcher({"TORCHELASTIC_RUN_ID": "x"}) or "")
