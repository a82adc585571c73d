"""The built-in families as a task: who is asked, what counts as right, what is reported of each family."""

from __future__ import annotations

from collections import Counter

import pytest

from sftkit.data.demo import builtin
from sftkit.evals import results, tasks
from sftkit.evals.results import Question, Task
from sftkit.generation.repl import Answer


def families(max_per_family: int | None = None) -> Task[Question, Answer]:
    return tasks.load_task("families", max_examples=max_per_family)


def answered(texts: list[str], max_per_family: int) -> dict[str, float | None]:
    task = families(max_per_family)
    given = [Answer(text, "end_of_turn", 1) for text in texts]
    return results.values_of([results.evaluated(task, given, task.judge(task.examples, given), {})])


def test_heldout_prompts_wait_for_the_assistant():
    for question in families().examples:
        assert question.prompt[-1]["role"] == "user"


def test_heldout_is_the_same_on_every_call_and_a_smaller_number_is_its_beginning():
    everything, few = families().examples, families(3).examples
    assert everything == families().examples
    assert Counter(question.source["family"] for question in few) == dict.fromkeys(builtin.FAMILIES, 3)
    asked = [question.prompt for question in everything]
    assert all(question.prompt in asked for question in few)


def test_the_right_answers_score_one_over_all_and_in_every_family():
    right = [f" {question.target}\n" for question in families(2).examples]
    values = answered(right, 2)
    expected = {f"eval/{family}/acc": 1.0 for family in (*builtin.FAMILIES, "families")}
    assert expected.items() <= values.items()
    assert values["eval/centred_mean"] == 1.0
    assert values["eval/families/low"] < values["eval/families/high"] == pytest.approx(1.0)


@pytest.mark.parametrize("wrong", ["", "no idea", "{}.", "{} {}"])
def test_only_the_whole_answer_is_right(wrong):
    given = [wrong.format(question.target, question.target) for question in families(1).examples]
    assert answered(given, 1)["eval/families/acc"] == 0.0


def test_one_right_family_is_its_share_of_the_mean():
    examples = families(2).examples
    first = examples[0].source["family"]
    values = answered([q.target if q.source["family"] == first else "?" for q in examples], 2)
    assert values[f"eval/{first}/acc"] == 1.0
    assert values["eval/families/acc"] == pytest.approx(1 / len(builtin.FAMILIES))


def test_a_missing_answer_is_an_error():
    task = families(1)
    with pytest.raises(ValueError, match="shorter"):
        task.judge(task.examples, [])
