"""The held-out built-in task families as an evaluation task: exact match, per family and over all."""

from __future__ import annotations

from sftkit.data.demo import builtin
from sftkit.evals.task import ExampleScores, Question, Task, each
from sftkit.generation.answer import Answer

FAMILIES_TASK = "families"
MAX_NEW_TOKENS = 32


def heldout(max_per_family: int | None = None) -> list[builtin.TaskConversation]:
    """Return the first `max_per_family` held-out instances of each family (None: all), always the same ones."""
    tasks = list(builtin.tasks("heldout"))
    by_family = [[task for task in tasks if task.family == family] for family in builtin.FAMILIES]
    return [task for of_family in by_family for task in of_family[:max_per_family]]


def load_families(max_per_family: int | None = None, max_new_tokens: int | None = None) -> Task[Question, Answer]:
    """Return the task: conversations that wait for the assistant, each with the one right answer;
    `source` names the family."""
    questions = tuple(
        Question(
            id=f"{task.family}-{i}",
            prompt=task.messages[:-1],
            max_new_tokens=max_new_tokens or MAX_NEW_TOKENS,
            target=task.answer,
            source={"family": task.family},
        )
        for i, task in enumerate(heldout(max_per_family))
    )
    settings = {"shots": 0, "format": "chat", "split": "heldout", "data": "builtin:tasks"}
    return Task(FAMILIES_TASK, questions, judge, metric="acc", chance=0.0, settings=settings)


@each
def judge(question: Question, answer: Answer) -> ExampleScores:
    """Mark an answer: 1 for the right one, whitespace around it aside."""
    return {"acc": float(answer.text.strip() == question.target)}
