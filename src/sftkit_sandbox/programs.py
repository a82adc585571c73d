"""Run model-written programs without network and without files of this machine, with limited memory, time
and processes.

Linux namespaces and a filter of system calls isolate them: docs/evaluation.md lists what they protect and what they
do not. On a machine without them nothing runs: there is no weaker mode. `check_sandbox` tries each protection before
any model-written code runs.
"""

from __future__ import annotations

import errno
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

from sftkit_sandbox import memory
from sftkit_sandbox.grader import NONCE_BYTES, STARTED
from sftkit_sandbox.isolation import OWN_PROCESSES
from sftkit_sandbox.system_calls import CLONE, MACHINES, REFUSED

PACKAGE_FOLDER = str(Path(__file__).parents[1])
"Folder from which the launcher's process imports this package."
LAUNCH = f"import sys; sys.path.append({PACKAGE_FOLDER!r}); from sftkit_sandbox.isolation import main; main()"
# A fixed hash seed orders sets of strings, so that a program passes every time or never.
_ENVIRONMENT = {"HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
MAX_VERDICT_BYTES = 2048
STARTS = 3
GRACE_SECONDS = 5.0


class SandboxError(Exception):
    """Programs cannot run safely on this machine; the text has the reason and the remedy."""


@dataclass(frozen=True)
class ProgramTests:
    """A program and its tests."""

    program: str
    tests: str
    names: tuple[str, ...] = ()
    "names of the program that the tests use: functions, classes and constants; all other names are Python's own"
    preamble: str = ""
    "code that the tests also need and no model wrote, such as imports and helpers; `names` override its names"


@dataclass(frozen=True)
class ProgramLimits:
    """The limits of one program."""

    cpu_seconds: int = 10
    "for each process"
    wall_seconds: float = 30.0
    memory_mib: int = 512
    "address space of each process"
    total_memory_mib: int = 1024
    "for all processes and files together, if a control group can be created"
    processes: int = 8
    "at the same time, counting threads"
    file_mib: int = 16
    "for one file, and for all its files together"


@dataclass(frozen=True)
class ProgramVerdict:
    """The result of a program."""

    passed: bool
    reason: str
    "empty if it passed; otherwise its error, the limit that it reached, or that it ended before its tests"
    seconds: float
    "wall time, including the start of the sandbox (0.1 s)"


def run_tests(job: ProgramTests, limits: ProgramLimits | None = None) -> ProgramVerdict:
    """Execute the program, then its tests, in two processes; it passes if the tests end without an exception.

    The program's `__name__` is "solution", its standard input is empty, its output is discarded, and it can import
    only the standard library. The tests call its functions in its process with copies of plain data (numbers, texts,
    lists, tuples, sets, dicts, ...); changes to lists, sets and dicts are applied to those of the tests too. Other
    values are available by their methods and attributes, but equal nothing else. SandboxError: the sandbox does not
    work here.
    """
    for left in reversed(range(STARTS)):
        try:
            return _start(job, limits or ProgramLimits())
        except OSError as error:
            if not left:
                advice = SANDBOX_ADVICE
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    advice = f"free some in {tempfile.gettempdir()}, or name another folder in TMPDIR"
                said = f"the sandbox for model-written code does not work here: {error}; {advice}"
                raise SandboxError(said) from None
            time.sleep(0.5)
    raise AssertionError("unreachable")


def run_many(
    jobs: Sequence[ProgramTests], workers: int | None = None, limits: ProgramLimits | None = None
) -> list[ProgramVerdict]:
    """Run every job, `workers` at a time (None: one for each CPU core). Return the verdicts in order."""
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda job: run_tests(job, limits), jobs))


SANDBOX_ADVICE = (
    "it needs Linux 5.12 or newer on x86_64 or aarch64, with seccomp filters and namespaces: root, or user "
    "namespaces that are allowed (sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces > 0, "
    "kernel.apparmor_restrict_unprivileged_userns=0; in Docker, as root: --cap-add SYS_ADMIN --security-opt "
    "apparmor=unconfined). Evaluate in a virtual machine or container that has them, or leave humaneval and mbpp out"
)


def _start(job: ProgramTests, limits: ProgramLimits) -> ProgramVerdict:
    """Attempt `run_tests` once; OSError if a protection could not be built, before any model-written code ran."""
    # Known only to this process and the grader: printed after the tests, it proves that they ended.
    nonce = secrets.token_hex(NONCE_BYTES // 2).encode()
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="sftkit-sandbox-") as root,
        tempfile.TemporaryFile() as errors,
        memory.group(limits.total_memory_mib, limits.processes + OWN_PROCESSES) as group,
    ):
        with tempfile.TemporaryFile() as feed:
            data = json.dumps(asdict(job)).encode()
            feed.write(b"%012d" % len(data) + data + nonce)
            feed.seek(0)
            # stdin is a file, not a pipe: a large job would fill a pipe before the launcher reads it.
            process = subprocess.Popen(
                # no user packages, no site, and not the script's folder on the search path
                [python(), "-s", "-S", "-P", "-c", LAUNCH, specification(root, group, limits)],
                stdin=feed,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=_ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        assert process.stdout is not None
        try:
            said, in_time = read_verdict(process.stdout, began + limits.wall_seconds)
        finally:
            kill(process)
        seconds = time.monotonic() - began
        # No model-written code has run before STARTED, so a failure here may be retried.
        if not said.startswith(STARTED):
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines() or ["no message"]
            raise OSError(lines[-1] if in_time else f"no start in {limits.wall_seconds} s")
    passed = said == STARTED + nonce
    reason = "" if passed else failure_reason(said[1:], process.returncode, limits, in_time=in_time)
    return ProgramVerdict(passed, reason, seconds)


def specification(root: str, group: Path | None, limits: ProgramLimits) -> str:
    """Return the launcher's instructions as JSON: where to build, which files of this machine to show, the control
    group to join.
    """
    # Read-only in the sandbox: the interpreter, its standard library, and their shared libraries.
    executable = python()
    prefix = os.path.realpath(sys.base_prefix)
    own = (executable, f"{prefix}/lib", f"{prefix}/lib64") if prefix != "/usr" else (executable,)
    visible = list(dict.fromkeys(path for path in (*LIBRARIES, *own) if os.path.exists(path)))
    return json.dumps({"root": root, "group": group and str(group), "visible": visible, "limits": asdict(limits)})


def python() -> str:
    """Return the interpreter behind a virtual environment, whose packages stay outside."""
    # Python has no public name for it: python/cpython#114476 asks for one.
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def read_verdict(pipe: IO[bytes], deadline: float) -> tuple[bytes, bool]:
    """Return the data that arrives until the pipe closes or exceeds the limit, and whether that was
    before `deadline`.
    """
    said = b""
    # poll instead of select(2), which fails for descriptors from 1024 on: a process with many workers has them.
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
    """End the launcher. On request, it first waits until all processes in its namespaces are gone."""
    for seconds, ending in ((0.1, process.terminate), (GRACE_SECONDS, process.kill)):
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            ending()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def failure_reason(output: bytes, code: int, limits: ProgramLimits, *, in_time: bool) -> str:
    """Return the reason why a program did not pass, for the per-example output."""
    if not in_time:
        return f"no end in {limits.wall_seconds:g} s"
    # The kernel does not report which limit it was: both the group's memory and the hard limit on CPU cause SIGKILL.
    if code in (128 + signal.SIGXCPU, 128 + signal.SIGKILL, -signal.SIGKILL):
        return f"ended by the kernel: more than {limits.cpu_seconds} s of CPU, or no memory left"
    return output[:300].decode(errors="replace") or f"ended before its tests (exit code {code})"


# ---- does it work here? ----------------------------------------------------------------------------------------------

# Without the protection each of these calls would succeed, or fail with another error.
PROBE = """
import ctypes, errno, os, socket, time
libc = ctypes.CDLL(None, use_errno=True)
space = ctypes.create_string_buffer(256)

def holds(what, number, *arguments):
    child = os.fork()
    if child == 0:
        result = libc.syscall(number, *map(ctypes.c_long, arguments))
        refused = result == -1 and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS)
        os._exit(0 if refused else 1)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
        raise SystemError(what + " can be had")

NEW_USERS, NEW_NETWORK, CHILD_ENDS = 0x10000000, 0x40000000, 17
holds("a user namespace (unshare)", {unshare}, NEW_USERS)
holds("a user namespace (clone)", {clone}, NEW_USERS | CHILD_ENDS, 0, 0, 0, 0)
holds("a network namespace", {unshare}, NEW_NETWORK)
holds("clone3", 435, 0, 0)
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET, 38):
    holds(f"a socket of family {{int(family)}}", {socket}, family, socket.SOCK_DGRAM, 0)
holds("io_uring", 425, 1, ctypes.addressof(space))
holds("the kernel's keys (keyctl)", {keyctl}, 0, -3, 1)
holds("the kernel's keys (add_key)", {add_key}, ctypes.addressof(space), ctypes.addressof(space), 0, 0, -3)
holds("ptrace", {ptrace}, 0, 0, 0, 0)
holds("another process's memory", {process_vm_readv}, os.getppid(), 0, 0, 0, 0, 0)
holds("userfaultfd", {userfaultfd}, 1)
holds("bpf", {bpf}, 0, 0, 0)
holds("perf_event_open", {perf_event_open}, ctypes.addressof(space), 0, -1, -1, 0)
holds("personality", {personality}, 0xFFFFFFFF)
if libc.prctl(21, 0, 0, 0, 0) != 2:
    raise SystemError("there is no filter of system calls")

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
    """Return the reason why programs cannot run safely on this machine, with a remedy; None if they can."""
    sandbox = "the sandbox for model-written code"
    if sys.platform != "linux":
        return f"{sandbox} is made of Linux namespaces, this is {sys.platform}; {SANDBOX_ADVICE}"
    # On an unknown machine installing the filter fails with a message before these numbers matter.
    place = MACHINES.get(os.uname().machine, (0, 0))[0]
    numbers = {name: numbers[place] for name, numbers in REFUSED.items()} | {"clone": CLONE[place]}
    try:
        verdict = run_tests(ProgramTests(PROBE.format(processes=ProgramLimits().processes, **numbers), ""))
    except SandboxError as error:
        return str(error)
    return None if verdict.passed else f"{sandbox} does not hold: {verdict.reason}; {SANDBOX_ADVICE}"


def memory_bound() -> str:
    """Describe how the memory of a program is limited on this machine."""
    limits = ProgramLimits()
    if memory.parent() is not None:
        return f"{limits.total_memory_mib} MiB for all processes of a program together"
    processes = limits.processes + 2
    return (
        f"{limits.memory_mib} MiB for each process of a program, which is up to {processes * limits.memory_mib} MiB "
        f"for {processes}: no control group can be made here"
    )
