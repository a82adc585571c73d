"""The flags of scripts/chat.py. No torch."""

from __future__ import annotations

import argparse
from argparse import Namespace

import yaml

from sftkit.config.command_line import Parser, path_or_id
from sftkit.generation.answer import Sampling


def parse(description: str | None) -> Namespace:
    """Parse the command line; adds `sampling` and `template_args` (None if not given). Prints problems and exits with
    code 2 if there are any."""
    parser = Parser(description)
    parser.add_argument(
        "path", nargs="?", type=path_or_id, help="run, step directory, model folder or hub id; default: the newest run"
    )
    parser.add_argument("--prompt", help="one question; print the answer and exit")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--temperature", type=float, default=0.0, help="of sampling, say 0.7; 0: the likeliest (0)")
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the likeliest tokens that have this probability together (1)",
    )
    parser.add_argument("--max-new-tokens", type=int, default=256, help="longest answer in tokens (256)")
    parser.add_argument(
        "--template-arg",
        metavar="NAME=VALUE",
        type=_argument,
        action="append",
        help="of the chat template: enable_thinking=false, reasoning_effort=high; may be given several times",
    )
    args = parser.parse_args()
    if not 0 <= args.temperature < float("inf"):
        parser.error(f"--temperature {args.temperature}: must be 0 or more")
    if not 0 < args.top_p <= 1:
        parser.error(f"--top-p {args.top_p}: must be more than 0 and at most 1")
    if args.top_p < 1 and not args.temperature:
        parser.error("--top-p needs --temperature, say 0.7: without one the likeliest token is taken")
    if args.max_new_tokens < 1:
        parser.error(f"--max-new-tokens {args.max_new_tokens}: must be 1 or more")
    args.sampling = Sampling(args.temperature, args.top_p, args.max_new_tokens)
    args.template_args = dict(args.template_arg) if args.template_arg else None
    return args


def _argument(word: str) -> tuple[str, bool | int | float | str | None]:
    """Parse NAME=VALUE; the value is YAML."""
    name, sign, text = word.partition("=")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    if not (sign and name.isidentifier()) or not isinstance(value, bool | int | float | str | None):
        raise argparse.ArgumentTypeError(f"{word}: expected NAME=VALUE, say enable_thinking=false")
    return name, value
