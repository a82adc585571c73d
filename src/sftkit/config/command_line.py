"""Common parts of the command lines of all scripts: paths, secrets, refusing a wrong word. No torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from sftkit.config.commands import running, typed
from sftkit.config.paths import expanded
from sftkit.config.secrets import SECRET, secret_in
from sftkit.config.terminal import print_text
from sftkit.errors import ConfigError


def path(word: str) -> Path:
    """Parse an argument that is a file or folder; ~ is expanded."""
    return Path(path_or_id(word))


def path_or_id(word: str) -> str:
    """Parse an argument that is a path or a hub id; ~ is expanded."""
    try:
        return expanded(word)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def whole_number(noun: str, least: int, example: str = "") -> Callable[[str], int]:
    """Return what parses an argument that counts things, `least` or more."""

    def parse(word: str) -> int:
        if not word.isdecimal() or int(word) < least:
            raise argparse.ArgumentTypeError(f"{word}: how many {noun}? Take {least} or more{example}")
        return int(word)

    return parse


class Parser(argparse.ArgumentParser):
    """The flags of a script; the text in front of them is its docstring."""

    def __init__(self, description: str | None = None, **more: Any) -> None:  # Any: the arguments of ArgumentParser
        more = {"prog": running(), **more}
        description = typed(description or "")
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, **more)

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message to stderr, and exit with code 2."""
        self.print_usage(sys.stderr)
        print_text(f"{self.prog}: error: {message}", error=True, level="error")
        self.exit(2)

    def refuse_secrets(self, words: Sequence[str]) -> None:
        """Exit with code 2 if a word looks like a secret, for a script that saves its words."""
        for word in words:
            if kind := secret_in(word):
                self.error(f"a word {SECRET.format(kind=kind)}")
