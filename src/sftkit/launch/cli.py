"""The command `sftkit`: the scripts as words, for where there is no clone. A script of this folder is taken before the
one that came with sftkit, and so are recipes and Accelerate configs."""

import difflib
import os
import shlex
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

from sftkit import __version__
from sftkit.config import commands, keys, load, tables, terminal
from sftkit.errors import ConfigError
from sftkit.runtime.script import ENDING

CLI_USAGE = """usage: sftkit WORD ...    (sftkit WORD --help says more; sftkit --version)

  doctor                what this machine lacks, and what would be slow
  init DIR              copy scripts, recipes and Accelerate configs into DIR
  chain FOLDER          base, mid, sft, evaluation: sftkit chain recipes/smoke
  base|mid|sft RECIPE   train one stage: sftkit sft RECIPE [key=value ...]
  caption RECIPE        train a model with an encoder to say what it sees
  prepare RECIPE        tokenize data into the cache, before a GPU is used
  data list             tokenized data in the cache; prepare, verify, prune
  inspect RECIPE        what would be learned and dropped, and its cost
  eval [RUN TASK ...]   measure a run, a checkpoint or a Hugging Face model
  chat [RUN]            talk to it
  report [RUN]          a page about a run
  export [RUN] --out D  a folder that transformers, vLLM and llama.cpp load
  validate RECIPE       does compiling pay, and change nothing?
  bench PLAN            measure the training step
  explain RECIPE        where the graph breaks, which module is to blame
  convert FILE          a recipe from YAML of TRL, Axolotl or LLaMA-Factory
  launch --slurm N ...  a Slurm script that trains a recipe on N machines
  patterns              a small model in every layout of processes
  dashboard ...         the wandb workspace of a project

Scripts, recipes and configs of this folder are taken, if there are any,
else those that came with sftkit. Exit codes: 0 done, 1 failed, 2 a mistake
in words, recipe or data, 128 + n ended by signal n."""
LABS = ("bench", "explain", "patterns")
"Words of the package `labs`, which lies next to the scripts and is not installed as a module."


def main() -> None:
    """Replace this process by the one that does what the word asks for, with its signals and exit code."""
    word, *words = sys.argv[1:] or ["--help"]
    if word == "data" and words[:1] == ["prepare"]:
        word, *words = words
    if word in ("-h", "--help"):
        terminal.print_text(CLI_USAGE)
    elif word == "--version":
        terminal.print_text(f"sftkit {__version__}, torch {version('torch')}, transformers {version('transformers')}")
    elif word == "init":
        init(words)
    elif word == "convert":
        from sftkit.config import convert  # only this word needs it

        convert.print_recipe(words)
    elif word == "launch":
        from sftkit.launch import slurm  # only this word needs it

        slurm.print_script(words)
    else:
        env = os.environ | {commands.TYPED: word}
        if word in LABS:
            env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(commands.ROOT), os.environ.get("PYTHONPATH"))))
            # Python looks into this folder first, where a package of another project may have the same name.
            if Path("labs/__init__.py").exists() and not commands.is_ours("labs/__init__.py"):
                env["PYTHONSAFEPATH"] = "1"
        arguments = [sys.executable, *python_arguments(word), *words]
        with ENDING:  # a signal that another thread has reported must not find a new program in its place
            os.execve(sys.executable, arguments, env)


def python_arguments(word: str) -> list[str]:
    """Return what comes after `python` for a word of the command line. Exits with code 2 if there is no such word."""
    if word in LABS:
        return ["-m", f"labs.{word}"]
    if word not in commands.SCRIPTS:
        near = difflib.get_close_matches(word, ["init", "convert", "launch", *LABS, *commands.SCRIPTS], n=1)
        hint = f"Did you mean sftkit {near[0]}?" if near else "sftkit --help lists them"
        setting = of_setting(word)
        known = [keys.instead_of(table, word) for table in ("no_word", "no_key")]
        load.fail(f"sftkit {word}: no such word. {next(filter(None, [*known, setting]), hint)}")
    script = f"scripts/{commands.SCRIPTS[word]}"
    # Stages alone go through the launcher: all others are one process.
    launcher = ["-m", "sftkit.launch"] if word in tables.STAGE_SCRIPTS else []
    flags = ["--preview", "0"] if word == "prepare" else []
    return [*launcher, script if commands.is_ours(script) else str(commands.ROOT / script), *flags]


def of_setting(word: str) -> str | None:
    """Return how to set a setting, ours or of another trainer, that was typed as a word; None if it is none."""
    name, _, value = word.partition("=")
    name = name.replace("-", "_")
    settings = [key for key in dict.fromkeys([*keys.own_names(name), *keys.ending_in(name)]) if "." in key]
    if not settings:
        return None
    which = " or ".join(key.replace(".N.", ".0.") for key in settings)
    given = f"{settings[0].replace('.N.', '.0.')}={value or 'VALUE'}"
    kind = "" if value else f" ({keys.key_table()[settings[0]].kind})"
    return f"It is a setting of recipes: {which}. Set it after the recipe: `sftkit sft RECIPE {given}`{kind}"


def init(words: list[str]) -> None:
    """Copy what comes with sftkit into a folder, which may be there already.

    Raises:
        ConfigError: something of it is there already, or cannot be written.
    """
    usage = f"usage: sftkit init DIR\n\nCopies {', '.join(commands.SHIPPED)} into DIR, to read and to change."
    if words in (["-h"], ["--help"]):
        terminal.print_text(usage)
        return
    if len(words) != 1 or words[0].startswith("-"):
        load.fail(usage)
    folder = Path(commands.expanded(words[0]))
    try:
        # All of it is looked at before anything is copied: a folder that is half there would be rejected the next time.
        for name in commands.SHIPPED:
            if (folder / name).exists():
                raise ConfigError(f"{folder / name} is there already: name another folder, or move it away")
        for name in commands.SHIPPED:
            copy(commands.ROOT / name, folder / name)
    except OSError as error:
        raise ConfigError(f"{folder}: {error}") from error
    sftkit = commands.program_path("sftkit", folder.absolute())
    terminal.print_text(
        f"{folder}: {', '.join(commands.SHIPPED)}: yours to change\n\n  cd {shlex.quote(str(folder))}\n"
        f"  {sftkit} chain recipes/smoke\n  {sftkit} chat"
    )


def copy(source: Path, target: Path) -> None:
    """Copy a file, or a folder without what Python has compiled."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copyfile(source, target)
