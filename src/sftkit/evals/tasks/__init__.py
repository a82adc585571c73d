"""Published evaluation tasks by name: what each asks, where its rows are, how answers are judged. No torch."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from sftkit.config.rules import eval_problems
from sftkit.config.schema import EvalConfig
from sftkit.config.tables import TASKS
from sftkit.errors import ConfigError
from sftkit.evals.task import Task
from sftkit.evals.tasks import data as rows

_BUILDERS = {
    "mmlu": "mmlu:build",
    "arc_easy": "arc:arc_easy",
    "arc_challenge": "arc:arc_challenge",
    "hellaswag": "hellaswag:build",
    "piqa": "short_answers:piqa",
    "openbookqa": "arc:openbookqa",
    "boolq": "short_answers:boolq",
    "truthfulqa_mc1": "truthfulqa:truthfulqa_mc1",
    "truthfulqa_mc2": "truthfulqa:truthfulqa_mc2",
    "gsm8k": "gsm8k:build",
    "humaneval": "humaneval:build",
    "mbpp": "mbpp:build",
    "ifeval": "ifeval:build",
}
"Task -> module of this package and its function build(read, shots, format, max_examples)."
assert tuple(_BUILDERS) == TASKS, "config.eval_tasks names the same tasks"

PROMPT_FORMATS = ("completion", "chat")


def check_names(config: EvalConfig) -> None:
    """Refuse names of tasks that the settings alone show to be wrong.

    Raises:
        ConfigError: which of them, a line each.
    """
    problems = eval_problems(config.tasks, config.backend, allow_code_execution=config.allow_code_execution)
    if lines := "\n".join(f"{key}: {what}" for key, what in problems):
        raise ConfigError(lines)


def load_task(
    name: str,
    data: str | None = None,
    shots: int | None = None,
    format: str = "completion",
    max_examples: int | None = None,
) -> Task[Any, Any]:
    """Return the task of that name, one of TASKS, with all its examples read.

    Args:
        data: a folder with the rows; None: the hub.
        shots: few-shot examples; None: the task's own number.
        format: "completion" continues a text, "chat" asks through the chat template.
        max_examples: the most examples; None: all.

    Raises:
        ConfigError: a setting that cannot work.
        DataError: rows that are missing or cannot be used.
    """
    if format not in PROMPT_FORMATS:
        raise ConfigError(f'eval.format: "{format}" is not one of {", ".join(PROMPT_FORMATS)}')
    if shots is not None and shots < 0:
        raise ConfigError(f"eval.shots: {shots} is less than 0")
    module, function = _BUILDERS[name].split(":")
    # Imported by name when asked for, so that the names of tasks are known without their packages.
    build = getattr(import_module(f"sftkit.evals.tasks.{module}"), function)
    task: Task[Any, Any] = build(partial(rows.read_split, folder=data), shots, format, max_examples)
    return task
