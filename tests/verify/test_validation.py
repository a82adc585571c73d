"""Validation loss and bits per byte by hand, and that a fault in them turns the row red."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import cpu_runtime, make_examples, make_layout_of, tiny_llama

from sftkit.config.schema import LossConfig
from sftkit.data.types import Examples
from sftkit.evals import suite
from sftkit.objectives.objective import ModelWithLoss, NextToken
from sftkit.tracking.names import Check
from sftkit.verify.counts import DOCUMENTS, some_documents, validation_check

LENGTHS = [30, 4, 25, 8, 31, 3]


def examples_of(tokenizer: Any) -> Examples:
    """Documents of random tokens with the bytes of their decoded targets."""
    examples = make_examples(LENGTHS)
    for i in range(len(examples)):
        ids = examples[i].ids[examples[i].is_target]
        text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        examples.num_bytes[i] = len(text.encode("utf-8", errors="replace"))
    return examples


def checked(tokenizer: Any, examples: Examples | None = None, kind: str = "packed") -> Check:
    examples = examples_of(tokenizer) if examples is None else examples
    model = ModelWithLoss(tiny_llama(), "reference", NextToken(LossConfig()))
    layout = make_layout_of(kind, examples.lengths)
    (check,) = validation_check(model, {"held out": examples}, layout, tokenizer, cpu_runtime())
    return check


@pytest.mark.parametrize("kind", ["packed", "bucketed", "fixed"])
def test_a_right_validation_is_that_by_hand(tokenizer, kind: str) -> None:
    check = checked(tokenizer, kind=kind)
    assert check.ok is True, check
    assert "val/bpb" in check.found


class NaturalLogarithms:
    """Bits that are nats."""

    def log(self, _: float) -> float:
        return 1.0


def wrong_bytes(tokenizer: Any) -> Examples:
    examples = examples_of(tokenizer)
    examples.num_bytes[:] = examples.num_targets
    return examples


def test_bits_per_byte_without_the_logarithm_of_2_turn_the_row_red(tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(suite, "math", NaturalLogarithms())
    check = checked(tokenizer)
    assert check.ok is False, check


def test_bytes_that_are_tokens_turn_the_row_red(tokenizer) -> None:
    assert checked(tokenizer, wrong_bytes(tokenizer)).ok is False


def test_a_loss_over_other_targets_than_the_documents_have_turns_the_row_red(tokenizer, monkeypatch) -> None:
    right = suite.collate

    def wrong(examples: Examples, *args: Any) -> Any:
        batch = right(examples, *args)
        batch.targets.copy_(batch.targets.where(batch.targets < 0, batch.inputs["input_ids"]))
        return batch

    monkeypatch.setattr(suite, "collate", wrong)
    assert checked(tokenizer).ok is False


def test_documents_without_bytes_have_no_bits_per_byte(tokenizer) -> None:
    examples = examples_of(tokenizer)
    examples.num_bytes[:] = 0
    check = checked(tokenizer, examples)
    assert check.ok is False, "targets decode to some bytes"
    assert "val/bpb unknown against" in check.found


def test_a_few_documents_that_are_not_long_are_taken(tokenizer) -> None:
    few = some_documents(make_examples([2000, 7, 9, 2000, 4, 5, 6]))
    assert few.lengths.tolist() == [7, 9, 4, 5]
    assert len(few) == DOCUMENTS
    whole = make_examples([2000, 7, 9, 2000, 4, 5, 6])
    assert np.array_equal(few[2].ids, whole[4].ids)
    assert some_documents(make_examples([3000, 2000])).lengths.tolist() == [2000], "where there is no shorter one"
    assert validation_check(None, {}, None, tokenizer, cpu_runtime()) == []  # type: ignore[arg-type]
