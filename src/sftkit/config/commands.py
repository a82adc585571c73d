"""What comes with sftkit beside its modules, and how its commands are typed here: in a clone, in a folder that `sftkit
init` made, or wherever the package is installed. No torch."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

from sftkit.config.stages import STAGE_SCRIPTS

SCRIPTS = {
    **STAGE_SCRIPTS,
    "chain": "run_chain.py",
    "eval": "evaluate.py",
    "chat": "chat.py",
    "inspect": "inspect_data.py",
    "prepare": "inspect_data.py",
    "report": "report.py",
    "validate": "validate_compile.py",
    "dashboard": "make_dashboard.py",
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
    return _SHIPPED_FILE.sub(lambda match: shipped(match[0]), _COMMAND.sub(_here, text))


def _here(match: re.Match[str]) -> str:
    # What the user typed wins over the first word of a script: `prepare` and `inspect` start the same one.
    words, given = [word for word, script in SCRIPTS.items() if script == match[2]], os.environ.get(TYPED)
    if words and (given is not None or not is_ours(f"scripts/{match[2]}")):
        return f"{program_path('sftkit')} {given if given in words else words[0]}"
    return program_path(match[1]) + match[0].removeprefix(f".venv/bin/{match[1]}")


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
