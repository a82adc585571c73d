"""Whether the sandbox holds on this machine: a program inside it tries each wall before any code of a model runs."""

from __future__ import annotations

import os
import sys
from functools import cache

from sftkit.errors import ConfigError
from sftkit.evals.sandbox import memory
from sftkit.evals.sandbox.programs import SANDBOX_ADVICE, ProgramLimits, ProgramTests, run_tests
from sftkit.evals.sandbox.system_calls import CLONE, MACHINES, REFUSED

# A wall that does not stand is a sandbox that is not there. Each call would succeed, or fail otherwise,
# without its wall.
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
    """Return why programs cannot be run safely on this machine, with what to do; None if they can."""
    if sys.platform != "linux":
        return (
            f"the sandbox for model-written code is made of Linux namespaces, this is {sys.platform}; {SANDBOX_ADVICE}"
        )
    # On a machine that is not known the filter itself refuses, with a message, before these numbers matter.
    place = MACHINES.get(os.uname().machine, (0, 0))[0]
    numbers = {name: numbers[place] for name, numbers in REFUSED.items()} | {"clone": CLONE[place]}
    try:
        verdict = run_tests(ProgramTests(PROBE.format(processes=ProgramLimits().processes, **numbers), ""))
    except ConfigError as error:
        return str(error)
    return (
        None
        if verdict.passed
        else f"the sandbox for model-written code does not hold: {verdict.reason}; {SANDBOX_ADVICE}"
    )


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
