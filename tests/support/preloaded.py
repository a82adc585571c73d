"""Start processes with everything imported, for tests of the behaviour of ranks and scripts rather than of
their start.

A fresh Python takes 5 to 10 seconds of CPU to import torch, transformers and datasets. Here one process imports them
and forks the others, also the workers of pytest, each in its own session, with the arguments, environment, standard streams and exit of `python
script.py`, or of several ranks under torchrun. If forking is unsafe once torch is loaded, and with GPUs, each process
starts from scratch.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "", "tests/support", "tests/workers")  # "": labs
PYTHONPATH = os.pathsep.join([*(str(ROOT / name) for name in FOLDERS), *filter(None, [os.environ.get("PYTHONPATH")])])
"For a process that imports the package, or the folders next to the tests, of this checkout."
FORKS = sys.platform == "linux"
PRELOADED = (
    *("torch", "torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo", "torch._functorch.aot_autograd"),
    *("torch._inductor.compile_fx", "torch._inductor.lowering", "torch.distributed.tensor.experimental"),
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen3")),
    *("accelerate", "datasets", "sftkit.train.assemble", "sftkit.engine.blocks", "sftkit.evals.suite"),
    *("sftkit.checkpoint.checkpoint", "sftkit.verify.proof", "sftkit.verify.counts", "sftkit.verify.update"),
    *("sftkit.preflight.analysis", "sftkit.reports.page", "wandb", "wandb.apis.public", "requests"),
)
SOCKET = "SFTKIT_TEST_SERVER"
"Set in workers of pytest to the socket of the process with everything imported."
PASSED_ON = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGHUP, signal.SIGQUIT),
)


# ---- for tests -------------------------------------------------------------------------------------------------------


class Process:
    """A script, or several ranks of one, with the interface of subprocess.Popen. Its id is also that of its session."""

    returncode: int | None = None
    _written: tuple[str, str] | None = None

    def __init__(
        self,
        words: Sequence[str | Path],
        ranks: int = 1,
        env: Mapping[str, str] | None = None,
        terminal: str | None = None,
        *,
        forked: bool = True,
    ) -> None:
        """Args:
        words: words after `python`: a script, -m and a module, or -c and code; then its arguments.
        ranks: number of processes; a single one gets no rank variables.
        env: whole environment; None: that of this process.
        terminal: device that it writes to, and that hangs up on it; None: files.
        forked: whether to fork; False starts a new Python, as CUDA needs: it does not work in a fork of a process
        that has looked for GPUs.
        """
        assert forked or terminal is None
        self._forked = FORKS and forked
        self.words = [str(word) for word in words]
        self._streams = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115
        order = {"words": self.words, "ranks": ranks, "env": dict(os.environ if env is None else env)}
        if self._forked:
            streams = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in self._streams]
            self._server, self.pid = start(
                {**order, "streams": [os.devnull, *([terminal] * 2 if terminal else streams)]}
            )
            return
        out, err = self._streams
        command = [sys.executable, __file__, json.dumps(order)]
        self._own = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=err, start_new_session=True)
        self.pid = self._own.pid

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._code() if self._forked else self._own.poll()
        return self.returncode

    def _code(self) -> int | None:
        """Exit code once the server has sent it."""
        if not select.select([self._server], [], [], 0)[0]:
            return None
        with self._server:
            return int(hear(self._server))

    def communicate(self, timeout: float = 200) -> tuple[str, str]:
        """Wait until it has ended. Returns its stdout and stderr; after the timeout it is killed."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(self.words, timeout, *self._read())
            time.sleep(0.02)
        if self._written is None:
            self._written = self._read()
            for file in self._streams:
                file.close()
        return self._written

    def _read(self) -> tuple[str, str]:
        for file in self._streams:
            file.seek(0)
        return self._streams[0].read(), self._streams[1].read()


def run(
    words: Sequence[str | Path],
    ranks: int = 1,
    env: Mapping[str, str] | None = None,
    timeout: float = 200,
    *,
    forked: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run to the end, as subprocess.run does."""
    process = Process(words, ranks, env, forked=forked)
    out, err = process.communicate(timeout)
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.words, process.returncode, out, err)


@cache
def server() -> str:
    """Socket of the process with everything imported, which all processes of a pytest share; the first use starts it."""
    if SOCKET in os.environ:
        return os.environ[SOCKET]
    folder = tempfile.TemporaryDirectory()
    path = f"{folder.name}/server"
    # Both variables are read once: freed memory is returned at once, so that tests measure memory in use; there
    # is no hub.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000", "HF_ENDPOINT": "http://127.0.0.1:9"}
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        number = listening.fileno()
        command = [sys.executable, __file__, str(number)]
        # In a session of its own, so that Ctrl-C is told by pytest alone.
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.PIPE, pass_fds=[number], start_new_session=True
        )
    assert process.stdin is not None
    stdin = process.stdin

    def close() -> None:
        stdin.close()
        process.wait(60)
        folder.cleanup()

    atexit.register(close)
    return path


def start(order: dict[str, Any]) -> tuple[socket.socket, int]:
    """Let the server fork a process. Returns the connection on which its exit code comes, and its id; the process is
    killed if the connection is closed before.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(server())
    connection.sendall(json.dumps(order).encode() + b"\n")
    return connection, int(hear(connection))


def hear(connection: socket.socket) -> bytes:
    """Read a line, which the other side sends at once."""
    line = b""
    while not line.endswith(b"\n"):
        read = connection.recv(1 << 16 if b"{" in line[:1] else 1)
        assert read, "the other process has ended"
        line += read
    return line


# ---- the server and what it starts -----------------------------------------------------------------------------------


def serve(number: int) -> dict[str, Any]:
    """Import, then fork a process for each connection to the socket of this number. Returns only in the forks, with
    their orders.
    """
    gc.disable()  # until all is imported, which makes hardly anything to give back
    for name in PRELOADED:
        with suppress(ModuleNotFoundError):  # datasets is optional: local files are read without it
            importlib.import_module(name)
    importlib.import_module("sftkit.config.load").read_config(ROOT / "recipes/smoke/base.yaml", ())  # fills its caches
    for _ in importlib.import_module("sftkit.data.demo.builtin").docs("heldout"):  # keeps what it parses
        pass
    folders = [each for each in gc.get_objects() if type(each) is tempfile.TemporaryDirectory]
    for folder in folders:  # wandb's: the first fork that ends would delete those of all
        folder._finalizer.detach()
        atexit.unregister(folder.cleanup)
    gc.enable()
    gc.collect()
    gc.freeze()  # memory shared with the forks stays in place, also when a run has ended
    listening = socket.socket(fileno=number)
    running: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([0, listening, *running.values()], [], [], 0.02 if running else None)
        if 0 in ready:  # its parent has ended
            break
        if listening in ready:
            connection, _ = listening.accept()
            order = json.loads(hear(connection))
            pid = os.fork()
            if pid == 0:
                os.setsid()
                for each in (listening, connection, *running.values()):
                    each.close()
                return order
            running[pid] = connection
            connection.sendall(b"%d\n" % pid)
        for pid, connection in list(running.items()):
            if connection in ready:  # whoever started it has ended
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with running.pop(pid), suppress(OSError):
                    connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    for pid in running:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    for folder in folders:
        folder.cleanup()
    os._exit(0)


def launch(order: dict[str, Any]) -> dict[str, str]:
    """Act as a launcher: fork the ranks, pass signals on, end all if one fails. Returns only in the ranks, with
    their variables.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks, count = {}, order["ranks"]
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            return {name: str(value) for name, value in places.items()} | {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        ranks[pid] = rank

    def send(number: int, _: object = None) -> None:
        for pid in ranks:
            os.kill(pid, number)

    for number in PASSED_ON:
        signal.signal(number, send)
    failed, deadline = False, float("inf")
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            time.sleep(0.02)
        else:
            del ranks[pid]
            if status and not failed:
                failed, deadline = True, time.monotonic() + 60
                send(signal.SIGTERM)
        if time.monotonic() > deadline:
            send(signal.SIGKILL)
    os._exit(1 if failed else 0)


def become(order: dict[str, Any]) -> None:
    """Become the script of the order, with its arguments, environment and streams."""
    if order.get("streams"):
        for number, path in zip((0, 1, 2), order["streams"], strict=True):
            # Open for reading too: the terminal then becomes that of the session, which has none.
            file = os.open(path, os.O_RDONLY if number == 0 else os.O_RDWR | os.O_APPEND)
            os.dup2(file, number)
            os.close(file)
    if "cwd" in order:
        os.chdir(order["cwd"])
    else:  # a worker of pytest has a use for them
        gc.freeze = gc.unfreeze = lambda: None
    places = launch(order) if order["ranks"] > 1 else {}
    os.environ.clear()
    os.environ.update(order["env"] | places)
    sys.path[:] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path] + sys.path[1:]
    words = order["words"]
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, "")
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        exec(compile(words[1], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


def run_to_the_end(order: dict[str, Any]) -> None:
    """Be the script, and end as Python does, but for taking apart all that was imported, which takes seconds of CPU."""
    code: int | None = 0
    try:
        become(order)
    except SystemExit as error:
        if not isinstance(error.code, int | None):
            raise
        code = error.code
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a terminal that is gone, a stream that was closed
            stream.flush()
    os._exit(code or 0)


def work(words: Sequence[str]) -> None:
    """Stand for a worker of pytest, which the server forks with the arguments of Python and the streams of this process."""
    streams = [f"/proc/{os.getpid()}/fd/{number}" for number in range(3)]
    # A plugin that is loaded cannot be rewritten; own_process.py says so too.
    more = f"{os.environ.get('PYTEST_ADDOPTS', '')} -W ignore::pytest.PytestAssertRewriteWarning"
    env = {**os.environ, "PYTEST_ADDOPTS": more.strip()}
    order = {"words": words, "ranks": 1, "env": env, "cwd": os.getcwd(), "streams": streams}
    connection, _ = start(order)
    os._exit(int(hear(connection)) & 255)


if __name__ == "__main__":
    if "-c" in sys.argv[1:]:
        work(sys.argv[sys.argv.index("-c") :])
    elif sys.argv[1].isdigit():
        run_to_the_end(serve(int(sys.argv[1])))
    else:
        become(json.loads(sys.argv[1]))
