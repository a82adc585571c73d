"""The model and the validation data of scripts/evaluate.py."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedTokenizerBase

from sftkit.config.schema import DataConfig, LossConfig, ModelConfig, SourceConfig, TrainConfig
from sftkit.data.batches import loader
from sftkit.data.batches.pack import PAD_MULTIPLE, DocumentLengths, Layout, make_layout
from sftkit.data.tokens import chat, text
from sftkit.data.types import Examples
from sftkit.evals.scoring import longest_input
from sftkit.models.kinds import check_causal
from sftkit.models.load import load_model, load_options
from sftkit.models.rope import max_positions
from sftkit.objectives.model_with_loss import ModelWithLoss
from sftkit.objectives.next_token import NextToken
from sftkit.ops.attention import windows
from sftkit.parallel.fsdp import Sharding
from sftkit.parallel.wrap import distribute
from sftkit.rundir.names import TRAINING_STATE
from sftkit.runtime.start import Runtime

VALIDATION_LENGTH = 2048
"The most tokens of a document of --val, for a model that comes from no run."
LEARNED_WITH = ("thinking", "split_turns", "targets")
TRAINED_WITH = ("max_length", *LEARNED_WITH, "too_long")
"Settings of data that are kept in a checkpoint's state."
VALIDATION_ROWS = 4
"Documents of --val that go through the model together."


def load_for_evaluation(source: ModelConfig, tokenizer: PreTrainedTokenizerBase, rt: Runtime) -> ModelWithLoss:
    """Load the model on its device, sharded over the ranks if the launcher's configuration says so."""
    # Empty where it will be sharded: every rank then reads its own part, and none holds the whole.
    orig_model = load_model(source, tokenizer, 0, rt.precision, empty=rt.topology.sharded)
    # sdpa is plain causal attention: no windows, no soft-capping, whole rows on each rank
    softcap = getattr(orig_model.config.get_text_config(), "attn_logit_softcapping", None)
    special = windows(orig_model.config) or softcap or rt.topology.context > 1
    model = ModelWithLoss(orig_model, "reference" if special else "sdpa", NextToken(LossConfig()))
    if not rt.topology.sharded:
        return model.to(rt.device)
    distribute(model, source, Sharding(), rt)
    return model


def longest_of(source: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the most tokens that the model reads at once, from its config alone.

    Raises:
        ConfigError: it has an encoder.
    """
    assert source.path is not None
    config = AutoConfig.from_pretrained(source.path, **load_options(source.path, source))
    check_causal(config, "scripts/evaluate.py")
    return longest_input(max_positions(config), tokenizer)


def load_validation(
    sources: Sequence[SourceConfig], source: ModelConfig, longest: int, tokenizer: PreTrainedTokenizerBase, rt: Runtime
) -> tuple[dict[str, Examples], Layout | None]:
    """Return (documents of each source, their layout). Targets are the answers of conversations, and all of plain text.

    Documents are made like those that the checkpoint was trained on, by the settings TRAINED_WITH of its run; if its
    recipe names no data.targets, targets are the answers, also after mid-training. If the checkpoint does not say how
    long documents are, they have as many tokens as the model reads, up to VALIDATION_LENGTH.

    Args:
        sources: like data.val.
    """
    if not sources:
        return {}, None
    # A document that is cut at another length has another loss, so the run's own settings come before today's defaults.
    trained = trained_with(source)
    max_length = min(trained.get("max_length") or VALIDATION_LENGTH, longest)
    learning = replace(chat.ANSWERS, **{name: trained[name] for name in LEARNED_WITH if name in trained})
    too_long = trained.get("too_long", "truncate")
    tokenize = partial(
        text.tokenize_any, tokenizer=tokenizer, max_length=max_length, too_long=too_long, learning=learning
    )
    chosen = tuple(sources)
    # all together say how rows are laid out
    data = DataConfig(train=chosen, val=chosen, layout="dynamic", pad_multiple=math.gcd(max_length, PAD_MULTIPLE))
    # The main rank tokenizes first, into the cache that the others read.
    together, validation = loader.load_examples(data, tokenize, rt.main_first())
    batch = TrainConfig(global_batch_size=VALIDATION_ROWS * rt.data_world_size, micro_batch_size=VALIDATION_ROWS)
    return validation, make_layout(data, batch, DocumentLengths(together.lengths, max_length), rt.data_world_size)


def trained_with(source: ModelConfig) -> dict[str, Any]:
    """Return the settings that decided the documents of a checkpoint's run, as far as it has them;
    {} for a model of no run."""
    state = Path(source.path or "") / TRAINING_STATE
    kept = json.loads(state.read_text()) if state.is_file() else {}
    return {name: kept[name] for name in TRAINED_WITH if kept.get(name) is not None}
