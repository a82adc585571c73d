"""The error that ended a rank: in words, and whether it is only what another rank's end did to this one."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from sftkit.errors import ConfigError, DataError, RunError


@dataclass(frozen=True)
class Failure:
    """The error that ended a rank."""

    rank: int
    step: int
    "the step it was in; 0: before the first"
    phase: str
    error: str
    time: float
    symptom: bool = False
    "it saw only what another rank, whose own error is the cause, did to it"
    start_id: str = ""
    "of the start that it ended; see RunStatus.start_id"

    def __str__(self) -> str:
        where = f"at step {self.step}" if self.step else "before the first step"
        return f"rank {self.rank} failed {where} ({self.phase}): {self.error}"


# What torch.distributed and its backends write when another rank is gone, in lower case.
_SYMPTOMS = ("closed by peer", "reset by peer", "broken pipe", "gloo", "nccl", "socket", "tcpstore", "connection")


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Libraries in Rust and C++ say it in words: of the system, or the number of its error.
_FULL_WORDS = (*map(os.strerror, _FULL), *(f"(os error {number})" for number in _FULL), "PytorchStreamWriter failed")


def is_full_disk(error: BaseException) -> bool:
    """Return whether an error says that a disk is full, or a quota or limit of the size of files is reached."""
    return (isinstance(error, OSError) and error.errno in _FULL) or any(mark in str(error) for mark in _FULL_WORDS)


def describe_error(error: BaseException) -> str:
    """Return the message of an error, with its class where the error is not made for users."""
    text = str(error).strip()
    if is_full_disk(error) and not isinstance(error, ConfigError | DataError | RunError):
        return (
            f"a disk is full, or a quota or limit of file sizes is reached: {text}. Free some space or take "
            "a run.dir on another disk, then start again with train.resume=auto"
        )
    named = isinstance(error, ConfigError | DataError | RunError)
    return text if named and text else f"{type(error).__name__}: {text}".removesuffix(": ")


def is_symptom(error: BaseException) -> bool:
    """Return whether an error says that another rank is gone, and nothing about this one."""
    return isinstance(error, RuntimeError | OSError) and any(mark in str(error).lower() for mark in _SYMPTOMS)
