"""Open a run directory: check that the ranks are one run and the only one in it, and write down what is about to start.

What it writes is in a folder of its own until this start has done a step (rundir/attempt.py). Random states are here
too: a resumed run draws the numbers that the uninterrupted one would have drawn.
"""

import hashlib
import json
import os
import random
import secrets
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from sftkit.config.terminal import print_text
from sftkit.config.yaml import flattened
from sftkit.errors import ConfigError
from sftkit.rundir import attempt, files, lock, names
from sftkit.rundir.status import RunStatus, describe_error, is_full_disk, read_status, where_it_was
from sftkit.runtime import hardware, launcher, signals, start


def assert_same_on_ranks(rt: start.Runtime, what: dict[str, str]) -> None:
    """Check that named values are the same on all ranks; every rank must call it.

    Args:
        what: name -> this rank's value.

    Raises:
        ConfigError: on every rank, with each name that differs and who has which value.
    """
    if differences := differing_values(rt.gathered(what)):
        text = "the ranks of this run differ; start all of them from the same checkout and recipe:"
        raise ConfigError("\n  ".join((text, *differences)))


def differing_values(values: list[dict[str, str]]) -> list[str]:
    """Return a line for each name whose value is not the same on all ranks.

    Args:
        values: of each rank, name -> value.
    """
    lines = []
    for name in sorted(set().union(*values)):
        ranks: dict[str, list[str]] = {}
        for rank, of_rank in enumerate(values):
            ranks.setdefault(of_rank.get(name, "not there"), []).append(str(rank))
        if len(ranks) > 1:
            who = (f"{value} on rank{'s' * (len(of) > 1)} {', '.join(of)}" for value, of in ranks.items())
            lines.append(f"{name}: {'; '.join(who)}")
    return lines


def neighbours(rt: start.Runtime) -> dict[int, int]:
    """Return rank -> process id of the ranks on this machine and in this container, which this process can see; every
    rank must call it."""
    scope = lock.pid_scope()
    return {rank: pid for rank, (place, pid) in enumerate(rt.gathered((scope, os.getpid()))) if place == scope}


def recipe_identity(recipe: str) -> dict[str, str]:
    """Return what must be the same on all ranks before data is read: the resolved recipe, by key, and the versions."""
    # The versions too: another torch would compute another loss, and only on some ranks.
    ours = hardware.installed_version("sftkit") or "not installed"  # run from its sources
    settings = {key: repr(value) for key, value in flattened(yaml.safe_load(recipe))}
    return {"sftkit": ours, "torch": torch.__version__, **settings}


def data_identity(lengths: np.ndarray) -> dict[str, str]:
    """Return what the plan of every epoch follows from: number and lengths of the training documents.

    Args:
        lengths: int64 [D], positions of each document.
    """
    # Lengths alone, as plans follow from them; all tokens would be gigabytes to read at each start.
    digest = hashlib.sha256(np.ascontiguousarray(lengths).tobytes()).hexdigest()
    return {"training documents": f"{len(lengths):,} (sha256 of their lengths {digest[:16]})"}


def random_state() -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's generators, in types
    that torch.load(weights_only=True) takes."""
    # numpy's keys are a tensor, since weights_only rejects its arrays. Only the GPU that this rank computes on: the
    # others belong to other ranks.
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore the generators from what `random_state` returned, bit for bit."""
    random.setstate(state["python"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def random_key(*numbers: int | str) -> int:
    """Return 64 bits that depend on all numbers and names; the same on every rank and after a resume."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest())


def open_run(run_dir: str, resume: str | None, recipe: str, rt: start.Runtime) -> Path:
    """Lock the directory and write config.yaml, environment.json and run_status.json; from here on a signal is written
    there. Every rank calls it.

    Returns:
        the folder to write to before `claim_run_dir`, inside the directory.

    Raises:
        ConfigError: the ranks have not the same recipe and versions, another run is at work in the directory, or no run
            can begin there.
    """
    assert_same_on_ranks(rt, recipe_identity(recipe))
    # One lock for all ranks: not every file system shows a lock to other machines, but all can ask the main rank.
    place, rt.resumes, start_id = rt.from_main(lambda: _lock(attempt.real(Path(run_dir)), resume, rt))
    status = rt.open_status(place)
    status.start_id = start_id
    status.open(place)
    # Known before anything can fail: by their process ids a rank finds out which one was killed without a word.
    status.neighbours = neighbours(rt)

    def write() -> None:
        try:
            status.begin(os.environ)
            files.replace_text(place / names.CONFIG, recipe)
            files.replace_text(
                place / names.ENVIRONMENT, json.dumps(hardware.environment(rt.device, rt.world_size), indent=1)
            )
        except OSError as error:
            raise ConfigError(f"run.dir={run_dir}: {describe_error(error)}") from None

    rt.from_main(write)
    rt.barrier()  # the files of the start before are cleared: no rank may write an end that would go with them
    # There is a status now for a signal to be written to, and nothing yet that would be worth saving.
    rt.stopping.end_at_once(partial(_end_of_signal, rt))
    if rt.is_main:
        if warning := launcher.check_launcher(os.environ):
            rt.print(warning, "warning")
        if not rt.resumes and attempt.has_begun(place.parent):
            rt.print(f"{run_dir} holds an earlier run, which is renamed after the first step of this one")
    return place


def claim_run_dir(rt: start.Runtime) -> None:
    """Make this start, which has done a step, the run of the directory. An earlier run is renamed, never overwritten,
    unless this one resumes it. Every rank calls it; from here on a signal asks for a stop that saves.

    Raises:
        ConfigError: the directory cannot be renamed.
    """
    status = rt.status
    assert status is not None
    # First: there is a step to save now, and a signal must not delete the folder while it is moved.
    rt.stopping.save_first()
    rt.barrier()  # nobody writes to the old place any more
    rt.from_main(lambda: _claim_run_dir(status, rt))
    _is_there(status)


def _lock(folder: Path, resume: str | None, rt: start.Runtime) -> tuple[Path, bool, str]:
    """Lock the directory on the main rank.

    Returns:
        (where to write before the first step; whether this start continues the run that is there; the id of this
        start)

    Raises:
        ConfigError: a run is at work there, or none can begin.
    """
    try:
        # Before the lock, which would create the directory.
        attempt.put_back(folder)
        rt.lock = lock.take_lock(folder)
        resumes = attempt.goes_on(folder, resume)
        if read_status(folder).get("status") == "running":  # and the lock was free
            then = "this start resumes from there" if resumes else "train.resume=auto would resume from there"
            rt.print(f"{folder}: the previous run was killed: {where_it_was(folder)}; {then}")
        return attempt.make_attempt_dir(folder, resumes=resumes), resumes, secrets.token_hex(8)
    except OSError as error:
        raise ConfigError(f"run.dir={folder}: {describe_error(error) if is_full_disk(error) else error}") from None


def _claim_run_dir(status: RunStatus, rt: start.Runtime) -> None:
    """Make this start the run of the directory, on the main rank.

    Raises:
        ConfigError: it cannot take its place there.
    """
    folder = status.run_dir.parent
    with rt.leaving:  # a signal that came before this may be about to delete it
        try:
            if rt.lock is not None:  # renamed meanwhile, its name may be another start's
                rt.lock.check(folder)
            if not attempt.is_attempt(status):
                pass
            elif rt.resumes:
                attempt.move_into_run(folder)
            elif not attempt.has_begun(folder):
                attempt.begin(folder)
            else:
                assert rt.lock is not None
                rt.lock, aside = attempt.replace(folder, rt.lock)
                rt.print(f"{folder} held an earlier run: it is now {aside} (train.resume=auto would have continued it)")
        except OSError as error:
            text = f"run.dir={folder}: after the first step this run could not be moved into it: {error}"
            raise ConfigError(text) from None
        _is_there(status)


def _is_there(status: RunStatus) -> None:
    """Note that this start is the run of the directory, which has its own name again."""
    if attempt.is_attempt(status):
        status.open(status.run_dir.parent)
    status.stepped = True


def _end_of_signal(rt: start.Runtime, number: int) -> None:
    """End the process on a signal, unless its first step is done by now."""
    assert rt.status is not None
    # The lock shows whether a claim was under way. If it does not come in time, the disk hangs, and the process ends
    # all the same.
    if rt.leaving.acquire(timeout=start.PATIENCE_SECONDS) and rt.status.stepped:
        rt.leaving.release()
        return
    try:
        name, cause = rt.status.end_of_signal(number)
        rt.print(f"\n{name}: ended before the first step")
        if cause:
            print_text(f"error: {cause}", error=True, level="error")
        rt.withdraw()
    finally:
        signals.end_process(128 + number)
