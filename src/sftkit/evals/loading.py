"""The model and the validation data of scripts/evaluate.py."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedTokenizerBase

from sftkit.config.schema import DataConfig, LossConfig, ModelConfig, TrainConfig
from sftkit.data import loader, text
from sftkit.data.pack import PAD_MULTIPLE, Layout, make_layout
from sftkit.data.types import Examples
from sftkit.evals.flags import as_source
from sftkit.evals.scoring import longest_input
from sftkit.models.kinds import check_causal
from sftkit.models.load import load_model, load_options
from sftkit.objectives.model_with_loss import ModelWithLoss
from sftkit.objectives.next_token import NextToken
from sftkit.ops.attention import windows
from sftkit.parallel.fsdp import Sharding
from sftkit.parallel.wrap import distribute
from sftkit.rundir.names import TRAINING_STATE
from sftkit.runtime.start import Runtime

VALIDATION_LENGTH = 2048
"Tokens of a document of --val at most, where no run says how many there are."
TRAINED_WITH = ("max_length", "thinking", "split_turns", "targets", "too_long")
"Settings of data that a checkpoint's state has."
VALIDATION_ROWS = 4
"Documents of --val that go through the model together."


def load(source: ModelConfig, tokenizer: PreTrainedTokenizerBase, rt: Runtime) -> ModelWithLoss:
    """The model on its device, its weights cut over the ranks where the launcher's configuration says so."""
    orig_model = load_model(source, tokenizer, 0, rt.precision, rt.topology.sharded)
    check_causal(orig_model.config, "scripts/evaluate.py")
    config = orig_model.config.get_text_config()
    plain = not windows(orig_model.config) and not getattr(config, "attn_logit_softcapping", None)
    whole_rows = rt.topology.context == 1
    model = ModelWithLoss(orig_model, "sdpa" if plain and whole_rows else "reference", NextToken(LossConfig()))
    if not rt.topology.sharded:
        return model.to(rt.device)
    distribute(model, source, Sharding(), rt)
    return model


def longest_of(source: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """The most tokens that the model reads at once, from its config alone."""
    assert source.path is not None
    config = AutoConfig.from_pretrained(source.path, **load_options(source.path, source))
    return longest_input(getattr(config.get_text_config(), "max_position_embeddings", None), tokenizer)


def load_validation(
    paths: Sequence[str], source: ModelConfig, longest: int, tokenizer: PreTrainedTokenizerBase, rt: Runtime
) -> tuple[dict[str, Examples], Layout | None]:
    """(documents of each source, their rows): answers of conversations and all of plain text are targets.

    Documents are made as those that the checkpoint was trained on, by the settings TRAINED_WITH of its run; where its recipe
    names no data.targets, answers are compared, also after mid-training. Of a model that does not say they have as many tokens
    as it reads, up to VALIDATION_LENGTH.

    Args:
        paths: like data.val.N.path, with [split] behind it where that is not train.
    """
    if not paths:
        return {}, None
    trained = trained_with(source)
    max_length = min(trained.pop("max_length", None) or VALIDATION_LENGTH, longest)
    tokenize = partial(
        text.tokenize_any, tokenizer=tokenizer, max_length=max_length, **{"targets": "assistant", **trained}
    )
    chosen = tuple(as_source(path) for path in paths)
    multiple = math.gcd(max_length, PAD_MULTIPLE)
    data = DataConfig(
        train=chosen, val=chosen, layout="dynamic", pad_multiple=multiple
    )  # all together say how rows are laid out
    together, validation = loader.load_examples(data, tokenize, rt.main_first())
    batch = TrainConfig(global_batch_size=VALIDATION_ROWS * rt.data_world_size, micro_batch_size=VALIDATION_ROWS)
    return validation, make_layout(data, max_length, batch, rt.data_world_size, together.lengths)


def trained_with(source: ModelConfig) -> dict[str, Any]:
    """What decided the documents of the run that a checkpoint comes from, as far as it says; {}: of no run."""
    state = Path(source.path or "") / TRAINING_STATE
    kept = json.loads(state.read_text()) if state.is_file() else {}
    return {name: kept[name] for name in TRAINED_WITH if kept.get(name) is not None}
