"""What the tasks that run code have in common: the sandbox, programs out of answers, pass@1."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from sftkit.errors import ConfigError
from sftkit.evals.sandbox import check
from sftkit.evals.sandbox.programs import ProgramLimits, ProgramTests, run_many
from sftkit.evals.task import ExampleScores, Question
from sftkit.generation.answer import Answer

BLOCK = re.compile(r"```[ \t]*(?P<language>[\w+-]*)[^\n]*\n(?P<code>.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)


def require_sandbox(task: str) -> None:
    """Refuse a task, before anything is loaded, where what the model writes cannot be run safely."""
    if (missing := check.check_sandbox()) is not None:
        raise ConfigError(f'eval.tasks: "{task}" runs code that the model writes: {missing}')


def code_of(answer: str) -> str:
    """Return the first Python block of a chat answer, else its first block, else all of it; a block
    without end runs to the end."""
    blocks = list(BLOCK.finditer(answer))
    python = [block for block in blocks if block["language"].lower() in ("python", "python3", "py")]
    return next((block["code"] for block in [*python, *blocks]), answer)


def judge(
    job: Callable[[Question, str], ProgramTests], questions: Sequence[Question], answers: Sequence[Answer]
) -> list[ExampleScores]:
    """Mark pass_at_1: 1 for each answer of which `job` makes a program whose tests end without an error."""
    jobs = [job(question, answer.text) for question, answer in zip(questions, answers, strict=True)]
    return [{"pass_at_1": float(verdict.passed)} for verdict in run_many(jobs)]


def program_settings() -> dict[str, Any]:
    """Return where the programs ran."""
    return {
        "python": f"{platform.python_version()}, the standard library alone",
        "limits": asdict(ProgramLimits()),
        "memory": check.memory_bound(),
    }
