"""The flags of `sftkit explain`. No torch."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from pathlib import Path

from sftkit.config.command_line import Parser, path, path_or_id, whole_number
from sftkit.config.load import read_config
from sftkit.config.schema import Config
from sftkit.errors import ConfigError

DESCRIPTION = """What the compiler makes of a model: where its graph breaks and why, which module is to blame, which \
kernels come out.

  sftkit explain recipes/default/base.yaml               breaks and recompiles, by three instruments
  sftkit explain recipes/default/base.yaml --bisect      the smallest module that breaks, recompiles or differs, as a \
script
  sftkit explain recipes/default/base.yaml --kernels     graph, fused kernels, where a step's time goes
  sftkit explain my_model.py:example                     the same of what example() returns: (module, args)
  sftkit explain --labs                                  small experiments on this machine

The model has random weights and is fed random tokens in rows of the recipe's shape: no weights and no data are read. \
What was
found is written as a page, explain.html, and as explain.json. Exit code 1: a graph breaks, or a module is at fault."""


def parse() -> tuple[Namespace, Config | None]:
    """Return the words of the command line, and the recipe that they name; None: they name none. Prints problems of the
    words and exits with code 2 if there are any.

    Raises:
        ConfigError: the recipe is wrong, there is no such file, or TORCH_LOGS is set.
    """
    parser = Parser(DESCRIPTION, prog="sftkit explain")
    parser.add_argument("subject", nargs="?", type=path_or_id, help="a recipe, or FILE.py:FUNCTION")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the recipe")
    blocks = whole_number("blocks", 1)
    parser.add_argument("--layers", type=blocks, metavar="N", help="the first N blocks of the model only; all")
    parser.add_argument("--encoder", action="store_true", help="examine the encoder in place of the decoder")
    parser.add_argument(
        "--bisect", action="store_true", help="find the smallest module at fault, and write it as a script"
    )
    parser.add_argument(
        "--kernels", action="store_true", help="graph, kernels and time of a training step; compiles with Inductor"
    )
    parser.add_argument("--labs", action="store_true", help="no recipe: experiments that show how the compiler works")
    parser.add_argument("--out", type=path, help="a folder (runs/explain/NAME-TIME)")
    args = parser.parse_intermixed_args()
    refuse_torch_logs()
    if args.encoder and args.layers:
        parser.error("--layers cuts the decoder, and --encoder examines the encoder: leave one out")
    if (args.subject is None) == (not args.labs):
        parser.error("name a recipe or FILE.py:FUNCTION, or take --labs alone")
    if args.labs and (args.bisect or args.kernels or args.layers or args.encoder):
        parser.error("--labs has no recipe, so no --bisect, --kernels, --layers or --encoder")
    if is_file(args.subject) and (args.overrides or args.layers or args.encoder):
        parser.error("key=value words, --layers and --encoder belong to a recipe")
    if is_file(args.subject):
        file_of(args.subject)
    without = args.labs or is_file(args.subject)
    return args, None if without else read_config(args.subject, args.overrides, world_size=1)


def refuse_torch_logs() -> None:
    """Refuse an environment whose TORCH_LOGS torch would let win over what is listened to here.

    Raises:
        ConfigError: it has one.
    """
    if "TORCH_LOGS" in os.environ:
        raise ConfigError(
            "the environment has TORCH_LOGS, and with it torch ignores other settings of its logs: unset it"
        )


def is_file(subject: str | None) -> bool:
    """Return whether the words name a function in a file."""
    return subject is not None and ".py:" in subject


def file_of(subject: str) -> Path:
    """Return the file of FILE.py:FUNCTION, absolute.

    Raises:
        ConfigError: there is none.
    """
    file = subject.rpartition(":")[0]
    if not Path(file).is_file():
        raise ConfigError(f"{subject}: there is no Python file {file}; name a recipe, or FILE.py:FUNCTION")
    return Path(file).absolute()


def report_dir(args: Namespace) -> Path:
    """Return where the result goes: --out, or a new folder named after recipe and time."""
    words = Path((args.subject or "labs").replace(".py:", "/")).with_suffix("").parts
    name = "-".join(words[-2:]) + "-encoder" * args.encoder
    return args.out or Path("runs/explain") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
