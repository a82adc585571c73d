"""The plain model, against which ours is checked: each document alone through transformers' forward pass
and torch's loss."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sftkit.data.batches.collate import IGNORE, Batch, documents, single_rows
from sftkit.objectives.balanced import Balanced
from sftkit.objectives.model_with_loss import ModelWithLoss
from sftkit.objectives.sums import Sums


def plain_sums(model: ModelWithLoss, batch: Batch, multiple: int = 1) -> Iterator[Sums]:
    """Yield the sums of a batch document by document, so that the caller's backward pass frees one before the next.

    Call it inside ops.attention.plain_attention.

    Args:
        multiple: documents are padded to a multiple of this number of positions.
    """
    # The auxiliary loss of routers depends on what all tokens of a row choose, so documents need the counts
    # of their row.
    if isinstance(model.objective, Balanced) and model.orig_model.training:
        for row in single_rows(batch):
            yield from _of_row(model, model.objective, row, multiple)
        return
    if model.routing is not None:
        model.routing.begin(None)  # the load of experts is counted in training steps only
    for inputs, targets in documents(batch, multiple):
        yield _of_document(model, inputs, targets)


def _of_document(model: ModelWithLoss, inputs: dict[str, Tensor], targets: Tensor) -> Sums:
    """Return the sums of one document, in fp32 or more."""
    logits = model.kind.plain_logits(model.orig_model, inputs)[0]
    return model.objective.sums_of_logits(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets)


def _of_row(model: ModelWithLoss, objective: Balanced, row: Batch, multiple: int) -> Iterator[Sums]:
    """Yield the sums of a row's documents, each with its share of the row's auxiliary loss.

    How often the row chooses each expert must be known first, and is counted in passes without gradients. Given that,
    the loss is a sum over documents.
    """
    routing, ids = model.routing, row.doc_ids[row.doc_ids >= 0]
    assert routing is not None
    own = list(zip(documents(row, multiple), torch.bincount(ids).tolist(), strict=True))

    def passed(inputs: dict[str, Tensor], targets: Tensor, length: int) -> tuple[Sums, Tensor, Tensor]:
        """Return (sums, positions that each expert was given, sums of probabilities) of a document."""
        routing.begin(torch.arange(len(targets), device=targets.device)[None] < length)
        sums = _of_document(model, inputs, targets)
        chosen, probability = routing.taken()
        assert probability is not None
        return sums, chosen, probability

    with torch.no_grad():
        counted = [passed(*document, length)[1] for document, length in own]
    # The second pass, with gradients: each document adds its own probabilities to the counts of the whole row.
    of_row = row.doc_ids.new_tensor([len(ids)]), (row.targets != IGNORE).sum(-1)
    for document, length in own:
        sums, _, probability = passed(*document, length)
        yield objective.added(sums, routing.loss_of_rows(torch.stack(counted).sum(0), probability, *of_row))
