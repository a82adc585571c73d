"""Documents and weights that need neither network nor tokenizer: the same for everyone who runs the same plan."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from sftkit.data.types import Examples
from sftkit.experiments.bench.plan import SYNTHETIC, DataPlan, read_lengths
from sftkit.models.kind import check_causal, kind_of
from sftkit.models.load import DTYPES, scratch_config
from sftkit.models.vocabulary import check_rows
from sftkit.ops.attention import plain_implementation


def synthetic_documents(data: DataPlan, vocab_size: int) -> Examples:
    """Return chat-like documents: Zipf tokens, an untrained prompt first where not all is trained; lengths lognormal,
    or of a file.

    A document that takes n positions has n + 1 tokens. Loss falls from log(vocab_size) towards the tokens' entropy.

    Raises:
        ConfigError: the file of lengths cannot be read.
    """
    rng = np.random.default_rng(data.seed)
    lengths, targets = _sizes(data, rng)
    offsets = np.concatenate([[0], np.cumsum(lengths + 1)])
    # Tokens by inverse transform sampling: a uniform number is looked up in the cumulated probabilities of the ranks.
    weights = np.arange(1, vocab_size + 1, dtype=np.float64) ** -data.zipf
    token_of_rank = rng.permutation(vocab_size).astype(np.int32)
    ids = token_of_rank[np.searchsorted(np.cumsum(weights / weights.sum())[:-1], rng.random(int(offsets[-1])))]
    number_from_end = np.repeat(offsets[1:], lengths + 1) - np.arange(len(ids))  # the last token of a document has 1
    is_target = number_from_end <= np.repeat(targets, lengths + 1)
    zeros = np.zeros(len(lengths), dtype=np.int64)
    return Examples(ids, is_target, offsets, zeros, zeros.astype(np.int16), (SYNTHETIC,), {})


def _sizes(data: DataPlan, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions and targets of each document, int64 [D] both."""
    if data.documents is None:
        assert data.lengths is not None
        return tuple(  # type: ignore[return-value]
            np.array(sizes, dtype=np.int64) for sizes in read_lengths(Path(data.lengths))
        )
    d = data.documents
    sigma = math.sqrt(2.0 * math.log(d.mean / d.median))  # mean = median * exp(sigma**2 / 2)
    lengths = np.clip(np.rint(rng.lognormal(np.log(d.median), sigma, d.count)), 4, d.cap).astype(np.int64)
    return lengths, np.maximum(np.rint(data.target_share * lengths), 1).astype(np.int64)


@dataclass(frozen=True)
class ModelSpec:
    """A model whose weights are random."""

    fields: dict[str, Any]
    "of a transformers config, with model_type"
    seed: int
    precision: str
    "bf16 or fp32, the dtype of the parameters"
    attention: str | None = None
    "transformers' attn_implementation; None: its own of this model"


def new_model(
    spec: ModelSpec, device: torch.device, tokenizer: PreTrainedTokenizerBase | None = None
) -> PreTrainedModel:
    """Return a model with random weights, made on the device and rounded to bf16, in fp32 too, so that all runs start
    from the same ones.

    Args:
        tokenizer: what special ids and, where fields have none, the vocabulary come from; None: tokens are made up.

    Raises:
        ConfigError: the model has an encoder and tokens are made up, or it has no room for those of the tokenizer.
    """
    # The random numbers of a device differ from those of another: runs that are compared are made on one kind.
    torch.manual_seed(spec.seed)
    if tokenizer is None:
        # A copy: a config of two parts takes their fields out of what it is given.
        config = AutoConfig.for_model(**deepcopy(spec.fields))
        check_causal(config, "a bench on made-up texts (data.documents, data.lengths; name data.stage)")
    else:
        config = scratch_config(spec.fields, tokenizer)
    attention = spec.attention or plain_implementation(config)
    with torch.device(device):
        model = kind_of(config).auto_class.from_config(config, dtype=torch.float32, attn_implementation=attention)
    if tokenizer is not None:
        check_rows(model, tokenizer)
        kind_of(config).prepare(model, tokenizer)
    for parameter in model.parameters():  # not buffers: rotary frequencies stay fp32
        parameter.data = parameter.data.to(torch.bfloat16).to(DTYPES[spec.precision])
    # The fp32 weights of the initialisation are no part of the run's peak.
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    assert isinstance(model, PreTrainedModel)
    return model
