"""The kinds of model that can be trained, each by the class of transformers that loads it."""

from __future__ import annotations

from transformers import PretrainedConfig

from sftkit.errors import ConfigError
from sftkit.models import files
from sftkit.models.kind import CausalLM, ModelKind
from sftkit.models.text_to_text import TextToText
from sftkit.models.vision import VisionToText

MODEL_KINDS: dict[str, ModelKind] = {
    files.CAUSAL: CausalLM(),
    files.CAPTIONS: VisionToText(),
    files.TEXT_TO_TEXT: TextToText(),
}


def kind_of(config: PretrainedConfig) -> ModelKind:
    """Return the kind of the models with this config."""
    return MODEL_KINDS[files.auto_class(config.to_dict())]


def check_causal(config: PretrainedConfig, what: str) -> None:
    """Refuse a model with an encoder where only a text is continued.

    Raises:
        ConfigError: `what` is done with causal models.
    """
    if config.is_encoder_decoder:
        raise ConfigError(files.not_causal(config.model_type, what))
