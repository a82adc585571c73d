"""Check the validation loss and bits per byte of a few documents by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from sftkit.data.batches.pack import Layout
from sftkit.data.types import EncoderInputs, Examples
from sftkit.engine.plain import documents_of, plain_logits
from sftkit.evals.validation import validate
from sftkit.models.structure import inference
from sftkit.objectives.model_with_loss import ModelWithLoss
from sftkit.parallel.fsdp import reshard
from sftkit.parallel.stagewise import stagewise
from sftkit.parallel.tensor import without_sequence_parallel
from sftkit.runtime.start import Runtime
from sftkit.tracking.checks import Check

DOCUMENTS = 4
"Maximum number of documents."
LONGEST = 1024
"Longer documents are not taken, if there are shorter ones."
SAME = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"Limit of the relative difference of a mean over few targets, by the dtype of the weights."


def some_documents(examples: Examples) -> Examples:
    """Return the first few documents that are not long, as examples of their own."""
    lengths = examples.lengths
    fitting = np.flatnonzero(lengths <= max(LONGEST, int(lengths.min())))[:DOCUMENTS]
    parts = [np.arange(examples.offsets[i], examples.offsets[i + 1]) for i in fitting]
    at = np.concatenate(parts)
    encoded = examples.encoder_inputs
    return replace(
        examples,
        ids=np.asarray(examples.ids[at]),
        is_target=np.asarray(examples.is_target[at]),
        offsets=np.concatenate([[0], np.cumsum([len(part) for part in parts])]),
        num_bytes=np.asarray(examples.num_bytes[fitting]),
        source=np.asarray(examples.source[fitting]),
        encoder_sources=[examples.encoder_sources[i] for i in fitting] if examples.encoder_sources else (),
        encoder_inputs=None if encoded is None else EncoderInputs(encoded.arrays, np.asarray(encoded.index[fitting])),
    )


def validation_check(
    model: ModelWithLoss,
    validation: Mapping[str, Examples],
    layout: Layout,
    tokenizer: PreTrainedTokenizerBase,
    rt: Runtime,
) -> list[Check]:
    """Return the check of val/loss and val/bpb; empty without validation data. Every rank calls it.

    A few documents go through the validation of the run. By hand: each alone through transformers, the base-2 logarithm
    of the probability of each target, the bytes of what the targets are decoded to.
    """
    chosen = next((examples for examples in validation.values() if len(examples)), None)
    if chosen is None:
        return []
    examples, orig_model = some_documents(chosen), model.orig_model
    with stagewise(orig_model):
        found = validate(model, {"": examples}, layout, int(tokenizer.pad_token_id or 0), rt)
    bits = targets = 0.0
    try:
        # Every rank computes all of them: shards are gathered, stages pass on what they compute.
        with stagewise(orig_model), inference(orig_model), without_sequence_parallel(orig_model):
            for (document,) in documents_of(examples, [(i,) for i in range(len(examples))], rt.device):
                learned = document.targets >= 0
                chances = plain_logits(model, document)[learned].log_softmax(-1)
                picked = chances.gather(1, document.targets[learned][:, None]).double()
                bits -= float(picked.sum()) / float(np.log(2.0))
                targets += int(learned.sum())
    finally:
        # A forward pass without a backward pass leaves gathered weights behind.
        reshard(orig_model)
    num_bytes = 0
    for i in range(len(examples)):
        ids = examples[i].ids[examples[i].is_target]
        text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        num_bytes += len(str(text).encode("utf-8", errors="replace"))
    by_hand = {
        "val/loss": bits * float(np.log(2.0)) / max(targets, 1),
        "val/bpb": bits / num_bytes if num_bytes else None,
    }
    limit = SAME.get(orig_model.dtype, SAME[torch.bfloat16])
    same, words = True, []
    for name, value in by_hand.items():
        logged = found[name]
        if (logged is None) != (value is None):
            same = False
        elif logged is not None and value is not None:
            same = same and abs(logged - value) <= limit * abs(value)
        words.append(f"{name} {_number(logged)} against {_number(value)}")
    how = (
        "documents of the validation data, each alone through transformers: log2 of the probability of each target, by "
        "the UTF-8 bytes of the decoded targets"
    )
    text = f"{'; '.join(words)}, {len(examples)} documents"
    return [Check("Validation loss and bits per byte, by hand", same, text, f"equal to {limit:.0e}", how)]


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.5f}"
