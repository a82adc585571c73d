"""The command line of scripts/inspect_data.py: flags, a recipe and settings, which the rules of the
recipe's stage check, and the cards that `--gpu` names. No torch.
"""

import argparse
import difflib
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from sftkit.config import schema
from sftkit.config.commands import Parser, path_or_id, whole_number
from sftkit.config.load import read_command_line
from sftkit.config.rules import Get, OfLaunch, Problem, Rule
from sftkit.config.tables import STAGE_SCRIPTS
from sftkit.config.topology import Topology, topology_of
from sftkit.errors import ConfigError, hint, texts
from sftkit.preflight.inputs import checks_of_stage, launch_rules


def parse(description: str | None) -> tuple[schema.Config, argparse.Namespace]:
    """Return the Config that the words ask for, and the flags. Prints problems and exits with code 2 if there are any.

    The flags are recipe, stage, is_asked (whether --stage named it), preview (documents), html and json (files or
    None), gpu (a name of speeds.yaml or None), gpu_gib (None: this machine's) and topology.
    """
    parser = Parser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    parser.add_argument(
        "--stage", choices=tuple(STAGE_SCRIPTS), help="what its script learns is shown; run.stage of the recipe"
    )
    documents = whole_number("documents", 0, ", say 3")
    gpus = whole_number("GPUs", 1, ", say 8")
    cards = texts("preflight/speeds.yaml")["cards"]
    card = partial(_card, cards=tuple(cards))
    parser.add_argument("--preview", metavar="N", type=documents, default=3, help="documents shown with their masks; 3")
    parser.add_argument("--html", metavar="FILE", type=new_file, help="all of it as one HTML file, without network")
    parser.add_argument("--json", metavar="FILE", type=new_file, help="the numbers, as training's preflight.json")
    parser.add_argument("--gpu", metavar="NAME", type=card, help=f"the GPU that it will run on: {', '.join(cards)}")
    parser.add_argument("--gpu-gib", metavar="GIB", type=size, help="its memory; that of --gpu, or of this machine's")
    parser.add_argument(
        "--config_file", metavar="FILE", type=Path, help="accelerate config that it will be launched with; one process"
    )
    parser.add_argument("--num_processes", metavar="N", type=gpus, help="GPUs of that launch; those of the file")
    flags, sys.argv[1:] = parser.parse_known_args()
    known = re.findall(r"--[\w-]+", parser.format_help())
    for word in sys.argv[1:]:
        name = word.partition("=")[0]
        if word.startswith("--") and (near := difflib.get_close_matches(name, known, n=1, cutoff=0.8)):
            parser.error(f"{name}: no such option. Did you mean {near[0]}?")
    if flags.num_processes and not flags.config_file:
        parser.error("--num_processes needs --config_file, say accelerate_configs/fsdp2.yaml")

    file = flags.config_file

    def launched(train: schema.TrainConfig) -> Topology:
        return topology_of(file, flags.num_processes, schema.num_stages(train)) if file else Topology()

    try:
        # Once with the defaults, so that a file that cannot be read is an error of the flag, not of the recipe.
        launched(schema.TrainConfig())
    except ConfigError as error:
        parser.error(str(error))
    text = f"{description}\n{parser.format_help().strip()}"
    # The processes are only known for a launch.
    of_launch = launch_rules() if file else []
    of_stage: list[Rule | OfLaunch] = [
        partial(_of_stage, rule=rule, stage=stage, asked=flags.stage)
        for stage in STAGE_SCRIPTS
        for rule in checks_of_stage(stage)
    ]
    named = partial(_named, asked=flags.stage)
    cfg = read_command_line(text, [named, *of_stage, *of_launch], launched)  # what is left: recipe, key=value
    flags.topology = launched(cfg.train)
    flags.recipe = sys.argv[1]
    flags.is_asked = flags.stage is not None
    flags.stage = flags.stage or cfg.run.stage
    if flags.gpu and flags.gpu_gib is None:
        flags.gpu_gib = float(cards[flags.gpu])
    return cfg, flags


def _named(get: Get, asked: str | None) -> Iterator[Problem]:
    if asked is None and get("run.stage") is None:
        stages = ", ".join(f"{stage} ({script})" for stage, script in STAGE_SCRIPTS.items())
        yield "run.stage", hint("no stage", stages=stages)


def _of_stage(get: Get, rule: Rule, stage: str, asked: str | None) -> Iterator[Problem]:
    if (asked or get("run.stage")) == stage:
        yield from rule(get)


def _card(word: str, cards: tuple[str, ...]) -> str:
    for card in cards:
        if word.lower().replace("-", " ") == card.lower():
            return card
    raise argparse.ArgumentTypeError(f"{word}: one of {', '.join(cards)}; of another GPU give its memory, --gpu-gib 24")


def size(word: str) -> float:
    """Return a GPU's GiB, more than 0, from a word."""
    with suppress(ValueError):
        if 0 < (gib := float(word)) < float("inf"):
            return gib
    raise argparse.ArgumentTypeError(f"{word}: GiB of a GPU, more than 0, say 80")


def new_file(word: str) -> Path:
    """Return a path in a folder that exists from a word."""
    path = Path(path_or_id(word))
    if path.is_dir() or not path.parent.is_dir():
        what = f"{word} is a folder" if path.is_dir() else f"{word}: there is no folder {path.parent}"
        raise argparse.ArgumentTypeError(f"{what}; name a file in a folder that exists")
    return path
