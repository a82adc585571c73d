"""The lock of a run directory: only one live run writes there; the error of a second one names the first. No torch.

The kernel holds it (flock), so it ends with the process, however that ends. Its content names the holder, for the
message, and for file systems whose flock does not reach other machines.
"""

import errno
import fcntl
import functools
import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from sftkit.errors import ConfigError, RunDirError, hint
from sftkit.rundir import files, names

_NO_FLOCK = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_LOCAL = ("apfs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs")
"File systems that one machine alone writes, so that its kernel knows every lock."
_SAME_START = 2.0
"Seconds by which two readings of a process's start may differ, on systems that count it from the time of the boot."


@dataclass(frozen=True)
class Holder:
    """The process that a lock's record names."""

    host: str
    machine: str
    "the boot of its kernel: containers of a machine share it"
    processes: str
    "the pid namespace, in which its id has a meaning"
    pid: int
    after_boot: float
    "when the process started, as of process_start"
    since: float
    "when it took the lock, Unix time"

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {since}"

    def is_here(self) -> bool:
        """Return whether its id is of this boot and pid namespace, so that this process could see it."""
        return (self.machine, self.processes) == pid_scope()[1:]

    def lives(self) -> bool:
        """Return whether the process still runs, and its id is not a later one's. Only for a holder that `is_here`."""
        try:
            same = abs(process_start(self.pid) - self.after_boot) < _SAME_START
            return same and psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


class RunLock:
    """A lock that this process holds; forks of it, which data workers are, do not keep it."""

    made_folder = False
    "whether the directory was made with the lock, so that it may go with it"

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        "of the lock file; to be set when the directory gets another name"
        self._descriptor = descriptor
        _held.append(self)

    def release(self) -> None:
        """Remove the lock file and release the lock. Does nothing the second time, and in a fork."""
        if self._descriptor < 0:
            return
        with suppress(OSError):
            if self._is_at(self.path):
                self.path.unlink()
        self.close()

    def close(self) -> None:
        """Close the descriptor; the file stays."""
        os.close(self._descriptor)
        self._descriptor = -1
        _held.remove(self)

    def lost(self, run_dir: Path) -> str | None:
        """Return what has become of the run's directory, and what to do; None: its lock is still there."""
        path = run_dir / names.LOCK
        try:
            if self._is_at(path):
                return None
        except OSError:  # a disk that stumbles
            return None
        link = Path(f"/proc/self/fd/{self._descriptor}")
        place = os.readlink(link) if link.is_symlink() else ""
        resume = "resume with train.resume=auto"
        if place and not place.endswith(" (deleted)"):
            if Path(place).parent == run_dir.resolve():
                return f"its lock is now {place}. What it saved is in the directory: {resume}"
            return (
                f"its folder is now {Path(place).parent}. What it saved is there: give the folder its name back or "
                f"take another run.dir, and {resume}"
            )
        if not run_dir.is_dir():
            if place:
                return "its folder was deleted. What it saved went with the folder: start it again"
            return f"its folder was renamed or deleted. Give the folder its name back, and {resume}, or start it again"
        holder = read_holder(path)
        taken = f", and {holder} has taken the directory" if holder else ""
        return f"{path} was removed{taken}. What it saved may still be in the directory: {resume}"

    def check(self, run_dir: Path) -> None:
        """Check that the directory is still this run's, before anything is written there.

        Raises:
            RunDirError: it is not; with where it went.
        """
        if (found := self.lost(run_dir)) is not None:
            raise RunDirError(
                f"run.dir={run_dir} is no longer this run's, and another start may write there now, so the run has "
                f"ended: {found}"
            )

    def _is_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(path.stat(), os.fstat(self._descriptor))
        except (FileNotFoundError, NotADirectoryError):
            return False


_held: list[RunLock] = []


def _leave_to_parent() -> None:
    for lock in list(_held):
        lock.close()


# A flock belongs to the open file, which a fork shares: a data worker that outlives this process would keep the lock.
os.register_at_fork(after_in_child=_leave_to_parent)


def release_all() -> None:
    """Release every lock of this process, which is about to end without cleaning up."""
    for lock in list(_held):
        lock.release()


def take_lock(run_dir: Path) -> RunLock:
    """Take the lock of a run directory, which is made if need be. That of a process that is gone is taken over.

    Raises:
        ConfigError: another run holds it, or may: with its process, host and time, and what to do. Or the file system
            has no flock.
    """
    path = run_dir / names.LOCK
    made = False
    # Until the file that is locked is the one at the path: the holder before may remove or rename it in between.
    while True:
        made |= not run_dir.exists()
        files.make_folder(run_dir)
        try:
            # Readable by other users, for the message that names the process at work.
            lock = RunLock(path, os.open(path, os.O_RDWR | os.O_CREAT, 0o666))
        except FileNotFoundError:  # the directory was renamed by the holder that has just ended
            continue
        try:
            _flock(lock._descriptor, path)
            # The holder before may have removed or renamed the file between open and flock: then this lock guards
            # nothing.
            if lock._is_at(path):
                _check_earlier(read_holder(path), path)
                ours = Holder(*pid_scope(), os.getpid(), process_start(os.getpid()), time.time())
                record = json.dumps(asdict(ours)).encode()
                # Written in place: a file that is renamed to this path would not be the locked one.
                os.pwrite(lock._descriptor, record, 0)
                os.ftruncate(lock._descriptor, len(record))
                os.fsync(lock._descriptor)
                lock.made_folder = made
                return lock
        except BaseException:
            lock.close()
            raise
        lock.close()


def read_holder(path: Path) -> Holder | None:
    """Return the process that a lock file names; None: nothing there can be read."""
    with suppress(TypeError):
        return Holder(**files.read_object(path))
    return None


def at_work(run_dir: Path) -> bool | None:
    """Return whether a process that holds the lock of a run directory lives; None: it cannot be seen from here."""
    path = run_dir / names.LOCK
    if not path.exists():
        return False
    holder = read_holder(path)
    return holder.lives() if holder is not None and holder.is_here() else None


def refuse_at_work(run_dir: Path) -> None:
    """Reject a directory in which a run is seen at work. `take_lock` would reject it too, later and for certain.

    Raises:
        ConfigError: a run is at work there.
    """
    if at_work(run_dir):
        raise ConfigError(_lock_message(run_dir / names.LOCK, read_holder(run_dir / names.LOCK)))


def process_start(pid: int) -> float:
    """Return the seconds from the boot of this machine to the start of a process, whatever the clock is set to; on
    systems without /proc, Unix time.

    Raises:
        psutil.NoSuchProcess: it is gone.
    """
    try:
        # The name of the program, in brackets, may hold anything; the start is the 20th field after it (proc(5)).
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return psutil.Process(pid).create_time()


def process_age() -> float:
    """Return the seconds since this process was started, whatever the clock is set to."""
    # Both since the boot on Linux, where suspended time counts too; elsewhere both are Unix time.
    now = time.clock_gettime(time.CLOCK_BOOTTIME) if Path("/proc/self/stat").exists() else time.time()
    return max(now - process_start(os.getpid()), 0.0)


@functools.cache
def boot_id() -> str:
    """Return what names this boot of the machine's kernel."""
    return files.read_text(Path("/proc/sys/kernel/random/boot_id")).strip() or socket.gethostname()


def pid_scope() -> tuple[str, str, str]:
    """Return where a process id has a meaning: host, boot of its kernel, pid namespace. Host names alone may be the
    same on several machines."""
    namespace = Path("/proc/self/ns/pid")
    return socket.gethostname(), boot_id(), os.readlink(namespace) if namespace.exists() else ""


def _flock(descriptor: int, path: Path) -> None:
    """Take the kernel's lock.

    Raises:
        ConfigError: another process holds it, or the file system has no such lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(_lock_message(path, read_holder(path))) from None
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
        raise ConfigError(hint("no flock", folder=path.parent, reason=error.strerror)) from None


def _check_earlier(holder: Holder | None, path: Path) -> None:
    """Reject a lock that the kernel gave to this process, but whose recorded holder may be at work on another machine.

    Raises:
        ConfigError: with the holder and what to do.
    """
    if holder is None or holder.machine == boot_id():
        return
    if holder.host == socket.gethostname() and holder.since < psutil.boot_time():
        return  # this machine was started again since
    # Another machine's holder is gone for certain only where no other machine can write to this disk.
    if not _is_local(path):
        raise ConfigError(_lock_message(path, holder, sure=False))


def _is_local(path: Path) -> bool:
    """Return whether no other machine writes to the file system of a path, as far as is known."""
    # The innermost mount that holds it has the longest path.
    folder = path.resolve()
    found = ("", "")
    for part in psutil.disk_partitions(all=True):
        if folder.is_relative_to(part.mountpoint) and len(part.mountpoint) >= len(found[0]):
            found = (part.mountpoint, part.fstype)
    return found[1] in _LOCAL


def _lock_message(path: Path, holder: Holder | None, *, sure: bool = True) -> str:
    who = "another process" if holder is None else str(holder)
    if sure:
        return hint("run at work", folder=path.parent, who=who)
    return hint("run that may be at work", folder=path.parent, who=who, path=path)
