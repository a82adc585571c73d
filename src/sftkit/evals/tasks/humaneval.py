"""HumanEval: 164 Python functions to complete from signature and docstring, judged by running their tests."""

from __future__ import annotations

from collections.abc import Sequence

from sftkit.errors import ConfigError
from sftkit.evals.sandbox.programs import ProgramTests
from sftkit.evals.task import ExampleScores, Message, Question, Task
from sftkit.evals.tasks import choices, code
from sftkit.evals.tasks.data import CheckedRow, DatasetSplit, Read
from sftkit.generation.answer import Answer

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
    return Task(
        name="humaneval",
        examples=tuple(_question(row, format) for row in rows[:max_examples]),
        judge=judge_chat if format == "chat" else judge,
        metric="pass_at_1",
        chance=0.0,
        settings=choices.settings_of(rows, choices.NO_SHOTS, format, choices.first(max_examples))
        | code.program_settings(),
    )


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


def judge(questions: Sequence[Question], answers: Sequence[Answer]) -> list[ExampleScores]:
    """Mark pass_at_1: the prompt with its completion passes the tests."""
    pairs = zip(questions, answers, strict=True)
    return code.pass_at_1([job(question, question.target["prompt"] + answer.text) for question, answer in pairs])


def judge_chat(questions: Sequence[Question], answers: Sequence[Answer]) -> list[ExampleScores]:
    """Mark pass_at_1: the function in the answer passes the tests; imports and helpers of the prompt are there."""
    pairs = zip(questions, answers, strict=True)
    return code.pass_at_1([job(question, program(question, answer.text)) for question, answer in pairs])


def job(question: Question, program: str) -> ProgramTests:
    """Return a program with its tests, which take the asked function from the program; imports and helpers, which some
    use, come from the prompt itself."""
    target = question.target
    return ProgramTests(program, target["tests"], names=(target["name"],), preamble=target["prompt"])


def program(question: Question, answer: str) -> str:
    """Return the prompt, a function with only a docstring, then the code, which defines it anew or is its body."""
    return f"{question.target['prompt']}\n\n{code.code_of(answer)}"
