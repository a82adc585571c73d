"""Builds the walls of the sandbox around this process, then starts judge and program inside; started by `programs`.

Four processes: this one stays outside and waits; the first process of the new namespaces (pid 1) waits for the judge,
and with its end the kernel ends all that the program started; the judge runs the tests; the program is a child of the
judge. A wall that cannot be built is an error on stderr, before any code of a model runs.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from typing import Any, NoReturn

from sftkit.evals.sandbox import walls
from sftkit.evals.sandbox.channel import Channel
from sftkit.evals.sandbox.judge import judge, program_exit_code
from sftkit.evals.sandbox.program import serve
from sftkit.evals.sandbox.walls import libc

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4


def main() -> None:
    """Build the walls, fork, wait. The program can import the standard library alone, wherever sftkit lies."""
    # the folder of sftkit, which `programs` has appended for this import
    sys.path.pop()
    sys.dont_write_bytecode = True
    try:
        launch(json.loads(sys.argv.pop()))
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "")
        os.write(2, f"{error.args[-1] if error.args else error} ({name})".encode())
        # not sys.exit: nothing of Python's own shutdown is needed here, or may write to stderr
        os._exit(125)


def launch(spec: dict[str, Any]) -> NoReturn:
    """Run the process outside: build the namespaces and the root, start pid 1, wait for it."""
    # The caller's umask may keep the sandbox's user out of the folders made below; this process ends, so nothing
    # is put back.
    os.umask(0o022)
    # If sftkit is killed, this process must not stay behind with a program in it.
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Joined before any fork: children are born into the group, so that none is outside the limit.
    if spec["group"]:
        with open(spec["group"] + "/cgroup.procs", "w") as processes:
            processes.write("0")
    # The limit on processes counts by user, so that a user of its own keeps one sandbox from filling another's.
    user = 20_000 + os.getpid() % 40_000
    # The new namespace of processes holds for children alone, hence the fork below.
    in_user_namespace = walls.new_namespaces()
    walls.build_root(spec["root"], spec["visible"], spec["limits"]["file_mib"])
    child = os.fork()
    if child == 0:
        first_process(spec, None if in_user_namespace else user)
    # The kernel ends pid 1 when this process is gone, whatever the reason; asked to end, this process sees to it first.
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    _, status = os.waitpid(child, 0)
    os._exit(program_exit_code(status))


def first_process(spec: dict[str, Any], user: int | None) -> NoReturn:
    """Run pid 1 of the namespaces: enter the root, drop privileges, start the judge, end with it."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # In this order: entering needs privileges, and limits come last, since building takes more than a program may.
    walls.enter(spec["root"])
    walls.drop_privileges(user)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a change of user has cleared it
    # the program, of the same user, may not look into this process and the judge
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    walls.limit(spec["limits"])
    first = os.fork()
    if first == 0:
        judge_and_program()
    # pid 1 inherits every orphan of the program; it has to wait for them, but ends with the judge alone.
    while True:
        pid, status = os.wait()
        if pid == first:
            os._exit(program_exit_code(status))


def judge_and_program() -> NoReturn:
    """Run the judge. The program, which gets two pipes and nothing else, is started before a
    test or the nonce is read."""
    # Away from 0 to 2, which become /dev/null: a print of the tests must not be read as a verdict.
    feed, verdict = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    requests, ask = os.pipe()
    answers, answer = os.pipe()
    program = os.fork()
    if program == 0:
        # A session of its own, so that a signal to its process group does not reach the judge.
        os.setsid()
        for descriptor in (feed, verdict, ask, answers, null):
            os.close(descriptor)
        try:
            serve(Channel(answer, requests))
        finally:
            os._exit(0)
    os.close(requests)
    os.close(answer)
    judge(program, Channel(ask, answers), feed, verdict)
