"""Runs programs that a model wrote, with no network, no files of this machine, and little memory, time and processes.

Linux namespaces are the walls: docs/evaluation.md says what they hold and what they do not.
Where they cannot be had, nothing is run: there is no weaker mode.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import IO

from sftkit.errors import ConfigError

LAUNCHER = Path(__file__).with_name("sandbox_launcher.py")
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
MAX_VERDICT_BYTES = 2048
STARTS = 3
GRACE_SECONDS = 5.0

# Runs inside. The nonce is read when the tests are over: until then no object of the process holds it, and an exit, a guess
# or changed builtins do not look like the end of the tests. But program and tests share one process: code that searches
# for the runner's files, names or frames can read the nonce and forge a verdict. Files of random numbers keep that from
# happening by a guess, not by intention.
RUNNER = """
import sys
from os import O_RDWR, _exit, devnull, dup2, open, read, urandom, write
def take(size, read=read):
    return read(feed, size)
number, null = 16 + urandom(1)[0] % 44, open(devnull, O_RDWR)
feed, verdict = dup2(0, number, False), dup2(1, number + 1 + urandom(1)[0] % (62 - number), False)
for standard in (0, 1, 2):
    dup2(null, standard)
def execute(take=take, write=write, verdict=verdict, run=exec, Problem=BaseException, kind=type, text=str, leave=_exit):
    import _sitebuiltins, builtins, types
    builtins.exit = builtins.quit = _sitebuiltins.Quitter("exit", "")
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    program, tests = (take(int(take(12))).decode() for _ in range(2))
    write(verdict, b"S")
    try:
        program, tests = compile(program, "program", "exec"), compile(tests, "tests", "exec")
        run(program, module.__dict__)
        run(tests, module.__dict__)
    except Problem as error:
        try:
            said = text(error)
        except Problem:
            said = ""
        write(verdict, (kind(error).__name__ + ": " + said)[:300].encode("utf-8", "replace"))
    else:
        write(verdict, take(32))
    leave(0)
execute()
"""


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    cpu_seconds: int = 10
    "of each process"
    wall_seconds: float = 30.0
    memory_mib: int = 512
    "address space of each process"
    processes: int = 8
    "at a time, threads count"
    file_mib: int = 16
    "of one file, and of all its files together"


@dataclass(frozen=True)
class Verdict:
    """What became of a program."""

    passed: bool
    why: str
    "empty if it passed; else its error, the limit that it met, or that it ended before its tests did"
    seconds: float
    "wall time, with the start of the sandbox (0.1 s)"


class SandboxError(Exception):
    """A wall of the sandbox could not be built; no code of a model has run."""


def run(program: str, tests: str, limits: Limits | None = None) -> Verdict:
    """Execute `program`, then `tests` in the names that it defined; it passes if the tests end without an exception.

    `__name__` is "solution", standard input is empty, what is printed is thrown away, the standard library is all there
    is to import. ConfigError: the sandbox does not work here.
    """
    for left in reversed(range(STARTS)):
        try:
            return start(program, tests, limits or Limits())
        except SandboxError as error:
            if not left:
                raise ConfigError(f"the sandbox for model-written code does not work here: {error}; {ADVICE}") from None
            time.sleep(0.5)
    raise AssertionError("unreachable")


def run_many(
    jobs: Sequence[tuple[str, str]], workers: int | None = None, limits: Limits | None = None
) -> list[Verdict]:
    """`run` for every (program, tests), `workers` at a time (None: one for each CPU core), verdicts in order."""
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda job: run(job[0], job[1], limits), jobs))


ADVICE = (
    "it needs Linux 5.12 or newer with namespaces: root, or user namespaces that are allowed "
    "(sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces > 0, "
    "kernel.apparmor_restrict_unprivileged_userns=0; in Docker, as root: --cap-add SYS_ADMIN "
    "--security-opt apparmor=unconfined). Evaluate in a virtual machine or container that has them, or leave humaneval "
    "and mbpp out"
)

# Holds each wall that matters to the others: a limit that is not enforced is a sandbox that is not there.
PROBE = """
import os, socket, time
try:
    socket.create_connection(("127.0.0.1", 9), 1)
except ConnectionRefusedError:
    raise SystemError("the network of the machine is in reach")
except OSError:
    pass
children = []
try:
    for _ in range({processes} + 1):
        child = os.fork()
        if child == 0:
            time.sleep(60)
        children.append(child)
except BlockingIOError:
    pass
else:
    raise SystemError("the number of processes is not limited")
"""


@cache
def check_sandbox() -> str | None:
    """What keeps programs from being run safely on this machine, with what to do; None if nothing does."""
    if sys.platform != "linux":
        return f"the sandbox for model-written code is made of Linux namespaces, this is {sys.platform}; {ADVICE}"
    try:
        verdict = run(PROBE.format(processes=Limits().processes), "")
    except ConfigError as error:
        return str(error)
    return None if verdict.passed else f"the sandbox for model-written code does not hold: {verdict.why}; {ADVICE}"


def start(program: str, tests: str, limits: Limits) -> Verdict:
    """One attempt of `run`; SandboxError if the program could not be started."""
    nonce = secrets.token_hex(16).encode()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sftkit-sandbox-") as root, tempfile.TemporaryFile() as errors:
        with tempfile.TemporaryFile() as feed:
            for text in (program, tests):
                data = text.encode("utf-8", "replace")
                feed.write(b"%012d" % len(data) + data)
            feed.write(nonce)
            feed.seek(0)
            process = subprocess.Popen(
                [python(), "-I", "-S", str(LAUNCHER), specification(root, limits)],
                stdin=feed,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={},
                cwd="/",
                start_new_session=True,
            )
        assert process.stdout is not None
        try:
            said, in_time = read_verdict(process.stdout, began + limits.wall_seconds)
        finally:
            kill(process)
        seconds = time.monotonic() - began
        if not said.startswith(b"S"):
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines() or ["no message"]
            raise SandboxError(lines[-1] if in_time else f"no start in {limits.wall_seconds} s")
    passed = said == b"S" + nonce
    return Verdict(passed, "" if passed else explain(said[1:], in_time, process.returncode, limits), seconds)


def specification(root: str, limits: Limits) -> str:
    """What the launcher is told, as JSON: where to build, what to show of this machine, what to run."""
    executable = python()
    prefix = os.path.realpath(sys.base_prefix)
    own = (executable, f"{prefix}/lib", f"{prefix}/lib64") if prefix != "/usr" else (executable,)
    visible = list(dict.fromkeys(path for path in (*LIBRARIES, *own) if os.path.exists(path)))
    return json.dumps(
        {"root": root, "executable": executable, "visible": visible, "code": RUNNER, "limits": asdict(limits)}
    )


def python() -> str:
    """The interpreter below a virtual environment, whose packages stay outside."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def read_verdict(pipe: IO[bytes], deadline: float) -> tuple[bytes, bool]:
    """(what arrives until the pipe is closed or too much came, whether that was before `deadline`)."""
    said = b""
    arrivals = select.poll()
    arrivals.register(pipe, select.POLLIN)
    while len(said) <= MAX_VERDICT_BYTES:
        left = deadline - time.monotonic()
        if left <= 0 or not arrivals.poll(1000 * left):
            return said, False
        part = os.read(pipe.fileno(), 4096)
        if not part:
            break
        said += part
    return said, True


def kill(process: subprocess.Popen[bytes]) -> None:
    """End the launcher; asked to, it first waits until everything in its namespaces is gone."""
    for seconds, ending in ((0.1, process.terminate), (GRACE_SECONDS, process.kill)):
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            ending()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def explain(said: bytes, in_time: bool, code: int, limits: Limits) -> str:
    """Why a program did not pass, for the per-example output."""
    if not in_time:
        return f"no end in {limits.wall_seconds:g} s"
    if code in (128 + signal.SIGXCPU, 128 + signal.SIGKILL):
        return f"ended by the kernel: more than {limits.cpu_seconds} s of CPU, or no memory left"
    return said[:300].decode(errors="replace") or f"ended before its tests did (exit code {code})"
