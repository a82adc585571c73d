"""HumanEval and MBPP: their prompts are lm-evaluation-harness's, right solutions pass, wrong ones do not."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml
from helpers import SHARED_DATA

from sftkit.config.tables import CODE
from sftkit.errors import ConfigError, DataError
from sftkit.evals import tasks
from sftkit.evals.results import Question, Task
from sftkit.evals.tasks import code
from sftkit.evals.tasks.data import CheckedRow, DatasetSplit
from sftkit.generation.repl import Answer
from sftkit_sandbox import memory, programs

MISSING = programs.check_sandbox()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
DATA = SHARED_DATA / "eval"
has_data = pytest.mark.skipif(not DATA.is_dir(), reason="needs the shared data")

DOUBLE = {
    "task_id": "HumanEval/0",
    "prompt": 'import math\n\ndef half(x):\n    return x / 2\n\ndef double(x):\n    """Twice x."""\n',
    "entry_point": "double",
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(0) == 0\n",
}
PROBLEMS = [
    {
        "task_id": number,
        "text": f"Write a function that adds {number}.",
        "code": f"def add(x):\r\n    return x + {number}",
        "test_setup_code": "zero = 0" if number == 12 else "",
        "test_list": [f"assert add(zero) == {number}" if number == 12 else f"assert add(0) == {number}"] * 3,
    }
    for number in (1, 2, 3, 4, 11, 12, 510, 511)
]


def reading(rows: Sequence[dict[str, Any]]) -> Callable[[DatasetSplit], list[CheckedRow]]:
    return lambda split: [CheckedRow(row, "rows.jsonl", i) for i, row in enumerate(rows)]


def answers(*texts: str) -> list[Answer]:
    return [Answer(text, "end_of_turn", 1) for text in texts]


def passed(task: Task[Question, Answer], *texts: str) -> list[float]:
    return [float(marks["pass_at_1"]) for marks in task.judge(task.examples[: len(texts)], answers(*texts))]  # type: ignore[arg-type]


# ---- HumanEval -------------------------------------------------------------------------------------------------------


def test_a_completion_that_solves_it_passes() -> None:
    task = code.build("humaneval", reading([DOUBLE] * 4), None, "completion", None)
    assert task.examples[0].prompt == DOUBLE["prompt"]
    assert passed(task, "    return 2 * x", "    return x", "    return half(4 * x)", "    return 2 * x\n  broken") == [
        *(1, 0),
        *(1, 0),
    ]


def test_a_chat_answer_may_define_the_function_give_its_body_or_be_bare_code() -> None:
    task = code.build("humaneval", reading([DOUBLE] * 5), None, "chat", None)
    assert task.examples[0].prompt[0]["role"] == "user"  # type: ignore[index]
    assert passed(
        task,
        "Here it is:\n```python\ndef double(x):\n    return half(4 * x)\n```\nIt doubles.",
        "```\n    return 2 * x\n```",
        "def double(x):\n    return math.floor(2 * x)",
        "```python\ndef double(x):\n    return x\n```",
        "I cannot do that.",
    ) == [1, 1, 1, 0, 0]


def test_code_is_taken_from_the_first_python_block() -> None:
    assert code.code_of("```bash\nls\n```\nthen\n```python\nx = 1\n```\n```python\nx = 2\n```") == "x = 1"
    assert code.code_of("```\nx = 1\n```") == "x = 1"
    assert code.code_of("```python\nx = 1\ny = 2") == "x = 1\ny = 2"
    assert code.code_of("``` py title\nx = '```'\n```") == "x = '```'"
    assert code.code_of("x = 1") == "x = 1"


def test_helpers_that_the_tests_use_are_those_of_the_prompt_and_all_else_is_pythons_own() -> None:
    tests = "def check(candidate):\n    assert abs(candidate(3) - half(12)) < 0.5\n"
    task = code.build("humaneval", reading([DOUBLE | {"test": tests}] * 4), None, "completion", None)
    assert passed(
        task,
        "    return 2 * x",
        "    return x\ndef half(x):\n    return 3",
        "    return x\ndef abs(x):\n    return 0",
        "    return type('All', (), {'__sub__': lambda *a: 0})()",
    ) == [1, 0, 0, 0]


def test_results_say_how_memory_was_limited() -> None:
    task = code.build("humaneval", reading([DOUBLE]), None, "completion", None)
    together = "for all processes of a program together" if memory.parent() else "for each process of a program"
    assert together in task.settings["memory"]


@has_data
def test_canonical_solutions_of_humaneval_pass_and_empty_ones_do_not() -> None:
    task = tasks.load_task("humaneval", str(DATA), max_examples=30)
    assert sum(passed(task, *(question.source["canonical_solution"] for question in task.examples))) == 30
    assert sum(passed(task, *["    return None\n"] * 10)) == 0


@has_data
@pytest.mark.slow
def test_all_canonical_solutions_of_humaneval_pass() -> None:
    task = tasks.load_task("humaneval", str(DATA))
    assert len(task.examples) == 164
    assert sum(passed(task, *(question.source["canonical_solution"] for question in task.examples))) == 164


@has_data
@pytest.mark.slow
def test_all_canonical_solutions_of_humaneval_pass_as_chat_answers() -> None:
    task = tasks.load_task("humaneval", str(DATA), format="chat")
    rows = [question.source for question in task.examples]
    whole = [f"Sure.\n```python\n{row['prompt']}{row['canonical_solution']}```" for row in rows]
    body = [f"```python\n{row['canonical_solution']}```" for row in rows[:40]]
    assert sum(passed(task, *whole)) == 164
    assert sum(passed(task, *body)) == 40


# ---- MBPP ------------------------------------------------------------------------------------------------------------


def test_mbpp_asks_the_test_split_with_its_three_shots() -> None:
    task = code.build("mbpp", reading(PROBLEMS), None, "completion", None)
    assert [question.id for question in task.examples] == ["mbpp/11", "mbpp/12", "mbpp/510"]
    prompt = str(task.examples[0].prompt)
    assert [prompt.count(f"adds {n}.") for n in (1, 2, 3, 4, 11)] == [0, 1, 1, 1, 1]
    assert prompt.endswith("[BEGIN]\n")
    chat = code.build("mbpp", reading(PROBLEMS), 2, "chat", 1).examples
    assert [message["role"] for message in chat[0].prompt] == ["user", "assistant"] * 2 + ["user"]  # type: ignore[index, union-attr]
    with pytest.raises(ConfigError, match="3 few-shot examples"):
        code.build("mbpp", reading(PROBLEMS), 4, "completion", None)


def test_mbpp_runs_the_set_up_and_all_tests() -> None:
    task = code.build("mbpp", reading(PROBLEMS), 0, "completion", None)
    right = [question.source["code"] for question in task.examples]
    assert passed(task, *right) == [1, 1, 1]
    assert passed(task, "def add(x):\n    return 1", right[0], "") == [0, 0, 0]
    chat = code.build("mbpp", reading(PROBLEMS), 0, "chat", None)
    assert passed(chat, *(f"Like this:\n```python\n{text}\n```" for text in right)) == [1, 1, 1]


def test_mbpp_takes_from_the_program_what_the_published_solution_defines() -> None:
    row = {
        "task_id": 11,
        "text": "Write a function sum.",
        "code": "import math\nclass Node:\n    def __init__(self, x):\n        self.x = x\ndef sum(*nodes):\n    return nodes[0].x + nodes[1].x",
        "test_setup_code": "a = Node(1)\na.next = Node(2)",
        "test_list": ["assert sum(a, a.next) == 3", "assert set([sum(a, a)]) == {2}", "assert len('ab') == 2"],
    }
    task = code.build("mbpp", reading([row]), 0, "completion", None)
    assert task.examples[0].target["names"] == ["Node", "sum"]
    lies = "def set(x):\n    return {2}\ndef len(x):\n    return 2\n"
    assert passed(task, row["code"]) == [1]
    assert passed(task, str(row["code"]).replace("[1].x", "[1].x - (nodes[0] is nodes[1])") + "\n" + lies) == [0]
    with pytest.raises(DataError, match=r"task_id 11: code or tests are not Python"):
        code.build("mbpp", reading([row | {"code": "def f(:"}]), 0, "completion", None)


@has_data
def test_canonical_solutions_of_mbpp_pass() -> None:
    task = tasks.load_task("mbpp", str(DATA), max_examples=40)
    assert sum(passed(task, *(question.source["code"] for question in task.examples))) == 40


@has_data
@pytest.mark.slow
def test_many_canonical_solutions_of_mbpp_pass() -> None:
    task = tasks.load_task("mbpp", str(DATA))
    assert len(task.examples) == 500
    assert sum(passed(task, *(question.source["code"] for question in task.examples[:200]))) == 200


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CODE)
def test_without_a_sandbox_the_task_is_refused_before_a_row_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "check_sandbox", lambda: "no namespaces here")
    with pytest.raises(ConfigError, match=f'"{name}" runs code that the model writes: no namespaces here'):
        tasks.load_task(name, "/no/such/folder")


def test_settings_and_rows_that_do_not_fit_are_errors() -> None:
    with pytest.raises(ConfigError, match="humaneval has a fixed prompt and takes no shots"):
        tasks.load_task("humaneval", shots=3)
    with pytest.raises(DataError, match='row 0: no column "test"'):
        code.build("humaneval", reading([{"task_id": "a", "prompt": "b"}]), None, "completion", None)
    with pytest.raises(DataError, match="no row with a task_id from 11 to 510"):
        code.build("mbpp", reading(PROBLEMS[:2]), 0, "completion", None)


# ---- lm-evaluation-harness -------------------------------------------------------------------------------------------


def lm_eval_task(name: str, folder: str) -> dict[str, Any]:
    """The task's YAML, its Python functions left out."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or spec.origin is None:
        pytest.skip("needs lm_eval")

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("!function", lambda *_: None)
    path = Path(spec.origin).parent / "tasks" / folder / f"{name}.yaml"
    task: dict[str, Any] = yaml.load(path.read_text(), Loader)
    return task


def rendered(template: str, row: dict[str, Any]) -> str:
    return (
        jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
        .from_string(template)
        .render(row)
    )


@pytest.mark.slow
@has_data
def test_prompts_and_stops_are_those_of_lm_eval() -> None:
    theirs = lm_eval_task("humaneval", "humaneval")
    ours = tasks.load_task("humaneval", str(DATA))
    until = theirs["generation_kwargs"]["until"]
    for question in ours.examples:
        assert question.prompt == rendered(theirs["doc_to_text"], question.source)
        assert question.target["tests"] == rendered(theirs["doc_to_target"], question.source)
        assert (list(question.stop), question.max_new_tokens) == (until, theirs["generation_kwargs"]["max_gen_toks"])
    asked = lm_eval_task("humaneval_instruct", "humaneval")["doc_to_text"]
    for question in tasks.load_task("humaneval", str(DATA), format="chat").examples:
        assert question.prompt[0]["content"] == rendered(asked, question.source)  # type: ignore[index]

    theirs = lm_eval_task("mbpp", "mbpp")
    every = {row["task_id"]: row for row in tasks.rows.read_split(code.MBPP_PROMPT, str(DATA))}
    shots = [
        rendered(theirs["doc_to_text"], every[i]) + rendered(theirs["doc_to_target"], every[i] | {"is_fewshot": True})
        for i in (2, 3, 4)
    ]
    for question in tasks.load_task("mbpp", str(DATA)).examples:
        assert question.prompt == "\n\n".join([*shots, rendered(theirs["doc_to_text"], question.source)])
        assert list(question.stop) == theirs["generation_kwargs"]["until"]
    asked = lm_eval_task("mbpp_instruct", "mbpp")["doc_to_text"]
    for question in tasks.load_task("mbpp", str(DATA), format="chat").examples:
        assert question.prompt[-1]["content"] == rendered(asked, question.source)  # type: ignore[index]
