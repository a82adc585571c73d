"""Captions that are written in an evaluation: what is compared, and that a model that knows them scores 1."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import cpu_runtime
from made_captioners import CAPTIONER, TRANSLATOR, captions, made

from sftkit.data.types import Examples
from sftkit.evals import captions as scored
from sftkit.evals.captions import describe, evaluate, token_f1

TOKENIZER: Any = SimpleNamespace(eos_token_id=0, pad_token_id=1, decode=lambda ids, **_: " ".join(map(str, ids)))


def with_ends(examples: Examples) -> Examples:
    """Each document ends with eos and has the name of what is encoded for it."""
    ids = np.maximum(examples.ids, 2)
    ids[examples.offsets[1:] - 1] = 0
    return replace(examples, ids=ids, given=[f"picture {i}" for i in range(len(examples))])


@pytest.mark.parametrize(
    ("written", "reference", "expected"),
    [([1, 2], [1, 2], 1.0), ([], [], 1.0), ([], [3], 0.0), ([1, 1, 2], [1, 2, 3], 2 / 3), ([2, 1], [1, 2], 1.0)],
)
def test_token_f1_counts_tokens_that_both_have_as_often(
    written: list[int], reference: list[int], expected: float
) -> None:
    assert token_f1(written, reference) == pytest.approx(expected)


@pytest.mark.parametrize("fields", [CAPTIONER, TRANSLATOR], ids=["pictures", "texts"])
def test_greedy_texts_are_those_of_one_pass_at_a_time(fields: dict[str, Any]) -> None:
    orig_model = made(fields)
    examples = with_ends(captions(orig_model, [5, 7, 4]))
    found = describe(orig_model, TOKENIZER, examples, range(3), 6, batch_size=2)
    kind = scored.kind_of(orig_model.config)
    assert examples.encoder_inputs is not None
    for document, written in enumerate(found.written):
        ids = [0]
        arrays = examples.encoder_inputs.arrays.items()
        inputs = {name: torch.from_numpy(array[document : document + 1]) for name, array in arrays}
        orig_model.eval()
        while len(ids) < 7 and (len(ids) == 1 or ids[-1] != 0):
            with torch.no_grad():
                logits = kind.plain_logits(orig_model, {"input_ids": torch.tensor([ids]), **inputs})
            ids.append(int(logits[0, -1].argmax()))
        assert written == (ids[1:-1] if ids[-1] == 0 else ids[1:])


def test_each_rank_takes_its_share_and_the_first_texts_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    orig_model = made(CAPTIONER)
    examples = with_ends(captions(orig_model, [5, 7, 4, 6]))
    asked = []

    def known(_: Any, __: Any, of: Examples, documents: range, *rest: Any) -> scored.Described:
        asked.append(list(documents))
        right = [of[i].ids[1:-1].tolist() for i in documents]
        return scored.Described([ids if i else ids[:1] for i, ids in enumerate(right)], [True] * len(right))

    monkeypatch.setattr(scored, "describe", known)
    limits: dict[str, Any] = {"max_examples": 3, "samples": 2, "max_new_tokens": 8, "batch_size": 4}
    values, shown = evaluate(orig_model, TOKENIZER, {"a": examples}, cpu_runtime(), **limits)
    assert asked == [[0, 1, 2]]
    assert values["eval/captions/exact_match"] == pytest.approx(2 / 3)
    assert values["eval/captions/token_f1"] == pytest.approx((2 * 1 / (1 + 4) + 2) / 3)
    assert [sample["prompt"] for sample in shown] == ["picture 0", "picture 1"]
    assert shown[1]["answer"] == shown[1]["reference"] != shown[0]["answer"]
