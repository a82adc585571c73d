"""Builds the walls of the sandbox around this process and starts the program inside; run by `sandbox`, never imported.

    python -I -S sandbox_launcher.py '{"root": EMPTY_FOLDER, "executable": ..., "visible": [...], "code": ..., ...}'

Three processes: this one stays outside and waits; the first process of the new namespaces (pid 1) waits for the program,
and with its end the kernel ends all that the program started; the program runs `code` with the standard library only.
A wall that cannot be built is an error on stderr, before any code of a model runs.
"""

import ctypes
import errno
import json
import os
import resource
import signal
import sys
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x04000000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, ATTR_RDONLY, ATTR_NOSUID = 442, -100, 0x8000, 0x1, 0x2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
CAPABILITY_VERSION = 0x20080522
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
INSIDE_ID = 1000

libc = ctypes.CDLL(None, use_errno=True)


def check(what: str, result: int) -> None:
    """Raise OSError that names the wall if a call of libc failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """mount(2)."""
    names = (source.encode(), target.encode(), kind.encode() if kind else None)
    check(f"mount {source} on {target}", libc.mount(*names, ctypes.c_ulong(flags), options.encode()))


def make_read_only(path: str, flags: int) -> None:
    """Take the right to write from a mount (with AT_RECURSIVE: and from those below it); needs Linux 5.12."""
    attributes = (ctypes.c_uint64 * 4)(ATTR_RDONLY | ATTR_NOSUID, 0, 0, 0)
    result = libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, attributes, ctypes.sizeof(attributes))
    check(f"mount_setattr read-only {path}", result)


def new_namespaces() -> bool:
    """Own mounts, network, processes, IPC and host name; whether it took a user namespace, which root can do without."""
    apart = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    if os.geteuid() == 0 and libc.unshare(apart) == 0:
        return False
    uid, gid = os.geteuid(), os.getegid()
    check("unshare (user namespace)", libc.unshare(apart | CLONE_NEWUSER))
    for name, line in (("setgroups", "deny"), ("gid_map", f"{INSIDE_ID} {gid} 1"), ("uid_map", f"{INSIDE_ID} {uid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)
    return True


def show(root: str, path: str) -> None:
    """Make a file, folder or link of this machine visible under `root`, read-only."""
    target = root + path
    if os.path.islink(path):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(os.readlink(path), target)
        return
    os.makedirs(target if os.path.isdir(path) else os.path.dirname(target), exist_ok=True)
    if not os.path.isdir(path) and not os.path.exists(target):
        open(target, "x").close()
    mount(path, target, None, MS_BIND | MS_REC)
    if not path.startswith("/dev/"):
        make_read_only(target, AT_RECURSIVE)


def build_root(root: str, visible: list[str], mib: int) -> None:
    """A file system in memory: what Python needs read-only, four devices, and /tmp, the one place to write."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID, "mode=755,size=1m")
    for path in (*visible, *DEVICES):
        show(root, path)
    os.mkdir(root + "/tmp")
    mount("tmpfs", root + "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,size={mib}m,nr_inodes=4096")
    make_read_only(root, 0)


def enter(root: str) -> None:
    """Make `root` the whole file system: nothing outside it can be named any more."""
    os.chdir(root)
    check("pivot_root", libc.pivot_root(b".", b"."))
    check("umount of the old root", libc.umount2(b".", MNT_DETACH))
    os.chdir("/tmp")


def drop_privileges(user: int | None) -> None:
    """No capability is left and none can be won; root becomes `user`, who owns nothing (None: a user namespace did it)."""
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    check("capset", libc.capset(header, none))
    check("no_new_privs", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def limit(limits: dict[str, int]) -> None:
    """Resource limits of the program: seconds of CPU and MiB for each process, processes for all together."""
    mib = 2**20
    for what, most, hard in (
        (resource.RLIMIT_CPU, limits["cpu_seconds"], limits["cpu_seconds"] + 1),
        (resource.RLIMIT_AS, limits["memory_mib"] * mib, limits["memory_mib"] * mib),
        (resource.RLIMIT_NPROC, limits["processes"] + 2, limits["processes"] + 2),  # pid 1 and the launcher count
        (resource.RLIMIT_FSIZE, limits["file_mib"] * mib, limits["file_mib"] * mib),
        (resource.RLIMIT_NOFILE, 64, 64),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        allowed = resource.getrlimit(what)[1]
        if allowed != resource.RLIM_INFINITY:
            most, hard = min(most, allowed), min(hard, allowed)
        resource.setrlimit(what, (most, hard))


def exit_code(status: int) -> int:
    """What a shell would return: 128 + signal for a process that a signal ended."""
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def first_process(spec: dict[str, Any], user: int | None) -> None:
    """pid 1 of the namespaces: lock the door, start the program, end with it."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    enter(spec["root"])
    drop_privileges(user)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a change of user has cleared it
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # the program, of the same user, may not look into this process
    program = os.fork()
    if program == 0:
        os.setsid()
        limit(spec["limits"])
        # The order of sets of strings is fixed: a program passes every time or never.
        environment = {"HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
        os.execve(spec["executable"], [spec["executable"], "-s", "-S", "-P", "-B", "-c", spec["code"]], environment)
    while True:
        pid, status = os.wait()
        if pid == program:
            os._exit(exit_code(status))


def main() -> None:
    """Build, fork, wait."""
    spec = json.loads(sys.argv[1])
    os.umask(0o022)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The limit on processes counts by user, so that a user of its own keeps one sandbox from filling another's.
    user = 20_000 + os.getpid() % 40_000
    in_user_namespace = new_namespaces()
    build_root(spec["root"], spec["visible"], spec["limits"]["file_mib"])
    child = os.fork()
    if child == 0:
        first_process(spec, None if in_user_namespace else user)
    # The kernel ends pid 1 when this process is gone, whatever the reason; asked to end, this process sees to it first.
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    _, status = os.waitpid(child, 0)
    os._exit(exit_code(status))


try:
    main()
except OSError as error:
    name = errno.errorcode.get(error.errno or 0, "")
    os.write(2, f"{error.args[-1] if error.args else error} ({name})".encode())
    os._exit(125)
