"""The flags of scripts/inspect_data.py, besides recipe and key=value. No torch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sftkit.config.command_line import Parser, path_or_id, whole_number
from sftkit.config.load import read_command_line
from sftkit.config.schema import Config, TrainConfig, num_stages
from sftkit.config.stages import STAGE_SCRIPTS, stage_of_recipe
from sftkit.config.terminal import print_text
from sftkit.config.topology import Topology, idle_pipeline, topology_of
from sftkit.errors import ConfigError
from sftkit.preflight.inputs import data_rules
from sftkit.preflight.launched import launch_rules


def parse(description: str | None) -> tuple[Config, argparse.Namespace]:
    """Return the Config that the words ask for, and the flags. Prints problems and exits with code 2 if there are any.

    The flags are recipe, stage (None: by the recipe's name), preview (documents), html and json (files or None),
    gpu_gib (None: this machine's) and topology.
    """
    parser = Parser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    parser.add_argument(
        "--stage",
        choices=tuple(STAGE_SCRIPTS),
        help="what it learns is shown; by the recipe's name: base*.yaml, mid*.yaml, caption*.yaml, otherwise sft",
    )
    documents, gpus = whole_number("documents", 0, ", say 3"), whole_number("GPUs", 1, ", say 8")
    parser.add_argument(
        "--preview", metavar="N", type=documents, default=3, help="documents to show with their masks; 3"
    )
    parser.add_argument("--html", metavar="FILE", type=new_file, help="all of it as one HTML file, without network")
    parser.add_argument(
        "--json", metavar="FILE", type=new_file, help="the numbers: what training writes to preflight.json"
    )
    parser.add_argument("--gpu-gib", metavar="GIB", type=size, help="memory of the GPU that it will run on; this one's")
    parser.add_argument(
        "--config_file", metavar="FILE", type=Path, help="accelerate config that it will be launched with; one process"
    )
    parser.add_argument("--num_processes", metavar="N", type=gpus, help="GPUs of that launch; those of the file")
    flags, sys.argv[1:] = parser.parse_known_args()
    if flags.num_processes and not flags.config_file:
        parser.error("--num_processes needs --config_file, say accelerate_configs/fsdp2.yaml")

    def launched(train: TrainConfig) -> Topology:
        one = not flags.config_file
        return Topology() if one else topology_of(flags.config_file, flags.num_processes, num_stages(train))

    try:
        # Once with the defaults, so that a file that cannot be read is an error of the flag, not of the recipe.
        launched(TrainConfig())
    except ConfigError as error:
        parser.error(str(error))
    stage = flags.stage or stage_of_recipe(sys.argv[1] if len(sys.argv) > 1 else "")
    text = f"{description}\n{parser.format_help().strip()}"
    # Without a launch it is not known yet over which processes it will run.
    of_launch = launch_rules() if flags.config_file else []
    cfg = read_command_line(text, [*data_rules(stage), *of_launch], launched)  # what is left: recipe, key=value
    flags.topology = launched(cfg.train)
    file = flags.config_file
    if file and (warning := idle_pipeline(file, cfg.train.engine, flags.topology)):
        print_text(warning, level="warning")
    flags.recipe = sys.argv[1]
    return cfg, flags


def size(word: str) -> float:
    """Return a GPU's GiB, more than 0, from a word."""
    try:
        gib = float(word)
    except ValueError:
        gib = 0.0
    if not 0 < gib < float("inf"):
        raise argparse.ArgumentTypeError(f"{word}: GiB of a GPU, more than 0, say 80")
    return gib


def new_file(word: str) -> Path:
    """Return a path in a folder that exists from a word."""
    path = Path(path_or_id(word))
    if path.is_dir() or not path.parent.is_dir():
        what = f"{word} is a folder" if path.is_dir() else f"{word}: there is no folder {path.parent}"
        raise argparse.ArgumentTypeError(f"{what}; name a file in a folder that exists")
    return path
