"""The flags of scripts/evaluate.py, what a run was evaluated on, and messages in words of flags. No torch."""

import json
import re
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sftkit.config.commands import Parser, invocation, path_or_id, similar_paths
from sftkit.config.schema import EvalConfig, SourceConfig
from sftkit.config.tables import EVAL_TASKS
from sftkit.config.yaml import parse as parse_recipe
from sftkit.data.reading import origin
from sftkit.errors import ConfigError, DataError, config_error
from sftkit.evals import tasks
from sftkit.models.files import CAUSAL, auto_class, find_with_base, not_causal
from sftkit.rundir.files import read_object
from sftkit.rundir.names import ADAPTER_FOLDERS, CONFIG, newest_run, step_of

FLAGS: dict[str, dict[str, Any]] = {
    "backend": {"choices": ("sftkit", "lm_eval"), "help": "who runs the tasks; default: sftkit"},
    "data": {"type": path_or_id, "help": "folder with the rows of the tasks; default: the hub"},
    "shots": {
        "type": int,
        "help": "worked examples before each question, of tasks that take any; default: the task's own number",
    },
    "format": {"choices": ("completion", "chat"), "help": "how questions are put; default: completion"},
    "allow_code_execution": {
        "action": "store_const",
        "const": True,
        "help": "humaneval, mbpp: run the model's programs, sandboxed",
    },
    "max_examples": {"type": int, "help": "examples per task, and per family of families; default: all"},
    "batch_size": {"type": int, "help": "prompts that go through the model together; default: 64"},
    "max_new_tokens": {"type": int, "help": "longest answer in tokens; default: the task's own"},
}
"Keys of eval that have a flag of the same name -> arguments of the parser."


def parse(description: str | None) -> Namespace:
    """Parse the command line. Prints problems and exits with code 2 if there are any."""
    parser = Parser(description)
    parser.add_argument(
        "path", nargs="?", type=path_or_id, help="run, step directory, model folder or hub id; default: the newest run"
    )
    parser.add_argument(
        "tasks",
        nargs="*",
        help="default, unless --val is given: what the run was evaluated on; families, the held-out built-in tasks, if "
        "the model is of no run; docs/evaluation.md lists all",
    )
    parser.add_argument(
        "--val",
        nargs="+",
        type=path_or_id,
        default=(),
        help="loss and bits per byte of these: files, folders or hub ids, or ID[SPLIT]",
    )
    for name, options in FLAGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **options)
    parser.add_argument(
        "--out", type=path_or_id, help="folder for results.json, validation.json and TASK.jsonl with every example"
    )
    parser.set_defaults(own=None)
    parser.refuse_secrets(sys.argv[1:])
    return parser.parse_args()


def eval_config(args: Namespace) -> EvalConfig:
    """Return the settings of the flags. Without tasks: those of the run, or the held-out built-in ones, unless --val is
    given."""
    given = {name: value for name in FLAGS if (value := getattr(args, name)) is not None}
    if args.own is not None:
        return replace(args.own, **given)
    return EvalConfig(tasks=tuple(args.tasks or (() if args.val else ("families",))), samples=0, **given)


def check_arguments(args: Namespace) -> None:
    """Reject numbers below 1, unknown tasks, a model or data that do not exist, and an --out that is not a folder.
    Creates that folder, and replaces args.path by the folder or hub id of the model, and args.val by sources. If
    neither tasks nor --val are named, args.own has the settings that the run was evaluated by, args.val its data.

    Raises:
        ConfigError: which of them.
    """
    for name in ("max_examples", "batch_size", "max_new_tokens"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be 1 or more")
    # The first word is the model: a task alone would be looked for on the hub, and the error would not name the cause.
    if args.path in EVAL_TASKS and not Path(args.path).exists():
        right = invocation("scripts/evaluate.py", "PATH", args.path)
        raise config_error("task for a model", task=args.path, right=right)
    args.path = args.path or newest_run()
    args.val = tuple(map(as_source, args.val))
    if not args.tasks and not args.val and (own := own_evaluation(args.path)) is not None:
        args.own, args.val = own
    with flags_named():
        tasks.check_names(eval_config(args))
    args.path = find_with_base(args.path)
    config = read_object(Path(args.path) / "config.json")
    if config and auto_class(config) != CAUSAL:  # whatever data it is given
        raise ConfigError(not_causal(str(config.get("model_type")), "scripts/evaluate.py"))
    if args.data is not None and not Path(args.data).is_dir():
        raise ConfigError(f"--data {args.data}: no such folder (looked in {Path.cwd()}){similar_paths(args.data)}")
    for source in args.val:
        if origin.find_here(source) is None:
            origin.check_dataset(source)
    if args.out is not None:
        try:
            Path(args.out).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {args.out}: no folder can be made there: {error.strerror}") from None


def own_evaluation(path: str) -> tuple[EvalConfig, tuple[SourceConfig, ...]] | None:
    """Return (settings, validation sources) of the run that a path names or has a checkpoint of; None: it is of no run.

    `allow_code_execution` of the file is ignored: the file may come from anybody.

    Raises:
        ConfigError: its recipe evaluates nothing, or cannot be read.
    """
    folder = Path(path)
    if folder.parent.name == ADAPTER_FOLDERS:  # one of several adapters, in a step directory
        folder = folder.parents[1]
    file = (folder if step_of(folder.name) is None else folder.parent) / CONFIG
    if not file.is_file():
        return None
    problems: list[str] = []
    # The parser of recipes has limits on size and nesting.
    recipe = parse_recipe(file.read_text(encoding="utf-8", errors="replace"), file.name, problems).plain()
    if not problems and not (isinstance(recipe, dict) and {"eval", "data"} <= recipe.keys()):
        return None  # such as the one that wandb writes

    def validated(kind: Any, value: Any) -> Any:
        return TypeAdapter(kind).validate_json(json.dumps(value), strict=True)

    try:
        recipe = validated(dict[str, Any], recipe)
        config = validated(EvalConfig, recipe.get("eval"))
        validation = validated(tuple[SourceConfig, ...], validated(dict[str, Any], recipe.get("data")).get("val", []))
    except ValidationError:
        raise config_error(
            "unreadable recipe of a run", file=file, problems="; ".join(problems) or "another version"
        ) from None
    if not config.tasks and not validation:
        raise ConfigError(f"{file}: this run was evaluated on nothing (eval.tasks, data.val): name tasks, or --val")
    unasked = {"every": None, "at_start": False, "samples": 0, "allow_code_execution": False}
    return replace(config, **unasked), validation


def as_source(path: str) -> SourceConfig:
    """Parse PATH or PATH[SPLIT], as messages write it: wikitext[validation], builtin:docs[heldout],
    rows.jsonl[train[:100]]."""
    match = None if Path(path).exists() else re.fullmatch(r"(.+?)\[(.+)\]", path)
    return SourceConfig(path=match[1], split=match[2]) if match else SourceConfig(path=path)


@contextmanager
def flags_named() -> Iterator[None]:
    """Rewrite a ConfigError or DataError that leaves the block, with flags in the place of keys: eval.max_new_tokens ->
    --max-new-tokens; eval.tasks -> tasks."""
    try:
        yield
    except (ConfigError, DataError) as error:
        # Sentences first, which hold keys: after the keys are replaced they would no longer be found.
        text = str(error)
        text = text.replace("eval.allow_code_execution: false does not go with", "--allow-code-execution: needed by")
        text = text.replace("; true runs each", "; with it each runs").replace("leave it null or set 0", "leave it out")
        text = re.sub(rf"\beval\.({'|'.join(FLAGS)})\b", lambda match: "--" + match[1].replace("_", "-"), text)
        text = text.replace(": set it to null, or use backend", ": leave it out, or use --backend")
        raise type(error)(text.replace("eval.tasks", "tasks")) from error
