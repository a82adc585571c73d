"""Build the isolation around a process, then start grader and program inside it; `programs` starts this module.

The isolation has namespaces, a separate root, no privileges, a filter of system calls, and limits. There are four
processes: the launcher stays outside and waits; the first process of the new namespaces (pid 1) waits for the grader,
and when pid 1 ends the kernel ends everything that the program started; the grader runs the tests; the program is a
child of the grader. If a protection cannot be built, the launcher writes an error to stderr before any model-written
code runs.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import struct
import sys
from typing import Any, NoReturn

from sftkit_sandbox import system_calls
from sftkit_sandbox.exchange import Channel, serve
from sftkit_sandbox.grader import grade, program_exit_code

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x04000000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, ATTR_RDONLY, ATTR_NOSUID = 442, -100, 0x8000, 0x1, 0x2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
PR_SET_SECCOMP, SECCOMP_MODE_FILTER, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 22, 2, 24, 38
CAPABILITY_VERSION = 0x20080522
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
INSIDE_ID = 1000
OWN_PROCESSES = 3
"Number of our own processes (launcher, pid 1, grader): they count against the program's user and control group."
BOX = "/box"
"""Folder of the new root that becomes the program's root: the kernel makes no user namespace for a
process in a chroot.
"""

# Called by ctypes, because Python has no unshare before 3.12, nor mount, pivot_root, capset or seccomp.
libc = ctypes.CDLL(None, use_errno=True)


def _check(what: str, result: int) -> None:
    """Raise OSError that names the protection if a call of libc failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Call mount(2). OSError: it failed."""
    names = (source.encode(), target.encode(), kind.encode() if kind else None)
    _check(f"mount {source} on {target}", libc.mount(*names, ctypes.c_ulong(flags), options.encode()))


def make_read_only(path: str, flags: int) -> None:
    """Make a mount read-only (with AT_RECURSIVE, also the mounts below it); needs Linux 5.12."""
    attributes = (ctypes.c_uint64 * 4)(ATTR_RDONLY | ATTR_NOSUID, 0, 0, 0)
    result = libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, attributes, ctypes.sizeof(attributes))
    _check(f"mount_setattr read-only {path}", result)


def new_namespaces() -> bool:
    """Give this process its own mounts, network, processes, IPC and host name; return whether it used a user
    namespace, which root does not need.
    """
    apart = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    if os.geteuid() == 0 and libc.unshare(apart) == 0:
        return False
    uid = os.geteuid()
    gid = os.getegid()
    _check("unshare (user namespace)", libc.unshare(apart | CLONE_NEWUSER))
    # setgroups is denied first: otherwise the kernel lets no unprivileged process write a gid_map.
    for name, line in (("setgroups", "deny"), ("gid_map", f"{INSIDE_ID} {gid} 1"), ("uid_map", f"{INSIDE_ID} {uid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)
    return True


def _show(root: str, path: str) -> None:
    """Make a file, folder or link of this machine visible under `root`, read-only."""
    target = root + path
    if os.path.islink(path):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        # Links stay links (/lib to usr/lib): their targets are shown under their own path.
        os.symlink(os.readlink(path), target)
        return
    os.makedirs(target if os.path.isdir(path) else os.path.dirname(target), exist_ok=True)
    if not os.path.isdir(path) and not os.path.exists(target):
        open(target, "x").close()
    mount(path, target, None, MS_BIND | MS_REC)
    if not path.startswith("/dev/"):
        make_read_only(target, AT_RECURSIVE)


def build_root(root: str, visible: list[str], mib: int) -> None:
    """Build a file system in memory: Python's files read-only, four devices, and /tmp, the only writable folder."""
    # First, otherwise the mounts below would appear in the machine's own namespace too.
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID, "mode=755,size=1m")
    box = root + BOX
    for path in (*visible, *DEVICES):
        _show(box, path)
    os.mkdir(box + "/tmp")
    mount("tmpfs", box + "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,size={mib}m,nr_inodes=4096")
    make_read_only(root, 0)


def enter(root: str) -> None:
    """Make `root` the whole file system: after this call no path leads outside it."""
    os.chdir(root)
    # "." stacks the old root on the new one, and it is removed at once, so no folder is needed for it
    # (pivot_root(2), NOTES).
    _check("pivot_root", libc.pivot_root(b".", b"."))
    _check("umount of the old root", libc.umount2(b".", MNT_DETACH))
    os.chroot(BOX)
    os.chdir("/tmp")


def drop_privileges(user: int | None) -> None:
    """Drop all capabilities for good; root becomes `user`, who owns nothing (None: a user namespace
    already did that).
    """
    # First from the bounding set, while the capability for that exists; 64 is more than any kernel has, and an
    # unknown one fails alone.
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    if user is not None:
        os.setgroups([])
        # Groups before the user: afterwards this process may not change them.
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    # After the change of user, which did not happen inside a user namespace and so dropped nothing.
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    none = (ctypes.c_uint32 * 6)()
    _check("capset", libc.capset(header, none))
    _check("no_new_privs", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    install_filter()


def install_filter() -> None:
    """Put this process and all its descendants under the filter, for good; it needs no_new_privs. OSError: the filter
    cannot be installed.
    """
    code = system_calls.filter_of(os.uname().machine)
    steps = ctypes.create_string_buffer(code, len(code))
    description = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(steps))
    result = libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, description, 0, 0)
    _check("filter of system calls (seccomp)", result)


def limit(limits: dict[str, int]) -> None:
    """Set the resource limits of grader and program: CPU seconds and MiB for each process, number of processes
    in total.
    """
    mib = 2**20
    processes = limits["processes"] + OWN_PROCESSES
    for what, soft, hard in (
        (resource.RLIMIT_CPU, limits["cpu_seconds"], limits["cpu_seconds"] + 1),
        (resource.RLIMIT_AS, limits["memory_mib"] * mib, limits["memory_mib"] * mib),
        (resource.RLIMIT_NPROC, processes, processes),
        (resource.RLIMIT_FSIZE, limits["file_mib"] * mib, limits["file_mib"] * mib),
        (resource.RLIMIT_NOFILE, 64, 64),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        # The machine's own lower limit cannot be raised: setting it would be an error.
        allowed = resource.getrlimit(what)[1]
        if allowed != resource.RLIM_INFINITY:
            soft = min(soft, allowed)
            hard = min(hard, allowed)
        resource.setrlimit(what, (soft, hard))


# ---- the processes ---------------------------------------------------------------------------------------------------


def main() -> None:
    """Build the isolation, fork, wait. The program can import only the standard library, wherever this package
    is installed.
    """
    # The folder of this package, which `programs` appended for this import.
    sys.path.pop()
    sys.dont_write_bytecode = True
    try:
        launch(json.loads(sys.argv.pop()))
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "")
        os.write(2, f"{error.args[-1] if error.args else error} ({name})".encode())
        # not sys.exit: Python's own shutdown is not needed here, and could write to stderr
        os._exit(125)


def launch(spec: dict[str, Any]) -> NoReturn:
    """Run the outside process: build the namespaces and the root, start pid 1, wait for it."""
    # The caller's umask could keep the sandbox's user out of the folders made below; this process ends, so
    # nothing is restored.
    os.umask(0o022)
    # If sftkit is killed, this process must not survive with a program in it.
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Joined before any fork: children are born into the group, so that none escapes the limit.
    if spec["group"]:
        with open(spec["group"] + "/cgroup.procs", "w") as processes:
            processes.write("0")
    # The kernel counts processes by user, so a separate user stops one sandbox from using up another's limit.
    user = 20_000 + os.getpid() % 40_000
    # The new process namespace applies only to children, hence the fork below.
    in_user_namespace = new_namespaces()
    build_root(spec["root"], spec["visible"], spec["limits"]["file_mib"])
    child = os.fork()
    if child == 0:
        first_process(spec, None if in_user_namespace else user)
    # The kernel ends pid 1 when this process is gone for any reason; on a request to end, this process ends it first.
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    _, status = os.waitpid(child, 0)
    os._exit(program_exit_code(status))


def first_process(spec: dict[str, Any], user: int | None) -> NoReturn:
    """Run pid 1 of the namespaces: enter the root, drop privileges, start the grader, end with it."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # In this order: entering needs privileges, and limits come last, because building needs more than a program
    # may use.
    enter(spec["root"])
    drop_privileges(user)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a change of user has cleared it
    # the program has the same user and may not inspect this process or the grader
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    limit(spec["limits"])
    first = os.fork()
    if first == 0:
        grader_and_program()
    # pid 1 inherits every orphan of the program and must wait for them, but it ends with the grader.
    while True:
        pid, status = os.wait()
        if pid == first:
            os._exit(program_exit_code(status))


def grader_and_program() -> NoReturn:
    """Run the grader. The program gets only two pipes, and starts before a test or the nonce is read."""
    # Away from 0 to 2, which become /dev/null: a print of the tests must not be read as a verdict.
    feed = os.dup(0)
    verdict = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    requests, ask = os.pipe()
    answers, answer = os.pipe()
    program = os.fork()
    if program == 0:
        # A separate session, so that a signal to its process group does not reach the grader.
        os.setsid()
        for descriptor in (feed, verdict, ask, answers, null):
            os.close(descriptor)
        try:
            serve(Channel(answer, requests))
        finally:
            os._exit(0)
    os.close(requests)
    os.close(answer)
    grade(program, Channel(ask, answers), feed, verdict)
