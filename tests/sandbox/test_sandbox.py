"""The sandbox: programs pass by passing their tests, everywhere, or are not run at all."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from launched import fill, small_file_system
from sandboxed import change_launcher, run, try_it, works

from sftkit_sandbox import programs
from sftkit_sandbox.programs import ProgramLimits, ProgramTests, SandboxError, run_many


@works
def test_a_program_passes_when_its_tests_do() -> None:
    verdict = run("import math\ndef area(r):\n    return math.pi * r * r", "assert round(area(2), 2) == 12.57", "area")
    assert verdict.passed
    assert verdict.reason == ""
    assert 0 < verdict.seconds < 30


@works
@pytest.mark.parametrize(
    "program",
    [
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\ndef f():\n    return A(1).x",
        "import threading\nfound = []\nt = threading.Thread(target=found.append, args=(1,))\nt.start()\nt.join()\nf = found.pop",
        "from pathlib import Path\nPath('notes').write_text('1')\ndef f():\n    return int(Path('/tmp/notes').read_text())",
        "import asyncio\nasync def one():\n    return 1\ndef f():\n    return asyncio.run(one())",
        "import subprocess, sys\ndef f():\n    return int(subprocess.run([sys.executable, '-c', 'print(1)'], stdout=-1).stdout)",
        "print('x' * 10**8)\ndef f():\n    return 1",
        "def f():\n    return 1\nif __name__ == '__main__':\n    raise SystemExit",
        "é = 1\ndef f():\n    return é",
    ],
    ids=["dataclass", "thread", "files in its folder", "asyncio", "process", "huge output", "main guard", "unicode"],
)
def test_what_honest_programs_do_works(program: str) -> None:
    assert run(program, "assert f() == 1", "f").reason == ""


@works
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("def f():\n    return 2", "AssertionError"),
        ("def f(:", "SyntaxError"),
        ("def g():\n    return 1", "NameError"),
        ("import numpy", "ModuleNotFoundError"),
        ("f = input", "EOFError"),
        ("import sys\nsys.exit(0)", "SystemExit"),
        ("exit()", "SystemExit"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("class Mine(Exception):\n    pass\ndef f():\n    raise Mine('what')", "Mine: what"),
        ("import os\nos._exit(0)", "ended before its tests"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "ended"),
        ("def f():\n    return f()", "RecursionError"),
    ],
)
def test_a_program_that_does_not_reach_the_end_of_its_tests_fails_and_says_why(program: str, reason: str) -> None:
    verdict = run(program, "assert f() == 1", "f")
    assert not verdict.passed
    assert reason in verdict.reason


# ---- the program in its process, the tests in theirs -----------------------------------------------------------------

DATA = """
import copy, math
sent = [1, -1.5, 10**5000, True, None, "é\\ud800", b"a\\xff", (1, [2]), {1: {"a": 2}, (1, 2): 3}, {1, "b"}, frozenset({2}),
        bytearray(b"c"), 1 + 2j, float("inf"), range(1, 9, 2), [], {}, set(), ()]
got = f(copy.deepcopy(sent))
assert got == sent
assert [type(value) for value in got] == [type(value) for value in sent]
assert math.isnan(f(float("nan"))) and str(f(-0.0)) == "-0.0"
"""


@works
def test_plain_data_arrives_as_it_was_sent() -> None:
    assert run("def f(x):\n    return x", DATA, "f").reason == ""


USES = [
    ("def f(x):\n    x.sort()", "x = [2, 1]\nf(x)\nassert x == [1, 2]"),
    ("def f(x):\n    x[0].append(3)\n    x.append(x[1])", "x = [[1], [2]]\nf(x)\nassert x == [[1, 3], [2], [2]] and x[1] is x[2]"),
    ("def f(x):\n    x[1] = x.pop(0)\n    return x", "x = {0: 'a'}\nassert f(x) is x and x == {1: 'a'}"),
    ("def f(x):\n    x.append(x)\n    return x", "x = f([1])\nassert x[1] is x and x[0] == 1"),
    ("def f(x):\n    return x[0] is x[1]", "a = []\nassert f([a, a]) and not f([[], []])"),
    ("def f(x):\n    return (i * i for i in range(x))", "assert list(f(3)) == [0, 1, 4]"),
    ("def f(x):\n    while True:\n        yield x", "values = f(7)\nassert [next(values), next(values)] == [7, 7]"),
    ("def f(x):\n    return {x: 1}.keys()", "assert sorted(f(2)) == [2] and len(f(2)) == 1 and 2 in f(2)"),
    ("import collections\ndef f(x):\n    return collections.Counter(x)", "assert f('aab') == {'a': 2, 'b': 1}"),
    ("import collections\nf = collections.namedtuple('P', 'x y')", "assert f(1, 2) == (1, 2)"),
    ("import enum\nclass E(enum.IntEnum):\n    a = 3\ndef f():\n    return E.a", "assert f() == 3"),
    ("from fractions import Fraction as f", "assert f(1, 2) == 0.5 and abs(f(1, 3) - 1 / 3) < 1e-9"),
    ("from decimal import Decimal\ndef f(x):\n    return Decimal(x)", "assert f('1.5') == 1.5"),
    ("def f(x):\n    return lambda y: x + y", "assert f(1)(y=2) == 3"),
    ("def f(x):\n    raise ValueError('bad')", "try:\n    f(1)\nexcept ValueError as e:\n    assert str(e) == 'bad'\nelse:\n    raise SystemExit"),
    ("class Mine(KeyError):\n    pass\ndef f(x):\n    raise Mine(x)", "try:\n    f(1)\nexcept LookupError:\n    pass\nelse:\n    raise SystemExit"),
    ("class f:\n    def __init__(self, x):\n        self.x, self.next = x, None", "a = f(1)\na.next = f(2)\nassert a.next.x == 2 and a.next is a.next"),
    ("f = [1, 2]", "assert f == [1, 2]"),
    ("def f(x):\n    return str(x)", "import ast\nassert ast.literal_eval(f([1, (2,)])) == [1, (2,)]"),
]  # fmt: skip


@works
def test_what_tests_do_with_a_program_in_another_process_is_what_they_do_with_one_in_theirs() -> None:
    names = [f"f{number}" for number in range(len(USES))]
    sources, tests = zip(
        *([re.sub(r"\bf\b", name, code) for code in use] for name, use in zip(names, USES, strict=True)), strict=True
    )
    here: dict[str, object] = {"__name__": "solution"}
    exec("\n".join(sources), here)
    exec("\n".join(tests), here)
    assert run("\n".join(sources), "\n".join(tests), *names).reason == ""


@works
def test_the_standard_library_is_all_there_is_to_import() -> None:
    imports = "import sys\nf = [path for path in sys.path if 'packages' in path or 'src' in path]"
    assert run(imports, "assert f == []", "f").passed


@works
def test_what_cannot_be_sent_is_said() -> None:
    assert "the tests give the program a function" in run("def f(x):\n    return x", "f(lambda: 1)", "f").reason


@works
def test_what_the_tests_are_given_is_not_the_programs() -> None:
    given = "import math\ndef helper(x):\n    return math.floor(x)\ndef f(x):\n    pass\n"
    job = ProgramTests(
        given + "def f(x):\n    return 1\ndef helper(x):\n    return 1", "assert f(2) == helper(2.5)", ("f",), given
    )
    assert "AssertionError" in programs.run_tests(job).reason
    assert programs.run_tests(ProgramTests(given + "def f(x):\n    return x", job.tests, ("f",), given)).passed
    assert "NameError" in programs.run_tests(ProgramTests("x = 1", job.tests, ("f",), given)).reason


# ---- what surrounds it -----------------------------------------------------------------------------------------------


@works
def test_verdicts_come_in_the_order_of_the_jobs_and_folders_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    jobs = [
        ProgramTests(f"import time\ntime.sleep({0.2 - i / 20})\nx = {i}", "assert x in (0, 3)", ("x",))
        for i in range(4)
    ]
    assert [verdict.passed for verdict in run_many(jobs, workers=2)] == [True, False, False, True]
    assert list(tmp_path.iterdir()) == []
    assert run_many([]) == []


@works
def test_sets_of_strings_have_the_same_order_every_time() -> None:
    shown = "raise ValueError(str(list({'a', 'b', 'c', 'd', 'e', 'f'})))"
    assert len({run(shown).reason for _ in range(3)}) == 1


@works
def test_strict_masks_low_limits_and_many_open_files_do_not_matter() -> None:
    script = (
        "import os, resource\n"
        "os.umask(0o077)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (1500, 1500))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))\n"
        "held = [os.dup(0) for _ in range(1100)]\n"
        "from sftkit_sandbox.programs import ProgramTests, run_tests\n"
        "print(run_tests(ProgramTests('x = 1', 'assert x == 1', ('x',))))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "passed=True" in done.stdout, done.stderr


@pytest.mark.slow
@works
def test_a_bomb_next_to_it_does_not_disturb_a_program() -> None:
    bomb = ProgramTests(
        "import os, time\ntry:\n    while True:\n        os.fork()\nexcept OSError:\n    time.sleep(60)", ""
    )
    fine = ProgramTests("import os\nif os.fork() == 0:\n    os._exit(0)\nos.wait()", "")
    verdicts = run_many([bomb, fine, fine, fine, fine], workers=2, limits=ProgramLimits(wall_seconds=3))
    assert [verdict.passed for verdict in verdicts] == [False, True, True, True, True]


# ---- where it does not work ------------------------------------------------------------------------------------------


def test_where_there_are_no_namespaces_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "unshare (user namespace): Operation not permitted (EPERM)"
    monkeypatch.setattr(programs, "LAUNCH", f"import os\nos.write(2, b'{said}')\n")
    missing = try_it()
    assert missing is not None
    assert "unshare (user namespace): Operation not permitted" in missing
    assert "user.max_user_namespaces" in missing
    assert "virtual machine" in missing
    with pytest.raises(SandboxError, match="Operation not permitted"):
        run("")


def test_a_full_disk_is_told_as_one_with_the_folder_to_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_file_system(tmp_path / "disk", "64k") as disk:
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        fill(disk, leave=0)
        with pytest.raises(SandboxError, match=f"No space left on device; free some in {disk}") as caught:
            run("")
        monkeypatch.undo()
    assert "namespaces" not in str(caught.value)


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs.sys, "platform", "darwin")
    assert "darwin" in (try_it() or "")


@works
def test_a_machine_whose_system_calls_are_not_known_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    change_launcher(monkeypatch, tmp_path, ("isolation", "os.uname().machine", "'riscv64'"))
    assert "no list of system calls for riscv64, only for x86_64, aarch64" in (try_it() or "")


@works
@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv") or not Path("/usr/bin/python3.11").exists(),
    reason="needs root, who can become another user, and a Python that the other user can read",
)
def test_it_works_for_users_without_privileges() -> None:
    source = Path(programs.PACKAGE_FOLDER) / "sftkit_sandbox"
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(source, Path(folder) / source.name)
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        script = (
            "from sftkit_sandbox.programs import ProgramTests, check_sandbox, run_tests\n"
            "passed = run_tests(ProgramTests('x = 1', 'assert x == 1', ('x',))).passed\n"
            "print(check_sandbox(), passed, run_tests(ProgramTests('open(\"/etc/passwd\")', '')).reason)"
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
