"""MBPP: 500 small Python functions described in a sentence, with tests to pass."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Sequence
from typing import Any

from sftkit.errors import ConfigError, DataError
from sftkit.evals.sandbox.programs import ProgramTests
from sftkit.evals.task import Question, Task
from sftkit.evals.tasks import choices, code
from sftkit.evals.tasks.data import CheckedRow, DatasetSplit, Read
from sftkit.generation.repl import Answer

HUB = "google-research-datasets/mbpp"
TEST = DatasetSplit(("mbpp_test", "mbpp"), HUB, "full", "test")
PROMPT = DatasetSplit(("mbpp_prompt", "mbpp"), HUB, "full", "prompt")
TEST_IDS = range(11, 511)
SHOT_IDS = (2, 3, 4)
MAX_NEW_TOKENS = {"completion": 256, "chat": 512}
STOP = ("[DONE]",)


def build(read: Read, shots: int | None, format: str, max_examples: int | None) -> Task[Question, Answer]:
    """Return the task: format completion is lm-evaluation-harness's mbpp; chat asks as
    mbpp_instruct, shots as earlier turns.

    All tests of a row must pass, after its test_setup_code. ConfigError where the sandbox does not work.
    """
    shots = len(SHOT_IDS) if shots is None else shots
    if shots > len(SHOT_IDS):
        raise ConfigError(f"eval.shots: {shots}: mbpp has {len(SHOT_IDS)} few-shot examples, tasks 2, 3 and 4")
    code.require_sandbox("mbpp")
    rows = _of_ids(read(TEST), TEST_IDS)
    pool = _of_ids(read(PROMPT), SHOT_IDS[:shots]) if shots else []
    questions = [_question(row, pool, format) for row in rows[:max_examples]]
    settings = choices.settings_of(rows, format, max_examples) | choices.shot_settings(shots, pool, "tasks 2, 3, 4")
    return code.task("mbpp", questions, _program_job, settings)


def _of_ids(rows: Sequence[CheckedRow], ids: Sequence[int]) -> list[CheckedRow]:
    """Return the rows of these tasks: a file may hold all 974, numbered as they were published."""
    found = [row for row in rows if row["task_id"] in ids]
    if not found:
        raise DataError(f"{rows[0].origin}: no row with a task_id from {min(ids)} to {max(ids)}")
    return found


def _question(row: CheckedRow, shots: Sequence[CheckedRow], format: str) -> Question:
    turns = [(_ask(shot), f"```python\n{shot.text('code')}\n```") for shot in shots]
    text = "".join(f"{_begin(shot)}{shot.text('code')}\n[DONE]\n\n" for shot in shots) + _begin(row)
    return Question(
        id=f"mbpp/{row['task_id']}",
        prompt=choices.conversation(turns, _ask(row)) if format == "chat" else text,
        max_new_tokens=MAX_NEW_TOKENS[format],
        stop=() if format == "chat" else STOP,
        target=_target(row),
        group="mbpp" if shots else "",
        source=dict(row),
    )


def _target(row: CheckedRow) -> dict[str, Any]:
    """Return the tests, and the names that they take from the program: those in them that the
    published solution defines."""
    tests = "\n".join([row.text("test_setup_code"), *row.texts("test_list")])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in published strings, which Python deprecates
            solution, asked = ast.parse(row.text("code")), ast.walk(ast.parse(tests))
    except SyntaxError as error:
        raise DataError(f"{row.origin}: task_id {row['task_id']}: code or tests are not Python: {error}") from None
    defined = {node.name for node in solution.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return {"tests": tests, "names": sorted(defined & {node.id for node in asked if isinstance(node, ast.Name)})}


def _begin(row: CheckedRow) -> str:
    tests = "\n".join(row.texts("test_list"))
    return (
        f"You are an expert Python programmer, and here is your task: {row.text('text')} Your code should pass these "
        f"tests:\n\n{tests}\n[BEGIN]\n"
    )


def _ask(row: CheckedRow) -> str:
    tests = "\n".join(row.texts("test_list"))
    ask = (
        f"You are an expert Python programmer, and here is your task:\n{row.text('text')}\nYour code should pass "
        "these tests:"
    )
    return f"{ask}\n{tests}"


def _program_job(question: Question, program: str) -> ProgramTests:
    """Return what was written before [DONE], or the code in a chat answer, with the tests of its question."""
    return ProgramTests(program, question.target["tests"], names=tuple(question.target["names"]))
