"""HumanEval: 164 Python functions to complete from signature and docstring, judged by running their tests."""

from __future__ import annotations

from sftkit.errors import ConfigError
from sftkit.evals.sandbox.programs import ProgramTests
from sftkit.evals.task import Message, Question, Task
from sftkit.evals.tasks import choices, code
from sftkit.evals.tasks.data import CheckedRow, DatasetSplit, Read
from sftkit.generation.repl import Answer

TEST = DatasetSplit(("humaneval_test", "humaneval"), "openai/openai_humaneval", split="test")
STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
MAX_NEW_TOKENS = 1024
ASK = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{prompt}\n```\n"


def build(read: Read, shots: int | None, format: str, max_examples: int | None) -> Task[Question, Answer]:
    """Return the task: format completion is lm-evaluation-harness's humaneval; chat asks as humaneval_instruct
    and runs the answer's code.

    ConfigError where the sandbox does not work.
    """
    if shots:
        raise ConfigError(f"eval.shots: {shots}: humaneval has no few-shot examples; set 0 or null")
    code.require_sandbox("humaneval")
    rows = read(TEST)
    questions = [_question(row, format) for row in rows[:max_examples]]
    return code.task("humaneval", questions, _program_job, choices.settings_of(rows, format, max_examples))


def _question(row: CheckedRow, format: str) -> Question:
    prompt = row.text("prompt")
    ask: tuple[Message, ...] = ({"role": "user", "content": ASK.format(prompt=prompt)},)
    return Question(
        id=row.text("task_id"),
        prompt=ask if format == "chat" else prompt,
        max_new_tokens=MAX_NEW_TOKENS,
        stop=() if format == "chat" else STOP,
        target={
            "prompt": prompt,
            "tests": f"{row.text('test')}\ncheck({row.text('entry_point')})",
            "name": row.text("entry_point"),
        },
        source=dict(row),
    )


def _program_job(question: Question, completion: str) -> ProgramTests:
    """Return the prompt with its completion and the tests, which take the asked function from there; imports and
    helpers, which some use, come from the prompt itself. The code of a chat answer stands after the prompt, a function
    with only a docstring, and defines it anew or is its body."""
    target = question.target
    program = target["prompt"] + completion
    return ProgramTests(program, target["tests"], names=(target["name"],), preamble=target["prompt"])
