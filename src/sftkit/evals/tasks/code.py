"""What the tasks that run code have in common: the sandbox, programs out of answers, pass@1."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from sftkit.errors import ConfigError
from sftkit.evals.sandbox import check
from sftkit.evals.sandbox.programs import ProgramLimits, ProgramTests, run_many
from sftkit.evals.task import ExampleScores, Question, Task
from sftkit.generation.repl import Answer

CODE_BLOCK = re.compile(r"```[ \t]*(?P<language>[\w+-]*)[^\n]*\n(?P<code>.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)


def require_sandbox(task: str) -> None:
    """Refuse a task, before anything is loaded, where what the model writes cannot be run safely."""
    if (missing := check.check_sandbox()) is not None:
        raise ConfigError(f'eval.tasks: "{task}" runs code that the model writes: {missing}')


def code_of(answer: str) -> str:
    """Return the first Python block of a chat answer, else its first block, else all of it; a block
    without end runs to the end."""
    blocks = list(CODE_BLOCK.finditer(answer))
    python = [block for block in blocks if block["language"].lower() in ("python", "python3", "py")]
    return next((block["code"] for block in [*python, *blocks]), answer)


def task(
    name: str,
    questions: Iterable[Question],
    program_job: Callable[[Question, str], ProgramTests],
    settings: dict[str, Any],
) -> Task[Question, Answer]:
    """Return a task that is judged by running, for each question, what `program_job` makes of it and of the answer's
    program: in a chat the code in the answer. `settings` get where the programs ran."""
    in_chat = settings["format"] == "chat"
    where = {
        "python": f"{platform.python_version()}, the standard library alone",
        "limits": asdict(ProgramLimits()),
        "memory": check.memory_bound(),
    }

    def judge(questions: Sequence[Question], answers: Sequence[Answer]) -> list[ExampleScores]:
        """Mark pass_at_1: 1 for each answer whose tests end without an error."""
        programs = [f"\n\n{code_of(answer.text)}" if in_chat else answer.text for answer in answers]
        verdicts = run_many([program_job(*pair) for pair in zip(questions, programs, strict=True)])
        return [{"pass_at_1": float(verdict.passed)} for verdict in verdicts]

    return Task(name, tuple(questions), judge, metric="pass_at_1", chance=0.0, settings=settings | where)
