"""Errors that end a run with a message; its text says what, where, what is allowed and what to do next."""


class ConfigError(Exception):
    """A recipe, an override or a setting that cannot work. Scripts print it and exit with code 2."""


class DataError(Exception):
    """Input data that cannot be used: the message names the file, the line or row, and the reason.

    `reason` is the same for all records with the same fault ("empty answer"), so that they can be counted by it.
    """

    def __init__(self, message: str, reason: str = "other") -> None:
        super().__init__(message)
        self.reason = reason


class CheckpointError(Exception):
    """A checkpoint that had to be written, the last one of a run or of a stop, or one to resume that had to be read, could
    not be: the message says why."""


class NonFiniteError(Exception):
    """A loss or gradient norm that is not a finite number, and numerics.on_nonfinite or max_skips says that this is it."""


class Stopped(Exception):
    """A stop was asked for while something other than a step ran; raised on all ranks together, caught by train()."""


class RecompileError(ConfigError):
    """Something in a training step would have been compiled after the warm-up, or broke a graph in it."""
