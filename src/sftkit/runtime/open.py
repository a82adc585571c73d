"""Open a run directory: the ranks are one run and the only one in it, and what is about to start is written down.

Where an earlier run is, that is a folder of its own until all that can be refused has been checked (runtime/attempt.py).
"""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import NoReturn

from sftkit.errors import ConfigError
from sftkit.runtime import attempt, lock
from sftkit.runtime.consistency import agree, identity, neighbours
from sftkit.runtime.files import replace_text
from sftkit.runtime.hardware import environment
from sftkit.runtime.launcher import check_launcher
from sftkit.runtime.rundir import CONFIG, ENVIRONMENT
from sftkit.runtime.signals import end_process
from sftkit.runtime.start import Runtime


def open_run(run_dir: str, resume: str | None, recipe: str, rt: Runtime) -> Path:
    """Lock the directory and write config.yaml, environment.json and run_status.json; from here on a signal is written
    there. Every rank calls it.

    Returns:
        the folder to write to until `take_place`: the directory, or one inside it where an earlier run is.

    Raises:
        ConfigError: the ranks have not the same recipe and versions, or another run is at work in the directory.
    """
    agree(rt, identity(recipe))
    place = rt.from_main(lambda: _lock(Path(run_dir), resume, rt))
    if isinstance(place, str):
        raise ConfigError(place)
    status = rt.open_status(place)
    status.open(place)
    status.neighbours = neighbours(rt)
    if rt.is_main:
        status.begin(os.environ)
        replace_text(place / CONFIG, recipe)
        replace_text(place / ENVIRONMENT, json.dumps(environment(rt.device, rt.world_size), indent=1))
        if warning := check_launcher(os.environ):
            rt.say(warning)
    rt.barrier()
    rt.stopping.end_at_once(partial(_end_of_signal, rt))
    return place


def take_place(run_dir: str, resume: str | None, rt: Runtime) -> Path:
    """Make what this start has written the run of the directory: model, data and what is resumed have been checked. An
    earlier run is renamed, never overwritten, unless this one resumes it. Every rank calls it.

    Raises:
        ConfigError: the directory cannot be renamed.
    """
    folder, status = Path(run_dir), rt.status
    assert status is not None
    rt.barrier()  # nobody writes to the old place any more
    if status.run_dir != folder and (problem := rt.from_main(lambda: _take_place(folder, resume, rt))):
        raise ConfigError(problem)
    status.open(folder)
    return folder


def _lock(folder: Path, resume: str | None, rt: Runtime) -> Path | str:
    """Where to write, until the run ends. A problem is a text, because the other ranks wait for one."""
    try:
        rt.lock = lock.take(folder)
        return attempt.place_of(folder, resume is not None)
    except ConfigError as error:
        return str(error)
    except OSError as error:
        return f"run.dir={folder}: {error}"


def _take_place(folder: Path, resume: str | None, rt: Runtime) -> str | None:
    """Returns what went wrong: the other ranks wait for an answer."""
    assert rt.lock is not None
    try:
        if resume is not None:
            attempt.go_on(folder)
            return None
        rt.lock, rt.replaced = attempt.replace(folder, rt.lock)
    except OSError as error:
        return f"run.dir={folder}: the earlier run in it cannot make room: {error}"
    rt.say(f"{folder} holds an earlier run: it is now {rt.replaced} (train.resume=auto would continue it)")
    return None


def _end_of_signal(rt: Runtime, number: int) -> NoReturn:
    try:
        rt.say(f"\n{signal.Signals(number).name}: ended before the first step")
        if rt.status is not None:
            rt.status.end_of_signal(number)
        rt.withdraw(refused=False)
    finally:
        end_process(128 + number)
