"""A seccomp filter of the system calls that are forbidden in the sandbox: a program in the kernel's classic BPF."""

from __future__ import annotations

import errno
import struct

REFUSED = {
    # other processes and their contents
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    # namespaces, mounts, roots, files by handle
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "mknod": (133, None),
    "mknodat": (259, 33),
    # keys
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # large parts of the kernel that such programs do not need
    "socket": (41, 198),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "io_setup": (206, 0),
    "io_destroy": (207, 1),
    "io_getevents": (208, 4),
    "io_submit": (209, 2),
    "io_cancel": (210, 3),
    "io_pgetevents": (333, 292),
    "seccomp": (317, 277),
    "splice": (275, 76),
    "tee": (276, 77),
    "vmsplice": (278, 75),
    "remap_file_pages": (216, 234),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "get_mempolicy": (239, 236),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmdt": (67, 197),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "mq_timedsend": (242, 182),
    "mq_timedreceive": (243, 183),
    "mq_notify": (244, 184),
    "mq_getsetattr": (245, 185),
    # the machine
    "personality": (135, 92),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42),
    "_sysctl": (156, None),
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
    "modify_ldt": (154, None),
    "ioperm": (173, None),
    "iopl": (172, None),
}
"Name -> its number on x86_64 and on aarch64, which lacks some. The answer is EPERM."

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"Machine -> its index in REFUSED, and the kernel's name for it (AUDIT_ARCH_*)."

CLONE, SOCKETPAIR = (56, 220), (53, 199)
FIRST_NEW = 424
"""Calls from this number on, the same on all machines (io_uring, clone3, ...), fail as on an older kernel, except
those in NEW.
"""
NEW = {"close_range": 436, "faccessat2": 439}
X32 = 0x40000000
"Bit that marks numbers of x86_64's second, 32-bit table."

NEW_NAMESPACES = 0x7E020000
"CLONE_NEW* flags of clone: mounts, control groups, host name, IPC, users, processes, network."
AF_UNIX = 1

LOAD, EQUALS, AT_LEAST, HAS_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
CALL_NUMBER, MACHINE, FIRST_ARGUMENT = 0, 4, 16
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000


def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return one instruction; a comparison also has a number of instructions to skip."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


def answered(number: int, answer: int) -> bytes:
    """Return the instructions that give this answer to the call of this number."""
    return step(EQUALS, number, 0, 1) + step(RETURN, answer)


def filter_of(machine: str) -> bytes:
    """Return the filter for a machine. OSError: its call numbers are unknown."""
    if machine not in MACHINES:
        raise OSError(errno.ENOSYS, f"no list of system calls for {machine}, only for {', '.join(MACHINES)}")
    place, kernels_name = MACHINES[machine]
    no = REFUSE | errno.EPERM
    unknown = REFUSE | errno.ENOSYS
    # Another machine's numbers end the process; the 32-bit table and new calls do not exist; then come the
    # rejected calls.
    steps = [step(LOAD, MACHINE), step(EQUALS, kernels_name, 1, 0), step(RETURN, KILL), step(LOAD, CALL_NUMBER)]
    steps += [step(AT_LEAST, X32, 0, 1), step(RETURN, unknown)]
    steps += [answered(number, ALLOW) for number in NEW.values()]
    steps += [step(AT_LEAST, FIRST_NEW, 0, 1), step(RETURN, unknown)]
    steps += [answered(number, no) for number in (numbers[place] for numbers in REFUSED.values()) if number is not None]
    # two calls are rejected only for some values of their first argument
    for numbers, comparison, value, if_true, if_false in (
        (CLONE, HAS_BITS, NEW_NAMESPACES, no, ALLOW),
        (SOCKETPAIR, EQUALS, AF_UNIX, ALLOW, no),
    ):
        steps += [step(EQUALS, numbers[place], 0, 4), step(LOAD, FIRST_ARGUMENT), step(comparison, value, 0, 1)]
        steps += [step(RETURN, if_true), step(RETURN, if_false)]
    return b"".join((*steps, step(RETURN, ALLOW)))
