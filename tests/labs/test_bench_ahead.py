"""`--ahead`: the processes of a run that import while the run before it is at work, and wait until it has ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from preloaded import PYTHONPATH
from test_bench import row, write_plan, write_worker

from labs.bench.plan import Processes, read_jobs, save_job
from labs.bench.run import bench
from labs.jobs import LOWEST, Hold, bench_command, can_go_back, can_wait, modules_of, wait_for
from labs.tables import ahead_line

STAND_IN = """
import fcntl, json, os, sys, time
from pathlib import Path

there = time.time()
folder = Path(sys.argv[1]).parent
(folder / "pid.tmp").write_text(str(os.getpid()))
(folder / "pid.tmp").rename(folder / "pid")
if sys.argv[2:]:
    with open(sys.argv[2]) as hold:  # as labs.jobs.wait_for does, whose import takes a second
        fcntl.flock(hold, fcntl.LOCK_SH)
        if hold.read() != "go":
            sys.exit(1)
begun, options = time.time(), json.loads((folder / "job.json").read_text())["config"]["train"]["resume_changes"]
print("at work", flush=True)
for name in options[1:]:  # of a run whose process must be there by now
    while not (folder.parent / name / "pid").exists():
        time.sleep(0.02)
time.sleep(float(options[0]))
row = json.loads(ROW)
(folder / "row.json").write_text(json.dumps(row | {"there": there, "begun": begun, "ended": time.time()}))
"""
"""In the place of a run's process: it imports little and does nothing for so many seconds. What it is told stands in
train.resume_changes, which a run of the bench does not use."""


def stand_in(folder: Path) -> str:
    """The stand-in as a script."""
    text = STAND_IN.replace("ROW", repr(json.dumps(row("run", [5.0], {"1": 1.0}))))
    return write_worker(folder, text, "stand_in.py")


@pytest.fixture
def no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labs.bench.run.machine_ceilings", lambda out: {"error": "not asked"})


@pytest.fixture
def stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / stand_in(tmp_path)
    monkeypatch.setattr("labs.jobs.bench_command", partial(stand_in_command, script))


def stand_in_command(script: Path, _: Processes, worker: str | None, *files: Path | None) -> tuple[list[str], dict]:
    return [sys.executable, worker or str(script), *(str(file) for file in files if file is not None)], {}


def stand_in_run(name: str, seconds: float, *there: str, **changes: Any) -> dict[str, Any]:
    """A run that goes on for so many seconds, from when the processes of the runs `there` have been started."""
    return {"name": name, "model": "tiny", "set": {"train.resume_changes": [str(seconds), *there]}, **changes}


@pytest.mark.usefixtures("no_machine", "stands_in")
def test_a_run_started_ahead_begins_when_the_one_before_it_has_ended(tmp_path: Path) -> None:
    runs = [stand_in_run("one", 0.3, "two"), stand_in_run("two", 0.3, "three"), stand_in_run("three", 0.1)]
    results = bench(write_plan(tmp_path, runs=runs, timeout_seconds=60), tmp_path / "out", ahead=True)
    one, two, three = results["runs"]
    assert [run["error"] for run in results["runs"]] == [None] * 3
    assert one["ended"] <= two["begun"] < two["ended"] <= three["begun"]
    assert [run["ahead"] for run in results["runs"]] == [True] * 3
    assert (tmp_path / "out" / "two" / "log.txt").read_text() == "at work\n"
    assert ahead_line(results["runs"]) in (tmp_path / "out" / "report.md").read_text().splitlines()


@pytest.mark.usefixtures("no_machine", "stands_in")
def test_without_the_flag_a_run_is_started_when_the_one_before_it_has_ended_and_the_results_are_as_before(
    tmp_path: Path,
) -> None:
    one, two = bench(write_plan(tmp_path, runs=[stand_in_run("one", 0.1), stand_in_run("two", 0.1)]), tmp_path / "out")[
        "runs"
    ]
    assert (one["error"], two["error"]) == (None, None)
    assert one["ended"] < two["there"]
    assert "ahead" not in one
    assert ahead_line([one, two]) == ""


@pytest.mark.usefixtures("stands_in")
def test_neither_wall_seconds_nor_the_time_limit_counts_the_wait(tmp_path: Path, monkeypatch) -> None:
    def machine_ceilings(out: Path) -> dict[str, Any]:
        while not (out / "one" / "pid").exists():
            time.sleep(0.02)
        time.sleep(2.2)
        return {"error": "not asked"}

    monkeypatch.setattr("labs.bench.run.machine_ceilings", machine_ceilings)
    plan = write_plan(tmp_path, runs=[stand_in_run("one", 0.2)], timeout_seconds=2)
    (one,) = bench(plan, tmp_path / "out", ahead=True)["runs"]
    assert one["error"] is None
    assert one["begun"] - one["there"] > 2
    assert 0.2 < one["wall_seconds"] < 2


@pytest.mark.usefixtures("no_machine", "stands_in")
def test_a_worker_of_the_plans_own_is_not_started_ahead_but_the_run_after_it_is(tmp_path: Path) -> None:
    told = "(folder / 'told').write_text(str(sys.argv[2:]))\n"
    own = write_worker(tmp_path, told + (tmp_path / "stand_in.py").read_text(), "own.py")
    runs = [stand_in_run("one", 0.1), stand_in_run("own", 0.1, "three", worker=own), stand_in_run("three", 0.1)]
    one, two, three = bench(write_plan(tmp_path, runs=runs, timeout_seconds=60), tmp_path / "out", ahead=True)["runs"]
    assert (one["error"], two["error"], three["error"]) == (None, None, None)
    assert one["ended"] < two["there"]
    assert (tmp_path / "out" / "own" / "told").read_text() == "[]"
    assert "ahead" not in two
    assert "(`--ahead`): one, three." in ahead_line([one | {"name": "one"}, two, three | {"name": "three"}])


def test_a_run_whose_time_counts_from_the_start_of_its_process_is_not_started_ahead(tmp_path: Path) -> None:
    runs = [stand_in_run("free", 0), {"name": "limited", "model": "tiny", "set": {"train.max_minutes": 5}}]
    assert [can_wait(job) for job in read_jobs(write_plan(tmp_path, runs=runs), tmp_path)] == [True, False]


@pytest.mark.usefixtures("no_machine", "stands_in")
def test_a_run_that_fails_or_takes_too_long_does_not_let_the_next_one_begin_early_nor_stay(tmp_path: Path) -> None:
    bad = stand_in_run("bad", 0, set={"train.resume_changes": ["no number", "hung"]})
    runs = [bad, stand_in_run("hung", 60, "good"), stand_in_run("good", 0.1)]
    started = time.time()
    results = bench(write_plan(tmp_path, runs=runs, timeout_seconds=3), tmp_path / "out", ahead=True)["runs"]
    assert "ValueError" in results[0]["error"]
    assert results[1]["error"] == "not done after 3 s"
    assert results[2]["error"] is None
    assert results[2]["begun"] > started + 3
    assert not [name for name in ("bad", "hung", "good") if psutil.pid_exists(pid_of(tmp_path / "out" / name))]


def pid_of(folder: Path) -> int:
    """The id of a run's process, once it is there."""
    deadline = time.monotonic() + 60
    while not (folder / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return int((folder / "pid").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_that_waits_is_left_when_the_bench_is_interrupted_or_killed(tmp_path: Path, number: int) -> None:
    plan = write_plan(tmp_path, runs=[stand_in_run("one", 1000), stand_in_run("two", 0)])
    script, out = tmp_path / stand_in(tmp_path), tmp_path / "out"
    code = f"""
import sys
from pathlib import Path
from labs import jobs as start
from labs.bench import run

def bench_command(processes, worker, *files):
    return [sys.executable, {str(script)!r}, *map(str, files)], {{}}

start.bench_command, run.machine_ceilings = bench_command, lambda out: {{}}
run.bench(Path({str(plan)!r}), Path({str(out)!r}), ahead=True)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    one, two = (psutil.Process(pid_of(out / name)) for name in ("one", "two"))
    process.send_signal(number)
    assert process.wait(60) == (-number if number == signal.SIGKILL else 128 + number)
    if number == signal.SIGKILL:  # nobody could end the one at work
        one.kill()
    _, alive = psutil.wait_procs([one, two], timeout=20)
    assert not alive
    assert not (out / "two" / "row.json").exists()


def test_processes_wait_for_a_file_that_is_locked_and_end_if_it_is_unlocked_without_a_word(tmp_path: Path) -> None:
    hold = Hold(tmp_path / "hold")
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(wait_for, hold.path) for _ in range(2)]
        assert not wait(waiting, timeout=0.2).done
        hold.release()
        assert [each.result(timeout=10) for each in waiting] == [True, True]
        hold = Hold(tmp_path / "hold")
        waiting = [pool.submit(wait_for, hold.path)]
        assert not wait(waiting, timeout=0.2).done
        hold.close()
        assert not waiting[0].result(timeout=10)
    assert not wait_for(tmp_path / "gone")


TOLD = """
import json, os, runpy, sys
from pathlib import Path
import labs.bench.run as rows

seen = {}

class AtImport:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torch":
            seen["priority"], seen["spins"] = os.getpriority(os.PRIO_PROCESS, 0), os.environ.get("GOMP_SPINCOUNT")

def run_job(job, run):
    early = "torch._inductor.compile_fx" in sys.modules
    import torch, torch._inductor.config
    threads = [int(path.name) for path in Path("/proc/self/task").iterdir()]
    same = {
        "threads": torch.get_num_threads(),
        "compile_threads": torch._inductor.config.compile_threads,
        "affinities": sorted({tuple(sorted(os.sched_getaffinity(thread))) for thread in threads}),
        "priorities": sorted({os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}),
        "spins": seen["spins"],
        "device": torch.cuda.is_initialized(),
        "group": torch.distributed.is_initialized(),
    }
    print(json.dumps({"same": same, "priority": seen["priority"], "early": early}))

rows.run_job = run_job  # which the worker takes from there
sys.meta_path.insert(0, AtImport)
module, *sys.argv[1:] = sys.argv[1:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def told(tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a run found of its process, and the same run started ahead of its time."""
    (job,) = read_jobs(write_plan(tmp_path), tmp_path / "out")
    script = tmp_path / write_worker(tmp_path, TOLD)
    words = [sys.executable, str(script), "labs.bench.worker", str(save_job(job))]
    hold = Hold(tmp_path / "hold")
    later = [*words, str(hold.path)]
    later[2] = "labs.jobs"
    with ExitStack() as stack:
        env = {**os.environ, "PYTHONPATH": PYTHONPATH}
        processes = [subprocess.Popen(each, stdout=subprocess.PIPE, text=True, env=env) for each in (words, later)]
        for process in processes:
            stack.enter_context(process)
            stack.callback(process.kill)
        plain = json.loads(processes[0].communicate(timeout=120)[0])
        hold.release()
        # Longer: until then it has had the lowest priority, beside whatever else is at work.
        return plain, json.loads(processes[1].communicate(timeout=300)[0])


@pytest.mark.slow
def test_threads_priority_and_cpus_of_a_run_started_ahead_are_those_of_any(tmp_path: Path) -> None:
    plain, ahead = told(tmp_path)
    assert ahead["same"] == plain["same"]
    assert plain["priority"] == os.getpriority(os.PRIO_PROCESS, 0)
    assert ahead["priority"] == (LOWEST if can_go_back() else plain["priority"])
    assert (plain["early"], ahead["early"]) == (False, True)


@pytest.mark.gpu
def test_a_run_started_ahead_has_touched_no_device(tmp_path: Path) -> None:
    assert [found["same"]["device"] for found in told(tmp_path)] == [False, False]


@pytest.mark.parametrize("processes", [Processes(), Processes(count=2, topology="cpu_ddp")])
def test_a_process_of_ours_is_told_what_it_waits_for_and_another_worker_is_not(
    tmp_path: Path, processes: Processes
) -> None:
    job, hold = tmp_path / "job.json", tmp_path / "hold"
    ahead = ["-m", "labs.jobs", str(job), str(hold)]
    assert bench_command(processes, None, job, hold)[0][-4:] == ahead
    assert bench_command(processes, None, job)[0][-3:] == ["-m", "labs.bench.worker", str(job)]
    assert bench_command(processes, "own.py", job)[0][-2:] == ["own.py", str(job)]


def test_what_is_imported_ahead_is_what_the_run_will_need(tmp_path: Path) -> None:
    changes = ({}, {"compile.enabled": False}, {"compile.backend": "aot_eager"})
    runs = [{"name": str(i), "model": "tiny", "set": change} for i, change in enumerate(changes)]
    found = [modules_of(job)[1:] for job in read_jobs(write_plan(tmp_path, runs=runs), tmp_path)]
    assert found == [["torch._inductor.compile_fx"], [], []]
