"""The flags of scripts/validate_compile.py, and the plan that they ask for. No torch."""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path

from labs.validate.cases import ValidationPlan
from sftkit.config.command_line import Parser, path, path_or_id
from sftkit.config.commands import shipped
from sftkit.config.load import read_config


def parse(description: str | None) -> Namespace:
    """Return the words of the command line. Prints problems and exits with code 2 if there are any."""
    parser = Parser(description)
    parser.add_argument("recipe", nargs="?", type=path_or_id, help="YAML of the stage that is trained")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of every run")
    parser.add_argument("--script", default="scripts/chat_sft.py", help="the stage (scripts/chat_sft.py)")
    parser.add_argument("--layouts", nargs="+", help="packed, bucketed, fixed, dynamic; default: the recipe's own")
    parser.add_argument(
        "--processes", nargs="+", type=int, default=[1], help="GPUs (or CPU processes) of the runs; default: 1"
    )
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each run (100)")
    parser.add_argument("--warm-up", type=int, default=10, help="first steps that count in no speed and no loss (10)")
    parser.add_argument("--window", type=int, default=5, help="steps between logged lines (5)")
    parser.add_argument("--timeout", type=int, default=3600, help="seconds that one run may take (3600)")
    parser.add_argument(
        "--no-reference", action="store_true", help="leave the slow reference run out: losses are held to the eager run"
    )
    parser.add_argument("--judge", type=path, metavar="VALIDATION.json", help="train nothing: judge these earlier runs")
    parser.add_argument(
        "--ledger", type=path, metavar="FILE", help="earlier results (benchmarks/ledger.jsonl if there)"
    )
    parser.add_argument(
        "--record", action="store_true", help="append what was found to the ledger if everything passes"
    )
    parser.add_argument("--out", type=path, help="a new folder (runs/validate/RECIPE-TIME)")
    args = parser.parse_intermixed_args()
    if (args.recipe is None) == (args.judge is None):
        parser.error("name a recipe, or earlier runs with --judge")
    return args


def validation_plan(args: Namespace) -> ValidationPlan:
    """Return the plan that the flags ask for.

    Raises:
        ConfigError: the recipe, or a setting behind it, is wrong.
    """
    cfg = read_config(args.recipe, args.overrides, world_size=1)
    return ValidationPlan(
        recipe=args.recipe,
        script=shipped(args.script),
        layouts=tuple(dict.fromkeys(args.layouts or [cfg.data.layout])),
        processes=tuple(sorted(set(args.processes))),
        steps=args.steps,
        warm_up=args.warm_up,
        window=args.window,
        overrides=tuple(args.overrides),
        timeout_seconds=args.timeout,
        reference=not args.no_reference,
    )


def results_dir(args: Namespace) -> Path:
    """Return where the result goes: --out, or a new folder named after recipe and time."""
    name = "-".join(Path(args.recipe).with_suffix("").parts[-2:])
    return args.out or Path("runs/validate") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
