"""Open a run directory: the ranks are one run, an earlier run makes room, and what is about to start is written down."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import NoReturn

from sftkit.errors import ConfigError
from sftkit.runtime import lock
from sftkit.runtime.consistency import agree, identity, neighbours
from sftkit.runtime.files import replace_text, set_aside
from sftkit.runtime.hardware import environment
from sftkit.runtime.launcher import check_launcher
from sftkit.runtime.rundir import CONFIG, ENVIRONMENT
from sftkit.runtime.signals import end_process
from sftkit.runtime.start import Runtime
from sftkit.runtime.status import RunStatus


def open_run(run_dir: str, resume: str | None, recipe: str, rt: Runtime) -> Path:
    """Create the directory and write config.yaml, environment.json and run_status.json; from here on a signal is written
    there. An earlier run in it is renamed, never overwritten, unless this one resumes it.

    Raises:
        ConfigError: the ranks have not the same recipe and versions, or another run is at work in the directory.
    """
    agree(rt, identity(recipe))
    folder = Path(run_dir)
    if problem := rt.from_main(lambda: _lock(folder, rt)):
        raise ConfigError(problem)
    status = rt.open_status(folder)
    status.neighbours = neighbours(rt)
    if rt.is_main:
        if resume is None and (folder / CONFIG).exists():
            rt.say(
                f"{folder} holds an earlier run: it is now {set_aside(folder)} (train.resume=auto would continue it)"
            )
        folder.mkdir(parents=True, exist_ok=True)
        status.begin(os.environ)
        replace_text(folder / CONFIG, recipe)
        replace_text(folder / ENVIRONMENT, json.dumps(environment(rt.device, rt.world_size), indent=1))
        if warning := check_launcher(os.environ):
            rt.say(warning)
    rt.barrier()
    rt.stopping.end_at_once(partial(_end_of_signal, status))
    return folder


def _lock(folder: Path, rt: Runtime) -> str | None:
    """Take the lock until the run ends. A problem is a value, because the other ranks wait for one."""
    try:
        rt.at_end.callback(lock.take(folder).release)
    except ConfigError as error:
        return str(error)
    except OSError as error:
        return f"run.dir={folder}: {error}"
    return None


def _end_of_signal(status: RunStatus, number: int) -> NoReturn:
    try:
        status.end_of_signal(number)
    finally:
        end_process(128 + number)
