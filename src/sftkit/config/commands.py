"""Command lines: the files that come with sftkit, how its commands are typed here (in a clone, in a folder that `sftkit
init` made, or wherever the package is installed), what a path may have meant, and the parser of all scripts. No
torch."""

import argparse
import difflib
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from sftkit.config.tables import STAGE_SCRIPTS
from sftkit.config.terminal import print_text, secret_in, visible
from sftkit.errors import ConfigError, hint

SCRIPTS = {
    **STAGE_SCRIPTS,
    "chain": "run_chain.py",
    "eval": "evaluate.py",
    "chat": "chat.py",
    "inspect": "inspect_data.py",
    "prepare": "inspect_data.py",
    "data": "data_stores.py",
    "report": "report.py",
    "export": "export.py",
    "validate": "validate_compile.py",
    "dashboard": "make_dashboard.py",
    "doctor": "doctor.py",
}
"Word of the command `sftkit` -> its script."
TYPED = "SFTKIT_TYPED"
"Environment variable with the word given to the command `sftkit`: the script that it starts names itself by it."
SHIPPED = ("scripts", "recipes", "accelerate_configs", "benchmarks/smoke_plan.yaml")
"The files and folders that lie at the root of a clone and, in the wheel, in sftkit/project."
_PACKAGED = Path(__file__).resolve().parents[1] / "project"
ROOT = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).resolve().parents[3]
"The folder that holds SHIPPED."

_COMMAND = re.compile(r"\.venv/bin/(\w+)(?: (?:-m sftkit\.launch )?scripts/(\w+\.py))?")
_SHIPPED_FILE = re.compile(r"(?<![\w./-])(?:scripts|accelerate_configs)/\w+\.\w+")


def shipped(path: str) -> str:
    """Return the path of a file such as recipes/smoke/sft.yaml: as given if it exists or is not one of sftkit's, else
    that of the file that came with sftkit."""
    theirs = ROOT / path
    ours = path.startswith(tuple(f"{name.partition('/')[0]}/" for name in SHIPPED))
    return str(theirs) if ours and not Path(path).exists() and theirs.exists() else path


def shipped_recipes() -> list[str]:
    """Return the recipes that came with sftkit, as `shipped` takes them."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "recipes").glob("*/*.yaml"))


def is_ours(script: str) -> bool:
    """Return whether the file is a script of sftkit, changed or not; one of another project may have the same name."""
    try:
        return "sftkit" in Path(script).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def program_path(name: str, folder: Path | None = None) -> str:
    """Return how to type a program of this environment in a folder (None: the current one): .venv/bin/python if it lies
    below the folder, python if the search path finds that one first, else its whole path."""
    # Not resolved: the python of a virtual environment is a link to one that has none of its packages.
    path = Path(sys.executable).with_name(name)
    if name == "python" and not path.exists():
        path = Path(sys.executable)
    folder = folder or Path.cwd()
    if path.is_relative_to(folder):
        return shlex.quote(str(path.relative_to(folder)))
    return path.name if shutil.which(path.name) == str(path) else shlex.quote(str(path))


def typed(text: str) -> str:
    """Return a text in which commands written as in a clone (.venv/bin/python scripts/chat.py) work here: with the
    programs of this environment, and as `sftkit chat` where there are no scripts or where `sftkit` was typed."""
    given = os.environ.get(TYPED)

    def here(match: re.Match[str]) -> str:
        words = [word for word, script in SCRIPTS.items() if script == match[2]]
        # The word that the user typed wins over the script's first word: `prepare` and `inspect` start the same script.
        if words and (given is not None or not is_ours(f"scripts/{match[2]}")):
            return f"{program_path('sftkit')} {given if given in words else words[0]}"
        return program_path(match[1]) + match[0].removeprefix(f".venv/bin/{match[1]}")

    return _SHIPPED_FILE.sub(lambda match: shipped(match[0]), _COMMAND.sub(here, text))


def invocation(script: str, *words: str, launcher: bool = False) -> str:
    """Return how to start a script with these words.

    Args:
        script: its path, as in sys.argv.
        launcher: by sftkit.launch, which takes the hardware that is there.
    """
    script = script.removeprefix(f"{ROOT}/")
    start = typed(f".venv/bin/python {'-m sftkit.launch ' * launcher}{shlex.quote(script)}")
    return " ".join([start, *map(shlex.quote, words)])


def running(started: str | None = None) -> str:
    """Return how this program was started, for its usage line.

    Args:
        started: by whom it was not started as `sftkit WORD`; None: as a script, by python.
    """
    if word := os.environ.get(TYPED):
        return f"sftkit {word}"
    return started or invocation(str(Path(sys.argv[0])))


def install(package: str) -> str:
    """Return the command that installs a package, or an extra: sftkit[eval]."""
    return f"{program_path('python')} -m pip install {shlex.quote(package)}"


def first_run() -> str:
    """Return the advice for when no run is found."""
    return f"make one: {invocation('scripts/run_chain.py', 'recipes/smoke')}"


MAX_NAME_BYTES = 240
"The most bytes in the name of a run directory. File systems allow 255, and earlier runs are kept as NAME.old-1."
MAX_PATH_BYTES = 3800
"The most bytes in its path. A path may have 4096, and the files of a checkpoint lie some levels below."

WILDCARD = re.compile(r"[*?]")


def expanded(path: str) -> str:
    """Return a path with ~ as the home directory that it means; anything else, hub ids and URLs too, as it is.

    Raises:
        ConfigError: it begins with ~ and means no home directory, or no file can have such a name.
    """
    if "\0" in path:
        raise ConfigError("a path cannot hold the character \\0")
    found = os.path.expanduser(path)
    if found.startswith("~"):
        name = path.partition("/")[0]
        problem = f"{name}: no such user on this machine. Write the path in full, or ./{name} for a file of that name"
        raise ConfigError(problem)
    return found


def similar_paths(path: str) -> str:
    """Return a sentence that names existing paths like a missing one; empty if none is like it."""
    wanted = Path(path)
    if wanted.exists():
        return ""  # of another kind than was asked for
    if WILDCARD.search(path):
        return ". Wildcards are not expanded: name a folder or a file."
    try:
        # The first part that is missing is what was misspelt; what follows it is looked for below each candidate.
        folder = next((parent for parent in wanted.parents if parent.is_dir()), Path("."))
        there = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return ""
    missing, *rest = wanted.parts[len(folder.parts) :] or ("",)
    close = difflib.get_close_matches(_stem(missing), map(_stem, there), n=3, cutoff=0.6)
    near = [folder / name for name in there if _stem(name) in close][:3]
    found = [str(path.joinpath(*rest) if path.joinpath(*rest).exists() else path) for path in near]
    return f". Did you mean {' or '.join(found)}?" if found else ""


def _stem(name: str) -> str:
    """Return a name without its suffixes: a common suffix alone does not make two names alike."""
    return name.partition(".")[0] or name


def unusable(run_dir: str) -> str | None:
    """Return why no run can be written to a directory, and what to do; None if one can. Leaves nothing there."""
    # A link is followed, since its target is what is written to; without one `..` is only tidied up.
    path = os.path.realpath(run_dir) if os.path.islink(run_dir) else os.path.abspath(run_dir)
    sizes = [len(os.fsencode(name)) for name in path.split(os.sep)]
    if visible(run_dir) != run_dir or "\n" in run_dir or "\t" in run_dir:
        return f"{run_dir!r} has characters that no terminal shows: take letters, digits, dots and dashes"
    if max(sizes) > MAX_NAME_BYTES or sum(sizes) + len(sizes) > MAX_PATH_BYTES:
        shown = run_dir if len(run_dir) <= 60 else f"{run_dir[:40]}...{run_dir[-10:]}"
        whole = sum(sizes) + len(sizes)
        most = (MAX_NAME_BYTES, MAX_PATH_BYTES)
        return hint("long run directory", shown=shown, longest=max(sizes), whole=whole, most=most)
    parent = path
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    if not os.path.isdir(parent):
        return f"{parent} is not a folder, so {run_dir} cannot be one: take another name, or move that file away"
    try:
        # Tried, not asked: os.access says nothing of a full disk or a read-only mount, and root may do everything.
        with tempfile.TemporaryFile(dir=parent):
            return None
    except OSError as error:
        return f"{run_dir}: nothing can be written in {parent} ({error.strerror}): name a folder that you may write to"


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

    takes_second_word = ""
    "The flag that a second word without a flag most likely belongs to."

    def __init__(self, description: str | None = None, **more: Any) -> None:  # Any: the arguments of ArgumentParser
        more = {"prog": running(), **more}
        description = typed(description or "")
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, **more)

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message to stderr, and exit with code 2."""
        self.print_usage(sys.stderr)
        surplus = message.removeprefix("unrecognized arguments: ")
        if self.takes_second_word and surplus != message and not surplus.startswith("-"):
            message += f". Did you mean {self.takes_second_word} {shlex.quote(surplus)}?"
        print_text(f"{self.prog}: error: {message}", error=True, level="error")
        self.exit(2)

    def refuse_secrets(self, words: Sequence[str]) -> None:
        """Exit with code 2 if a word looks like a secret, for a script that saves its words."""
        for word in words:
            if kind := secret_in(word):
                self.error(f"a word {hint('secret', kind=kind)}")
