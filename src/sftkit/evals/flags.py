"""Messages about settings of recipes in the words of scripts/evaluate.py, which has flags. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from sftkit.errors import ConfigError, DataError

FLAGS = ("backend", "data", "shots", "format", "allow_code_execution", "max_examples", "batch_size", "max_new_tokens")
"Keys of eval that have a flag of the same name."


@contextmanager
def flags_named() -> Iterator[None]:
    """A ConfigError or DataError leaves with the flags in the place of the keys."""
    try:
        yield
    except (ConfigError, DataError) as error:
        raise type(error)(in_flags(str(error))) from error


def in_flags(text: str) -> str:
    """eval.max_new_tokens -> --max-new-tokens; eval.tasks -> tasks."""
    text = text.replace("eval.allow_code_execution: false does not go with", "--allow-code-execution: needed by")
    text = text.replace("; true runs each", "; with it each runs").replace("leave it null or set 0", "leave it out")
    keys = re.compile(rf"\beval\.({'|'.join(FLAGS)})\b")
    text = keys.sub(lambda found: "--" + found[1].replace("_", "-"), text)
    return text.replace("eval.tasks", "tasks").replace(
        ": set it to null, or use backend", ": leave it out, or use --backend"
    )
