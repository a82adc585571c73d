"""Compute each document alone: by transformers' own forward pass, with whole logits and plain loss operators.

The reference engine trains so, and checks compute the plain side of a comparison so.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from sftkit.data.batches.collate import IGNORE, Batch, documents, single_rows
from sftkit.data.types import Examples
from sftkit.models.kind import ModelKind
from sftkit.models.routing import Routing
from sftkit.objectives.objective import Balanced, Objective, Sums


class PlainDocument(NamedTuple):
    """A document as the plain model takes it, or several of one padded length."""

    inputs: dict[str, Tensor]
    "of the model, [N, L] without positions, and of an encoder [N, ...]"
    targets: Tensor
    "[N L], IGNORE where nothing is learned"
    length: int
    "positions of the document, without padding"


class Computes(Protocol):
    """A model with its objective: the one that is trained, for the reference engine, or a PlainModel."""

    orig_model: PreTrainedModel
    objective: Objective
    routing: Routing | None
    kind: ModelKind


def documents_of(
    examples: Examples, rows: Iterable[Sequence[int]], device: torch.device, multiple: int = 1
) -> list[list[PlainDocument]]:
    """Return the documents of each row, made from their own ids and mask: nothing of a batch or its collation.

    Args:
        multiple: documents are padded to a multiple of this number of positions.
    """
    return [[_document(examples, number, device, multiple) for number in row] for row in rows]


def _document(examples: Examples, number: int, device: torch.device, multiple: int) -> PlainDocument:
    """Return document i: its tokens but the last, and as target of each the token that follows, if that is learned."""
    ids = examples[number].ids
    length = len(ids) - 1
    padding = (0, -length % multiple)
    targets = np.where(examples[number].is_target[1:], ids[1:], IGNORE).astype(np.int64)
    inputs = {"input_ids": pad(torch.from_numpy(ids[:-1].astype(np.int64)), padding)[None].to(device)}
    if (encoded := examples.encoder_inputs) is not None:
        entry = int(encoded.index[number])
        inputs |= {
            name: torch.from_numpy(array[entry][None].copy()).to(device) for name, array in encoded.arrays.items()
        }
    return PlainDocument(inputs, pad(torch.from_numpy(targets), padding, value=IGNORE).to(device), length)


def in_one_pass(found: Iterable[PlainDocument]) -> PlainDocument:
    """Return documents as one, padded behind to the same length, for a single pass: no token sees those behind it."""
    found = list(found)
    length = max(one.inputs["input_ids"].shape[1] for one in found)

    def padded(one: PlainDocument, name: str) -> Tensor:
        value = one.inputs[name]
        return pad(value, (0, length - value.shape[1])) if name == "input_ids" else value

    inputs = {name: torch.cat([padded(one, name) for one in found]) for name in found[0].inputs}
    targets = [pad(one.targets, (0, length - len(one.targets)), value=IGNORE) for one in found]
    return PlainDocument(inputs, torch.cat(targets), sum(one.length for one in found))


def rows_of_batch(model: Computes, batch: Batch) -> Iterator[list[PlainDocument]]:
    """Yield the documents of a batch, for an engine that learns from it; those of a row together only where the
    objective needs that."""
    if _balanced(model) is not None:
        for row in single_rows(batch):
            yield [PlainDocument(inputs, targets, len(targets)) for inputs, targets in documents(row)]
        return
    for inputs, targets in documents(batch):
        yield [PlainDocument(inputs, targets, len(targets))]


def _balanced(model: Computes) -> Balanced | None:
    """Return the objective where it has the auxiliary loss of routers in this pass, which is that of whole rows."""
    return model.objective if isinstance(model.objective, Balanced) and model.orig_model.training else None


def plain_sums(model: Computes, rows: Iterable[Sequence[PlainDocument]]) -> Iterator[Sums]:
    """Yield the sums of documents one by one, so that the caller's backward pass frees one before the next.

    Call it inside ops.attention.plain_attention.
    """
    # The auxiliary loss of routers depends on what all tokens of a row choose, so documents need the counts
    # of their row.
    objective = _balanced(model)
    if objective is None and model.routing is not None:
        model.routing.begin(None)  # the load of experts is counted in training steps only
    for row in rows:
        if objective is None:
            yield from (model.objective.sums_of_logits(plain_logits(model, one), one.targets) for one in row)
        elif row:  # else it is padding
            yield from _of_row(model, objective, row)


def plain_logits(model: Computes, document: PlainDocument) -> Tensor:
    """Return the logits [N L, V] of a document by transformers' own forward pass, in fp32 or more."""
    logits = model.kind.plain_logits(model.orig_model, document.inputs).flatten(0, 1)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _of_row(model: Computes, objective: Balanced, row: Sequence[PlainDocument]) -> Iterator[Sums]:
    """Yield the sums of a row's documents, each with its share of the row's auxiliary loss.

    How often the row chooses each expert must be known first, and is counted in passes without gradients. Given that,
    the loss is a sum over documents.
    """
    routing = model.routing
    assert routing is not None

    def passed(document: PlainDocument) -> tuple[Sums, Tensor, Tensor]:
        """Return (sums, positions that each expert was given, sums of probabilities) of a document."""
        targets = document.targets
        routing.begin(torch.arange(len(targets), device=targets.device)[None] < document.length)
        sums = objective.sums_of_logits(plain_logits(model, document), targets)
        chosen, probability = routing.taken()
        assert probability is not None
        return sums, chosen, probability

    with torch.no_grad():
        counted = [passed(document)[1] for document in row]
    # The second pass, with gradients: each document adds its own probabilities to the counts of the whole row.
    tokens = torch.tensor([sum(one.length for one in row)], device=row[0].targets.device)
    learned = torch.stack([(one.targets != IGNORE).sum() for one in row]).sum()[None]
    for document in row:
        sums, _, probability = passed(document)
        yield objective.added(sums, routing.loss_of_rows(torch.stack(counted).sum(0), probability, tokens, learned))
