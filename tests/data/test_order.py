"""Every document of an epoch is taken once and in the same batches, whatever a resumed run changes in the middle of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from helpers import make_examples

from sftkit.config.schema import DataConfig, TrainConfig
from sftkit.data.batches.loader import Batches, StepBatches, StepDataset
from sftkit.data.batches.pack import PlanSegment, make_layout

KINDS = ("packed", "bucketed", "fixed", "dynamic")
LENGTHS = np.random.default_rng(0).integers(1, 33, 300)
EXAMPLES = make_examples(LENGTHS.tolist())


def batches(
    kind: str, batch: int, micro: int, earlier: Sequence[PlanSegment] = (), first_step: int = 0, seed: int = 0
) -> Batches:
    """Of a run that begins, or goes on at a step."""
    train = TrainConfig(max_steps=1, global_batch_size=batch, micro_batch_size=micro)
    layout = make_layout(DataConfig(train=(), layout=kind), train, LENGTHS, 32, 1, earlier)  # type: ignore[arg-type]
    return Batches(StepDataset(EXAMPLES, layout), seed=seed, earlier=earlier, first_step=first_step)


def rows(step: StepBatches) -> tuple[torch.Tensor, ...]:
    """Tokens, targets, positions and documents of a global batch, without the empty rows that fill its last micro-batch."""
    parts = [
        torch.stack([batch.inputs["input_ids"], batch.targets, batch.inputs["position_ids"], batch.doc_ids.long()])
        for batch in step.micro_batches
    ]
    together = torch.cat(parts, dim=1)
    return together[:, (together[3] >= 0).any(-1)], torch.tensor([step.num_targets, step.divisor, step.num_tokens])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("micro", [1, 3, 12])
def test_another_micro_batch_makes_the_same_global_batches_bit_for_bit(kind: str, micro: int) -> None:
    whole = batches(kind, 12, 4)
    resumed = batches(kind, 12, micro, whole.segments, 5)
    assert resumed.segments == whole.segments
    assert resumed.layout.row_lengths == whole.layout.row_lengths
    last = whole.num_steps(2)
    assert resumed.num_steps(2) == last
    for ours, theirs in zip(resumed.steps(5, last), whole.steps(5, last), strict=True):
        assert all(map(torch.equal, rows(ours), rows(theirs)))
    largest = max(b.shape[0] * b.shape[1] for step in resumed.steps(5, last) for b in step.micro_batches)
    assert largest <= (micro + 1) * 32  # a row more at most


@pytest.mark.parametrize("kind", KINDS)
def test_another_global_batch_loses_no_document_and_takes_none_twice_in_the_epoch(kind: str) -> None:
    taken: dict[int, list[int]] = {0: [], 1: [], 2: []}
    sizes = []
    begun = batches(kind, 12, 4)
    boundary = None
    segments: Sequence[PlanSegment] = ()
    step = 0
    # Twice in the first epoch, also back; exactly where the second begins; with another seed in the second.
    for batch, micro, seed, steps in ((12, 4, 0, 5), (8, 8, 0, 3), (12, 2, 0, None), (16, 4, 0, 4), (16, 4, 7, None)):
        now = batches(kind, batch, micro, segments, step, seed)
        assert now.layout.row_lengths == begun.layout.row_lengths
        boundary = now.num_steps(1 if step < 9 else 2)
        last = boundary if steps is None else step + steps
        for of_step in now.steps(step, last):
            taken[of_step.epoch] += of_step.documents
            sizes.append(batch)
        again = batches(kind, batch, 1, now.segments, last - 1, seed)  # resumed once more, one step before
        assert [s.documents for s in again.steps(last - 1, last + 2)] == [
            s.documents for s in now.steps(last - 1, last + 2)
        ]
        segments, step = now.segments, last
    assert len(segments) == 5
    assert Counter(taken[0]) == Counter(taken[1]) == Counter(range(300))
    assert taken[2] == []
    third = [i for of_step in now.steps(step, now.num_steps(3)) for i in of_step.documents]
    assert Counter(third) == Counter(range(300))


def test_a_change_that_is_taken_back_before_a_step_was_made_with_it_is_none() -> None:
    begun = batches("packed", 8, 2)
    changed = batches("packed", 16, 2, begun.segments, 4)
    assert [stretch.after_step for stretch in changed.segments] == [0, 4]
    kept = [stretch for stretch in changed.segments if stretch.after_step < 4]  # as a checkpoint of step 4 has them
    assert batches("packed", 8, 2, kept, 4).segments == begun.segments
