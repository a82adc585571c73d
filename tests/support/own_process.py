"""Run tests marked own_process in a pytest of their own: a failing kernel breaks the CUDA context, and with it every
later test of its process.
"""

from __future__ import annotations

import os
import sys

import preloaded
import pytest

STARTED_BY = "SFTKIT_TEST_STARTED_BY"
"Set in such a process to the id of its parent."
TIMEOUT_SECONDS = 600


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the test by its id in a new process; it fails with that process's output, and is skipped if the process
    skipped it.
    """
    if pyfuncitem.get_closest_marker("own_process") is None or STARTED_BY in os.environ:
        return None
    test = f"{pyfuncitem.config.rootpath}/{pyfuncitem.nodeid}"
    command = ["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-m", "own_process", test]
    command += ["--show-capture=stderr"]  # torch's log of an Inductor run would push the error out of the shown output
    # A fork has torch and pytest's plugins loaded at once, but no CUDA.
    forked = "torch" in sys.modules and pyfuncitem.get_closest_marker("gpu") is None
    command += ["-W", "ignore::pytest.PytestAssertRewriteWarning"] * forked
    env = {**os.environ, STARTED_BY: str(os.getpid())}
    done = preloaded.run(command, env=env, timeout=TIMEOUT_SECONDS, forked=forked)
    if done.returncode:
        output = (done.stdout + done.stderr)[-6000:]
        pytest.fail(f"its process ended with {done.returncode}:\n{output}", pytrace=False)
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    if skipped:
        pytest.skip(skipped[0])
    return True
