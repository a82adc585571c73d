"""Tasks that run code of the model in the sandbox: HumanEval (164 functions to complete) and MBPP (500 to write)."""

import ast
import platform
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from sftkit.errors import ConfigError, DataError
from sftkit.evals.results import ExampleScores, Question, Task
from sftkit.evals.tasks.data import CheckedRow, DatasetSplit, Read, conversation, settings_of
from sftkit.generation.repl import Answer
from sftkit_sandbox import programs

HUMANEVAL = DatasetSplit(("humaneval_test", "humaneval"), "openai/openai_humaneval")
MBPP_TEST = DatasetSplit(("mbpp_test", "mbpp"), "google-research-datasets/mbpp", "full", "test")
MBPP_PROMPT = DatasetSplit(("mbpp_prompt", "mbpp"), "google-research-datasets/mbpp", "full", "prompt")
MBPP_IDS = range(11, 511)
MBPP_SHOTS = (2, 3, 4)
MAX_NEW_TOKENS = {"completion": 256, "chat": 512, "humaneval": 1024}
STOP = {"humaneval": ("\nclass", "\ndef", "\n#", "\nif", "\nprint"), "mbpp": ("[DONE]",)}
ASK = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```\n"
CODE_BLOCK = re.compile(r"```[ \t]*(?P<language>[\w+-]*)[^\n]*\n(?P<code>.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)


def require_sandbox(task: str) -> str:
    """Return how the memory of programs is limited. ConfigError: what the model writes cannot be run safely here."""
    if (missing := programs.check_sandbox()) is not None:
        raise ConfigError(f'eval.tasks: "{task}" runs code that the model writes: {missing}')
    return programs.memory_bound()


def build(name: str, read: Read, shots: int | None, format: str, max_examples: int | None) -> Task[Question, Answer]:
    """Return a task, judged by running programs: in a chat the code in the answer. Format completion is
    lm-evaluation-harness's humaneval or mbpp; chat asks as humaneval_instruct or mbpp_instruct, shots as earlier turns.

    ConfigError: the sandbox does not work here.
    """
    memory = require_sandbox(name)
    if name == "humaneval":
        rows = read(HUMANEVAL)
        questions = [_humaneval(row, format) for row in rows[:max_examples]]
        settings = settings_of(rows, format, max_examples)
    else:
        shots = len(MBPP_SHOTS) if shots is None else shots
        if shots > len(MBPP_SHOTS):
            raise ConfigError(f"eval.shots: {shots}: mbpp has {len(MBPP_SHOTS)} few-shot examples, tasks 2, 3 and 4")
        rows = _of_ids(read(MBPP_TEST), MBPP_IDS)
        pool = _of_ids(read(MBPP_PROMPT), MBPP_SHOTS[:shots]) if shots else []
        questions = [_mbpp(row, pool, format) for row in rows[:max_examples]]
        settings = settings_of(rows, format, max_examples, shots, pool, "tasks 2, 3, 4")
    settings |= {
        "python": f"{platform.python_version()}, the standard library alone",
        "limits": asdict(programs.ProgramLimits()),
        "memory": memory,
    }

    def judge(questions: Sequence[Question], answers: Sequence[Answer]) -> list[ExampleScores]:
        """Mark pass_at_1: 1 for each answer whose tests end without an error."""
        written = [f"\n\n{code_of(answer.text)}" if format == "chat" else answer.text for answer in answers]
        jobs = [_program_tests(question.target, of) for question, of in zip(questions, written, strict=True)]
        try:
            verdicts = programs.run_many(jobs)
        except programs.SandboxError as error:
            raise ConfigError(str(error)) from None
        return [{"pass_at_1": float(verdict.passed)} for verdict in verdicts]

    return Task(name, tuple(questions), judge, metric="pass_at_1", chance=0.0, settings=settings)


def code_of(answer: str) -> str:
    """Return the first Python block of a chat answer, else its first block, else all of it; a block without end runs to
    the end."""
    blocks = list(CODE_BLOCK.finditer(answer))
    python = [block for block in blocks if block["language"].lower() in ("python", "python3", "py")]
    return next((block["code"] for block in [*python, *blocks]), answer)


def _program_tests(target: dict[str, Any], written: str) -> programs.ProgramTests:
    """Return the program of an answer with its tests.

    HumanEval: the prompt with its completion. The tests take the asked function from there; imports and helpers, which
    some use, come from the prompt itself. The code of a chat answer follows the prompt, a function with only a
    docstring, and defines it again or is its body. MBPP: the answer alone.
    """
    prompt = target.get("prompt", "")
    names = target["names"] if "names" in target else [target["name"]]
    return programs.ProgramTests(prompt + written, target["tests"], tuple(names), preamble=prompt)


def question_texts(name: str, read: Read) -> Iterator[tuple[str, str]]:
    """Yield the problem and the published solution of each row."""
    columns = ("prompt", "canonical_solution") if name == "humaneval" else ("text", "code")
    rows = read(HUMANEVAL) if name == "humaneval" else _of_ids(read(MBPP_TEST), MBPP_IDS)
    yield from ((row.text(columns[0]), row.text(columns[1])) for row in rows)


def _humaneval(row: CheckedRow, format: str) -> Question:
    prompt = row.text("prompt")
    tests = row.text("test")
    name = row.text("entry_point")
    return Question(
        id=row.text("task_id"),
        prompt=conversation([], ASK.format(prompt)) if format == "chat" else prompt,
        max_new_tokens=MAX_NEW_TOKENS["humaneval"],
        stop=() if format == "chat" else STOP["humaneval"],
        target={"prompt": prompt, "tests": f"{tests}\ncheck({name})", "name": name},
        source=dict(row),
    )


def _of_ids(rows: Sequence[CheckedRow], ids: Sequence[int]) -> list[CheckedRow]:
    """Return the rows of these tasks of MBPP: a file may hold all 974, numbered as they were published."""
    found = [row for row in rows if row["task_id"] in ids]
    if not found:
        raise DataError(f"{rows[0].origin}: no row with a task_id from {min(ids)} to {max(ids)}")
    return found


def _mbpp(row: CheckedRow, shots: Sequence[CheckedRow], format: str) -> Question:
    def ask(one: CheckedRow) -> str:
        space = "\n" if format == "chat" else " "
        tests = "\n".join(one.texts("test_list"))
        text = f"You are an expert Python programmer, and here is your task:{space}{one.text('text')}{space}"
        text += "Your code should pass these tests:\n"
        return f"{text}{tests}" if format == "chat" else f"{text}\n{tests}\n[BEGIN]\n"

    prompt: Any
    if format == "chat":
        prompt = conversation([(ask(shot), f"```python\n{shot.text('code')}\n```") for shot in shots], ask(row))
    else:
        prompt = "".join(f"{ask(shot)}{shot.text('code')}\n[DONE]\n\n" for shot in shots) + ask(row)
    return Question(
        id=f"mbpp/{row['task_id']}",
        prompt=prompt,
        max_new_tokens=MAX_NEW_TOKENS[format],
        stop=() if format == "chat" else STOP["mbpp"],
        target=_tests(row),
        group="mbpp" if shots else "",
        source=dict(row),
    )


def _tests(row: CheckedRow) -> dict[str, Any]:
    """Return all tests of a row of MBPP, after its test_setup_code, and the names that they take from the program:
    those in them that the published solution defines."""
    tests = "\n".join([row.text("test_setup_code"), *row.texts("test_list")])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in published strings, which Python deprecates
            solution = ast.parse(row.text("code"))
            asked = ast.walk(ast.parse(tests))
    except SyntaxError as error:
        raise DataError(f"{row.origin}: task_id {row['task_id']}: code or tests are not Python: {error}") from None
    defined = {node.name for node in solution.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return {"tests": tests, "names": sorted(defined & {node.id for node in asked if isinstance(node, ast.Name)})}
