"""Errors that end a run with a message; its text says what, where, what is allowed and what to do next."""

import difflib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import yaml


class ConfigError(Exception):
    """A recipe, an override or a setting that cannot work. Scripts print it and exit with code 2."""


class DataError(Exception):
    """Input data that cannot be used: the message names the file, the line or row, and the reason.

    `reason` is the same for all records with the same fault ("empty answer"), so that they can be counted by it. A
    line break in what the message quotes of the data is written out: it would begin a line of the data's own in a log.
    """

    def __init__(self, message: str, reason: str = "other") -> None:
        super().__init__(message.replace("\n", "\\n"))
        self.reason = reason


class LeftOut(DataError):
    """A valid row that the setting `where` of its source leaves out; `reason` names the column."""


class RunError(Exception):
    """An error that ends a run with a message for users. Scripts print it and exit with code 1."""


class CheckpointError(RunError):
    """A checkpoint that had to be written, the last one of a run or of a stop, or one to resume that had to be read,
    could not be: the message says why."""


class RunDirError(RunError):
    """The directory of a run is no longer its own: it was renamed or deleted, or its lock was, while the run was at
    work."""


class NumericsError(RunError):
    """Numbers that training must not go on with; raised on all ranks together."""


class NonFiniteError(NumericsError):
    """A loss or gradient norm that is not a finite number, and numerics.on_nonfinite or max_skips says that
    this is it."""


class SpikeError(NumericsError):
    """A loss or gradient norm far above those before, and numerics.on_spike or max_skips says that this is it."""


class ReplicaError(NumericsError):
    """Ranks that must hold the same weights and optimizer states hold different ones."""


class WorkerError(RunError):
    """A process that makes batches was killed or crashed: the message names what it was making."""


class Stopped(Exception):
    """A stop was asked for while something other than a step ran; raised on all ranks together, caught by train()."""


class RecompileError(ConfigError):
    """Something in a training step would have been compiled after the warm-up, or broke a graph in it."""


# ---- texts of more than a line ---------------------------------------------------------------------------------------


@cache
def texts(table: str) -> dict[str, dict[str, str]]:
    """Return a YAML file of texts or tables, which is read when the first of them is asked for.

    Args:
        table: its path in the package.
    """
    found: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).parent.joinpath(table).read_text())
    return found


def hint(name: str, /, **words: object) -> str:
    """Return the text of a problem of settings, of a launch or of a run directory.

    Args:
        name: in the table `problems` of config/hints.yaml.
        words: the values that the text names.
    """
    return texts("config/hints.yaml")["problems"][name].format(**words)


def config_error(name: str, /, **words: object) -> ConfigError:
    """Return the ConfigError with a text of `hint`."""
    return ConfigError(hint(name, **words))


def did_you_mean(name: str, known: Iterable[str], before: str = " ") -> str:
    """Return a question that names the known name most like a wrong one, after `before`; empty if none is like it."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f'{before}Did you mean "{near[0]}"?' if near else ""


def fault(where: str, key: str, /, **words: object) -> DataError:
    """Return the DataError of a row.

    Args:
        where: the place of the row, file:line.
        key: of data/reading/faults.yaml, which begins with the reason.
        words: the values that its text names.
    """
    text = texts("data/reading/faults.yaml")["rows"][key].format(**words)
    return DataError(f"{where}: {text}", reason=key.partition(" / ")[0])
