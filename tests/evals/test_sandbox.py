"""The sandbox: programs pass by passing their tests and by nothing else, and attacks find nothing and leave nothing."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sftkit.errors import ConfigError
from sftkit.evals import sandbox
from sftkit.evals.sandbox import Limits, run, run_many

MISSING = sandbox.check_sandbox()
works = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
SHORT = Limits(cpu_seconds=1, wall_seconds=20)
AWAKE = Limits(wall_seconds=1.5)
"For programs that sleep: nothing else ends them."


@works
def test_a_program_passes_when_its_tests_do() -> None:
    verdict = run("import math\ndef area(r):\n    return math.pi * r * r", "assert round(area(2), 2) == 12.57")
    assert verdict.passed
    assert verdict.why == ""
    assert 0 < verdict.seconds < 30


@works
@pytest.mark.parametrize(
    "program",
    [
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\ndef f():\n    return A(1).x",
        "import threading\nfound = []\nt = threading.Thread(target=found.append, args=(1,))\nt.start()\nt.join()\nf = found.pop",
        "from pathlib import Path\nPath('notes').write_text('1')\ndef f():\n    return int(Path('/tmp/notes').read_text())",
        "print('x' * 10**8)\ndef f():\n    return 1",
        "def f():\n    return 1\nif __name__ == '__main__':\n    raise SystemExit",
        "é = 1\ndef f():\n    return é",
    ],
    ids=["dataclass", "thread", "files in its folder", "huge output", "main guard", "unicode"],
)
def test_what_honest_programs_do_works(program: str) -> None:
    assert run(program, "assert f() == 1").why == ""


@works
@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("def f():\n    return 2", "AssertionError"),
        ("def f(:", "SyntaxError"),
        ("def g():\n    return 1", "NameError"),
        ("import numpy", "ModuleNotFoundError"),
        ("f = input", "EOFError"),
        ("import sys\nsys.exit(0)", "SystemExit"),
        ("exit()", "SystemExit"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import os\nos._exit(0)", "ended before its tests did"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "ended"),
        ("def f():\n    return f()", "RecursionError"),
    ],
)
def test_a_program_that_does_not_reach_the_end_of_its_tests_fails_and_says_why(program: str, why: str) -> None:
    verdict = run(program, "assert f() == 1")
    assert not verdict.passed
    assert why in verdict.why


@works
@pytest.mark.parametrize(
    "program",
    [
        "import builtins\nbuiltins.exec = builtins.compile = builtins.print = lambda *a, **k: None",
        "import builtins\nbuiltins.AssertionError = builtins.BaseException = ValueError",
        "import os\nos.read = os.write = lambda *a: b''",
        "import os\nfor fd in range(64):\n    try:\n        os.write(fd, b'S' + b'0' * 32)\n    except OSError:\n        pass",
        "import os\nfor fd in range(64):\n    try:\n        os.write(fd, b'S' * 10**7)\n    except OSError:\n        pass",
        "import os\nos.write(4, os.read(3, 32))\nos._exit(0)",
        "import os\nos.write(1, os.read(0, 32))\nos._exit(0)",
        "import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit(0)",
        "print('PASS' * 100, flush=True)\nimport os\nos._exit(0)",
        "x = '''",
        "if False:",
    ],
)
def test_programs_that_guess_exit_or_change_builtins_do_not_pass(program: str) -> None:
    assert not run(program, "assert False").passed


# ---- attacks ---------------------------------------------------------------------------------------------------------


@works
def test_files_of_the_machine_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "canary").write_text("secret")
    for path in (tmp_path / "canary", __file__, "/etc/passwd", "/../etc/passwd", "/proc/1/environ", "/../proc/mounts"):
        assert "FileNotFoundError" in run(f"open({str(path)!r}).read()", "").why, path
    home = run(f"import os\nraise ValueError([len(files) for _, _, files in os.walk({str(Path.home())!r})][:1])", "")
    assert home.why in ("ValueError: []", "ValueError: [0]")


@works
def test_nothing_can_be_written_outside_its_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "canary", Path("/canary"), Path("/usr/lib/canary"), Path(sys.base_prefix) / "lib/canary"):
        assert "Error" in run(f"open({str(path)!r}, 'w').write('x')", "").why, path
        assert not path.exists()
    verdict = run(f"import ctypes, os\nf = ctypes.CDLL(None).system(b'touch {tmp_path}/canary')", "assert f == 0")
    assert not verdict.passed
    assert not (tmp_path / "canary").exists()


@works
def test_the_network_is_out_of_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        port = server.getsockname()[1]
        assert "OSError" in run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)", "").why
        with pytest.raises(TimeoutError):
            server.accept()


@works
def test_the_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary")
    assert "canary" not in run("import os\nraise ValueError(dict(os.environ))", "").why
    assert run("import os", "assert set(os.environ) <= {'HOME', 'TMPDIR', 'LANG', 'PYTHONHASHSEED', 'LC_CTYPE'}").passed


@works
def test_privileges_are_gone() -> None:
    assert run("import os", "assert os.getuid() != 0 and os.geteuid() != 0").passed
    mount = "import ctypes\nf = ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, b'')"
    assert run(mount, "assert f == -1").passed
    assert "PermissionError" in run("import os\nos.mkdir('a')\nos.chroot('a')", "").why
    assert "PermissionError" in run("import os\nos.setuid(0)", "").why
    assert run("import ctypes\nf = ctypes.CDLL(None).ptrace(16, 1, 0, 0)", "assert f == -1").passed


@works
@pytest.mark.parametrize(
    ("program", "why"),
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
def test_bombs_are_bounded(program: str, why: str) -> None:
    verdict = run(program, "", SHORT)
    assert not verdict.passed
    assert why in verdict.why


@works
def test_a_program_that_sleeps_is_ended() -> None:
    began = time.monotonic()
    assert run("import time\ntime.sleep(60)", "", AWAKE).why == "no end in 1.5 s"
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


@works
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
    run(daemon + ending, "", AWAKE)
    assert processes_named(name) == []


@works
def test_strict_masks_low_limits_and_many_open_files_do_not_matter() -> None:
    script = (
        "import os, resource\n"
        "os.umask(0o077)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (1500, 1500))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))\n"
        "held = [os.dup(0) for _ in range(1100)]\n"
        "from sftkit.evals.sandbox import run\n"
        "print(run('x = 1', 'assert x == 1'))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "passed=True" in done.stdout, done.stderr


@works
def test_a_bomb_next_to_it_does_not_disturb_a_program() -> None:
    bomb = ("import os, time\ntry:\n    while True:\n        os.fork()\nexcept OSError:\n    time.sleep(60)", "")
    fine = ("import os\nif os.fork() == 0:\n    os._exit(0)\nos.wait()", "")
    verdicts = run_many([bomb, fine, fine, fine, fine], workers=2, limits=Limits(wall_seconds=3))
    assert [verdict.passed for verdict in verdicts] == [False, True, True, True, True]


# ---- what surrounds it -----------------------------------------------------------------------------------------------


@works
def test_verdicts_come_in_the_order_of_the_jobs_and_folders_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    jobs = [(f"import time\ntime.sleep({0.2 - i / 20})\nx = {i}", "assert x in (0, 3)") for i in range(4)]
    assert [verdict.passed for verdict in run_many(jobs, workers=2)] == [True, False, False, True]
    assert list(tmp_path.iterdir()) == []
    assert run_many([]) == []


@works
def test_sets_of_strings_have_the_same_order_every_time() -> None:
    shown = "raise ValueError(list({'a', 'b', 'c', 'd', 'e', 'f'}))"
    assert len({run(shown, "").why for _ in range(3)}) == 1


@pytest.fixture
def unchecked() -> Iterator[None]:
    sandbox.check_sandbox.cache_clear()
    yield
    sandbox.check_sandbox.cache_clear()


@pytest.mark.usefixtures("unchecked")
def test_where_there_are_no_namespaces_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launcher = tmp_path / "launcher.py"
    launcher.write_text("import os\nos.write(2, b'unshare (user namespace): Operation not permitted (EPERM)')\n")
    monkeypatch.setattr(sandbox, "LAUNCHER", launcher)
    missing = sandbox.check_sandbox()
    assert missing is not None
    assert "unshare (user namespace): Operation not permitted" in missing
    assert "user.max_user_namespaces" in missing
    assert "virtual machine" in missing
    with pytest.raises(ConfigError, match="Operation not permitted"):
        run("", "")


@pytest.mark.usefixtures("unchecked")
def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    assert "darwin" in (sandbox.check_sandbox() or "")


@works
@pytest.mark.usefixtures("unchecked")
def test_a_sandbox_with_a_hole_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    walls = {
        "of the network": (" | CLONE_NEWNET", ""),
        "of the processes": ("resource.RLIMIT_NPROC", "resource.RLIMIT_RSS"),
    }
    for wall, (line, without) in walls.items():
        source = sandbox.LAUNCHER.read_text()
        assert line in source
        launcher = tmp_path / "launcher.py"
        launcher.write_text(source.replace(line, without))
        with monkeypatch.context() as patch:
            patch.setattr(sandbox, "LAUNCHER", launcher)
            assert "does not hold" in (sandbox.check_sandbox() or ""), wall
        sandbox.check_sandbox.cache_clear()


@works
@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv") or not Path("/usr/bin/python3.11").exists(),
    reason="needs root, who can become another user, and a Python that the other user can read",
)
def test_it_works_for_users_without_privileges() -> None:
    source = Path(sandbox.__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "sftkit"
        (package / "evals").mkdir(parents=True)
        for name in ("__init__.py", "errors.py", "evals/__init__.py", "evals/sandbox.py", "evals/sandbox_launcher.py"):
            shutil.copy(source / name, package / name)
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        script = (
            "from sftkit.evals.sandbox import check_sandbox, run\n"
            "print(check_sandbox(), run('x = 1', 'assert x == 1').passed, run('open(\"/etc/passwd\")', '').why)"
        )
        unprivileged = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        done = subprocess.run(
            [*unprivileged, "/usr/bin/python3.11", "-c", script],
            env={"PYTHONPATH": folder},
            cwd="/",
            capture_output=True,
            text=True,
        )
    assert done.stdout.startswith("None True FileNotFoundError"), done.stdout + done.stderr
