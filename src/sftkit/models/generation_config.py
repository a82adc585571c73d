"""The generation_config of a start model: checkpoints can be saved with it, and it keeps its meaning."""

from __future__ import annotations

import copy
import logging
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from sftkit.data.tokens import chat
from sftkit.errors import ConfigError
from sftkit.models.structure import vocab_size
from sftkit.runtime.script import first_of

log = logging.getLogger(__name__)

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"Fields that transformers reads only where do_sample is true, and does not save without it."
INERT = (
    *("early_stopping", "length_penalty"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    *("cache_implementation", "cache_config", "pad_token_id"),
)
"""Other fields that transformers does not save where they have no effect: without beams, without a returned dict,
without a cache; a negative padding token."""


def settle_generation_config(orig_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Repair what save_pretrained would reject, without a change of meaning, and add the ends of turns to the stops.

    Raises:
        ConfigError: it cannot be saved as it is.
    """
    generation = orig_model.generation_config
    if generation is None:
        return
    where = orig_model.name_or_path or "the model"
    _make_saveable(generation, where)
    ends, named = chat.end_of_turn_ids(tokenizer), generation.eos_token_id
    start: list[Any] = list(named) if isinstance(named, list | tuple) else [] if named is None else [named]
    # A stop of a config that transformers has derived may be a default of the architecture: 2 for Llama, whatever the
    # tokenizer says. Such a number is a stop only if it is a special token.
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    if getattr(generation, "_from_model_config", False):
        start = [i for i in start if i in special]
    rows = vocab_size(orig_model)
    if wrong := [one for one in start if type(one) is not int or not 0 <= one < rows]:
        raise ConfigError(
            f"{where}: generation_config.json: eos_token_id has {wrong[0]!r}, which is no token of the model's {rows}: "
            "correct the file, or remove the field"
        )
    generation.eos_token_id = list(dict.fromkeys([*ends, *start]))
    if more := [i for i in generation.eos_token_id if i not in ends]:
        words = first_of([f"{tokenizer.convert_ids_to_tokens(i)} ({i})" for i in more])
        log.info("generation also stops at %s, as the start model's generation_config says", words)


def stop_ids(orig_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end an answer: of a model that load_model has loaded those of its generation_config,
    which a server reads too; else those of the chat template and eos."""
    settled = getattr(orig_model.generation_config, "eos_token_id", None)
    return settled if isinstance(settled, list) else chat.end_of_turn_ids(tokenizer)


def _make_saveable(generation: GenerationConfig, where: str) -> None:
    """Make save_pretrained accept it.

    Sampling fields without do_sample imply it; with do_sample false they have no effect and are removed, as are other
    fields without effect.
    """
    if _problem(generation) is None:
        return
    changed = []
    if generation.do_sample is None and any(_is_set(generation, name) for name in SAMPLING):
        generation.do_sample = True
        changed.append("do_sample set to true, which its sampling fields imply")
    for name in SAMPLING if generation.do_sample is False else ():
        if _is_set(generation, name):
            setattr(generation, name, None)
            changed.append(f"{name} removed, which has no effect while do_sample is false")
    for name in INERT:
        before = _problem(generation)
        # Removed only if transformers complains of this field.
        if before is not None and getattr(generation, name, None) is not None:
            trial = copy.deepcopy(generation)
            setattr(trial, name, None)
            if _problem(trial) != before:
                setattr(generation, name, None)
                changed.append(f"{name} removed, which has no effect here")
    if (problem := _problem(generation)) is not None:
        raise ConfigError(
            f"{where}: generation_config.json: transformers would not save it with a checkpoint: {problem}. Correct "
            "the file, or remove it"
        )
    log.warning("%s: generation_config.json: transformers would not save it as it is: %s", where, "; ".join(changed))


def _is_set(generation: GenerationConfig, name: str) -> bool:
    """Return whether a field differs from the value that has no effect."""
    neutral = {"top_k": 50, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}.get(name, 1.0)
    return getattr(generation, name, None) not in (None, neutral)


def _problem(generation: GenerationConfig) -> str | None:
    """Return why transformers would not save it; None: it would."""
    try:
        generation.validate(strict=True)
    except (ValueError, TypeError) as error:
        return " ".join(str(error).split())
    return None
