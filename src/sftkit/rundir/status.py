"""The state of a run, or how it ended: run_status.json, for people and requeue scripts; the error of each rank, with
which one failed first; and, of a run that was killed, what its directory shows. No torch."""

import errno
import json
import os
import shlex
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from sftkit.config import commands, terminal
from sftkit.errors import ConfigError, DataError, RunError
from sftkit.rundir import files, lock, names


@dataclass(frozen=True)
class Failure:
    """The error that ended a rank."""

    rank: int
    step: int
    "the step it was in; 0: before the first"
    phase: str
    error: str
    time: float
    symptom: bool = False
    "it saw only what another rank, whose own error is the cause, did to it"
    start_id: str = ""
    "of the start that it ended; see RunStatus.start_id"

    def __str__(self) -> str:
        where = f"at step {self.step}" if self.step else "before the first step"
        return f"rank {self.rank} failed {where} ({self.phase}): {self.error}"


# Words in errors of torch.distributed and its backends when another rank is gone, in lower case.
_SYMPTOMS = ("closed by peer", "reset by peer", "broken pipe", "gloo", "nccl", "socket", "tcpstore", "connection")


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Libraries in Rust and C++ have it in their text: the words of the system, or the number of its error.
_FULL_WORDS = (*map(os.strerror, _FULL), *(f"(os error {number})" for number in _FULL), "PytorchStreamWriter failed")


def is_full_disk(error: BaseException) -> bool:
    """Return whether an error says that a disk is full, or a quota or limit of the size of files is reached."""
    return (isinstance(error, OSError) and error.errno in _FULL) or any(mark in str(error) for mark in _FULL_WORDS)


def describe_error(error: BaseException) -> str:
    """Return the message of an error, with its class where the error is not made for users."""
    text = str(error).strip()
    if is_full_disk(error) and not isinstance(error, ConfigError | DataError | RunError):
        # Not from a table: no file may be readable now.
        return (
            f"a disk is full, or a quota or limit of file sizes is reached: {text}. Free some space or take "
            "a run.dir on another disk, then start again with train.resume=auto"
        )
    named = isinstance(error, ConfigError | DataError | RunError)
    return text if named and text else f"{type(error).__name__}: {text}".removesuffix(": ")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; its type if there is none."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def is_symptom(error: BaseException) -> bool:
    """Return whether an error says that another rank is gone, and nothing about this one."""
    return isinstance(error, RuntimeError | OSError) and any(mark in str(error).lower() for mark in _SYMPTOMS)


Outcome = Literal["running", "finished", "stopped", "preempted", "failed"]
_BEAT_BYTES = 192
"Length of a heartbeat's text, filled up with blanks so that it covers the one before."
_WATCH_SECONDS = 3.0


@dataclass
class RunStatus:
    """The place of this process in the run. `at` notes it on the way and takes microseconds; files are written when a
    run begins, fails or ends."""

    run_dir: Path
    rank: int
    world_size: int
    start_id: str = ""
    """names this start, the same on all its ranks: errors, heartbeats and a status of another id are of an earlier
    one"""
    step: int = 0
    total_steps: int | None = None
    phase: str = "start"
    since: float = field(default_factory=time.monotonic)
    "when the phase began, time.monotonic()"
    longest_step_seconds: float = 0.0
    failure: Failure | None = None
    "this rank's own"
    neighbours: dict[int, int] = field(default_factory=dict)
    "rank -> process id of the ranks on this machine"
    stopped_by: int | None = None
    "the signal that ended training with its checkpoint; known to the main rank"
    stepped: bool = False
    "whether this start has done its first step, so that the directory is its own"
    inode: int | None = None
    "of the directory that was opened; an earlier run may have got its name back since. None: not known"
    heartbeat: int | None = None
    "descriptor of the file that tells the other ranks where this one is; None: there are none, or nobody reads it"

    def at(self, step: int, phase: str) -> None:
        """Note that this rank enters a phase of a step."""
        now = time.monotonic()
        if self.phase == "step":
            self.longest_step_seconds = max(self.longest_step_seconds, now - self.since)
        self.step = step
        self.phase = phase
        self.since = now
        self.beat()

    def progress(self) -> None:
        """Note that the present phase continues: a part of it is done."""
        self.since = time.monotonic()

    def beat(self) -> None:
        """Tell the other ranks where this one is, and that it lives: a write to memory, some microseconds."""
        if self.heartbeat is not None:
            # Ranks of one machine compare the clock that nobody sets; other machines have only the time of day.
            clocks = {"time": round(time.time(), 3), "monotonic": round(time.monotonic(), 3), "boot": lock.boot_id()}
            text = json.dumps({"step": self.step, "phase": self.phase, "start_id": self.start_id, **clocks})
            with suppress(OSError):  # a full or shared disk that stumbles is no reason to end training
                os.pwrite(self.heartbeat, text.ljust(_BEAT_BYTES).encode(), 0)

    def open(self, run_dir: Path) -> None:
        """Note where this start writes from here on."""
        self.run_dir = run_dir
        self.inode = None
        with suppress(FileNotFoundError):  # a shared file system may show it to this machine later
            self.inode = run_dir.stat().st_ino

    def is_withdrawn(self) -> bool:
        """Return whether the directory is another start's, which this one must not write to: an earlier run's, to which
        the main rank has left it, or a later start's, if this rank was stopped meanwhile."""
        if (newest := newest_start(self.run_dir)) is not None:
            return newest != self.start_id
        try:
            return self.inode is not None and self.run_dir.stat().st_ino != self.inode
        except FileNotFoundError:
            return True

    def begin(self, environ: Mapping[str, str]) -> None:
        """Clear what an earlier start left, and write that the run is running. Main rank."""
        shutil.rmtree(self.run_dir / names.ERRORS, ignore_errors=True)
        (self.run_dir / names.STATUS).unlink(missing_ok=True)
        self._write("running", launch=launch_id(environ), failed_save=None)

    def save_ended(self, step: int, failure: str | None) -> None:
        """Note in run_status.json whether the newest save has failed. Main rank.

        Args:
            step: of the save.
            failure: why it failed; None: it was written.
        """
        # Only where it changes: a run that saves often would write the file each time.
        failed = None if failure is None else {"step": step, "error": failure}
        before = self._own_status()
        with suppress(OSError):  # on a full disk the event reports it
            if before and failed != before.get("failed_save"):
                _replace(self.run_dir / names.STATUS, before | {"failed_save": failed, "time": round(time.time(), 3)})

    def end(self, status: Outcome, **more: Any) -> None:
        """Write how the run ended, once: a rank that writes later, for example when a signal wakes it, changes
        nothing. But a cause replaces what was only its symptom."""
        # Every rank calls it: which comes first is not known, and the launcher may end the main rank before.
        before = self._own_status()
        symptoms = [str(failure) for failure in self.failures() if failure.symptom]
        if before.get("status") in (None, "running") or before.get("error") in symptoms:
            self._write(status, **more)

    def _own_status(self) -> dict[str, Any]:
        """Return the content of run_status.json; empty if an earlier start has written it."""
        found = read_status(self.run_dir)
        return found if found.get("start_id", "") == self.start_id else {}

    def _write(self, status: Outcome, **more: Any) -> None:
        """Replace run_status.json."""
        if self.is_withdrawn():
            return
        before = self._own_status()
        values = {
            "status": status,
            "step": self.step,
            "total_steps": self.total_steps,
            "signal": None,
            "first_failing_rank": None,
            "error": None,
            "resume": resume_command(sys.argv),
            "start": start_command(sys.argv),
            "launch": before.get("launch"),
            "start_id": self.start_id,
            "failed_save": before.get("failed_save"),
            "time": round(time.time(), 3),
        }
        _replace(self.run_dir / names.STATUS, values | more)

    def end_of_signal(self, number: int) -> tuple[str, str | None]:
        """Write how a run ends that a signal stops while there is nothing to save. Often the signal comes from the
        launcher, because another rank has ended: then how that rank ended is written.

        Returns:
            (the name of the signal that ends the run: this one, or that of a rank that has written its own down first;
            a message about a rank that ended without a word, for the first of the ranks that are left to print, or
            None)
        """
        name = signal.Signals(number).name
        with suppress(OSError):
            if first := self._own_status().get("signal"):
                return first, None
            if self.failures():
                return name, None
            # A rank that was killed by the kernel wrote nothing, and the launcher then ends the others by a signal: the
            # signal is not the cause.
            if gone := self.gone():
                text = f"rank {gone[0]} ended without an error message (killed? out of memory?) before the first step"
                self.end("failed", first_failing_rank=gone[0], error=text)
                return name, text if self.rank == min(self.neighbours.keys() - gone) else None
            self.end("stopped" if number == signal.SIGINT else "preempted", signal=name)
        return name, None

    def gone(self) -> list[int]:
        """Return the ranks of this machine that had ended before a launcher ended the others, in order: their process
        ids are gone, as the launcher has collected their exit codes. Codes of ranks that it ended are collected
        only after this rank has ended, too."""
        return sorted(rank for rank, pid in self.neighbours.items() if not psutil.pid_exists(pid))

    def write_end(self, number: int | None, *, stopped: bool) -> None:
        """Write that training has ended with its checkpoint. Main rank.

        Args:
            stopped: before its last step.
            number: the signal that stopped it; None: the time limit, or nothing did.
        """
        self.stopped_by = number if stopped else None
        name = None if number is None else signal.Signals(number).name
        self.end("stopped" if number == signal.SIGINT else "preempted" if stopped else "finished", signal=name)

    def failed(self, error: BaseException | str, *, symptom: bool = False) -> Failure:
        """Write this rank's error, the first one only, for the others to find, and return it.

        Args:
            symptom: it is known to be what another rank's end did to this one.
        """
        if self.failure is None:
            text = error if isinstance(error, str) else describe_error(error)
            symptom = symptom or (self.world_size > 1 and not isinstance(error, str) and is_symptom(error))
            self.failure = Failure(self.rank, self.step, self.phase, text, time.time(), symptom, self.start_id)
            file = names.error_file(self.run_dir, self.rank)
            with suppress(OSError):  # on a full disk the error itself must be reported
                if not self.is_withdrawn():
                    file.parent.mkdir(parents=True, exist_ok=True)
                    _replace(file, asdict(self.failure))
        return self.failure

    def failures(self) -> list[Failure]:
        """Return the failures of all ranks in this start, causes before symptoms, earliest first."""
        found = []
        for path in (self.run_dir / names.ERRORS).glob("rank*.json"):
            with suppress(TypeError):  # half a file, or one of another version
                found.append(Failure(**files.read_object(path)))
        found = [failure for failure in found if failure.start_id == self.start_id]
        if self.failure is not None and all(failure.rank != self.rank for failure in found):
            found.append(self.failure)  # the disk had no room for it
        return sorted(found, key=lambda failure: (failure.symptom, failure.time))

    def first_failure(self) -> Failure | None:
        """Return what ended the run; None: nothing was written. A rank that only lost a connection looks a few seconds
        for the cause."""
        end = time.monotonic() + _WATCH_SECONDS
        while not (found := self.failures()) or (found[0].symptom and time.monotonic() < end):
            if time.monotonic() >= end:
                return None
            time.sleep(0.1)
        # If nobody has written a cause and exactly one rank has written nothing, it is the one that ended.
        silent = sorted(set(range(self.world_size)) - {failure.rank for failure in found})
        if not found[0].symptom or len(silent) != 1:
            return found[0]
        text = (
            f"it ended without an error message (killed? out of memory?); rank {found[0].rank} then saw: "
            f"{found[0].error}"
        )
        return Failure(silent[0], found[0].step, found[0].phase, text, found[0].time)

    def write_failed(self) -> Failure | None:
        """Write run_status.json of a failed run, from what the ranks have written, and return the first failure."""
        first = self.first_failure()
        if first is not None:
            with suppress(OSError):
                self.end("failed", step=first.step, first_failing_rank=first.rank, error=str(first))
        return first


def report(error: BaseException, status: RunStatus | None = None, page: Callable[[Path], None] | None = None) -> int:
    """Write down how the run failed and print it, the cause instead of its symptoms; then write the run's page, which
    shows the error too. Return the exit code: 2 for a mistake of the user's, else 1.

    Args:
        status: of the run; None: it failed outside of one, or before its directory was opened.
        page: writes the page of a run directory; the main rank calls it.
    """
    code = _report_error(error, status)
    if page is not None and status is not None and status.rank == 0:
        with suppress(Exception):  # whatever becomes of the page, the run ends with its own error
            page(status.run_dir)
    return code


def _report_error(error: BaseException, status: RunStatus | None) -> int:
    """Write the error down and print what caused it; another rank's cause only where it is not the same error. Return
    the exit code."""
    code = 2 if isinstance(error, ConfigError | DataError) else 1
    # The text of an error for users is enough; any other error is a mistake of ours, whose place is needed.
    expected = isinstance(error, ConfigError | DataError | RunError) or is_full_disk(error)
    prefix = ""
    cause = None
    if status is not None:
        own = status.failed(error)
        cause = status.write_failed()
        prefix = f"rank {status.rank}: " if status.world_size > 1 else ""
        if cause is not None and cause.rank != own.rank:
            if cause.error != own.error:
                terminal.print_text(f"\nerror: {cause}", error=True, level="error")
            return code
    if not expected:
        terminal.print_text("".join(traceback.format_exception(error)), error=True)
    place = f"{cause}" if cause is not None and cause.step and prefix else f"{prefix}{describe_error(error)}"
    terminal.print_text(f"\nerror: {place}", error=True, level="error")
    return code


def read_status(run_dir: Path) -> dict[str, Any]:
    """Return the content of run_status.json; empty where there is none that can be read."""
    return files.read_object(run_dir / names.STATUS)


def newest_start(run_dir: Path) -> str | None:
    """Return the id of the newest start that has done a step in a directory; None: there is none.

    A launcher that asks before and after a run learns whether a status is the run's. Times would not do: a clock may be
    set meanwhile, and a file server has its own.
    """
    return read_status(run_dir).get("start_id")


def stopped_by(run_dir: Path, earlier: str | None) -> signal.Signals | None:
    """Return the signal that has stopped a run; None: it ended otherwise.

    Args:
        earlier: newest_start of the directory before the run was started.
    """
    status = read_status(run_dir)
    stopped = status.get("status") in ("stopped", "preempted") and status.get("start_id") != earlier
    return signal.Signals[status["signal"]] if stopped and status["signal"] else None


def launch_id(environ: Mapping[str, str]) -> str | None:
    """Return what names the launcher of this process, the same over its restarts; None without torch's elastic
    launcher."""
    # The elastic agent sets it for each process that it starts, and is their parent.
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    launcher = os.getppid()
    return f"{socket.gethostname()}:{launcher}:{lock.process_start(launcher):.2f}"


def effective_resume(setting: str | None, run_dir: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return train.resume, but "auto" where the launcher has started this run again (`--max-restarts`); every rank
    calls it.

    A run that resumed from a named checkpoint resumes from its own once it has one.
    """
    if setting == "auto" or int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
        return setting
    import torch.distributed as dist  # torch is not imported with this module, which the launcher reads too

    # The main rank decides for all: it alone is sure to see the files that it wrote itself.
    main = environ.get("RANK") == "0"
    begun = main and read_status(Path(run_dir)).get("launch") == launch_id(environ)
    again = [begun and (setting is None or bool(names.step_dirs(Path(run_dir))))]
    if dist.is_initialized():
        dist.broadcast_object_list(again)
    if main and again[0]:
        terminal.print_text(f"restart {environ['TORCHELASTIC_RESTART_COUNT']} of this launch: train.resume=auto")
    return "auto" if again[0] else setting


def start_command(argv: list[str]) -> str:
    """Return the command that starts again what these words started, by the launcher of this process: as `accelerate
    launch` or torchrun was called, since their options decide how the run is spread."""
    with suppress(psutil.Error):
        words = psutil.Process(os.getppid()).cmdline()
        program = next((at for at, word in enumerate(words) if Path(word).name in ("accelerate", "torchrun")), None)
        if program is not None and argv[0] in words[program:]:
            options = words[program + 1 : words.index(argv[0], program)]
            cpu = "ACCELERATE_USE_CPU=true " * (os.environ.get("ACCELERATE_USE_CPU") == "true")
            launcher = commands.typed(f".venv/bin/{Path(words[program]).name}")
            return " ".join([cpu + launcher, *map(shlex.quote, [*options, *argv])])
    return commands.invocation(*argv, launcher=True)


def resume_command(argv: list[str]) -> str:
    """Return the command that continues, from its newest checkpoint, a run whose script was started with these
    words."""
    words = [word for word in argv if not word.startswith("train.resume=")]
    return start_command([*words, "train.resume=auto"])


def _replace(path: Path, values: dict[str, Any]) -> None:
    """Write JSON to a file as a whole; several ranks may write at a time. On a full disk write in place."""
    text = json.dumps(values, indent=1)
    try:
        files.replace_shared(path, text)
    except OSError:
        with path.open("r+") as file:  # not truncated first: its blocks are all that there is
            file.write(text)
            file.truncate()


def killed_by(code: int) -> signal.Signals | None:
    """Return the signal that killed a process of this exit code (128 + the signal's number).

    Returns:
        None: no signal did, or it was one that asks for a stop (runtime.signals.SIGNALS).
    """
    asked = ("TERM", "USR1", "USR2", "XCPU", "INT", "HUP", "QUIT")
    return next((s for s in signal.Signals if s == code - 128 and s.name.removeprefix("SIG") not in asked), None)


def where_it_was(run_dir: Path) -> str:
    """Return the newest step that a run has logged and its newest checkpoint, in words."""
    step = last_step(run_dir)
    checkpoint = None
    with suppress(OSError):
        checkpoint = names.latest_checkpoint(run_dir)
    logged = "no step was logged" if step is None else f"newest logged step {step}"
    return f"{logged}, {f'newest checkpoint {checkpoint}' if checkpoint else 'no checkpoint'}"


def how_to_go_on(run_dir: Path, resume: str, start: str) -> str:
    """Return what to do next, in words: resume from the newest checkpoint or, without one, start again.

    Args:
        resume: command that resumes from the newest checkpoint.
        start: command that started the run.
    """
    with suppress(OSError):
        if names.latest_checkpoint(run_dir) is not None:
            return f"resume from there: {resume}"
    return f"start it again: {start}"


def last_step(run_dir: Path) -> int | None:
    """Return the step of the last whole line of METRICS_FILE; None without one."""
    rows = files.read_metric_rows(run_dir / names.METRICS_FILE)
    return int(rows[-1]["step"]) if rows else None


def as_killed(run_dir: Path, status: dict[str, Any]) -> dict[str, Any]:
    """Return the status; `killed` instead of `running` if the run is gone, with what is known of the end."""
    # "Not known" is not "gone": the lock may be of another machine, whose processes are not seen from here.
    if status.get("status") != "running" or lock.at_work(run_dir) is not False:
        return status
    resume, start = (str(status.get(name) or "") for name in ("resume", "start"))
    text = f"killed (kill -9, out of memory, or the machine went down): {where_it_was(run_dir)}"
    step = last_step(run_dir)
    next_one = f"; {how_to_go_on(run_dir, resume, start)}" if resume and start else ""
    values = {"status": "killed", "step": status.get("step") if step is None else step, "error": text + next_one}
    return status | values


def report_killed(run_dir: Path, number: signal.Signals, cause: str, earlier: str | None, words: list[str]) -> str:
    """Return the message about a run that was killed. Write it to run_status.json too, unless a surviving rank
    has done so.

    Args:
        number: the signal that killed it.
        cause: what has likely sent the signal, in words (runtime.script.likely_cause).
        earlier: status.newest_start before the run was started.
        words: script and arguments that started it.
    """
    status = read_status(run_dir)
    # The launcher can be killed alone: then the run continues, and nothing of it may be overwritten.
    if lock.at_work(run_dir):
        return f"error: the launcher was killed by {number.name}: {cause}\n{run_dir}: the run itself is still at work"
    who = "the run"
    # The status is that of an earlier run.
    if status.get("start_id") == earlier:
        end = f"It had not begun to train. Start it again: {start_command(words)}"
        return f"error: {who} was killed by {number.name}: {cause}\n{end}"
    # Nobody was left to write the end. Where a rank was, it knows more than the exit code does.
    if status.get("status") == "running":
        step = last_step(run_dir)
        values = {"status": "failed", "error": f"killed by {number.name}: {cause}", "time": round(time.time(), 3)}
        values |= {} if step is None else {"step": step}
        with suppress(OSError):
            files.replace_shared(run_dir / names.STATUS, json.dumps(status | values, indent=1))
    elif status.get("first_failing_rank") is not None:
        who = f"rank {status['first_failing_rank']}"
    where = f"{run_dir}: {where_it_was(run_dir)}; {how_to_go_on(run_dir, resume_command(words), start_command(words))}"
    return f"error: {who} was killed by {number.name}: {cause}\n{where}"
