"""Programs that attack the sandbox: they find nothing, leave nothing, and cannot say that they have passed."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import pytest
from sandboxed import AWAKE, SHORT, change_launcher, run, try_it, works

from sftkit_sandbox import memory, programs, system_calls
from sftkit_sandbox.exchange import Channel
from sftkit_sandbox.grader import Program
from sftkit_sandbox.programs import ProgramLimits, ProgramTests, run_many

pytestmark = works

# ---- the verdict -----------------------------------------------------------------------------------------------------

FORGERIES = {
    "reads all descriptors and writes what it found to all": """
import os
for source in range(64):
    try: found = os.pread(source, 10**6, 0)[-32:]
    except OSError: continue
    for to in range(64):
        try: os.write(to, found)
        except OSError: pass
os._exit(0)""",
    "calls what the frames hold": """
import sys
frame = sys._getframe()
while frame:
    held = {**frame.f_globals, **frame.f_locals}
    if "take" in held and "verdict" in held:
        held["write"](held["verdict"], held["take"](32))
        held["leave"](0)
    frame = frame.f_back""",
    "says on its pipe that all is done": """
import json, os
for said in ([True, None], [True, 5], [False, ["SystemExit", "SystemExit", ""]]):
    text = json.dumps({"values": said, "containers": []}).encode()
    for to in range(64):
        try: os.write(to, len(text).to_bytes(8, "big") + text)
        except OSError: pass""",
    "says more than is read": "import os\nfor to in range(64):\n    try:\n        os.write(to, b'\\xff' * 10**6)\n    except OSError:\n        pass",
    "writes the first word of a verdict": "import os\nfor to in range(64):\n    try:\n        os.write(to, b'S' + b'0' * 32)\n    except OSError:\n        pass",
    "raises an error whose text looks like one": "raise ValueError('S' + '0' * 32)",
    "exits": "import os\nos._exit(0)",
    "exits at the exit": "import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit(0)",
    "exits later, in a thread": "import os, threading, time\nthreading.Thread(target=lambda: (time.sleep(0.05), os._exit(0))).start()",
    "prints": "print('PASS' * 100, flush=True)\nimport os\nos._exit(0)",
    "changes builtins": "import builtins\nbuiltins.exec = builtins.compile = builtins.print = builtins.len = lambda *a, **k: None",
    "changes errors": "import builtins\nbuiltins.AssertionError = builtins.BaseException = ValueError",
    "changes modules": "import os, sys\nos.read = os.write = lambda *a: b''\nfor name in list(sys.modules):\n    sys.modules[name] = None",
    "swallows the tests": "x = '''",
    "guards the tests": "if False:",
    "has a process that writes when it is gone": """
import os, time
if os.fork() == 0:
    time.sleep(0.2)
    for to in range(64):
        try: os.write(to, b"S" + b"0" * 32)
        except OSError: pass
os._exit(0)""",
    "kills all others": "import os\nfor process in (os.getppid(), 1, -1):\n    try:\n        os.kill(process, 9)\n    except OSError:\n        pass",
    "stops its grader": "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)",
    "interrupts its grader": "import os, signal\nos.kill(os.getppid(), signal.SIGINT)",
}


def test_no_program_says_that_it_has_passed() -> None:
    jobs = [
        ProgramTests(f"def f():\n    return 1\n{program}", "assert f() == 2", ("f",)) for program in FORGERIES.values()
    ]
    verdicts = dict(zip(FORGERIES, run_many(jobs, limits=ProgramLimits(wall_seconds=3)), strict=True))
    assert [name for name, verdict in verdicts.items() if verdict.passed] == []


LIARS = {
    "equal to everything": "class All:\n    __eq__ = lambda *a: True\n    __ne__ = lambda *a: False\n    __hash__ = lambda s: 0\ndef f(x):\n    return All()",
    "an int that is equal to everything": "class All(int):\n    __eq__ = lambda *a: True\n    __ne__ = lambda *a: False\n    __hash__ = int.__hash__\ndef f(x):\n    return All(1)",
    "a list that is equal to everything": "class All(list):\n    __eq__ = lambda *a: True\n    __contains__ = lambda *a: True\ndef f(x):\n    return All()",
    "a class that claims to be another": "class All:\n    __class__ = property(lambda s: int)\n    __eq__ = lambda *a: True\ndef f(x):\n    return All()",
    "ordered and near everything": "class All:\n    __lt__ = __gt__ = __le__ = __ge__ = lambda *a: True\n    __sub__ = __rsub__ = __abs__ = lambda *a: 0\ndef f(x):\n    return All()",
    "a function in place of abs": "abs = set = sorted = lambda *a: 0\nround = all = any = lambda *a: True\ndef f(x):\n    return 1",
    "other builtins": "import builtins\nbuiltins.abs = builtins.set = lambda *a: 0\nbuiltins.all = lambda *a: True\ndef f(x):\n    return 1",
    "other classes' comparisons": "import ctypes\ndef f(x):\n    import fractions, math\n    math.isclose = lambda *a: True\n    return 1",
    "arguments that it changes": "def f(x):\n    for it in (x, *x):\n        getattr(it, 'clear', int)()\n    return 1",
}  # fmt: skip


TRIED = """
believed = []
for text in ("f([7]) == 5", "not f([7]) != 5", "f([7]) in ([5], 5)", "abs(f([7]) - 5) < 0.5", "f([7]) > 4"):
    try:
        believed += [text] * bool(eval(text))
    except TypeError:
        pass
assert not believed, believed
"""


def test_no_value_of_a_program_lies_about_what_it_is_equal_to() -> None:
    verdicts = run_many([ProgramTests(program, TRIED, ("f",)) for program in LIARS.values()])
    assert {name: verdict.reason for name, verdict in zip(LIARS, verdicts, strict=True) if not verdict.passed} == {}


NOT_DATA = [
    *(b"", b"{", b"[]", b"null", b"\x80\x04N.", b'{"values": []}', b'{"values": [true], "containers": []}'),
    *(b'{"values": [true, %s], "containers": []}' % value for value in (
        *(b'["os.system", "true"]', b'["object", "a"]', b'["object", {}]', b'["container", 9]', b'["int", 5]', b"[]"),
        *(b'["range", "a"]', b'["Decimal", ["tuple", 1]]', b'["frozenset", ["container", 0]]', b"[" * 10**5 + b"]" * 10**5),
    )),
    *(b'{"values": [true, 1], "containers": %s}' % value for value in (b'[["object"]]', b'[["dict", [1]]]', b'[["set", [["container", 0]]]]')),
    *(b'{"values": [false, %s], "containers": []}' % value for value in (b"1", b'["eval", "eval", "1"]', b'["\\u0000", "ValueError", ""]', b'["a"]')),
]  # fmt: skip


class Ended(Exception):
    pass


@pytest.mark.parametrize("answer", NOT_DATA, ids=range(len(NOT_DATA)))
def test_an_answer_that_is_not_data_is_the_end(answer: bytes) -> None:
    def end(reason: str) -> NoReturn:
        raise Ended(reason)

    (of, to), (asked, ask) = os.pipe(), os.pipe()
    threading.Thread(target=Channel(to, asked).send, args=(answer,)).start()
    with pytest.raises(Ended, match="its answer is not data"):
        Program(Channel(ask, of), end).ask("call", [1])
    for descriptor in (of, to, asked, ask):
        os.close(descriptor)


@pytest.mark.parametrize(
    ("said", "reason"),
    [("b'\\0' * 7 + b'\\1' + b'{'", "its answer is not data"), ("b'\\1' * 8", "its answer is too long")],
)
def test_no_test_takes_such_an_end_for_an_error(said: str, reason: str) -> None:
    program = (
        "import os, sys\ndef f():\n    frame = sys._getframe()\n"
        "    while 'channel' not in frame.f_locals:\n        frame = frame.f_back\n"
        f"    os.write(frame.f_locals['channel'].to, {said})\n"
    )
    assert run(program, "try:\n    f()\nexcept BaseException:\n    pass", "f").reason.startswith(reason)


def test_the_process_of_a_program_holds_no_test_and_no_descriptor_but_its_pipes() -> None:
    held = "import os, stat\nkinds = []\nfor number in range(64):\n    try:\n        kinds.append(stat.S_IFMT(os.fstat(number).st_mode))\n    except OSError:\n        pass"
    assert (
        run(held, "import stat\nassert kinds == [stat.S_IFCHR] * 3 + [stat.S_IFIFO] * 2, kinds", "kinds").reason == ""
    )
    search = (
        "import gc, sys\ndef f(x):\n    frames, frame = [], sys._getframe()\n    while frame:\n        frames.append(frame)\n"
        "        frame = frame.f_back\n    every = [*gc.get_objects(), *(frame.f_locals for frame in frames)]\n"
        "    return [str(it)[:90] for it in every if any(word + str(9) in str(it) for word in ('CANARY',))]"
    )
    verdict = run(search, "expected = 'CANARY9'\nassert f(1) == [], 'found'", "f")
    assert verdict.reason == ""


def test_its_parent_cannot_be_read_or_traced() -> None:
    program = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nhere = ctypes.create_string_buffer(16)\n"
        "part = (ctypes.c_size_t * 2)(ctypes.addressof(here), 16)\ndef f(name, *given):\n"
        "    return getattr(libc, name)(*given), ctypes.get_errno()\n"
        "def read(pid):\n    return f('process_vm_readv', pid, part, 1, part, 1, 0)\n"
        "parent = os.getppid()\n"
    )
    tests = (
        "import errno\nno = (-1, errno.EPERM)\n"
        "assert [f('ptrace', what, pid, 0, 0) for what in (16, 0x4206) for pid in (parent, 1)] == [no] * 4\n"
        "assert [read(pid) for pid in (parent, 1)] == [no] * 2\n"
        "assert f('syscall', 434, parent, 0) == f('syscall', 438, 3, 0, 0) == (-1, errno.ENOSYS)\n"
    )
    assert run(program, tests, "f", "read", "parent").reason == ""
    for path in (f"/proc/{{{'os.getppid()'}}}/mem", "/proc/1/fd/1", "/proc/self/mem"):
        assert "FileNotFoundError" in run(f"import os\nopen(f'{path}', 'rb')").reason


# ---- files, network, privileges, bombs -------------------------------------------------------------------------------


def test_files_of_the_machine_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "canary").write_text("secret")
    for path in (tmp_path / "canary", __file__, "/etc/passwd", "/../etc/passwd", "/proc/1/environ", "/../proc/mounts"):
        assert "FileNotFoundError" in run(f"open({str(path)!r}).read()").reason, path
    home = run(f"import os\nraise ValueError([len(files) for _, _, files in os.walk({str(Path.home())!r})][:1])")
    assert home.reason in ("ValueError: []", "ValueError: [0]")


def test_nothing_can_be_written_outside_its_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "canary", Path("/canary"), Path("/usr/lib/canary"), Path(sys.base_prefix) / "lib/canary"):
        assert "Error" in run(f"open({str(path)!r}, 'w').write('x')").reason, path
        assert not path.exists()
    verdict = run(f"import ctypes, os\nf = ctypes.CDLL(None).system(b'touch {tmp_path}/canary')", "assert f == 0", "f")
    assert not verdict.passed
    assert not (tmp_path / "canary").exists()


def test_the_network_is_out_of_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        port = server.getsockname()[1]
        assert "PermissionError" in run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)").reason
        with pytest.raises(TimeoutError):
            server.accept()


def test_the_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary")
    assert "canary" not in run("import os\nraise ValueError(str(dict(os.environ)))").reason
    names = "{'HOME', 'TMPDIR', 'LANG', 'PYTHONHASHSEED', 'LC_CTYPE'}"
    assert run("import os\nnames = set(os.environ)", f"assert names <= {names}", "names").passed


def test_privileges_are_gone() -> None:
    assert run(
        "import os\nf = os.getresuid() + os.getresgid() + tuple(os.getgroups())", "assert 0 not in f", "f"
    ).passed
    mount = "import ctypes\nf = ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, b'')"
    assert run(mount, "assert f == -1", "f").passed
    assert "PermissionError" in run("import os\nos.mkdir('a')\nos.chroot('a')").reason
    assert "PermissionError" in run("import os\nos.setuid(0)").reason


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os\nwhile True:\n    os.fork()", "BlockingIOError"),
        (
            "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(9,)).start()",
            "RuntimeError",
        ),
        ("held = [0] * 10**9", "MemoryError"),
        ("held = []\nwhile True:\n    held.append(bytearray(2**20))", "MemoryError"),
        ("while True:\n    pass", "of CPU"),
        ("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True:\n    pass", "of CPU"),
        ("with open('big', 'wb') as file:\n    while True:\n        file.write(bytes(2**20))", "OSError"),
        ("i = 0\nwhile True:\n    open(str(i), 'wb').write(bytes(2**20))\n    i += 1", "OSError"),
    ],
    ids=["forks", "threads", "memory", "memory bit by bit", "loop", "loop that ignores it", "file", "files"],
)
def test_bombs_are_bounded(program: str, reason: str) -> None:
    patient = ProgramLimits(cpu_seconds=20, wall_seconds=60)  # a busy machine takes a second of CPU to fill the memory
    verdict = run(program, limits=SHORT if reason == "of CPU" else patient)
    assert not verdict.passed
    assert reason in verdict.reason


def test_a_program_that_sleeps_is_ended() -> None:
    began = time.monotonic()
    assert run("import time\ntime.sleep(60)", limits=AWAKE).reason == "no end in 1.5 s"
    assert time.monotonic() - began < 30


def processes_named(name: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "comm").read_text().strip() == name:
                found.append(entry.name)
        except OSError:
            continue
    return found


@pytest.mark.parametrize("ending", ["pass", "time.sleep(60)", "os._exit(0)", "os.kill(1, 9)\nos.kill(-1, 9)"])
def test_no_process_is_left_behind(ending: str) -> None:
    name = f"left{os.getpid()}"
    daemon = (
        "import ctypes, os, signal, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        f"    ctypes.CDLL(None).prctl(15, b'{name}', 0, 0, 0)\n"
        "    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\n"
        "    for number in (1, 2, 15):\n"
        "        signal.signal(number, signal.SIG_IGN)\n"
        "    time.sleep(60)\n"
        "    os._exit(0)\n"
        "time.sleep(0.3)\n"
    )
    run(daemon + ending, limits=AWAKE)
    assert processes_named(name) == []


# ---- system calls ----------------------------------------------------------------------------------------------------

RAW_SOCKET = """
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
made = libc.unshare(0x10000000 | 0x40000000)
f = [made]
try:
    f.append(socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).fileno())
except OSError as error:
    f.append(type(error).__name__)
"""
CALL = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nspace = ctypes.create_string_buffer(256)\ndef f(number, *given):\n    made = libc.syscall(number, *map(ctypes.c_long, given))\n    return made, ctypes.get_errno()\nspace = ctypes.addressof(space)\n"


def test_no_nested_user_namespace_gives_capabilities_or_raw_sockets() -> None:
    assert run(RAW_SOCKET, "assert f == [-1, 'PermissionError'], f", "f").reason == ""


WITHOUT_FILTER = [("isolation", "    install_filter()\n", "")]
WITHOUT_BOX = [("isolation", 'BOX = "/box"', 'BOX = ""'), ("isolation", "    os.chroot(BOX)\n", "")]
WITHOUT_NETWORK = [("isolation", " | CLONE_NEWNET", "")]
WITHOUT_LIMIT = [("isolation", "resource.RLIMIT_NPROC", "resource.RLIMIT_RSS")]


@pytest.mark.parametrize("missing", [WITHOUT_FILTER, WITHOUT_BOX], ids=["filter", "root"])
def test_without_one_of_its_two_protections_no_user_namespace_is_nested(
    missing: list[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    change_launcher(monkeypatch, tmp_path, *missing)
    assert run(RAW_SOCKET, "assert f[0] == -1, f", "f").reason == ""


@pytest.mark.parametrize("missing", [WITHOUT_FILTER, WITHOUT_NETWORK], ids=["filter", "namespace"])
def test_without_one_of_its_two_protections_the_network_is_out_of_reach(
    missing: list[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    change_launcher(monkeypatch, tmp_path, *missing)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "Error" in run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)").reason
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        (WITHOUT_FILTER + WITHOUT_BOX, "a user namespace (unshare) can be had"),
        (WITHOUT_FILTER, "clone3 can be had"),
        ([("system_calls", '"keyctl": (250', '"keyctl": (9999')], "the kernel's keys (keyctl) can be had"),
        ([("system_calls", "NEW = {", 'NEW = {"io_uring_setup": 425, ')], "io_uring can be had"),
        (WITHOUT_LIMIT, "the number of processes is not limited"),
    ],
    ids=["user namespaces", "filter", "keyctl", "io_uring", "processes"],
)
def test_a_sandbox_with_a_hole_is_not_used(
    missing: list[tuple[str, str, str]], reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    change_launcher(monkeypatch, tmp_path, *missing)
    assert f"does not hold: SystemError: {reason}" in (try_it() or "")


def test_system_calls_are_refused_by_number() -> None:
    place = system_calls.MACHINES[os.uname().machine][0]
    refused = [numbers[place] for numbers in system_calls.REFUSED.values() if numbers[place] is not None]
    tests = (
        "import errno\n"
        f"assert {{f(number, 0, 0, 0, 0, 0, 0) for number in {refused}}} == {{(-1, errno.EPERM)}}\n"
        "assert f(425, 1, space) == f(435, space, 88) == f(462, 0) == f(9999, 0) == (-1, errno.ENOSYS)\n"
        f"made = [f({system_calls.CLONE[place]}, flag | 17, 0, 0, 0, 0) for flag in "
        "(1 << 17, 1 << 25, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30)]\n"
        "assert set(made) == {(-1, errno.EPERM)}\n"
    )
    assert run(CALL, tests, "f", "space").reason == ""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="other machines have one table of system calls")
def test_the_other_two_tables_of_system_calls_are_closed() -> None:
    assert run(CALL, "import errno\nassert f(0x40000000 + 39) == (-1, errno.ENOSYS)", "f").reason == ""
    getpid_32 = b"\xb8\x14\x00\x00\x00\xcd\x80\xc3"  # mov eax, 20; int 0x80; ret
    program = (
        "import ctypes, mmap\ncode = mmap.mmap(-1, 4096, prot=7)\n"
        f"code.write({getpid_32!r})\n"
        "f = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()\n"
    )
    assert run(program).reason == "ended before its tests (exit code 159)"


HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}


@pytest.mark.parametrize("machine", HEADERS)
def test_the_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    if not Path(HEADERS[machine]).exists():
        pytest.skip("needs the kernel's headers")
    pattern = re.compile(r"#define __NR(?:3264)?_(\w+)\s+(\d+)")
    theirs = {name: int(number) for name, number in pattern.findall(Path(HEADERS[machine]).read_text())}
    place = system_calls.MACHINES[machine][0]
    ours = system_calls.REFUSED | {"clone": system_calls.CLONE, "socketpair": system_calls.SOCKETPAIR}
    assert {name: numbers[place] for name, numbers in ours.items()} == {name: theirs.get(name) for name in ours}
    assert system_calls.NEW.items() <= theirs.items()


# ---- memory of all processes together --------------------------------------------------------------------------------

MANY = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        held = bytearray(b"1") * (64 * 2**20)
        time.sleep(1)
        os._exit(0)
f = sum(os.wait()[1] != 0 for _ in range(4))
"""
has_groups = pytest.mark.skipif(memory.parent() is None, reason="no control group can be made here")


@pytest.mark.slow
@has_groups
def test_processes_that_are_small_each_and_large_together_are_ended_and_no_control_group_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, make = list[Path](), memory.make
    monkeypatch.setattr(memory, "make", lambda *args, **_: made.append(make(*args)) or made[-1])
    assert run(MANY, "assert f == 0", "f", limits=ProgramLimits(total_memory_mib=600)).reason == ""
    assert not run(MANY, "assert f == 0", "f", limits=ProgramLimits(total_memory_mib=160)).passed
    run("import time\ntime.sleep(60)", limits=AWAKE)
    assert len(made) == 3
    assert not [folder for folder in made if folder.exists()]


def test_where_no_control_group_can_be_made_programs_run_and_the_results_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if memory.parent() is not None:
        assert programs.memory_bound() == "1024 MiB for all processes of a program together"
    monkeypatch.setattr(memory, "candidates", lambda: [Path("/proc")])
    memory.parent.cache_clear()
    try:
        assert programs.memory_bound().startswith(
            "512 MiB for each process of a program, which is up to 5120 MiB for 10: no"
        )
        assert run("x = 1").passed
    finally:
        memory.parent.cache_clear()


def test_the_nearest_group_that_divides_its_memory_is_the_one(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/self/cgroup": "1:name=systemd:/\n0::/user.slice/app.slice/a.scope\n",
        "/proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n",
        "/sys/fs/cgroup/cgroup.subtree_control": "cpu memory pids\n",
        "/sys/fs/cgroup/user.slice/cgroup.subtree_control": "memory\n",
        "/sys/fs/cgroup/user.slice/app.slice/cgroup.subtree_control": "cpu memory pids\n",
        "/sys/fs/cgroup/user.slice/app.slice/a.scope/cgroup.subtree_control": "\n",
    }
    monkeypatch.setattr(memory, "_text_of", lambda path: files.get(str(path), ""))
    assert list(memory.candidates()) == [Path("/sys/fs/cgroup/user.slice/app.slice")]
    files["/sys/fs/cgroup/user.slice/app.slice/cgroup.subtree_control"] = "cpu\n"
    assert list(memory.candidates()) == [Path("/sys/fs/cgroup/user.slice")]


def test_a_group_without_limits_on_memory_is_not_taken() -> None:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    plain = [
        Path(mount) for _, mount, kind, *_ in mounts if kind == "cgroup2" and not memory.divides_memory(Path(mount))
    ]
    for folder in (*plain, Path("/proc/self")):
        assert not memory.works(folder)
        assert not list(folder.glob("sftkit-sandbox-*"))
