"""Check before training that our forward pass computes what the plain model does, document by document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from sftkit.data.batches.collate import OF_TOKENS, Batch, collate, documents
from sftkit.data.batches.pack import BatchShape
from sftkit.data.types import Examples
from sftkit.errors import ConfigError
from sftkit.models.stages import from_last
from sftkit.models.structure import inference, logit_softcap, output_projection, vocab_size
from sftkit.objectives.model_with_loss import ModelWithLoss
from sftkit.ops.attention import mixes_tokens, short_windows
from sftkit.parallel.tensor import without_sequence_parallel

_SIZES = (8, 5)
"Lengths of the two documents, in positions."
_ROW_LENGTH = 16
REFUSED_FROM = 0.05
"With this relative difference of the logits, or a larger one, no run starts; proof.json allows less: roundings.limits."


@dataclass(frozen=True)
class DocumentCheck:
    """Two documents and padding in one row, against each document alone."""

    backend: str
    "attention backend that was compared"
    logits_difference: float
    "relative: norm of the difference over the norm of the plain model's logits"
    loss: float
    "mean of the objective's monitored sum in nats per target, over both documents, each in a micro-batch of its own"
    plain_loss: float
    "the same from the plain model's logits, by the objective's plain operators"
    targets: int
    "what both documents add to the divisor"
    leak: float
    "the largest change of a hidden state of one document when every token of the other is replaced"
    changed: float
    "the same for the document that was replaced"


def check_documents(
    model: ModelWithLoss, backend: str, device: torch.device, max_length: int = _ROW_LENGTH
) -> DocumentCheck:
    """Compare the logits of two documents and padding in one row through our forward pass with those of each document
    alone through the model's own.

    Sliding windows are made shorter than the documents for it.

    Args:
        backend: of attention; "sdpa" takes one document a row, so the reference kernel stands in for it.
        max_length: data.max_length, to which texts for an encoder are padded.

    Raises:
        ConfigError: they differ, or the model does not take our arguments: this architecture does something that our
            attention or head leaves out, or mixes the tokens of a row outside attention.
    """
    orig_model, name = model.orig_model, type(model.orig_model).__name__
    # A convolution or a recurrent layer carries tokens across documents whatever the masks say.
    mixer = mixes_tokens(orig_model)
    if mixer:
        raise ConfigError(f"{name} is not supported: {mixer} carries tokens from one document of a row to the next")
    try:
        with inference(orig_model), short_windows(orig_model), without_sequence_parallel(orig_model):
            found = _compare(model, "reference" if backend == "sdpa" else backend, device, max_length)
    # What a model raises when it is called with arguments that it does not know; out of memory says nothing about it.
    except (RuntimeError, TypeError, AttributeError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ConfigError(f"{name} is not supported: {' '.join(str(error).split())[:300]}") from error
    if not found.logits_difference < REFUSED_FROM:
        raise ConfigError(
            f"{name} is not supported: the logits of its own forward pass and sftkit's differ by "
            f"{found.logits_difference:.0%}, so it does more than attend within documents, project and soft-cap"
        )
    return found


def _compare(model: ModelWithLoss, backend: str, device: torch.device, max_length: int) -> DocumentCheck:
    """Compute both sides with the reference kernel or the run's own."""
    # The same documents in every run: the check of one start can be compared with that of another.
    ids = np.random.default_rng(0).integers(0, vocab_size(model.orig_model), sum(_SIZES) + 2)
    examples = Examples.of(ids, _SIZES, model.kind.made_up_inputs(model.orig_model, len(_SIZES), max_length))
    batch = _batch(examples, (0, 1)).to(device)
    hidden = model.hidden_states(batch, backend)
    ours, theirs = _projected(model, hidden)[:, : sum(_SIZES)], _plain_logits(model, batch)
    monitored, targets = model.objective.monitored, model.objective.count(batch)
    # Each document in a micro-batch of its own: their sums must add up to the plain model's over both.
    sums = [
        from_last(model.orig_model, model.sums(_batch(examples, (document,)).to(device), backend).measured[monitored])
        for document in (0, 1)
    ]
    plain = model.objective.sums_of_logits(theirs[0], batch.targets[0, : sum(_SIZES)]).measured[monitored]

    # Leakage, by its effect: with every token of the first document replaced, the second one must not move.
    replaced = replace(batch, inputs=_first_replaced(batch, vocab_size(model.orig_model)))
    moved = (model.hidden_states(replaced, backend) - hidden).float().abs()
    return DocumentCheck(
        backend=backend,
        logits_difference=float((ours - theirs).norm() / theirs.norm()),
        loss=float(sum(sums)) / targets,
        plain_loss=float(plain) / targets,
        targets=targets,
        leak=float(moved[:, _SIZES[0] : sum(_SIZES)].max()),
        changed=float(moved[:, : _SIZES[0]].max()),
    )


def _first_replaced(batch: Batch, vocabulary: int) -> dict[str, torch.Tensor]:
    """Return the inputs of a batch with every token and the encoder's input of its first document replaced."""
    found = {name: value.clone() for name, value in batch.inputs.items()}
    ids = found["input_ids"][:, : _SIZES[0]]
    ids.copy_((ids + 1) % vocabulary)
    for name in found.keys() - set(OF_TOKENS):
        found[name][0] = found[name][0].flip(-1)
    return found


def _batch(examples: Examples, documents: Sequence[int]) -> Batch:
    """Return these documents in one row of the fixed length."""
    return collate(examples, (tuple(documents),), BatchShape(_ROW_LENGTH, max_docs=3, max_doc_length=max(_SIZES)))


def _projected(model: ModelWithLoss, hidden: torch.Tensor) -> torch.Tensor:
    """Return the logits of hidden states [B, T, H] by the run's head: fp32 [B, T, V]."""
    projection, softcap = output_projection(model.orig_model), logit_softcap(model.orig_model)
    logits = projection(hidden).float()
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _plain_logits(model: ModelWithLoss, batch: Batch) -> torch.Tensor:
    """Return the logits of each document alone by transformers' own forward pass: fp32 [1, documents' positions, V]."""
    return torch.cat([model.kind.plain_logits(model.orig_model, inputs).float() for inputs, _ in documents(batch)], 1)
