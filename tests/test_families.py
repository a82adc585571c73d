"""Scoring the built-in families: who is asked, what counts as right, how families are averaged."""

from __future__ import annotations

from collections import Counter

import pytest

from sftkit.data import builtin
from sftkit.evals import families
from sftkit.evals.families import Prompt


def test_heldout_prompts_wait_for_the_assistant():
    for prompt in families.heldout():
        assert prompt.messages[-1]["role"] == "user"


def test_heldout_is_the_same_on_every_call_and_a_smaller_number_is_its_beginning():
    everything, few = families.heldout(), families.heldout(max_per_family=3)
    assert everything == families.heldout()
    assert Counter(prompt.family for prompt in few) == dict.fromkeys(builtin.FAMILIES, 3)
    assert all(prompt in everything for prompt in few)


def test_the_right_answers_score_one():
    prompts = families.heldout(max_per_family=2)
    scores = families.score(prompts, [f" {prompt.answer}\n" for prompt in prompts])
    assert scores == dict.fromkeys((*builtin.FAMILIES, "mean"), 1.0)


@pytest.mark.parametrize("wrong", ["", "Yes", "yes.", "yes no"])
def test_only_the_whole_answer_is_right(wrong):
    assert families.score([Prompt("contains", [], "yes")], [wrong])["mean"] == 0.0


def test_the_mean_is_over_families_not_over_prompts():
    prompts = [Prompt("sort", [], "1"), Prompt("sort", [], "1"), Prompt("sort", [], "1"), Prompt("pick", [], "a")]
    assert families.score(prompts, ["1", "1", "1", "b"]) == {"sort": 1.0, "pick": 0.0, "mean": 0.5}


def test_a_missing_answer_is_an_error():
    with pytest.raises(ValueError, match="shorter"):
        families.score([Prompt("sort", [], "1")], [])


def test_nothing_asked_has_no_score():
    assert families.score([], []) == {}
