"""Evaluation tasks by name: their prompts, their rows, their judges. No torch."""

from functools import partial
from importlib import import_module
from typing import Any

from sftkit.config import rules, tables
from sftkit.config.schema import DataConfig, EvalConfig
from sftkit.data.hygiene import LONG_GRAM, OF_ANSWERS, Benchmarks, words_of
from sftkit.errors import ConfigError, DataError
from sftkit.evals.results import Task
from sftkit.evals.tasks import data as rows

MODULES = dict.fromkeys(tables.EVAL_TASKS, "choices") | {
    **dict.fromkeys(("families", "gsm8k"), "answers"),
    **dict.fromkeys(tables.CODE, "code"),
}
"Task -> module of this package; its function build(name, read, shots, format, max_examples) makes the task."
PROMPT_FORMATS = ("completion", "chat")


def check_names(config: EvalConfig) -> None:
    """Reject names of tasks that are wrong by the settings alone.

    Raises:
        ConfigError: a line for each of them.
    """
    problems = rules.eval_problems(config.tasks, config.backend, allow_code_execution=config.allow_code_execution)
    if lines := "\n".join(f"{key}: {what}" for key, what in problems):
        raise ConfigError(lines)


def load_task(
    name: str,
    data: str | None = None,
    shots: int | None = None,
    format: str = "completion",
    max_examples: int | None = None,
) -> Task[Any, Any]:
    """Return the task of that name, one of EVAL_TASKS, with all its examples read.

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
    if shots and name in tables.WITHOUT_SHOTS:
        raise ConfigError(f"eval.shots: {shots}: {name} has a fixed prompt and takes no shots: leave it null or set 0")
    # Imported when asked for: the names of tasks are known without their packages.
    module = import_module(f"sftkit.evals.tasks.{MODULES[name]}")
    task: Task[Any, Any] = module.build(name, partial(rows.read_split, folder=data), shots, format, max_examples)
    return task


def benchmarks(data: DataConfig, config: EvalConfig, *, always: bool = False) -> Benchmarks | None:
    """Return the texts that training documents are compared with: of the tasks of data.decontaminate. None: no task.

    Args:
        always: without that setting, those of eval.tasks.

    Raises:
        ConfigError, DataError: the rows of a task that data.decontaminate names cannot be read, or of all those of
            `all`.
    """
    wanted = data.decontaminate or (config.tasks if always else ())
    texts: dict[str, list[str]] = {}
    missing: dict[str, str] = {}
    for name in tables.TASKS:
        if name not in wanted and "all" not in wanted:
            continue
        module = import_module(f"sftkit.evals.tasks.{MODULES[name]}")
        try:
            pairs = list(module.question_texts(name, partial(rows.read_split, folder=config.data)))
        except (ConfigError, DataError) as error:
            if name in data.decontaminate:
                raise
            missing[name] = str(error)
        else:
            # Shorter answers stand in many texts that have nothing to do with their question.
            answers = [answer if len(words_of(answer)) >= LONG_GRAM else "" for _, answer in pairs]
            texts |= {name: [question for question, _ in pairs], f"{name}{OF_ANSWERS}": answers}
    if data.decontaminate and not texts:
        raise DataError(f"data.decontaminate: no task can be read: {'; '.join(dict.fromkeys(missing.values()))}")
    return Benchmarks(texts, missing) if texts or missing else None
